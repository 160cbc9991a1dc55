"""Who is chosen, why, and what each refusal says."""

from __future__ import annotations

import itertools
import logging
import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelkit.errors import (
    AmbiguousBackendError,
    DeviceError,
    NoBackendError,
    PluginLoadError,
    PluginWarning,
    UnknownBackendError,
    UnsupportedFeatureError,
)
from parallelkit.launch import LaunchInfo
from parallelkit.loader import PluginManager
from parallelkit.plugin import Candidate, ProbeRequest, hookimpl
from parallelkit.records import PluginInfo
from parallelkit.selection import Absent, Probed, Selection, rank, require, select
from parallelkit.testing.fake import FakePlugin


def probed(
    name: str,
    score: float = 10,
    *,
    framework: str = "",
    first_party: bool = False,
    dist: str = "",
    **fields: object,
) -> Probed:
    fields = {"devices": ("cpu",), "backends": {"cpu": "gloo"}} | fields
    candidate = Candidate(name=name, framework=framework or name, score=score, **fields)
    dist = dist or (f"parallelkit-{name}" if first_party else f"vendor-{name}")
    info = PluginInfo(name=name, dist=dist, version="1.0", first_party=first_party)
    return Probed(info, candidate)


def choose(*found: Probed, absent=(), imported=(), installed=(), **request) -> Selection:
    request = ProbeRequest(**request)
    return rank(found, request, absent=absent, imported=imported, installed=installed)


class TestPreference:
    def test_the_only_one(self):
        got = choose(probed("torch"))
        assert got.winner.name == "torch"
        assert (got.device, got.backend) == ("cpu", "gloo")

    def test_explicit_beats_everything(self):
        got = choose(
            probed("torch", 1),
            probed("mindspore", 99),
            framework="torch",
            imported=["mindspore"],
            launch=LaunchInfo(launcher="msrun", framework="mindspore"),
        )
        assert got.winner.name == "torch"
        assert "asked for" in got.why

    def test_launcher_beats_imported_and_score(self):
        got = choose(
            probed("torch", 1),
            probed("mindspore", 99),
            imported=["mindspore"],
            launch=LaunchInfo(launcher="torchrun", framework="torch"),
        )
        assert got.winner.name == "torch"
        assert "torchrun implies torch" in got.why

    def test_launcher_whose_framework_is_not_usable_does_not_decide(self):
        got = choose(
            probed("torch"),
            probed("mindspore", 0),
            launch=LaunchInfo(launcher="msrun", framework="mindspore"),
        )
        assert got.winner.name == "torch"

    def test_imported_beats_score(self):
        got = choose(probed("torch", 1), probed("mindspore", 99), imported=["torch"])
        assert got.winner.name == "torch"
        assert "imported already" in got.why

    def test_both_imported_leaves_it_to_score(self):
        both = ["torch", "mindspore"]
        got = choose(probed("torch", 1), probed("mindspore", 99), imported=both)
        assert got.winner.name == "mindspore"

    def test_score(self):
        assert choose(probed("a", 1), probed("b", 2)).winner.name == "b"

    @pytest.mark.parametrize("framework", ["torch", "auto"])
    def test_third_party_before_first_party_and_it_is_logged(self, caplog, framework):
        ours = probed("torch", 99, first_party=True)
        theirs = probed("torch-xpu", 1, framework="torch")
        with caplog.at_level(logging.INFO, logger="parallelkit"):
            got = choose(ours, theirs, framework=framework)
        assert got.winner.name == "torch-xpu"
        assert "third party" in got.why
        assert [r.levelname for r in caplog.records] == ["INFO"]

    def test_third_party_of_another_framework_goes_by_score(self):
        got = choose(probed("torch", 99, first_party=True), probed("jax", 1))
        assert got.winner.name == "torch"

    def test_unusable_third_party_does_not_displace_us(self):
        ours = probed("torch", 1, first_party=True)
        assert choose(ours, probed("xpu", 0, framework="torch")).winner.name == "torch"

    def test_third_party_without_the_device_does_not_displace_us(self):
        ours = probed("torch", 1, first_party=True)
        theirs = probed("xpu", framework="torch", devices=("xpu",), backends={"xpu": "ccl"})
        assert choose(ours, theirs, device="cpu").winner.name == "torch"

    def test_a_candidates_own_name_can_be_asked_for(self):
        got = choose(probed("a", framework="x"), probed("b", framework="x"), framework="b")
        assert got.winner.name == "b"

    @given(
        st.permutations(
            [
                probed("torch", 5, first_party=True),
                probed("mindspore", 5, first_party=True),
                probed("xpu", 3, framework="torch"),
                probed("npu", 6, framework="mindspore"),
                probed("dead", 0),
            ]
        )
    )
    def test_order_does_not_matter(self, found):
        got = choose(*found)
        assert got.winner.name == "npu"
        assert got.ranking[0].plugin.name == "npu"
        assert got.ranking == choose(*sorted(found, key=lambda p: p.plugin.name)).ranking

    def test_the_ranking_has_everybody_with_a_reason(self):
        lost = Absent(PluginInfo(name="bad", dist="d", state="failed"), "boom")
        got = choose(
            probed("a", 5),
            probed("b", 3, reason="CPU only"),
            probed("c", 0, reason="no driver"),
            absent=[lost],
        )
        assert [(r.plugin.name, r.place) for r in got.ranking] == [
            ("a", 1),
            ("b", 2),
            ("c", 0),
            ("bad", 0),
        ]
        assert all(r.reason for r in got.ranking)
        assert got.why == "score 5 is the highest"
        assert got.ranking[1].reason == "score 3 is below 5; CPU only"
        assert got.ranking[2].reason == "no driver"
        text = "\n".join(got.lines())
        assert "no driver" in text
        assert "boom" in text
        assert got.as_dict()["ranking"][3]["reason"] == "boom"


