"""Three ranks: every collective and dtype against NumPy, mismatches, subgroups, leaving."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

import parallelkit as pk
from parallelkit.errors import (
    AlreadyInitializedError,
    CollectiveError,
    GroupClosedError,
    NotPlainError,
)

environ = dict(os.environ)


def raises(kind: type[Exception], call: Callable[[], Any], *said: str) -> None:
    try:
        call()
    except kind as error:
        assert all(text in str(error) for text in said), error
    else:
        raise AssertionError(f"no {kind.__name__}")


group = pk.init_process_group("mindspore", device="cpu", timeout=60)
rank, world = group.rank, group.world_size
assert (group.local_rank, world, group.backend, group.device) == (rank, 3, "mccl", "cpu")
assert dict(os.environ) == environ
assert pk.init_process_group("mindspore", device="cpu") is group
group.close()
raises(AlreadyInitializedError, lambda: pk.init_process_group(backend="nccl"), "mccl", "nccl")

# values against NumPy; inputs unchanged; contiguous or not
COMBINE = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "product": np.prod}
DTYPES = ["float16", "float32", "float64", "complex64", "bool", "uint8", "int8", "int16"]
for dtype in [*DTYPES, "int32", "int64", "uint16", "uint32", "uint64"]:
    rows = np.random.default_rng(0).integers(0, 5, (world, 6, 2)).astype(dtype)
    x = ms.Tensor(np.ascontiguousarray(rows[rank].T)).t()
    whole = np.issubdtype(rows.dtype, np.integer) or dtype == "bool"
    complex_ = dtype == "complex64"
    for op, combine in COMBINE.items():
        if (op == "mean" and whole) or (complex_ and op not in ("sum", "mean")):
            raises(CollectiveError, lambda op=op, x=x: group.all_reduce(x, op), f"op={op!r}")
            continue
        expected = (rows.any(0) if (dtype, op) == ("bool", "sum") else combine(rows, 0)).astype(
            dtype
        )
        close = {"rtol": 1e-3 if dtype == "float16" else 1e-6}
        found = group.all_reduce(x, op)
        assert found.dtype == x.dtype
        np.testing.assert_allclose(found.asnumpy(), expected, **close)
        part = group.reduce_scatter(x, op).asnumpy()
        np.testing.assert_allclose(part, expected[2 * rank : 2 * rank + 2], **close)
    assert (group.broadcast(x, 2).asnumpy() == rows[2]).all()
    assert (np.stack([t.asnumpy() for t in group.all_gather(x)]) == rows).all()
    assert (x.asnumpy() == rows[rank]).all()
half = ms.Tensor([float(rank), 1.5]).astype(ms.bfloat16)
for op, expected in {"sum": [3, 4.5], "mean": [1, 1.5], "product": [0, 3.375]}.items():
    assert group.all_reduce(half, op).astype(ms.float32).asnumpy().tolist() == expected, op
assert group.broadcast(half, 1).dtype == ms.bfloat16
for shape in ((0, 3), (3, 0)):
    empty = ops.ones(shape, ms.float32)
    assert group.all_reduce(empty).shape == shape
    assert group.broadcast(empty).shape == shape
    assert group.reduce_scatter(empty).shape == (shape[0] // 3, shape[1])
    assert [t.shape for t in group.all_gather(empty)] == [shape] * 3
assert group.all_reduce(ms.Tensor(float(rank))).asnumpy() == 3
large = ms.Tensor(np.arange(3 << 19, dtype=np.float64) + rank)  # more than one piece
assert (group.all_reduce(large).asnumpy() == 3 * np.arange(3 << 19) + 3).all()

# also while the mode is graph, outside of graphs; and by what `native` names, in graphs
with pk.execution_mode("graph", framework="mindspore"):
    assert group.all_reduce(ms.Tensor([1.0])).asnumpy() == 3


class Sum(nn.Cell):  # type: ignore[misc]
    def __init__(self, name: str) -> None:
        super().__init__()
        self.reduce = ops.AllReduce(group=name)

    def construct(self, x: Any) -> Any:
        return self.reduce(x) * 2


assert ms.jit(Sum(group.native))(ms.Tensor([1.0 + rank])).asnumpy() == 12
assert ops.AllReduce(group=group.native)(ms.Tensor([1.0])).asnumpy() == 3

# ranks that differ are told apart before anything moves, and go on
one = ms.Tensor([1.0])
raises(
    CollectiveError,
    lambda: group.all_reduce(ops.ones(2 + rank // 2)),
    "float32[2]",
    "float32[3]",
)
raises(CollectiveError, lambda: group.broadcast(one, rank // 2), "src=0", "src=1")
raises(
    CollectiveError,
    lambda: group.barrier() if rank else group.all_gather(one),
    "rank(s) 0: all_gather() of float32[1]",
    "rank(s) 1, 2: barrier()",
)
raises(CollectiveError, lambda: group.reduce_scatter(ops.ones(4)), "divide")
group.barrier()

# plain objects; an error at the source reaches everybody
big = {"data": b"x" * 100_000, "n": [1, -2.5, None, True, "text"]}
assert group.broadcast_object(big if rank == 1 else None, 1) == big
kind = NotPlainError if rank == 2 else CollectiveError
raises(kind, lambda: group.broadcast_object((1,) if rank == 2 else None, 2), "tuple")
assert group.broadcast_object("still usable", timeout=30) == "still usable"

# subgroups: by position, nested, repeated, and for members only
pair = group.subgroup([2, 0])
assert (pair is None) == (rank == 1)
if pair is not None:
    assert pair.rank == {2: 0, 0: 1}[rank]
    assert [int(t) for t in pair.all_gather(ms.Tensor(rank))] == [2, 0]
    assert int(pair.broadcast(ms.Tensor(rank), 0)) == 2
    assert ms.jit(Sum(pair.native))(one).asnumpy() == 4
    alone = pair.subgroup([1])
    assert (alone is None) == (rank == 2)
    if alone is not None:
        assert alone.all_reduce(ms.Tensor(5.0)).asnumpy() == 5
        assert ops.AllReduce(group=alone.native)(one).asnumpy() == 1
    pair.close()
    raises(GroupClosedError, pair.barrier, "closed")
others = group.subgroup([1, 2])
if others is not None:
    for _ in range(2):  # the same ranks again
        nested = others.subgroup([1, 0])
        assert nested is not None
        assert [int(t) for t in nested.all_gather(ms.Tensor(rank))] == [2, 1]
        nested.close()
part = group.partition([[1], [0, 2]])
assert part.world_size == (1 if rank == 1 else 2)
assert int(part.all_reduce(ms.Tensor(rank))) == (1 if rank == 1 else 2)
raises(CollectiveError, lambda: group.subgroup([0, 1] if rank else [0, 2]), "subgroup([0, 2])")
group.barrier()

# closing twice is harmless; MindSpore has one group a life
group.close()
group.close()
raises(GroupClosedError, group.barrier, "closed")
raises(
    AlreadyInitializedError,
    lambda: pk.init_process_group("mindspore", device="cpu"),
    "cannot open a second one",
)
