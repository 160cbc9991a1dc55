"""The recipe: in which order the axes of a plan are applied to a model, written once."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any, cast, final

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from parallelkit.errors import ExecutionModeError, RankMismatchError, UnsupportedFeatureError
from parallelkit.plan import ParallelPlan
from parallelkit.protocols import Plain, ProcessGroup
from parallelkit_torch import kinds, names
from parallelkit_torch.group import TorchProcessGroup
from parallelkit_torch.parallel.agreement import same_everywhere
from parallelkit_torch.parallel.mesh import DATA, Meshes
from parallelkit_torch.parallel.replicate import replicate
from parallelkit_torch.parallel.settings import Settings, needs_shards


@attrs.define(eq=False)
class Spread:
    """What was made of one model.

    Attributes:
        steps: what was done, in order.
        units: of FSDP2; replicas: of DDP.
        compared: whether gradients of what a tensor axis leaves whole were seen to be equal.
    """

    steps: list[str]
    units: list[Any] = attrs.field(factory=list)
    replicas: DistributedDataParallel | None = None
    compared: bool = False


@final
@attrs.frozen(kw_only=True)
class Recipe:
    """How one context spreads models."""

    plan: ParallelPlan
    mode: str
    reduce: str
    group: ProcessGroup
    meshes: Meshes
    settings: Settings

    def apply(self, model: nn.Module) -> tuple[nn.Module, Spread]:
        """Spread a model: look, compare, move, synchronise; cut, divide, shard or replicate.

        Collective; `TorchParallelContext.parallelize` says the rest.
        """
        refuse(model)
        layouts, stages = self._look(model)
        self._compare(model, stages)
        model = model.to(self.group.device)
        steps = [f"move to {self.group.device}"]
        trainable = any(p.requires_grad for p in model.parameters())
        if needs_shards(self.plan) or self.plan.tensor > 1 or self.plan.pipeline > 1:
            synchronise(model, self.group)  # DDP does it by itself
            steps.append("take rank 0's values")
        whole, parts = model, [model]
        if self.plan.pipeline > 1:
            whole, parts = self._cut(model, stages, steps)
        for part in parts:
            if self.plan.tensor > 1:
                from parallelkit_torch.parallel import tensor

                steps += tensor.apply(part, self.meshes.mesh("tensor"), _held(part, layouts))
            if needs_shards(self.plan):
                steps.append(self._shard(part))
        if whole is model and self.plan.data > 1 and trainable and not needs_shards(self.plan):
            whole = replicas = replicate(
                model, self.group, reduce=self.reduce, options=self.settings.replicas
            )
            steps.append(f"replicate {self.plan.data} times, gradients by {self.reduce} (DDP)")
            return whole, Spread(steps, replicas=replicas)
        if self.plan.world_size == 1 or not trainable:
            why = "a world of one" if self.plan.world_size == 1 else "no trainable parameters"
            steps.append(f"nothing to replicate: {why}")
        return whole, Spread(steps, _units(parts))

    def _look(self, model: nn.Module) -> tuple[Any, list[list[str]]]:
        """Everything that can be wrong with this model under this plan, before anything is sent."""
        layouts: Any = None
        if self.plan.tensor > 1:
            from parallelkit_torch.parallel import tensor

            layouts = tensor.styles(
                model,
                self.settings.layouts,
                builtin=self.mode != "semi_auto",
                sequence=self.settings.sequence,
            )
            tensor.check(model, layouts, self.plan.tensor)
        stages: list[list[str]] = []
        if self.plan.pipeline > 1:
            from parallelkit_torch.parallel import pipeline

            count = self.plan.pipeline * self.settings.virtual_stages
            stages = pipeline.assign(model, count, self.settings.stages)
        if self.settings.blocks is not None and needs_shards(self.plan):
            from parallelkit_torch.parallel.shard import blocks

            blocks(model, self.settings.blocks)
        return layouts, stages

    def _compare(self, model: nn.Module, stages: list[list[str]]) -> None:
        """Compare over ranks what is asked for and the model; a difference would end in a hang."""
        wanted = {"mode": self.mode, "reduce": self.reduce, "degrees": str(dict(self.plan.degrees))}
        wanted |= self.settings.fingerprint() | {"cut": str(stages)}
        told: list[Plain] = [f"{name}: {value}" for name, value in wanted.items()]
        agree(told, self.group, "options")
        check_same(model, self.group)

    def _cut(
        self, model: nn.Module, stages: list[list[str]], steps: list[str]
    ) -> tuple[nn.Module, list[nn.Module]]:
        from parallelkit_torch.parallel import pipeline

        staged = pipeline.cut_for(
            model,
            stages,
            group=cast("TorchProcessGroup", self.meshes.group("pipeline")),
            mesh=self.meshes.mesh("pipeline"),
            schedule=self.settings.schedule,
            virtual_stages=self.settings.virtual_stages,
            example=self.settings.example,
        )
        parts = list(staged.stage_modules)
        steps.append(
            f"cut into {len(stages)} stages, {len(parts)} here, run by {self.settings.schedule}"
        )
        return staged, parts

    def _shard(self, part: nn.Module) -> str:
        from parallelkit_torch.parallel.shard import blocks, shard

        plan, patterns = self.plan, self.settings.blocks
        mesh = self.meshes.mesh(*(DATA if plan.data > 1 else ("data_shard",)))
        # A stage holds some of the blocks only: a pattern that matches none there is no mistake.
        found = blocks(part, patterns, strict=plan.pipeline == 1)
        shard(
            part,
            mesh,
            names_of_blocks=found,
            reduce=self.reduce,
            options=self.settings.shards,
        )
        replicas = f", replicate {plan.data} times" if plan.data > 1 else ""
        return (
            f"shard {plan.data_shard} ways in {len(found)} blocks{replicas}, gradients by "
            f"{self.reduce} (FSDP2)"
        )


def _units(parts: list[nn.Module]) -> list[Any]:
    return [module for part in parts for module in part.modules() if kinds.is_unit(module)]


def _held(part: nn.Module, layouts: Mapping[str, Any]) -> dict[str, Any]:
    """The layouts of modules that a stage really has: others may have left a stand-in."""
    from parallelkit_torch.parallel.cutting import STAND_INS

    mine = {name for name, module in part.named_modules() if not isinstance(module, STAND_INS)}
    return {name: layout for name, layout in layouts.items() if name in mine}


def refuse(model: object) -> None:
    """Raise for what cannot be spread, whatever the plan."""
    if not isinstance(model, nn.Module):
        raise UnsupportedFeatureError(
            f"parallelize got a {type(model).__qualname__}; it takes a torch.nn.Module"
        )
    spread = any(
        isinstance(m, DistributedDataParallel) or kinds.is_unit(m) for m in model.modules()
    )
    if spread or any(kinds.is_dtensor(p) for p in model.parameters()):
        raise UnsupportedFeatureError(
            "parallelize got a model that is spread over ranks already; give the plain model"
        )
    if names.is_compiled(model):
        raise ExecutionModeError(
            "parallelize got a compiled model; parallelize first, then compile: "
            "pk.execution_mode('graph').compile(context.parallelize(model))"
        )
    meta = [name for name, p in model.named_parameters() if p.is_meta]
    if meta:
        raise UnsupportedFeatureError(
            f"parallelize got a model on the meta device ({meta[0]!r} has no values); build "
            "it with values: only rank 0's count, and all are moved to their device once"
        )


def check_same(model: nn.Module, group: ProcessGroup) -> None:
    """Compare names, shapes, dtypes and what is trained over all ranks. Collective."""
    frozen = {id(p) for p in model.parameters() if not p.requires_grad}
    tensors = [*model.named_parameters(), *model.named_buffers()]
    mine: list[Plain] = [
        f"{name}: {t.dtype} {list(t.shape)}{' frozen' if id(t) in frozen else ''}"
        for name, t in tensors
    ]
    agree(mine, group, "models")


def agree(mine: list[Plain], group: ProcessGroup, what: str) -> None:
    """Raise on every rank if `mine` is not the same on all. Collective.

    Raises:
        RankMismatchError: with the first difference, where it is this rank's.
    """
    same, first = same_everywhere(mine, group)
    if same:
        return
    how = "another rank's differ from rank 0's"
    if isinstance(first, list) and first != mine:
        pairs = zip_longest(mine, first, fillvalue="nothing")
        here, there = next((a, b) for a, b in pairs if a != b)
        how = f"rank {group.rank} has {here!r} where rank 0 has {there!r}"
    raise RankMismatchError(
        f"parallelize got different {what}: {how}. Every rank gives the same ones"
    )


def synchronise(model: nn.Module, group: ProcessGroup) -> None:
    """Give every rank the parameters and buffers of rank 0. Collective, a tensor at a time."""
    source = dist.get_global_rank(group.native, 0)
    unique = {id(value): value for value in [*model.parameters(), *model.buffers()]}
    with torch.no_grad():
        for value in unique.values():
            if value.numel():
                contiguous = value.detach().contiguous()
                dist.broadcast(contiguous, source, group=group.native)
                value.copy_(contiguous)
