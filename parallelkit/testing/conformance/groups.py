"""Parts of the group suite: what a `ProcessGroup` promises, on real ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np

import parallelkit as pk
from parallelkit.errors import (
    AlreadyInitializedError,
    CollectiveError,
    CollectiveTimeoutError,
    GroupClosedError,
    GroupError,
    NotInitializedError,
    NotPlainError,
)
from parallelkit.protocols import Plain, ProcessGroup
from parallelkit.testing.conformance.adapter import Array
from parallelkit.testing.conformance.parts import Case, Parts, main, raises

TIMEOUT: Final = 60.0
#: How late the last rank is on purpose, and how long the others wait for it.
LATE_SECONDS: Final = 8.0
PATIENCE_SECONDS: Final = 4.0

OPS: Final[dict[str, Callable[[Array], Array]]] = {
    "sum": np.add.reduce,
    "mean": lambda arrays: np.add.reduce(arrays) / len(arrays),
    "max": np.maximum.reduce,
    "min": np.minimum.reduce,
    "product": np.multiply.reduce,
}

PARTS: Final = Parts()


@PARTS.part()
def before_init(case: Case) -> None:
    """Without a group nothing has a rank, 0 least of all."""
    raises(NotInitializedError, pk.current_group, "init_process_group")
    raises(NotInitializedError, lambda: pk.parallel_context("data", manager=case.adapter.manager))


@PARTS.part()
def init(case: Case) -> None:
    """The group knows its place, and opening it changes no environment variable."""
    environ = dict(os.environ)
    case.group = group = open_group(case)
    assert dict(os.environ) == environ, "init_process_group changed os.environ"
    assert isinstance(group, ProcessGroup)
    assert (group.rank, group.world_size, group.local_rank) == (case.rank, case.world, case.rank)
    assert (group.framework, group.timeout) == (case.adapter.framework, TIMEOUT)
    assert group.device == "cpu"
    assert group.backend != ""
    assert not group.closed
    assert pk.current_group() is group
    group.barrier()


@PARTS.part()
def init_again(case: Case) -> None:
    """The same again is the same group and counts; another is an error that shows both."""
    again = open_group(case)
    assert again is case.group, "the same spec gave another group"
    again.close()
    assert not case.group.closed, "the first of two closes closed"
    other = case.world + 7
    raises(
        AlreadyInitializedError,
        lambda: open_group(case, world_size=other, rank=0, master_addr="127.0.0.1"),
        f"world_size={case.world}",
        f"world_size={other}",
    )


@PARTS.part()
def reductions(case: Case) -> None:
    """Every op over every dtype gives NumPy's values; inputs stay, results are new."""
    base = np.array([[1.0, 4.0, 2.0], [2.0, 3.0, 1.0]])
    for dtype in sorted(case.adapter.reduced):
        whole = "int" in dtype
        by_rank = [base + rank for rank in range(case.world)]
        for op, combine in OPS.items():
            if op == "mean" and whole:
                continue
            mine = case.tensor(by_rank[case.rank], dtype)
            expected = combine(np.stack(by_rank))
            found = case.group.all_reduce(mine, op)
            same(case, found, expected, dtype, f"all_reduce {op} of {dtype}")
            same(case, mine, by_rank[case.rank], dtype, "the input")
            tall = case.tensor(np.concatenate([by_rank[case.rank]] * case.world), dtype)
            scattered = case.group.reduce_scatter(tall, op)
            same(case, scattered, expected, dtype, f"reduce_scatter {op} of {dtype}")


@PARTS.part()
def slices_by_rank(case: Case) -> None:
    """`reduce_scatter` keeps this rank's slice, `all_gather` is by rank."""
    rows = np.arange(2.0 * case.world) + case.rank
    found = case.adapter.array(case.group.reduce_scatter(case.tensor(rows)))
    whole = case.world * np.arange(2.0 * case.world) + sum(range(case.world))
    assert found.tolist() == whole[2 * case.rank : 2 * case.rank + 2].tolist()
    gathered = case.group.all_gather(case.tensor([case.rank, 5.0]))
    assert [case.adapter.array(t).tolist() for t in gathered] == [
        [rank, 5.0] for rank in range(case.world)
    ]


