"""The probe: what is claimed, from metadata and files alone, and why."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from parallelkit_mindspore import plugin, runtime
from parallelkit_mindspore.diagnostics import section

import parallelkit as pk
from parallelkit.errors import LaunchError
from parallelkit.plugin import API_VERSION, LaunchSpec, ProbeRequest

Fake = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fake:
    """Make up device files and MindSpore's libraries."""

    def make(*devices: str, libraries: tuple[str, ...] = ("ascend", "cpu", "gpu11.6")) -> None:
        for name in devices:
            (tmp_path / "dev").mkdir(exist_ok=True)
            (tmp_path / "dev" / name).touch()
        for name in libraries:
            (tmp_path / "mindspore" / "lib" / "plugin" / name).mkdir(parents=True)
        origin = tmp_path / "mindspore" / "__init__.py"
        found = type("Spec", (), {"origin": str(origin)})
        monkeypatch.setattr(plugin, "_DEVICES", tmp_path / "dev")
        monkeypatch.setattr(plugin.importlib.util, "find_spec", lambda name: found)

    return make


def test_a_cpu(machine: Fake) -> None:
    machine("davinci_manager", "nvidiactl")
    found = plugin.parallelkit_probe(ProbeRequest())
    assert (found.name, found.framework, found.devices, found.score) == (
        "mindspore",
        "mindspore",
        ("cpu",),
        40,
    )
    assert "no modes semi_auto and auto, and no axes but data and tensor" in found.reason
    assert {"group.cpu", "context.hybrid"} <= found.features
    assert not {"context.auto", "group.npu", "group.cuda"} & found.features


def test_an_ascend(machine: Fake) -> None:
    machine("davinci0", "davinci1")
    found = plugin.parallelkit_probe(ProbeRequest())
    assert (found.devices, found.score) == (("npu", "cpu"), 70)
    assert {"group.npu", "context.auto", "context.semi_auto", "axis.pipeline"} <= found.features
    assert "never run" in found.reason


def test_a_gpu(machine: Fake) -> None:
    machine("nvidia0")
    found = plugin.parallelkit_probe(ProbeRequest())
    assert (found.devices, found.score) == (("cuda", "cpu"), 45)
    assert "group.cuda" in found.features


def test_devices_without_a_library(machine: Fake) -> None:
    machine("nvidia0", "davinci0", libraries=("cpu",))
    assert plugin.parallelkit_probe(ProbeRequest()).devices == ("cpu",)


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({"mindspore": "2.8.1", "numpy": "1.26.4"}, "needs 2.9 or newer"),
        ({"mindspore": "2.10.0", "numpy": "2.1.0"}, "fails with NumPy 2.1.0"),
    ],
)
def test_versions_that_do_not_go(
    versions: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "version", versions.__getitem__)
    found = plugin.parallelkit_probe(ProbeRequest())
    assert (found.score, found.devices, found.features) == (0, (), frozenset())
    assert said in found.reason
    assert not section().ok


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "installed", lambda: None)
    found = plugin.parallelkit_probe(ProbeRequest())
    assert found.score == 0
    assert "pip install mindspore" in found.reason


def test_diagnostics() -> None:
    (shown,) = plugin.parallelkit_diagnostics()
    assert shown.ok
    assert shown.facts["mindspore"].startswith("2.")
    assert shown.facts["usable"] == "yes"


def test_no_import() -> None:
    code = (
        "import sys; from parallelkit_mindspore import plugin; from parallelkit.plugin import *; "
        "plugin.parallelkit_probe(ProbeRequest()); plugin.parallelkit_diagnostics(); "
        "print([m for m in ('mindspore', 'torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_it_is_found_by_its_entry_point() -> None:
    found = {p.name: p for p in pk.plugins()}
    assert found["mindspore"].state == "loaded"
    assert found["mindspore"].dist == "parallelkit-mindspore"
    assert plugin.parallelkit_api == API_VERSION


def test_command_line_of_msrun(tmp_path: Path) -> None:
    (tmp_path / "python").touch()
    spec = LaunchSpec(
        framework="mindspore",
        ranks=3,
        script="train.py",
        args=("--lr", "1"),
        python=str(tmp_path / "python3"),
    )
    command = plugin.parallelkit_launch(spec)
    assert command is not None
    assert command[1].startswith(f"PATH={tmp_path}:")
    assert command[2:5] == [spec.python, "-m", "parallelkit_mindspore.msrun"]
    assert command[-3:] == ["train.py", "--lr", "1"]
    assert {"--worker_num=3", "--local_worker_num=3", "--join=True"} <= set(command)
    other = plugin.parallelkit_launch(LaunchSpec(framework="torch", ranks=1, script="x"))
    assert other is None
    (tmp_path / "python").unlink()
    with pytest.raises(LaunchError, match="a command named python"):
        plugin.parallelkit_launch(spec)
