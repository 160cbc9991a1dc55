"""Groups on real ranks. Each test starts processes once and checks many things; see `jobs/`."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from parallelkit.spawn import RankResult

pytestmark = pytest.mark.ranks
Job = Callable[..., list[RankResult]]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_collectives(job: Job) -> None:
    job("group_collectives.py", ranks=3)


def test_a_rank_that_never_comes_is_named(job: Job) -> None:
    job("group_failures.py", "never", ranks=3)


@pytest.mark.parametrize("gone", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_rank_is_named(job: Job, gone: int) -> None:
    job("group_failures.py", "killed", str(gone), ranks=3, ends={gone: -signal.SIGKILL})


@pytest.mark.parametrize("stopped", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_stopped_rank_gets_no_wrong_values(job: Job, stopped: int) -> None:
    job("group_failures.py", "stopped", str(stopped), ranks=2)


def test_a_group_of_the_user_is_adopted(job: Job) -> None:
    job("group_adopt.py", free_port(), ranks=2)


def test_beside_a_group_of_torch(job: Job, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    job("group_with_torch.py", str(tmp_path / "store"), ranks=2)


@pytest.mark.slow
def test_ranks_that_are_given_a_port(job: Job) -> None:
    job("group_launched.py", ranks=2, MASTER_PORT=free_port(), MASTER_ADDR="localhost")