class TestRefusals:
    def test_tie_names_both_and_the_setting(self):
        with pytest.raises(AmbiguousBackendError) as caught:
            choose(probed("a"), probed("b"))
        text = str(caught.value)
        assert "'a'" in text
        assert "'b'" in text
        assert "framework='a'" in text

    def test_tie_within_the_framework_asked_for(self):
        with pytest.raises(AmbiguousBackendError, match="framework='a' or framework='b'"):
            choose(probed("a", framework="x"), probed("b", framework="x"), framework="x")

    def test_tie_of_equal_names_is_decided_by_the_deny_list(self):
        with pytest.raises(AmbiguousBackendError, match="PARALLELKIT_DISABLE_PLUGINS"):
            choose(probed("x", dist="one"), probed("x", dist="two"))

    def test_the_names_in_that_message_decide(self):
        found = [probed("a", framework="x"), probed("b", framework="x")]
        assert choose(*found, framework="a").winner.name == "a"

    def test_unknown_name(self):
        with pytest.raises(UnknownBackendError) as caught:
            choose(probed("torch"), probed("mindspore"), framework="toch")
        assert "did you mean 'torch'" in str(caught.value)
        assert "mindspore, torch" in str(caught.value)

    def test_known_framework_without_a_plugin(self):
        with pytest.raises(UnknownBackendError, match="pip install parallelkit-mindspore"):
            choose(probed("torch"), framework="mindspore")

    def test_asked_for_one_failed_to_load(self):
        cause = ImportError("no libfoo.so")
        info = PluginInfo(name="torch", dist="vendor", version="2.0", state="failed")
        with pytest.raises(PluginLoadError, match=r"vendor 2.0.*no libfoo.so") as caught:
            choose(absent=[Absent(info, "ImportError: no libfoo.so", cause)], framework="torch")
        assert caught.value.__cause__ is cause

    def test_blocked_by_the_environment_yet_asked_for(self):
        reason = "switched off by PARALLELKIT_DISABLE_PLUGINS='torch'"
        info = PluginInfo(name="torch", dist="parallelkit-torch", state="blocked", reason=reason)
        with pytest.raises(NoBackendError, match="PARALLELKIT_DISABLE_PLUGINS='torch'"):
            choose(probed("b"), absent=[Absent(info, reason)], framework="torch")

    def test_nothing_installed(self):
        with pytest.raises(NoBackendError) as caught:
            choose()
        text = str(caught.value)
        assert "no plugin was found" in text
        assert "pip install parallelkit-torch" in text
        assert "pip install parallelkit-mindspore" in text

    def test_hint_names_what_is_installed(self):
        with pytest.raises(NoBackendError) as caught:
            choose(installed=["torch"])
        assert "torch is installed; `pip install parallelkit-torch`" in str(caught.value)
        assert "mindspore" not in str(caught.value)

    def test_nothing_usable_lists_each_reason(self):
        lost = Absent(PluginInfo(name="bad", dist="d", state="failed"), "boom")
        with pytest.raises(NoBackendError) as caught:
            choose(probed("a", 0, reason="no driver"), probed("b", 0), absent=[lost])
        for part in ("no driver", "b (plugin", "boom"):
            assert part in str(caught.value)

    def test_hints_are_for_the_framework_asked_for(self):
        with pytest.raises(NoBackendError) as caught:
            choose(probed("mindspore", 0), framework="mindspore", installed=["torch"])
        assert "pip install" not in str(caught.value)

    def test_asked_for_but_not_usable(self):
        with pytest.raises(NoBackendError, match=r"for 'a'(.|\n)*no driver"):
            choose(probed("a", 0, reason="no driver"), probed("b"), framework="a")