@PARTS.part()
def moved_bit_for_bit(case: Case) -> None:
    """`broadcast` and `all_gather` carry every dtype unchanged."""
    for dtype in sorted(case.adapter.moved):
        by_rank = [np.array([[rank % 2, 1], [1, 0]]) for rank in range(case.world)]
        mine = case.tensor(by_rank[case.rank], dtype)
        src = case.last
        same(case, case.group.broadcast(mine, src), by_rank[src], dtype, f"broadcast of {dtype}")
        for rank, found in enumerate(case.group.all_gather(mine)):
            same(case, found, by_rank[rank], dtype, f"all_gather of {dtype}")


@PARTS.part()
def odd_shapes(case: Case) -> None:
    """Scalars and tensors without elements go through like any other."""
    scalar = case.tensor(float(case.rank + 1))
    total = case.world * (case.world + 1) / 2
    same(case, case.group.all_reduce(scalar), np.array(total), "float32", "all_reduce of a scalar")
    same(case, case.group.broadcast(scalar, 0), np.array(1.0), "float32", "broadcast of a scalar")
    for shape in ((0, 3), (case.world, 0)):
        empty = case.tensor(np.zeros(shape))
        assert case.adapter.array(case.group.all_reduce(empty)).shape == shape
        assert len(case.group.all_gather(empty)) == case.world
        assert case.adapter.array(case.group.reduce_scatter(empty)).shape[1:] == shape[1:]


@PARTS.part()
def wrong_arguments(case: Case) -> None:
    """Each is refused before any communication: rank 0 alone makes the calls."""
    if case.rank:
        return
    group, x = case.group, case.tensor([1.0, 2.0])
    beyond = case.world
    for call, said in (
        (lambda: group.all_reduce(x, "avg"), "avg"),
        (lambda: group.all_reduce(case.tensor([1, 2], "int64"), "mean"), "mean"),
        (lambda: group.all_reduce([1.0]), "list"),
        (lambda: group.broadcast(x, beyond), str(beyond)),
        (lambda: group.broadcast(x, -1), "-1"),
        (lambda: group.reduce_scatter(case.tensor(1.0)), "dim 0"),
        (lambda: group.barrier(timeout=0), "timeout"),
        (lambda: group.barrier(timeout=float("nan")), "timeout"),
    ):
        raises(CollectiveError, call, said)
    wrong: list[Any] = [[], [0, 0], [beyond], [-1], 0]
    for ranks in wrong:
        raises(GroupError, partial(group.subgroup, ranks))


@PARTS.part(ranks=2)
def mismatches_are_named(case: Case) -> None:
    """Ranks that call different things all learn what both sides called; the group goes on."""
    group, last = case.group, case.rank == case.last
    raises(
        CollectiveError, lambda: group.all_reduce(case.tensor([1.0] * (3 if last else 2))),
        "[2]", "[3]",
    )  # fmt: skip
    dtypes = ("int64", "float32")
    raises(CollectiveError, lambda: group.all_gather(case.tensor([1, 2], dtypes[last])), *dtypes)
    raises(
        CollectiveError,
        lambda: group.barrier() if last else group.all_gather(case.tensor([1.0])),
        "barrier",
        "all_gather",
    )
    raises(
        CollectiveError,
        lambda: group.broadcast(case.tensor([1.0]), int(last)),
        "src=0",
        "src=1",
    )
    group.barrier()


