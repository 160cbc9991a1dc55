"""Every test of the torch plugin: no group left behind, and real ranks where asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parallelkit.plugin import GroupSpec, LaunchInfo
from parallelkit.spawn import RankResult
from parallelkit.testing.forkserver import ForkServer
from parallelkit.testing.jobs import run_job

JOBS = Path(__file__).parent / "jobs"
#: What ranks that are forked have imported already: what most jobs use.
IMPORTED = (
    "torch._dynamo.backends.debugging",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "parallelkit_torch.plugin",
    "parallelkit_torch.group",
    "parallelkit_torch.parallel",
    "parallelkit.weights",
)


# torch writes TORCHINDUCTOR_CACHE_DIR at the first compilation; here, not in some test
torch.compile(lambda: None, backend="eager")


@pytest.fixture(autouse=True)
def _no_group_left() -> Iterator[None]:
    """On top of the repository's leak checks: torch's default group and its exception hook."""
    hook = sys.excepthook
    yield
    left = dist.is_initialized()
    if left:
        dist.destroy_process_group()
    assert not left, "the test left a default process group"
    assert sys.excepthook is hook


@pytest.fixture
def spec() -> Callable[..., GroupSpec]:
    """Make a `GroupSpec` for a CPU group; launch facts by `launch=`."""

    def make(rank: int = 0, world_size: int = 1, **changes: object) -> GroupSpec:
        values: dict[str, object] = {
            "framework": "torch",
            "backend": "gloo",
            "device": "cpu",
            "rank": rank,
            "world_size": world_size,
            "local_rank": rank,
            "local_world_size": world_size,
            "master_addr": "127.0.0.1",
            "timeout": 10.0,
            "launch": LaunchInfo(),
        }
        return GroupSpec(**(values | changes))  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    """Ranks of it have torch, and what most jobs import of it, already."""
    made = ForkServer(IMPORTED, filters=("error",))
    yield made
    made.close()


@pytest.fixture
def job(server: ForkServer) -> Callable[..., list[RankResult]]:
    """Run a file of `jobs/` on real ranks; every rank must end well and warn of nothing.

    Ranks are forked, unless `fresh` asks for new interpreters.
    """

    def run(
        name: str,
        *args: str,
        ranks: int = 2,
        timeout: float = 120.0,
        ends: dict[int, int] | None = None,
        fresh: bool = False,
        **env: str,
    ) -> list[RankResult]:
        return run_job(
            JOBS / name,
            args,
            ranks=ranks,
            timeout=timeout,
            ends=ends,
            env=env,
            forbidden=("Warning", "destroy_process_group"),
            server=None if fresh else server,
        )

    return run