CUDA = {"devices": ("cuda", "cpu"), "backends": {"cpu": "gloo", "cuda": "nccl"}}


class TestDeviceAndBackend:
    @pytest.mark.parametrize(
        ("request_", "expected"),
        [
            ({}, ("cuda", "nccl")),
            ({"device": "cpu"}, ("cpu", "gloo")),
            ({"device": "cuda:3"}, ("cuda:3", "nccl")),
            ({"backend": "gloo"}, ("cpu", "gloo")),
            ({"backend": "nccl"}, ("cuda", "nccl")),
            ({"backend": "nccl", "device": "cuda"}, ("cuda", "nccl")),
        ],
    )
    def test_resolution(self, request_, expected):
        got = choose(probed("torch", **CUDA), **request_)
        assert (got.device, got.backend) == expected

    def test_nccl_on_a_cpu_box_lists_what_there_is(self):
        cpu = probed("torch", devices=("cpu",), backends={"cpu": "gloo", "cuda": "nccl"})
        with pytest.raises(UnknownBackendError, match=r"'nccl'.*it has gloo on cpu"):
            choose(cpu, backend="nccl")

    def test_a_device_that_is_not_there(self):
        with pytest.raises(DeviceError, match=r"'cuda'.*it has gloo on cpu"):
            choose(probed("torch"), device="cuda")

    def test_a_backend_that_does_not_run_on_the_device(self):
        with pytest.raises(UnknownBackendError, match="'nccl' does not run on 'cpu'"):
            choose(probed("torch", **CUDA), backend="nccl", device="cpu")

    def test_the_device_asked_for_narrows_auto(self):
        got = choose(probed("a", 99), probed("b", 1, **CUDA), device="cuda")
        assert got.winner.name == "b"
        assert "has gloo on cpu" in got.ranking[1].reason


class TestFeatures:
    def test_lacking_before_any_rendezvous(self):
        only = probed("torch", features={"context.data", "context.standalone", "axis.data"})
        with pytest.raises(UnsupportedFeatureError) as caught:
            require(only.candidate, only.plugin, {"context.hybrid"})
        text = str(caught.value)
        assert "'hybrid'" in text
        assert "data, standalone" in text
        assert "vendor-torch" in text

    def test_a_needed_feature_narrows_auto(self):
        a, b = probed("a", 99), probed("b", 1, features={"x.y"})
        assert choose(a, b, features={"x.y"}).winner.name == "b"
        with pytest.raises(UnsupportedFeatureError):
            choose(a, features={"x.y"})


def object_with(**hooks) -> object:
    """Make a plugin of functions."""
    module = types.ModuleType("pk_test_plugin")
    module.parallelkit_api = 1  # type: ignore[attr-defined]
    for name, function in hooks.items():
        setattr(module, name, hookimpl(function))
    return module


