"""Three ranks: every collective, what it refuses, subgroups, and leaving without closing."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

import parallelkit as pk
from parallelkit.errors import (
    AlreadyInitializedError,
    CollectiveError,
    GroupClosedError,
    NotPlainError,
)

environ = dict(os.environ)


def raises(kind: type[Exception], call: object, *said: str) -> None:
    try:
        call()  # type: ignore[operator]
    except kind as error:
        assert all(text in str(error) for text in said), error
    else:
        raise AssertionError(f"no {kind.__name__}")


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.view(torch.uint8).tolist()  # type: ignore[no-any-return]


group = pk.init_process_group(device="cpu", timeout=20)
rank, world = group.rank, group.world_size
assert (group.local_rank, world, group.backend, group.device) == (rank, 3, "gloo", "cpu")
assert dict(os.environ) == environ

# the same again is the same, another is an error that shows both
assert pk.init_process_group(device="cpu") is group
group.close()
raises(AlreadyInitializedError, lambda: pk.init_process_group(backend="nccl"), "gloo", "nccl")

# values, and inputs unchanged
x = torch.tensor([[1.0, 4.0], [2.0, 3.0]]).t() + rank
kept = x.clone()
for op, expected in {
    "sum": 3 * kept - 3 * rank + 3,
    "mean": kept - rank + 1,
    "max": kept - rank + 2,
    "min": kept - rank,
    "product": (kept - rank) * (kept - rank + 1) * (kept - rank + 2),
}.items():
    assert torch.equal(group.all_reduce(x, op), expected), op
    tall = x.repeat(3, 1)
    assert torch.equal(group.reduce_scatter(tall, op), expected), op
    assert torch.equal(x, kept)
assert [t.tolist() for t in group.all_gather(x.t())] == [
    (kept.t() - rank + r).tolist() for r in range(3)
]
grad = torch.ones(2, requires_grad=True)
assert not group.all_reduce(grad * 2).requires_grad

for dtype in (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16):
    assert group.all_reduce(torch.ones(2, dtype=dtype), "max").tolist() == [1, 1], dtype
half = torch.full((2,), float(rank), dtype=torch.bfloat16)
assert group.all_reduce(half).dtype == torch.bfloat16
assert group.all_reduce(half, "mean").tolist() == [1, 1]
assert group.all_reduce(torch.ones(3, dtype=torch.complex64), "mean").tolist() == [1, 1, 1]
for dtype in (torch.float8_e4m3fn, torch.int16, torch.uint32, torch.complex128, torch.bool):
    by_rank = [torch.tensor([r, 1]).to(torch.float32).to(dtype) for r in range(3)]
    assert bits(group.broadcast(by_rank[rank], 2)) == bits(by_rank[2]), dtype
    assert [bits(t) for t in group.all_gather(by_rank[rank])] == [bits(t) for t in by_rank], dtype
for empty in (torch.ones(0, 3), torch.ones(3, 0)):
    assert group.all_reduce(empty).shape == empty.shape
    assert group.reduce_scatter(empty).shape[1:] == empty.shape[1:]
    assert len(group.all_gather(empty)) == 3
assert group.broadcast(torch.tensor(rank), 1).item() == 1

# ranks that differ are told apart before gloo could end the process
raises(
    CollectiveError, lambda: group.all_reduce(torch.ones(2 + rank // 2)), "float32[2]", "float32[3]"
)
raises(CollectiveError, lambda: group.broadcast(torch.ones(2), rank // 2), "src=0", "src=1")
raises(
    CollectiveError,
    lambda: group.barrier() if rank else group.all_gather(torch.ones(1)),
    "barrier()",
    "rank(s) 1, 2",
)
raises(CollectiveError, lambda: group.all_reduce(torch.ones(1).reshape([1] * (60 + rank))), "...")
raises(CollectiveError, lambda: group.reduce_scatter(torch.ones(4)), "divide")
group.barrier()

# plain objects; an error at the source reaches everybody
big = {"data": b"x" * 100_000, "n": [1, -2.5, None, True, "text"]}
assert group.broadcast_object(big if rank == 1 else None, 1) == big
for size in (900, 1014, 1015, 1016, 1100):
    assert group.broadcast_object(b"y" * size if rank == 0 else None) == b"y" * size
kind = NotPlainError if rank == 2 else CollectiveError
raises(kind, lambda: group.broadcast_object((1,) if rank == 2 else None, 2), "tuple")
assert group.broadcast_object("still usable", timeout=5) == "still usable"

# subgroups: by position, nested, repeated, and for members only
pair = group.subgroup([2, 0])
assert (pair is None) == (rank == 1)
if pair is not None:
    assert pair.rank == {2: 0, 0: 1}[rank]
    assert [int(t) for t in pair.all_gather(torch.tensor(rank))] == [2, 0]
    assert pair.broadcast(torch.tensor(rank), 0).item() == 2
    assert pair.reduce_scatter(torch.tensor([1.0, 2.0])).item() == [2.0, 4.0][pair.rank]
    alone = pair.subgroup([1])
    assert (alone is None) == (rank == 2)
    if alone is not None:
        assert alone.all_reduce(torch.tensor(5.0)).item() == 5
    pair.close()
    raises(GroupClosedError, pair.barrier, "closed")
others = group.subgroup([1, 2])
if others is not None:
    for _ in range(2):  # the same ranks again, once one side closed and once both did
        nested = others.subgroup([1, 0])
        assert nested is not None
        assert [int(t) for t in nested.all_gather(torch.tensor(rank))] == [2, 1]
        nested.close()
again = group.subgroup([2, 0])
if again is not None:
    assert again.all_reduce(torch.tensor(1)).item() == 2
raises(CollectiveError, lambda: group.subgroup([0, 1] if rank else [0, 2]), "subgroup([0, 2])")

# a stateless group beside the default world: both usable, no clash
side_store = None
if rank == 0:
    side_store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
port = group.broadcast_object(side_store.port if side_store else 0)
if side_store is None:
    side_store = dist.TCPStore("127.0.0.1", port, None, False)  # type: ignore[arg-type]
side = dist.ProcessGroupGloo(side_store, rank, 3, timedelta(seconds=20))
sent = torch.full((4,), float(rank))
side.broadcast(sent, 1).wait()
assert sent.tolist() == [1.0] * 4
assert group.all_reduce(torch.ones(1)).item() == 3
group.barrier()
del side

# closing twice, and opening again with the same store's successor
group.close()
group.close()
raises(GroupClosedError, group.barrier, "closed")
assert not dist.is_initialized()
second = pk.init_process_group(device="cpu", timeout=20)
assert second.all_reduce(torch.ones(1)).item() == 3
# left open on purpose: no warning, exit code 0
