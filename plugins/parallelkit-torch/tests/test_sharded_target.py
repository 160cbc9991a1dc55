"""Targets in parts: which boxes a rank keeps, and where their bytes go. No peer takes part.

Torch's fake backend lets one process be any rank of a mesh.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from parallelkit_torch.sharded_target import ShardedModuleSink, weight_sink
from parallelkit_torch.sharded_weights import weight_source
from parallelkit_torch.sharding import Boxes, reshard
from parallelkit_torch.weights import ModuleSink
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from parallelkit.errors import ManifestError, StateError, UnsupportedFeatureError
from parallelkit.protocols import RegionSink
from parallelkit.spawn import RankResult
from parallelkit.weights.layout import Region
from parallelkit.weights.subscriber import SERVE_THREAD

Job = Callable[..., list[RankResult]]

_numbers = itertools.count()


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_of_a_target_get_exactly_their_parts_of_what_ranks_of_a_trainer_hold(
    job: Job, tmp_path: Path, ranks: int
) -> None:
    both("cpu", job, tmp_path, ranks)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_parts_of_two_gpus(job: Job, tmp_path: Path) -> None:
    both("cuda", job, tmp_path, 2)


def both(device: str, job: Job, folder: Path, ranks: int) -> None:
    with ThreadPoolExecutor(2) as pool:
        sides = [
            pool.submit(job, "resharding.py", role, str(folder), device, ranks=ranks, timeout=240.0)
            for role in ("publish", "follow")
        ]
    for side in sides:
        side.result()


# --- without ranks -----------------------------------------------------------------------------


@contextmanager
def ranks_of(world: int, rank: int) -> Iterator[None]:
    """Be a rank of a group whose other ranks do not exist."""
    hook = sys.excepthook
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook  # torch puts its own there


def mesh_of(*shape: int, ranks: Sequence[int] | None = None) -> DeviceMesh:
    """A mesh with names that no other has.

    Torch keeps what it derived for a mesh and uses it for an equal one, of another rank too.
    """
    size = torch.Size(shape).numel()
    places = torch.tensor(list(range(size)) if ranks is None else ranks).reshape(shape)
    names = tuple(f"axis{next(_numbers)}" for _ in shape)
    return DeviceMesh("cpu", places, mesh_dim_names=names)


def axes_of(mesh: DeviceMesh) -> list[DeviceMesh]:
    assert mesh.mesh_dim_names is not None
    return [mesh[name] for name in mesh.mesh_dim_names]


def counted(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(1, torch.Size(shape).numel() + 1).reshape(shape).to(dtype)


def sharded(tensor: torch.Tensor, mesh: DeviceMesh, *placements: object) -> DTensor:
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


class Holder(nn.Module):
    def __init__(self, **given: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in given.items():
            floating = tensor.is_floating_point()
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=floating))


class Staged(nn.Module):
    def __init__(self, **stages: nn.Module) -> None:
        super().__init__()
        self.indices = tuple(int(name[1:]) for name in stages)
        self.stage_modules = tuple(stages.values())


def bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return bytes(flat.tolist())


def place(sink: ShardedModuleSink, index: int, tensor: torch.Tensor) -> bool:
    """Give the sink its part; whether it was written in place."""
    into = sink.destination(index)
    if into is None:
        sink.write(index, memoryview(bytes_of(tensor)))
        return False
    into[:] = bytes_of(tensor)
    return True


def cut(whole: torch.Tensor, box: Region | None) -> torch.Tensor:
    assert box is not None
    inside = tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))
    return whole[inside]


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize(
    ("shape", "placements"),
    [
        ((8, 3), (Shard(0), Replicate())),
        ((7, 3), (Replicate(), Shard(0))),
        ((7, 5), (Shard(1), Shard(0))),
        ((5, 3), (Shard(0), Shard(0))),  # 2, 1, 1, 1 rows
        ((1, 2), (Shard(0), Shard(0))),  # three ranks hold nothing
        ((3, 4, 5), (Shard(2), Shard(1))),
        ((0, 4), (Shard(0), Shard(1))),
        ((), (Replicate(), Replicate())),
    ],
)
def test_the_box_of_a_part_is_what_torch_put_there(
    rank: int, shape: tuple[int, ...], placements: tuple[object, ...]
) -> None:
    whole = counted(*shape)
    with ranks_of(4, rank):
        mesh = mesh_of(2, 2)
        tensor = sharded(whole, mesh, *placements)
        boxes = Boxes()
        box = boxes.of("w", tensor)
        assert torch.equal(cut(whole, box), tensor.to_local())
        assert boxes.of("w", tensor) is box


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("rows", [8, 7, 5])
def test_the_box_under_fully_shard_over_tensor_parallel(rank: int, rows: int) -> None:
    whole = counted(rows, 2)
    with ranks_of(4, rank):
        data, tensor = axes_of(mesh_of(2, 2))
        model = Holder(w=sharded(whole, tensor, Shard(0)), v=sharded(whole, tensor, Shard(1)))
        fully_shard(model, mesh=data)
        sink = weight_sink(model)
        assert isinstance(sink, ShardedModuleSink)
        for name, box in zip(("w", "v"), sink.regions(), strict=True):
            part = getattr(model, name).to_local()
            assert torch.equal(cut(whole, box), part), (name, box)


def test_on_a_mesh_that_starts_elsewhere_places_count_and_not_ranks() -> None:
    with ranks_of(4, 2):
        mesh = mesh_of(2, ranks=[3, 2])
        assert Boxes().of("w", sharded(counted(6), mesh, Shard(0))) == Region((3,), (3,))


def test_a_tensor_of_other_ranks_alone_is_not_needed() -> None:
    with ranks_of(4, 0):
        mesh = mesh_of(2, ranks=[2, 3])
        theirs = DTensor.from_local(
            torch.empty(0), mesh, [Shard(0)], run_check=False, shape=torch.Size([6]), stride=(1,)
        )
        sink = ShardedModuleSink(Holder(theirs=theirs, mine=counted(2)))
        assert [t.name for t in sink.needs().tensors] == ["mine"]
        assert sink.regions() == (Region((0,), (2,)),)


def test_a_whole_model_has_a_whole_sink() -> None:
    assert isinstance(weight_sink(nn.Linear(2, 2)), ModuleSink)
    assert not isinstance(weight_sink(nn.Linear(2, 2)), RegionSink)
    sink = weight_sink(Staged(s0=nn.Linear(2, 2)))
    assert isinstance(sink, RegionSink)
    assert [t.name for t in sink.needs().tensors] == ["weight", "bias"]
    assert sink.regions() == (Region((0, 0), (2, 2)), Region((0,), (2,)))


@pytest.mark.parametrize("rank", range(2))
def test_parts_are_written_where_they_are(rank: int) -> None:
    given = {
        "rows": (counted(7, 3), [Shard(0)]),
        "columns": (counted(3, 5, dtype=torch.bfloat16), [Shard(1)]),
        "same": (counted(4, dtype=torch.int16), [Replicate()]),
        "few": (counted(1, 2), [Shard(0)]),
    }
    with ranks_of(2, rank):
        mesh = mesh_of(2)
        model = Holder(
            **{n: sharded(torch.zeros_like(t), mesh, *p) for n, (t, p) in given.items()},
            plain=torch.zeros(2),
        )
        model.register_parameter("tied", model.rows)
        wholes = {name: tensor for name, (tensor, _) in given.items()} | {"plain": counted(2)}
        sink = ShardedModuleSink(model)
        needs = sink.needs()
        assert {t.name: t.shape for t in needs.unique} == {
            n: tuple(t.shape) for n, t in wholes.items()
        }
        assert {t.name: t.alias_of for t in needs.tensors if t.alias_of} == {"tied": "rows"}
        assert all(t.layout is None for t in needs.tensors)
        locals_ = {n: getattr(model, n) for n in wholes}
        locals_ = {n: t.to_local() if isinstance(t, DTensor) else t for n, t in locals_.items()}
        places = {n: t.data_ptr() for n, t in locals_.items()}
        versions = {n: getattr(model, n)._version for n in wholes}
        sink.begin()
        for index, (spec, box) in enumerate(zip(needs.unique, sink.regions(), strict=True)):
            assert place(sink, index, cut(wholes[spec.name], box)), spec.name
        sink.finish()
        for index, (spec, box) in enumerate(zip(needs.unique, sink.regions(), strict=True)):
            expected = cut(wholes[spec.name], box)
            assert torch.equal(locals_[spec.name], expected), spec.name
            assert bytes(sink.host_bytes(index)) == bytes_of(expected)
            assert locals_[spec.name].data_ptr() == places[spec.name]
            assert getattr(model, spec.name)._version > versions[spec.name]


def test_a_part_that_is_no_row_major_memory_is_written_by_copy() -> None:
    with ranks_of(2, 1):
        mesh = mesh_of(2)
        turned = torch.zeros(3, 2).t()
        tensor = DTensor.from_local(turned, mesh, [Shard(0)], run_check=False)
        sink = ShardedModuleSink(Holder(w=tensor))
        sink.begin()
        assert not place(sink, 0, counted(2, 3))
        sink.finish()
        assert torch.equal(turned, counted(2, 3))
        assert bytes(sink.host_bytes(0)) == bytes_of(counted(2, 3))


def test_what_a_forward_left_whole_is_given_up_before_parts_are_written() -> None:
    with ranks_of(2, 0):
        model = fully_shard(nn.Linear(3, 4), mesh=mesh_of(2))
        model(torch.ones(1, 3))
        reshard(model)
        parts = [p.to_local().data_ptr() for p in model.parameters()]
        sink = ShardedModuleSink(model)
        for _ in range(2):
            model(torch.ones(1, 3))
            assert not isinstance(model.weight, DTensor), "the test needs a whole copy"
            sink.begin()
            assert isinstance(model.weight, DTensor)
            assert place(sink, 0, counted(2, 3))
            assert place(sink, 1, counted(2))
            sink.finish()
            assert torch.equal(model.weight.to_local(), counted(2, 3))
            assert [p.to_local().data_ptr() for p in model.parameters()] == parts


def test_what_was_being_gathered_already_is_not_what_the_next_forward_takes() -> None:
    with ranks_of(2, 0):
        model = fully_shard(nn.Linear(3, 4, bias=False), mesh=mesh_of(2))
        sink = ShardedModuleSink(model)
        for _ in range(2):
            model.unshard(async_op=True)  # as a forward prefetches
            sink.begin()
            assert place(sink, 0, counted(2, 3))
            sink.finish()
            model.unshard()
            assert torch.equal(model.weight[:2], counted(2, 3))
            model.reshard()
            with torch.no_grad():
                model.weight.to_local().zero_()


def test_what_a_failed_forward_left_whole_is_given_up() -> None:
    class Fails(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no")

    with ranks_of(2, 0):
        # Within a forward that is not over torch keeps such a unit whole.
        model = fully_shard(Fails(3, 4, bias=False), mesh=mesh_of(2), reshard_after_forward=False)
        sink = ShardedModuleSink(model)
        with pytest.raises(RuntimeError, match="no"):
            model(torch.ones(1, 3))
        sink.begin()
        assert place(sink, 0, counted(2, 3))
        sink.finish()
        model.unshard()
        assert torch.equal(model.weight[:2], counted(2, 3))


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_flat_shards_are_not_taken_for_replicas(original: bool) -> None:
    with ranks_of(2, 0):
        layer = nn.Linear(4, 4, bias=False)
        cpu = torch.device("cpu")
        wrapped = FullyShardedDataParallel(layer, device_id=cpu, use_orig_params=original)
        for take in (weight_source, weight_sink):
            with pytest.raises(ManifestError, match="'0' is wrapped in FullyShardedDataParallel"):
                take(nn.Sequential(wrapped))


def test_the_serving_thread_leaves_the_modules_as_they_are() -> None:
    with ranks_of(2, 0):
        model = fully_shard(nn.Linear(3, 4), mesh=mesh_of(2))
        sink = ShardedModuleSink(model)
        model(torch.ones(1, 3))
        said: list[Exception | None] = []

        def check() -> None:
            try:
                sink.check()
                said.append(None)
            except ManifestError as error:
                said.append(error)

        def in_its_thread() -> None:
            thread = threading.Thread(target=check, name=SERVE_THREAD)
            thread.start()
            thread.join(30)

        in_its_thread()
        assert said == [None]
        assert not isinstance(model.weight, DTensor)
        model.bias = None
        in_its_thread()
        assert "tensor 'bias' is no longer there" in str(said[1])


def test_a_name_of_two_stages_is_written_in_both() -> None:
    first, last = Holder(shared=torch.zeros(2), a=torch.zeros(1)), Holder(shared=torch.zeros(2))
    sink = ShardedModuleSink(Staged(s3=last, s0=first))
    assert [t.name for t in sink.needs().tensors] == ["shared", "a"]
    sink.begin()
    assert not place(sink, 0, counted(2))
    assert place(sink, 1, counted(1))
    sink.finish()
    assert torch.equal(first.shared, counted(2))
    assert torch.equal(last.shared, counted(2))
    with ranks_of(2, 0):
        mesh = mesh_of(2)
        part = Holder(shared=sharded(counted(2), mesh, Shard(0)))
        with pytest.raises(UnsupportedFeatureError, match=r"'shared' is \[0:2\] in one stage"):
            ShardedModuleSink(Staged(s0=first, s1=part))


def test_one_memory_in_two_stages_is_one_place() -> None:
    first, last = Holder(shared=torch.zeros(2)), Holder()
    last.register_parameter("shared", first.shared)
    sink = ShardedModuleSink(Staged(s0=first, s1=last))
    sink.begin()
    assert place(sink, 0, counted(2))


def test_what_changed_is_refused_by_name() -> None:
    with ranks_of(2, 0):
        mesh = mesh_of(2)
        model = Holder(w=sharded(counted(4, 2), mesh, Shard(0)), v=counted(2))
        sink = ShardedModuleSink(model)
        model.w = nn.Parameter(sharded(counted(4, 2), mesh, Shard(0)))  # the like is followed
        sink.begin()
        model.w = nn.Parameter(sharded(counted(4, 2), mesh, Shard(1)))
        with pytest.raises(ManifestError, match=r"'w' was \[0:2, 0:2\] on this rank and is now "):
            sink.begin()
        model.w = nn.Parameter(sharded(counted(4, 3), mesh, Shard(0)))
        with pytest.raises(ManifestError, match=r"'w' was float32\[4, 2\] and is now"):
            sink.check()
        del model.v
        with pytest.raises(ManifestError, match="'v' is no longer there"):
            sink.needs()


def test_what_cannot_be_placed_is_refused_by_name() -> None:
    with ranks_of(2, 0):
        mesh = mesh_of(2)
        partial = DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)
        with pytest.raises(UnsupportedFeatureError, match="'sums' has the placement Partial"):
            ShardedModuleSink(Holder(sums=partial))
        strided = DTensor.from_local(
            torch.ones(2), mesh, [_StridedShard(0, split_factor=2)], run_check=False
        )
        with pytest.raises(UnsupportedFeatureError, match="no intervals of dim 0"):
            ShardedModuleSink(Holder(qkv=strided))
        uneven = DTensor.from_local(
            torch.ones(3), mesh, [Shard(0)], run_check=False, shape=torch.Size([10]), stride=(1,)
        )
        with pytest.raises(UnsupportedFeatureError, match=r"'uneven' \[10\] has a part of shape"):
            ShardedModuleSink(Holder(uneven=uneven))
        wide = DTensor.from_local(torch.ones(1, 3).expand(2, 3), mesh, [Shard(0)], run_check=False)
        with pytest.raises(ManifestError, match="'wide' of the target .* share memory"):
            ShardedModuleSink(Holder(wide=wide))
        memory = torch.zeros(3)
        two = [
            DTensor.from_local(memory[i : i + 2], mesh, [Shard(0)], run_check=False) for i in (0, 1)
        ]
        with pytest.raises(ManifestError, match="'a' and 'b' of the target share memory"):
            ShardedModuleSink(Holder(a=two[0], b=two[1]))
        sparse = Holder(odd=torch.eye(3).to_sparse(), w=sharded(counted(4), mesh, Shard(0)))
        with pytest.raises(ManifestError, match="tensor 'odd' has layout"):
            ShardedModuleSink(sparse)


def test_writes_outside_an_update_or_of_another_size_are_refused() -> None:
    model = Staged(s0=Holder(w=torch.zeros(4).view(2, 2).t()))
    sink = ShardedModuleSink(model)
    for call in (lambda: sink.destination(0), lambda: sink.write(0, memoryview(b"")), sink.finish):
        with pytest.raises(StateError, match="outside begin and finish"):
            call()
    sink.begin()
    with pytest.raises(ManifestError, match="'w' has 16 bytes, 12 were given"):
        sink.write(0, memoryview(bytes(12)))
