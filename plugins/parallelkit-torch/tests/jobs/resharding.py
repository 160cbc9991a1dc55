"""Trainers and targets in parts, each a job of its own ranks: every rank gets its own parts.

    python resharding.py publish|follow folder [device]

Both jobs go through the same rounds: one way to spread a model at the trainer, another at the
target, over a transport. Tickets go through the folder. Values after each version are known from
the seed alone; what is held is put together by torch's own gather.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from models import decoder
from parallelkit_torch import sharding
from sharded_models import make, step_parts, stepped
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import parallelkit as pk
from parallelkit.plan import AXES
from parallelkit.weights.layout import region

SECONDS = 60.0
VERSIONS = 2
LAYERS = 4  # of the decoder
AWKWARD = {"vocabulary": 11, "dim": 6}


class Round(NamedTuple):
    """How trainer and target hold the model; `said`: what `explain` says of the trainer's."""

    trainer: str
    target: str
    said: str
    sizes: dict[str, int] | None = AWKWARD  # None: the decoder
    transport: str = "auto"
    commit: str = "staged"
    serving: bool = False  # the target takes versions in a thread, and puts them in place later


ROUNDS = {
    2: [
        Round("data_shard=2", "", "sharded over data_shard 2"),
        Round("data_shard=2", "tensor=2", "sharded over data_shard 2", commit="in_place"),
        Round("tensor=2", "data_shard=2", "over tensor 2", transport="tcp", serving=True),
        Round("data=2", "", "MB"),
        Round("alone", "data_shard=2", "MB"),
        Round("pipeline=2", "", "at pipeline 1", sizes=None),
        Round("pipeline=2", "data_shard=2", "at pipeline 1", sizes=None),
        Round("data_shard=2", "pipeline=2", "sharded over data_shard 2", sizes=None),
    ],
    4: [
        Round("data=2 data_shard=2", "", "sharded over data_shard 2"),
        Round("data_shard=2 tensor=2", "data_shard=4", "data_shard 2 x tensor 2"),
        # four ranks share three rows, and norms of two: some hold nothing
        Round("data_shard=4", "tensor=2 data_shard=2", "data_shard 4", {"vocabulary": 3, "dim": 2}),
        Round("pipeline=2 tensor=2", "data_shard=4", "tensor 2 at pipeline 1", sizes=None),
    ],
}

role, folder = sys.argv[1], Path(sys.argv[2])
group = pk.init_process_group(device=sys.argv[3] if len(sys.argv) > 3 else "cpu", timeout=SECONDS)
device = torch.device(group.device)
rank, world = group.rank, group.world_size
contexts: list[pk.ParallelContext] = []


def mesh_of(plan: pk.ParallelPlan) -> DeviceMesh:
    """The contexts' mesh over all axes, made by hand."""
    groups = [group.partition(plan.groups(axis)).native for axis in AXES]
    shape = [plan.degree(axis) for axis in AXES]
    return DeviceMesh.from_group(
        groups, device.type, mesh=torch.arange(world).reshape(shape), mesh_dim_names=AXES
    )


def by_hand(model: nn.Module, plan: pk.ParallelPlan) -> nn.Module:
    """Divide the awkward model as a user would, with torch's own calls."""
    mesh = mesh_of(plan)
    if plan.tensor > 1:
        for layer in model.layers:
            styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(layer, mesh["tensor"], styles)
    if plan.data_shard > 1:
        part = mesh["data", "data_shard"] if plan.data > 1 else mesh["data_shard"]
        for layer in model.layers:
            fully_shard(layer, mesh=part)
        fully_shard(model.low, mesh=part)  # a unit has one dtype
        fully_shard(model, mesh=part)
    elif plan.data > 1:
        return DistributedDataParallel(model, process_group=mesh["data"].get_group())
    return model


def plain(sizes: dict[str, int] | None) -> nn.Module:
    return decoder(layers=LAYERS) if sizes is None else make(**sizes)


def spread(how: str, model: nn.Module, sizes: dict[str, int] | None) -> nn.Module:
    if how in ("", "alone"):
        return model.to(device)
    degrees = {axis: int(n) for axis, n in (part.split("=") for part in how.split())}
    if sizes is not None:
        return by_hand(model.to(device), pk.plan(world, **degrees))
    context = pk.parallel_context(**degrees)
    contexts.append(context)
    made: nn.Module = context.parallelize(model)
    return made


def run(model: nn.Module, sizes: dict[str, int] | None, shift: int) -> None:
    """A forward, after which `fully_shard` leaves whole copies of the root."""
    if sizes is not None:
        with torch.no_grad():
            model(torch.arange(sizes["vocabulary"]).roll(shift)[None].to(device))


