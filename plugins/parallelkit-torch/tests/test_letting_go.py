"""Threads that were given up inside torch do not meet the end of Python."""

from __future__ import annotations

import subprocess
import sys
import time

SCRIPT = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
from parallelkit_torch.letting_go import run_aside

store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=float(sys.argv[1])))

def ask():
    try:
        store.get("never set")
    except RuntimeError:
        print("came out", flush=True)

assert run_aside(lambda: None, "quick", 30.0)
assert not run_aside(ask, "slow", 0.1)
print("ends", flush=True)
"""


def run(seconds: float) -> tuple[str, float]:
    command = [sys.executable, "-c", SCRIPT, str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        began = time.monotonic()
        lines.append(process.stdout.read())
        assert process.wait(60) == 0
    return "".join(lines), time.monotonic() - began


def test_the_end_waits_for_a_thread_that_comes_out_of_torch() -> None:
    said, _ = run(1.5)
    assert said.split("\n") == ["ends", "came out", ""]


def test_the_end_does_not_wait_for_ever() -> None:
    said, seconds = run(300)
    assert said == "ends\n"
    assert 4 < seconds < 60
