"""Tensor parallel: every rank is a member, one ticket admits them, and all move together."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

JOB = Path(__file__).parent / "tensor_parallel.py"
SECONDS = 580.0


def test_two_ranks_follow(checkpoint):
    """Tokens equal those of a fresh engine of two ranks, cached prefixes included.

    So they do after updates that failed on one rank, the first or the last.
    """
    env = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    # one core for each rank: `auto` wants as many NUMA nodes as ranks, `nobind` is far slower
    env |= {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(
        [sys.executable, str(JOB), str(checkpoint(0)), str(checkpoint(1))],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # whatever it left
        process.communicate()
    assert process.returncode == 0, errors[-4000:]
    told = json.loads(output.splitlines()[-1])
    assert told["after"] == told["fresh"]
    assert told["after"] != told["before"]
    assert told["version"] == 1
    assert [m[1:] for m in told["members"]] == [["committed", 1]] * 2
    ranks = [name.partition(" (pid")[0].rpartition(".")[2] for name, _, _ in told["members"]]
    assert sorted(ranks) == ["0", "1"]
    assert told["engines"] == [["committed", "1"]]
    assert [u["tokens"] for u in told["upset"]] == [told["before"], told["fresh"]]
    for rank, upset in enumerate(told["upset"]):
        assert f"worker {rank}: " in upset["failed"]
        assert f"worker {1 - rank}: " not in upset["failed"]
        assert upset["ranks"] == [0, 1]
        assert upset["states"] == ["committed"] * 3
