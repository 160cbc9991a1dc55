"""The plugin says what is installed and what it can; it imports no vLLM to do so."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace

import parallelkit_vllm
import pytest
from parallelkit_vllm import plugin, versions
from parallelkit_vllm.errors import EngineTargetError
from parallelkit_vllm.local import local_sink

import parallelkit as pk
from parallelkit.errors import NoBackendError, UnsupportedFeatureError
from parallelkit.loader import PluginManager
from parallelkit.plugin import API_VERSION, ProbeRequest


def install(monkeypatch, text):
    """Let the metadata say that vLLM is installed in some version, or not at all."""
    monkeypatch.setattr(versions, "installed", lambda: text and ("vllm", text))
    monkeypatch.setattr(plugin, "installed", versions.installed)
    monkeypatch.setattr(plugin, "find_spec", lambda name: text)


def test_probe(monkeypatch):
    install(monkeypatch, "0.32.0+cpu")
    candidate = plugin.parallelkit_probe(ProbeRequest())
    assert candidate.name == candidate.framework == "vllm"
    assert candidate.score == 0
    assert "vLLM 0.32.0+cpu is installed; it takes weights" in candidate.reason
    assert candidate.features == {
        "execution.eager",
        "execution.graph",
        "weights.sink",
        "weights.engine",
    }


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "vLLM is not installed; versions 0.25 to 0.33"),
        ("0.24.1", "vllm 0.24.1 is installed"),
    ],
)
def test_probe_without_a_usable_one(monkeypatch, text, why):
    install(monkeypatch, text)
    candidate = plugin.parallelkit_probe(ProbeRequest())
    assert why in candidate.reason
    assert not candidate.features
    (section,) = plugin.parallelkit_diagnostics()
    assert why in section.facts["usable"]


def test_diagnostics(monkeypatch):
    install(monkeypatch, "0.33.1")
    (section,) = plugin.parallelkit_diagnostics()
    assert section.facts["vllm"] == "0.33.1 (vllm)"
    assert section.facts["usable"] == "yes"
    assert "parallelkit" in section.facts["engine"]


def test_no_import():
    """Neither the plugin nor what it answers with imports vLLM or torch."""
    code = (
        "import sys, parallelkit_vllm\n"
        "from parallelkit_vllm import plugin, register\n"
        "from parallelkit.plugin import ProbeRequest\n"
        "plugin.parallelkit_probe(ProbeRequest()); plugin.parallelkit_diagnostics()\n"
        "assert plugin.parallelkit_weight_sink(object(), None) is None\n"
        "print(sorted({'vllm', 'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


def test_names_of_the_package_are_looked_up_when_they_are_used():
    assert set(parallelkit_vllm.__all__) <= set(dir(parallelkit_vllm))
    assert parallelkit_vllm.Guard.__name__ == "Guard"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        parallelkit_vllm.nothing  # noqa: B018


def test_it_is_found_by_its_entry_points():
    found = {p.name: p for p in pk.plugins()}
    assert found["vllm"].state == "loaded"
    assert found["vllm"].dist == "parallelkit-vllm"
    assert plugin.parallelkit_api == API_VERSION
    (engine,) = entry_points(group="vllm.general_plugins", name="parallelkit")
    assert engine.value == "parallelkit_vllm.register:register"


def test_asking_for_a_group_says_why_not():
    with pytest.raises(NoBackendError, match="opens no process group|not installed"):
        pk.init_process_group("vllm", manager=PluginManager(environ={}))


def an_llm(**engine):
    config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))
    core = SimpleNamespace(**engine)
    return SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core, vllm_config=config))


def test_an_engine_in_other_processes_cannot_be_joined_here(monkeypatch):
    install(monkeypatch, "0.32.0")
    with pytest.raises(EngineTargetError, match=r"process of its own.*publisher\.attach\(llm\)"):
        local_sink(an_llm())
    workers = an_llm(engine_core=SimpleNamespace(model_executor=SimpleNamespace()))
    workers.llm_engine.vllm_config.parallel_config.world_size = 2
    with pytest.raises(EngineTargetError, match="2 workers in processes of their own"):
        local_sink(workers)


def test_a_loader_is_not_for_engines(monkeypatch):
    install(monkeypatch, "0.32.0")
    with pytest.raises(UnsupportedFeatureError, match="leave out loader="):
        local_sink(an_llm(), loader=print)