class TestProbing:
    def test_a_probe_that_raises_is_a_warning_and_others_go_on(self, manager):
        def broken(request):
            raise OSError("driver gone")

        manager.register(object_with(parallelkit_probe=broken), name="vendor")
        manager.register(FakePlugin("cpu-only"), name="cpu-only")
        with pytest.warns(PluginWarning, match=r"'vendor'.*OSError: driver gone"):
            got = select(ProbeRequest(), manager=manager)
        assert got.winner.name == "cpu-only"
        assert "driver gone" in "\n".join(got.lines())
        assert select(ProbeRequest(), manager=manager).winner.name == "cpu-only"  # warned once

    def test_a_probe_that_raises_is_an_error_when_asked_for(self, manager):
        def broken(request):
            raise OSError("driver gone")

        manager.register(object_with(parallelkit_probe=broken), name="vendor")
        with pytest.warns(PluginWarning), pytest.raises(PluginLoadError) as caught:
            select(ProbeRequest(framework="vendor"), manager=manager)
        assert isinstance(caught.value.__cause__, OSError)

    @pytest.mark.parametrize("answer", ["torch", 5, {"name": "x"}, object()])
    def test_a_probe_that_answers_something_else(self, manager, answer):
        plugin = object_with(parallelkit_probe=lambda request: answer)
        manager.register(plugin, name="vendor")
        manager.register(FakePlugin(), name="fake")
        with pytest.warns(PluginWarning, match="'vendor'.*answers Candidate"):
            assert select(ProbeRequest(), manager=manager).winner.name == "fake"

    @pytest.mark.parametrize("score", [float("nan"), float("inf"), "high", True, None])
    def test_a_score_that_is_no_number(self, manager, score):
        def probe(request):
            return Candidate(name="x", framework="x", score=score)

        manager.register(object_with(parallelkit_probe=probe), name="vendor")
        manager.register(FakePlugin(), name="fake")
        with pytest.warns(PluginWarning, match="'vendor'.*score"):
            assert select(ProbeRequest(), manager=manager).winner.name == "fake"

    def test_none_means_no_framework(self, manager):
        plugin = object_with(parallelkit_probe=lambda request: None)
        manager.register(plugin, name="transport-only")
        manager.register(FakePlugin(), name="fake")
        assert len(select(ProbeRequest(), manager=manager).ranking) == 1

    def test_registration_order_does_not_matter(self):
        plugins = {"one": 3, "two": 9, "three": 5}
        for order in itertools.permutations(plugins):
            manager = PluginManager(environ={}, scan=False, builtin=False)
            for name in order:
                manager.register(FakePlugin(name, score=plugins[name]), name=name)
            assert select(ProbeRequest(), manager=manager).winner.name == "two"

    def test_shuffled_distributions_have_one_winner(self, distributions):
        for name in ("bb", "aa", "cc"):
            distributions.good(f"dist-{name}", name)
        winners = set()
        for paths in itertools.permutations(list(distributions.paths)):
            distributions.paths = list(paths)
            manager = distributions.manager(PARALLELKIT_DISABLE_PLUGINS="aa,cc")
            winners.add(select(ProbeRequest(), manager=manager).winner.dist)
        assert winners == {"dist-bb"}

    def test_registered_later_still_wins(self, manager):
        manager.register(FakePlugin("a", score=1), name="a")
        assert select(ProbeRequest(), manager=manager).winner.name == "a"
        manager.register(FakePlugin("b", score=2), name="b")
        assert select(ProbeRequest(), manager=manager).winner.name == "b"

    def test_a_framework_in_sys_modules(self, manager, monkeypatch):
        monkeypatch.setitem(sys.modules, "pk_test_framework", types.ModuleType("x"))
        manager.register(FakePlugin("pk_test_framework", score=1), name="a")
        manager.register(FakePlugin("b", score=9), name="b")
        assert select(ProbeRequest(), manager=manager).winner.name == "a"

    def test_the_record_is_kept(self, manager):
        manager.register(FakePlugin("a"), name="a")
        got = select(ProbeRequest(), manager=manager)
        assert manager.selections == {"auto": got}

    def test_the_installed_plugins(self):
        """On this machine: torch is chosen, the others say why not, nothing is imported."""
        before = set(sys.modules)
        got = select(ProbeRequest(framework="torch"), manager=PluginManager(environ={}))
        assert got.winner.name == "torch"
        reasons = {r.plugin.name: r.reason for r in got.ranking}
        assert set(reasons) >= {"torch", "mindspore", "vllm"}
        assert not {"mindspore", "vllm"} & (set(sys.modules) - before)
