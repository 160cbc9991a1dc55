"""Real ranks. Each test starts processes once and checks many things in them; see `jobs/`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from parallelkit_torch.plugin import parallelkit_launch

from parallelkit.plugin import LaunchSpec
from parallelkit.spawn import FOREIGN, FOREIGN_PREFIXES, RankResult

pytestmark = pytest.mark.ranks
Job = Callable[..., list[RankResult]]
JOBS = Path(__file__).parent / "jobs"


def test_collectives(job: Job) -> None:
    job("collectives.py", ranks=3)


def test_training(job: Job) -> None:
    job("training.py", ranks=2)


def test_adopted_group(job: Job, tmp_path: Path) -> None:
    job("adopt.py", str(tmp_path / "store"), ranks=2)


@pytest.mark.parametrize("case", ["late", "object", "never"])
def test_missing_rank_is_named(job: Job, case: str) -> None:
    job("failures.py", case, ranks=3)


@pytest.mark.parametrize("gone", [0, 2])
def test_killed_rank_is_named(job: Job, gone: int) -> None:
    job("failures.py", "killed", str(gone), ranks=3, ends={gone: -signal.SIGKILL})


def test_stopped_rank_zero_blocks_nobody(job: Job) -> None:
    job("failures.py", "stopped", ranks=3)


@pytest.mark.parametrize("ending", ["close", "exit", "adopted"])
def test_ranks_end_well_while_something_holds_the_group(
    ending: str, job: Job, tmp_path: Path
) -> None:
    job("endings.py", "8", ending, str(tmp_path), ranks=1)


def test_torchrun() -> None:
    spec = LaunchSpec(
        framework="torch", ranks=2, script=str(JOBS / "launched.py"), python=sys.executable
    )
    command = parallelkit_launch(spec)
    assert command is not None
    env = {k: v for k, v in os.environ.items() if k not in FOREIGN}
    env = {k: v for k, v in env.items() if not k.startswith(FOREIGN_PREFIXES)}
    done = subprocess.run(
        command,
        env=env | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        start_new_session=True,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):  # which may write at the same moment, into one line
        assert done.stdout.count(f"rank {rank} of 2 done") == 1, done.stdout
    assert "Warning" not in done.stderr, done.stderr


def test_ranks_that_are_given_a_port(job: Job) -> None:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job("launched.py", ranks=2, fresh=True, MASTER_PORT=str(port), MASTER_ADDR="localhost")
