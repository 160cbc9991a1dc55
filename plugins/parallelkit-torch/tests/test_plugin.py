"""The plugin's hooks, and that finding out about torch does not import it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from parallelkit_torch import plugin
from torch import nn

from parallelkit.plugin import (
    Candidate,
    ComparisonSpec,
    DemoSpec,
    ExecutionSpec,
    GraphSpec,
    LaunchSpec,
    ProbeRequest,
)


def test_probe_imports_no_torch() -> None:
    code = """
import sys, json
from parallelkit_torch import plugin
from parallelkit.plugin import ProbeRequest, LaunchSpec
found = plugin.parallelkit_probe(ProbeRequest())
plugin.parallelkit_launch(LaunchSpec(framework="torch", ranks=2, script="s.py"))
assert plugin.parallelkit_weight_source(object()) is None
assert plugin.parallelkit_weight_sink(3, None) is None
print(json.dumps([found.score, found.devices, "torch" in sys.modules, "numpy" in sys.modules]))
"""
    out = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert out.returncode == 0, out.stderr
    score, devices, torch, _ = json.loads(out.stdout)
    assert score > 0
    assert "cpu" in devices
    assert not torch


def test_probe_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin.importlib.util, "find_spec", lambda name: None)
    found = plugin.parallelkit_probe(ProbeRequest())
    assert isinstance(found, Candidate)
    assert found.score == 0
    assert "pip install torch" in found.reason


def test_probe_says_what_there_is() -> None:
    found = plugin.parallelkit_probe(ProbeRequest())
    assert found.backends["cpu"] == "gloo"
    assert {"group.cpu", "context.data", "execution.graph", "weights.sink"} <= found.features
    assert "torch" in found.reason


@pytest.mark.parametrize(
    ("text", "built"),
    [("cuda: Optional[str] = '12.8'\n", True), ("cuda: str | None = None\n", False), ("", None)],
)
def test_build_is_read_from_the_version_file(tmp_path: Path, text: str, built: bool | None) -> None:
    (tmp_path / "version.py").write_text(text)
    assert plugin._built_for_cuda(tmp_path / "version.py") is built


def test_launch_is_torchrun() -> None:
    spec = LaunchSpec(framework="torch", ranks=4, script="a.py", args=("--x", "1"), python="py")
    assert plugin.parallelkit_launch(spec) == [
        *("py", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"),
        *("a.py", "--x", "1"),
    ]


def test_other_frameworks_are_not_ours() -> None:
    assert plugin.parallelkit_launch(LaunchSpec(framework="x", ranks=1, script="s")) is None
    assert plugin.parallelkit_demo(DemoSpec(framework="x")) is None
    mode = ExecutionSpec(mode="eager", framework="mindspore")
    assert plugin.parallelkit_set_execution_mode(mode) is None
    assert plugin.parallelkit_check_graph(GraphSpec(framework="x", function=print)) is None
    compared = ComparisonSpec(framework="x", function=print)
    assert plugin.parallelkit_compare_modes(compared) is None


def test_modules_have_sources_and_sinks() -> None:
    assert plugin.parallelkit_weight_source(nn.Linear(1, 1)) is not None
    assert plugin.parallelkit_weight_sink(nn.Linear(1, 1), None) is not None


def test_diagnostics() -> None:
    (section,) = plugin.parallelkit_diagnostics()
    assert section.ok
    assert section.facts["gloo"] == "available"
    assert all(isinstance(value, str) for value in section.facts.values())
