"""`parallelkit demo` with a real vLLM server that follows, whichever framework trains."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from parallelkit.demo import main as demo
from parallelkit.demo.config import GREEDY, PROMPT, Settings
from parallelkit.demo.record import TOLERANCE
from parallelkit.specs import DemoSpec

TINY = Settings(
    steps=4,
    every=2,
    ranks=1,
    batch=2,
    block=16,
    hidden=64,
    layers=1,
    held_out=2,
    sample=24,
    timeout=120.0,
    engine="vllm",
)

pytestmark = [pytest.mark.ranks, pytest.mark.vllm]


@pytest.mark.parametrize("framework", ["torch", pytest.param("mindspore", marks=pytest.mark.slow)])
def test_an_engine_writes_while_a_trainer_trains(
    vllm_python: str, framework: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec(framework) is None or importlib.util.find_spec("plotly") is None:
        pytest.skip(f"{framework} and plotly have to be here")
    output = tmp_path / "report.html"
    spec = DemoSpec(output=str(output), engine_python=vllm_python)
    code, run = demo.execute(spec, f"parallelkit_{framework}.demo", TINY)
    shown = capsys.readouterr().out
    assert code == demo.EXIT_GOOD, shown
    assert [version.number for version in run.versions] == [1, 2, 3]
    for version in run.versions:
        (engine,) = version.report.engines
        assert (engine.state, engine.weight_version) == ("committed", str(version.number))
        assert 0 < engine.pause_seconds < version.report.seconds
        assert version.report.pause_seconds == engine.pause_seconds
        assert version.texts.equal
        assert version.texts.same > 0
        assert version.followed.sample.startswith(PROMPT)
        assert len(version.followed.sample) == len(PROMPT) + TINY.sample
        # at least one round that no update came into: the likeliest tokens, and a sample
        assert version.followed.written >= GREEDY + TINY.sample
        assert f"version {version.number} after {version.step} steps: committed, paused" in shown
    logprobs = np.array([version.followed.likeliest.logprobs[0] for version in run.versions])
    assert np.abs(np.diff(logprobs)).min() > 3 * TOLERANCE, "no version differs from the one before"
    assert "the engine's likeliest tokens are the trainer's at every version" in shown
    assert "how long the engine generated nothing" in output.read_text()


def group(leader: int) -> list[int]:
    """Processes of a session, by its leader: those of the engine's side of a demo."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z" and int(fields[3]) == leader:
            found.append(int(path.parent.name))
    return found


def test_a_demo_that_is_killed_leaves_no_server(vllm_python: str, tmp_path: Path) -> None:
    code = (
        "import os, sys, time; from parallelkit.cli.main import main; "
        "sys.exit(main(['demo', '--engine', 'vllm', '--framework', 'torch', '--engine-python', "
        "sys.argv[1], '--output', sys.argv[2]]))"
    )
    argv = [sys.executable, "-c", code, vllm_python, str(tmp_path / "report.html")]
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(
            argv,
            env=os.environ | {"TMPDIR": str(tmp_path)},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 240
        children: list[int] = []
        while not children or len(group(children[0])) < 2:  # the engine's side, and its server
            assert process.poll() is None, (tmp_path / "out").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
            tasks = Path(f"/proc/{process.pid}/task").iterdir()
            children = [int(c) for task in tasks for c in (task / "children").read_text().split()]
        process.send_signal(signal.SIGKILL)
        process.wait(20)
        while left := group(children[0]):
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()
