"""Every test of the MindSpore plugin: real ranks where asked for, in a folder of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mindspore as ms  # writes environment variables; here, not in some test
import pytest

from parallelkit.spawn import RankResult
from parallelkit.testing.jobs import run_job

JOBS = Path(__file__).parent / "jobs"

# By the first operation MindSpore starts threads that live as long as the process.
(ms.Tensor([1.0]) + 1).asnumpy()


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed compilation writes files into the working folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def job() -> Callable[..., list[RankResult]]:
    """Run a file of `jobs/` on real ranks; every rank must end well and warn of nothing."""

    def run(
        name: str,
        *args: str,
        ranks: int = 2,
        timeout: float = 120.0,
        ends: dict[int, int] | None = None,
        **env: str,
    ) -> list[RankResult]:
        quiet = {"GLOG_v": "3"}  # errors only
        return run_job(
            JOBS / name,
            args,
            ranks=ranks,
            timeout=timeout,
            ends=ends,
            env={**quiet, **env},
            ignored=["ignore:getName() is deprecated:DeprecationWarning"],  # MindSpore's, at exit
        )

    return run
