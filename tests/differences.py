"""One process without a launcher: situations in which Torch and MindSpore differ, and ours do not.

    python -m differences --adapter package.module:name --folder DIR

The parts are the rows of the table in `docs/differences.md`, by name.
"""

from __future__ import annotations

import socket
import time
from typing import Any

import numpy as np

import parallelkit as pk
from parallelkit.errors import (
    AlreadyInitializedError,
    GroupClosedError,
    GroupError,
    NotInitializedError,
    PortInUseError,
    RendezvousTimeoutError,
)
from parallelkit.testing.conformance.parts import Case, Parts, main, raises

PARTS = Parts()
CPU_BACKENDS = {"torch": "gloo", "mindspore": "mccl"}


def init(case: Case, **given: Any) -> pk.ProcessGroup:
    return pk.init_process_group(case.adapter.framework, device="cpu", **given)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@PARTS.part()
def rank_before_init(case: Case) -> None:
    raises(NotInitializedError, lambda: pk.current_group().rank, "init_process_group")


@PARTS.part()
def rank_of_an_unknown_group_before_init(case: Case) -> None:
    raises(
        GroupError,
        lambda: pk.parallel_context("data", group="hccl_world_group"),  # type: ignore[arg-type]
        "'hccl_world_group'",
    )


@PARTS.part()
def collective_before_init(case: Case) -> None:
    x = case.tensor([1.0])
    raises(NotInitializedError, lambda: pk.current_group().all_reduce(x))


@PARTS.part()
def new_group_before_init(case: Case) -> None:
    raises(NotInitializedError, lambda: pk.current_group().subgroup([0]))


@PARTS.part()
def peer_missing(case: Case) -> None:
    """Rank 0 of 2 alone: within the timeout, by number."""
    began = time.monotonic()
    error = raises(
        RendezvousTimeoutError,
        lambda: init(
            case,
            rank=0,
            world_size=2,
            master_addr="127.0.0.1",
            master_port=free_port(),
            timeout=1.5,
        ),
        "1",
    )
    assert error.missing == (1,)
    assert time.monotonic() - began < 30
    raises(NotInitializedError, pk.current_group)


@PARTS.part()
def port_busy(case: Case) -> None:
    """At once, with host and port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        began = time.monotonic()
        raises(
            PortInUseError,
            lambda: init(
                case,
                rank=0,
                world_size=2,
                master_addr="127.0.0.1",
                master_port=port,
                timeout=60,
            ),
            "127.0.0.1",
            str(port),
        )
        assert time.monotonic() - began < 30


@PARTS.part()
def init_with_no_launcher(case: Case) -> None:
    case.group = group = init(case)
    assert (group.rank, group.world_size, group.local_rank) == (0, 1, 0)
    assert case.adapter.array(group.all_reduce(case.tensor([3.0]))).tolist() == [3.0]


@PARTS.part()
def default_backend_on_cpu(case: Case) -> None:
    assert case.group.backend == CPU_BACKENDS[case.adapter.framework]


@PARTS.part()
def second_init(case: Case) -> None:
    """The same group, counted; another specification is an error that shows both."""
    again = init(case)
    assert again is case.group
    again.close()
    case.group.barrier()
    raises(
        AlreadyInitializedError,
        lambda: init(case, rank=0, world_size=2, master_addr="127.0.0.1"),
        "world_size=1",
        "world_size=2",
    )


@PARTS.part()
def gradient_reduction_default(case: Case) -> None:
    """Two ranks are the context suite's; here it is what the context says."""
    context = pk.parallel_context()
    assert context.reduce == "mean"
    context.reset()


@PARTS.part()
def default_execution_mode(case: Case) -> None:
    """Plain calls of a function are plain Python: it runs every time."""
    calls = []

    def step(x: Any) -> Any:
        calls.append(len(calls))
        return x * 2

    for _ in range(3):
        assert case.adapter.array(step(case.tensor([2.0]))).tolist() == [4.0]
    assert calls == [0, 1, 2]
    model = case.adapter.scale(2.0)
    assert np.allclose(case.adapter.array(model(case.tensor([2.0]))), 4.0)
    mode = pk.execution_mode("eager")
    assert (mode.effective, mode.graphs) == ("eager", 0)


@PARTS.part()
def destroy_twice_or_before_init(case: Case) -> None:
    """Closing again is harmless, using what is closed is an error."""
    x = case.tensor([1.0])
    for _ in range(3):
        case.group.close()
    raises(GroupClosedError, lambda: case.group.all_reduce(x), "closed")
    raises(NotInitializedError, pk.current_group)


if __name__ == "__main__":
    main(PARTS)
