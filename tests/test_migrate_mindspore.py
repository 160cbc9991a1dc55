"""The two scripts of docs/migrate-mindspore.md run as they stand there, and print the same."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest

from parallelkit import spawn_ranks

PAGE = Path(__file__).resolve().parents[1] / "docs" / "migrate-mindspore.md"
SECONDS = 240

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(find_spec("mindspore") is None, reason="MindSpore is not installed"),
]


def scripts() -> tuple[str, str]:
    """The script before, and after."""
    before, after = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return before, after


def losses(output: str) -> list[str]:
    return re.findall(r"^epoch \d: loss \d\.\d{5}$", output, re.MULTILINE)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(row[1].endswith(f":{port:04X}") and row[3] == "0A" for row in rows)


def raw(script: str, folder: Path) -> str:
    """What rank 0 prints under MindSpore's own cluster of two.

    The scheduler first: a worker that comes before it listens waits for a minute.
    """
    path = folder / "train_raw.py"
    path.write_text(script)
    port = free_port()
    common = {"MS_WORKER_NUM": "2", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": str(port)}
    common |= {"GLOG_v": "3", "OMP_NUM_THREADS": "1"}

    def start(**role: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(path)],
            env={**os.environ, **common, **role},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    with ExitStack() as stack:

        def keep(process: subprocess.Popen[str]) -> subprocess.Popen[str]:
            stack.callback(process.wait)
            stack.callback(process.kill)  # before the wait; harmless where it has ended
            return process

        scheduler = keep(start(MS_ROLE="MS_SCHED"))
        deadline = time.monotonic() + SECONDS
        while not listens(port) and time.monotonic() < deadline and scheduler.poll() is None:
            time.sleep(0.1)
        workers = [keep(start(MS_ROLE="MS_WORKER", MS_NODE_ID=str(rank))) for rank in (0, 1)]
        output = [worker.communicate(timeout=SECONDS)[0] for worker in workers]
        assert [worker.returncode for worker in workers] == [0, 0], output
        scheduler.communicate(timeout=60)
    return output[0]


def test_both_scripts_print_the_same(tmp_path: Path) -> None:
    before, after = scripts()
    path = tmp_path / "train.py"
    path.write_text(after)
    env = {"GLOG_v": "3", "OMP_NUM_THREADS": "1"}
    ranks = spawn_ranks([sys.executable, str(path)], 2, timeout=SECONDS, env=env)
    for rank in ranks:
        assert rank.returncode == 0, rank.stderr[-4000:]
    found = losses(ranks[0].stdout)
    assert len(found) == 3
    assert found == losses(raw(before, tmp_path))


def test_the_scripts_are_the_same_but_for_what_the_page_says() -> None:
    before, after = (script.splitlines() for script in scripts())
    start, stop = (
        next(i for i, x in enumerate(before) if x.startswith(w)) for w in ("class", "net")
    )
    ours = after.index(before[start])
    assert after[ours : ours + stop + 1 - start] == before[start : stop + 1]
    calls = [line for line in after if re.search(r"pk\b|context\.|group\.", line)]
    assert len(calls) <= 10
