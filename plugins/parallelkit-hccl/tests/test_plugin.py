"""The plugin says what is here and why `publish_weights` does not use it; nothing is loaded."""

from __future__ import annotations

import pytest
from parallelkit_hccl import found, plugin

import parallelkit as pk
from parallelkit.errors import TransportError
from parallelkit.hooks import transports
from parallelkit.plugin import API_VERSION
from parallelkit.specs import TransportRequest
from parallelkit.testing.peer import sample_model
from parallelkit.weights.identity import host_identity


@pytest.fixture
def request_():
    return TransportRequest(publisher=host_identity())


def look(environ: dict[str, str], files: set[str], devices: tuple[str, ...] = ()) -> found.Found:
    return found.look(environ, files.__contains__, lambda: devices)


FILES = {"/cann/lib64/libhccl.so", "/cann/lib64/libascendcl.so", "/own/h.so"}


@pytest.mark.parametrize(
    ("environ", "devices", "lacking"),
    [
        ({}, (), "libhccl.so was not found"),
        ({"LD_LIBRARY_PATH": "/nothing:/cann/lib64"}, (), "there is no Ascend NPU"),
        ({"ASCEND_HOME_PATH": "/cann"}, ("/dev/davinci0",), ""),
        ({"ASCEND_TOOLKIT_HOME": "/cann"}, ("/dev/davinci0",), ""),
        ({"HCCL_SO_PATH": "/own/h.so"}, ("/dev/davinci0",), "libascendcl.so was not found"),
        ({"HCCL_SO_PATH": "/typo", "ASCEND_HOME_PATH": "/cann"}, (), "libhccl.so was not found"),
    ],
)
def test_what_is_lacking(environ, devices, lacking):
    said = look(environ, FILES, devices).lacking
    assert said.startswith(lacking)
    assert bool(said) == bool(lacking)


def test_the_transport_is_listed_with_the_reason(request_, monkeypatch):
    (listed,) = plugin.parallelkit_transports(request_)
    assert (listed.name, listed.reach) == ("hccl", False)
    assert listed.reason == found.look().lacking or "HcclSender" in listed.reason
    monkeypatch.setattr(plugin, "look", lambda: look({"ASCEND_HOME_PATH": "/cann"}, FILES, ("x",)))
    (listed,) = plugin.parallelkit_transports(request_)
    assert not listed.reach
    assert "use parallelkit_hccl.HcclSender and HcclReceiver" in listed.reason


def test_publish_weights_says_what_to_use_instead():
    with pytest.raises(TransportError, match=r"'hccl' cannot be chosen.*HcclSender"):
        pk.publish_weights(sample_model(), transport="hccl")


def test_diagnostics(monkeypatch):
    (section,) = plugin.parallelkit_diagnostics()
    assert section.ok
    assert set(section.facts) == {"libhccl", "libascendcl", "NPUs", "usable"}
    monkeypatch.setattr(plugin, "look", lambda: look({}, set()))
    (section,) = plugin.parallelkit_diagnostics()
    assert section.facts["libhccl"] == "not found"
    assert section.facts["NPUs"] == "none"


def test_it_is_found_by_its_entry_point(request_):
    plugins = {p.name: p for p in pk.plugins()}
    assert plugins["hccl"].state == "loaded"
    assert plugins["hccl"].dist == "parallelkit-hccl"
    assert plugin.parallelkit_api == API_VERSION
    assert "hccl" in {candidate.name for candidate in transports(request_)}
