"""The plugin says what is installed and claims nothing; it imports nothing to do so."""

from __future__ import annotations

import sys

import pytest
from parallelkit_mindspore import plugin

import parallelkit as pk
from parallelkit.errors import NoBackendError
from parallelkit.loader import PluginManager
from parallelkit.plugin import API_VERSION, ProbeRequest


def test_probe():
    candidate = plugin.parallelkit_probe(ProbeRequest())
    assert candidate.name == candidate.framework == "mindspore"
    assert candidate.score == 0
    assert "no feature claimed yet in this release" in candidate.reason
    assert "installed" in candidate.reason
    assert not candidate.features


def test_diagnostics():
    (section,) = plugin.parallelkit_diagnostics()
    assert "mindspore" in section.facts


def test_no_import():
    before = "mindspore" in sys.modules
    plugin.parallelkit_probe(ProbeRequest())
    plugin.parallelkit_diagnostics()
    assert ("mindspore" in sys.modules) == before


def test_it_is_found_by_its_entry_point():
    found = {p.name: p for p in pk.plugins()}
    assert found["mindspore"].state == "loaded"
    assert found["mindspore"].dist == "parallelkit-mindspore"
    assert plugin.parallelkit_api == API_VERSION


def test_asking_for_it_says_why_not():
    with pytest.raises(NoBackendError, match="no feature claimed yet"):
        pk.init_process_group("mindspore", manager=PluginManager(environ={}))