@PARTS.part()
def plain_objects(case: Case) -> None:
    """`broadcast_object` carries plain values of any size, and nothing else."""
    group, src = case.group, case.last
    big: Plain = {"data": b"x" * 100_000, "n": [1, -2.5, None, True, "text"], "deep": {"a": {}}}
    sizes = (900, 1014, 1015, 1016, 1100)  # around the first message's room, in any backend
    plain: list[Plain] = [big, None, 0, "", [], *(b"y" * size for size in sizes)]
    for sent in plain:
        found = group.broadcast_object(sent if case.rank == src else "other", src)
        assert found == sent
        assert type(found) is type(sent)
    wrong: list[Any] = [(1,), {1: 2}, {"x": object()}, np.float32(1)]
    for obj in wrong:
        kind = NotPlainError if case.rank == src else CollectiveError
        given = obj if case.rank == src else 0
        raises(kind, partial(group.broadcast_object, given, src))
    assert group.broadcast_object("still usable", timeout=TIMEOUT) == "still usable"


@PARTS.part(ranks=2)
def subgroups(case: Case) -> None:
    """Everyone calls, members get a group numbered by position, the others None."""
    order = [case.last, 0]
    pair = case.group.subgroup(order)
    assert (pair is not None) == (case.rank in order)
    if pair is not None:
        place = order.index(case.rank)
        assert (pair.rank, pair.world_size) == (place, 2)
        gathered = pair.all_gather(case.tensor(float(case.rank)))
        assert [float(case.adapter.array(t)) for t in gathered] == order
        sent = pair.broadcast(case.tensor(float(case.rank)), 0)
        assert float(case.adapter.array(sent)) == case.last
        assert pair.broadcast_object(case.rank, 1) == 0
        alone = pair.subgroup([1])
        assert (alone is not None) == (place == 1)
        if alone is not None:
            same(case, alone.all_reduce(case.tensor(5.0)), np.array(5.0), "float32", "alone")
        pair.close()
        raises(GroupClosedError, pair.barrier, "closed")
    again = case.group.subgroup(order)  # the same ranks, after the first was closed
    if again is not None:
        again.barrier()
    raises(
        CollectiveError,
        lambda: case.group.subgroup([0] if case.rank else [0, 1]),
        "subgroup([0])",
        "subgroup([0, 1])",
    )
    case.group.barrier()


@PARTS.part(ranks=2)
def late_rank(case: Case) -> None:
    """A rank that is late is named to those who waited, told so itself, and the group is over."""
    began = time.monotonic()
    if case.rank == case.last:
        time.sleep(LATE_SECONDS)
        raises(CollectiveError, lambda: case.group.barrier(timeout=PATIENCE_SECONDS))
    else:
        error = raises(CollectiveTimeoutError, lambda: case.group.barrier(timeout=PATIENCE_SECONDS))
        assert error.missing == (case.last,), f"missing is {error.missing}: {error}"
        assert time.monotonic() - began < LATE_SECONDS + 60
    raises(CollectiveError, case.group.barrier)


@PARTS.part()
def close(case: Case) -> None:
    """Closing again is harmless; whatever is called afterwards says that it is closed."""
    group = case.group
    group.close()
    group.close()
    assert group.closed
    x = case.tensor([1.0])
    for call in (
        group.barrier,
        lambda: group.all_reduce(x),
        lambda: group.broadcast(x),
        lambda: group.all_gather(x),
        lambda: group.reduce_scatter(x),
        lambda: group.broadcast_object(1),
        lambda: group.subgroup([0]),
    ):
        raises(GroupClosedError, call, "closed")
    raises(NotInitializedError, pk.current_group)


def open_group(case: Case, *, timeout: float = TIMEOUT, **given: Any) -> ProcessGroup:
    """Open the adapter's group on the CPU."""
    return pk.init_process_group(
        case.adapter.framework,
        device="cpu",
        timeout=timeout,
        manager=case.adapter.manager,
        **given,
    )


def same(case: Case, found: Any, expected: Any, dtype: str, what: str) -> None:
    """Check dtype, shape and every value; small whole numbers are exact in every dtype."""
    assert case.adapter.dtype(found) == dtype, f"{what}: dtype {case.adapter.dtype(found)}"
    array = case.adapter.array(found)
    assert array.shape == np.shape(expected), f"{what}: shape {array.shape}"
    np.testing.assert_allclose(
        array.astype(np.complex128), expected, rtol=0.01 if "float" in dtype else 0, err_msg=what
    )


if __name__ == "__main__":
    main(PARTS)