def held(model: nn.Module) -> dict[str, torch.Tensor]:
    """Everything that this rank has, by its plain name."""
    model = getattr(model, "module", model)
    found = {}
    for part in getattr(model, "stage_modules", (model,)):
        found |= dict(part.named_parameters(remove_duplicate=False))
        found |= {name: b for name, b in part.state_dict().items() if name not in found}
    return found


def local(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def agrees_with_torch(model: nn.Module, publisher: pk.WeightPublisher) -> None:
    """Every layout's region on this rank is what DTensor says it is."""
    manifest = publisher.plan.manifest
    tensors = held(model)
    for spec in manifest.tensors:
        tensor = tensors.get(spec.name)
        if spec.layout is None or not isinstance(tensor, DTensor):
            continue
        box = region(spec.layout, manifest.mesh, spec.shape, rank)
        sizes, offsets = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        assert box is not None
        assert box.sizes == tuple(sizes) == tuple(local(tensor).shape), (spec.name, box, sizes)
        if box.elements:
            assert box.offsets == tuple(offsets), (spec.name, box, offsets)


def publish(number: int, this: Round) -> None:
    model = spread(this.trainer, plain(this.sizes), this.sizes)
    alone = group.subgroup([0]) if this.trainer == "alone" else None
    if this.trainer == "alone" and alone is None:
        return
    with pk.publish_weights(
        model, transport=this.transport, commit=this.commit, timeout=SECONDS, group=alone
    ) as publisher:
        agrees_with_torch(model, publisher)
        if rank == 0:
            ticket = folder / f"{number}.new"
            ticket.touch(mode=0o600)
            ticket.write_text(publisher.new_ticket(members=world))
            ticket.rename(folder / f"{number}.ticket")
        publisher.wait(world, timeout=SECONDS)
        for version in range(1, VERSIONS + 1):
            step_parts(model)
            run(model, this.sizes, rank + version)
            report = publisher.update()
            assert report.version == version
            assert version == 1 or report.changed_ratio > 0.5, report
            if rank == 0:
                needed = [(folder / f"{number}.{i}").read_text() for i in range(world)]
                assert report.moved_bytes == sum(map(int, needed)), (report, needed)
        assert this.said in publisher.explain(), publisher.explain()


def ticket_of(number: int) -> str:
    end = time.monotonic() + SECONDS
    path = folder / f"{number}.ticket"
    while not path.exists():
        assert time.monotonic() < end, f"no ticket for round {number}"
        time.sleep(0.02)
    return path.read_text()


def follow(number: int, this: Round) -> None:
    expected = {n: t.detach().clone() for n, t in plain(this.sizes).state_dict().items()}
    model = plain(this.sizes)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(77)
    model = spread(this.target, model, this.sizes)
    run(model, this.sizes, rank)
    sharding.reshard(model)
    mine = {id(t): local(t) for t in held(model).values()}
    places = {name: local(t).data_ptr() for name, t in held(model).items()}
    ticket = ticket_of(number)
    needed = sum(part.nbytes for part in mine.values())
    (folder / f"{number}.{rank}").write_text(str(needed))
    with pk.subscribe_weights(model, ticket, member=rank, timeout=SECONDS) as follower:
        assert follower.plan.nbytes == needed, (follower.plan.nbytes, needed)
        if this.serving:
            follower.serve()
        version = 0
        while version < VERSIONS:
            run(model, this.sizes, rank)
            before, version = version, follower.step(SECONDS)
            while this.serving and version < VERSIONS:  # ranks may see other versions on the way
                version = follower.step(SECONDS)
            assert this.serving or version == before + 1
            with follower.use() as current:
                assert current is model
                assert {n: local(t).data_ptr() for n, t in held(model).items()} == places
                for _ in range(before, version):
                    expected = {name: stepped(tensor) for name, tensor in expected.items()}
                for name, tensor in held(model).items():
                    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                    assert torch.equal(whole.cpu(), expected[name]), (this, version, name)
    if "pipeline" not in this.target:
        assert set(held(model)) == set(expected)


os.umask(0o077)
for number, this in enumerate(ROUNDS[world]):
    began = time.monotonic()
    (publish if role == "publish" else follow)(number, this)
    group.barrier()
    while contexts:
        contexts.pop().reset()
    print(
        f"{role} {this.trainer or 'whole'} -> {this.target or 'whole'}, {this.transport}: "
        f"{time.monotonic() - began:.1f} s"
    )
group.close()
