"""Ranks that each hold a part publish; a follower gets whole tensors.

`argv[1]` is the device type, `cpu` by default; the follower is always on the CPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from sharded_models import fingerprint, make
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

import parallelkit as pk
from parallelkit.plan import AXES
from parallelkit.weights.layout import region

group = pk.init_process_group(device=sys.argv[1] if len(sys.argv) > 1 else "cpu", timeout=30)
device = torch.device(group.device)
rank, world = group.rank, group.world_size


def mesh_of(plan: pk.ParallelPlan) -> DeviceMesh:
    """The contexts' mesh over all axes, made by hand."""
    groups = [group.partition(plan.groups(axis)).native for axis in AXES]
    shape = [plan.degree(axis) for axis in AXES]
    return DeviceMesh.from_group(
        groups, device.type, mesh=torch.arange(world).reshape(shape), mesh_dim_names=AXES
    )


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    for layer in model.layers:
        styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(layer, mesh["tensor"], styles)


def fully_sharded(model: nn.Module, mesh: DeviceMesh) -> None:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model.low, mesh=mesh)  # a unit has one dtype
    fully_shard(model, mesh=mesh)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """What every rank would hold without sharding, by torch's own gather."""
    found = {}
    for name, tensor in model.state_dict().items():
        found[name] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found


def agrees_with_torch(model: nn.Module, publisher: pk.WeightPublisher) -> None:
    """Every layout's region on this rank is what DTensor says it is."""
    manifest = publisher.plan.manifest
    for spec in manifest.tensors:
        tensor = dict(model.named_parameters(remove_duplicate=False)).get(spec.name)
        if spec.layout is None or not isinstance(tensor, DTensor):
            continue
        box = region(spec.layout, manifest.mesh, spec.shape, rank)
        sizes, offsets = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        assert box is not None
        assert box.sizes == tuple(sizes) == tuple(tensor.to_local().shape), (spec.name, box, sizes)
        if box.elements:
            assert box.offsets == tuple(offsets), (spec.name, box, offsets)


class Follower:
    """On rank 0, a process that follows one publisher after the other."""

    def __init__(self) -> None:
        script = str(Path(__file__).with_name("sharded_follower.py"))
        command = [sys.executable, "-W", "error", script]
        pipe = subprocess.PIPE
        self.process: subprocess.Popen[str] | None = None
        if rank == 0:
            self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def join(self, publisher: pk.WeightPublisher, sizes: dict[str, int]) -> None:
        if self.process is not None:
            assert self.process.stdin is not None
            line = json.dumps({"ticket": publisher.ticket, "sizes": sizes})
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        publisher.wait(1, timeout=60)

    def said(self) -> dict:
        assert self.process is not None
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()


def follow(model: nn.Module, sizes: dict[str, int], versions: int = 2) -> str:
    """Train and publish; the follower must hold exactly the whole tensors of every version."""
    # One at a time: these models mix tensors of several meshes, as contexts' models do not.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    seen = set()
    with pk.publish_weights(model, timeout=30) as publisher:
        agrees_with_torch(model, publisher)
        follower.join(publisher, sizes)
        for step in range(versions):
            ids = torch.arange(sizes["vocabulary"]).roll(rank + step)[None].to(device)
            model(ids).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(ids)  # fully_shard leaves whole copies of the root behind
            model.steps.add_(1)
            report = publisher.update()
            assert report.version == step + 1
            expected = {name: fingerprint(t.cpu()) for name, t in whole(model).items()}
            seen.add(expected["layers.0.up.weight"])
            if rank == 0:
                said = follower.said()
                wrong = {name for name in expected if expected[name] != said["held"][name]}
                assert not wrong, f"version {report.version}: {wrong}"
        text = publisher.explain()
        assert report.gathered_bytes > 0
        assert "gather" in report.phases
    assert len(seen) == versions
    if rank == 0:
        assert follower.said()["error"] == "PeerLostError"
    return text


def layouts(plan: pk.ParallelPlan, **sizes: int) -> str:
    model, mesh = make(**sizes).to(device), mesh_of(plan)
    if plan.tensor > 1:
        tensor_parallel(model, mesh)
    if plan.data_shard > 1:
        axes = ("data", "data_shard") if plan.data > 1 else ("data_shard",)
        fully_sharded(model, mesh[axes])
    return follow(model, sizes)


follower = Follower()
try:
    if world == 2:
        text = layouts(pk.plan(world, data_shard=2), vocabulary=11, dim=6)
        assert "sharded over data_shard 2" in text, text
        text = layouts(pk.plan(world, tensor=2), vocabulary=11, dim=6)
        assert "sharded over tensor 2" in text, text
    else:
        text = layouts(pk.plan(world, data=2, data_shard=2), vocabulary=11, dim=2)
        assert "sharded over data_shard 2" in text, text
        text = layouts(pk.plan(world, data_shard=4), vocabulary=3, dim=2)
        assert "sharded over data_shard 4" in text, text
        text = layouts(pk.plan(world, data_shard=2, tensor=2), vocabulary=11, dim=6)
        assert "sharded over data_shard 2 x tensor 2" in text, text
finally:
    follower.close()
print(text)
group.close()
