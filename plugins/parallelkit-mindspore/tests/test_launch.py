"""The launchers: torchrun, msrun, MindSpore's dynamic cluster by hand, `parallelkit run`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from parallelkit.spawn import FOREIGN, FOREIGN_PREFIXES

from .test_group_ranks import free_port

pytestmark = pytest.mark.ranks
LAUNCHED = str(Path(__file__).parent / "jobs" / "group_launched.py")
SCHEDULER = """
import mindspore as ms
ms.set_device("CPU")
from mindspore.communication import init
init()
"""


def environ(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in FOREIGN}
    kept = {k: v for k, v in kept.items() if not k.startswith(FOREIGN_PREFIXES)}
    return kept | {"OMP_NUM_THREADS": "1", "GLOG_v": "3"} | more


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=environ(),
        capture_output=True,
        text=True,
        timeout=180,
        start_new_session=True,
    )


def test_parallelkit_run_by_msrun() -> None:
    run_ = [sys.executable, "-m", "parallelkit", "run", "--framework", "mindspore", "-n", "2"]
    done = run(*run_, LAUNCHED)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    for rank in range(2):
        assert f"rank {rank} of 2 done" in said
    logs = named_logs(said)
    assert logs.name.startswith("parallelkit-msrun-")
    assert not logs.exists()


def named_logs(said: str) -> Path:
    """The folder of logs that msrun names in its output."""
    return Path(said.partition("log file:")[2].partition("/scheduler.log")[0])


@pytest.mark.slow
def test_a_failing_rank_fails_msrun() -> None:
    run_ = [sys.executable, "-m", "parallelkit", "run", "--framework", "mindspore", "-n", "2"]
    done = run(*run_, LAUNCHED, "3")
    said = done.stdout + done.stderr
    assert done.returncode != 0, said
    logs = named_logs(said)
    assert f"check logs in directory: {logs}" in said
    assert (logs / "scheduler.log").exists()
    shutil.rmtree(logs)


def test_torchrun() -> None:
    pytest.importorskip("torch")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = run(sys.executable, *torchrun, LAUNCHED)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert done.stdout.count(f"rank {rank} of 2 done") == 1, done.stdout


def test_a_cluster_whose_scheduler_is_mindspore_s() -> None:
    port = free_port()
    cluster = {"MS_WORKER_NUM": "2", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": port}
    started = []

    def start(command: list[str], **role: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            env=environ(**cluster, **role),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    try:
        scheduler = start([sys.executable, "-c", SCHEDULER], MS_ROLE="MS_SCHED")
        listening = f":{int(port):04X} 00000000:0000 0A"
        end = time.monotonic() + 60
        while listening not in Path("/proc/net/tcp").read_text() and time.monotonic() < end:
            time.sleep(0.1)
        workers = [
            start([sys.executable, LAUNCHED], MS_ROLE="MS_WORKER", MS_NODE_ID=str(rank))
            for rank in range(2)
        ]
        for rank, worker in enumerate(workers):
            out, _ = worker.communicate(timeout=150)
            assert worker.returncode == 0, out
            assert f"rank {rank} of 2 done" in out
        assert scheduler.wait(60) == 0
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.communicate()
