"""Pipeline parallel: cut a model into stages, hold some of them, run batches through all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelkit.errors import StageError
from parallelkit_torch.group import TorchProcessGroup
from parallelkit_torch.parallel.assign import assign
from parallelkit_torch.parallel.cutting import check, cut
from parallelkit_torch.parallel.schedule import Runner
from parallelkit_torch.parallel.staged import PipelineModule
from parallelkit_torch.parallel.units import units

__all__ = ["PipelineModule", "Runner", "assign", "check", "cut", "cut_for", "step", "units"]


def cut_for(
    model: nn.Module,
    stages: Sequence[Sequence[str]],
    *,
    group: TorchProcessGroup,
    mesh: DeviceMesh | None = None,
    schedule: str = "1f1b",
    virtual_stages: int = 1,
    example: Any = None,
) -> PipelineModule:
    """Take this rank's stages of `model`; nothing is sent.

    Args:
        model: the whole one, with values, the same on every rank. It stays as it is.
        stages: what `assign` gave for `group.world_size * virtual_stages` stages.
        group: over the pipeline axis.
        mesh: of the same ranks; for symmetry with the other axes, and not used.
        schedule, virtual_stages: as `Runner` takes them.
        example: as `check` takes it.

    Raises:
        StageError: the stages do not give what the model gives, or are of another number.
        PlanError: the schedule is unknown or does not go with `virtual_stages`.
    """
    runner = Runner(group, schedule=schedule, virtual_stages=virtual_stages)
    if len(stages) != runner.count:
        raise StageError(f"there are {len(stages)} stages for a pipeline of {runner.count}")
    notes = [f"stages: {check(model, stages, example)}", *_notes(model)]
    mine = range(group.rank, runner.count, group.world_size)
    parts = [cut(model, stages, index) for index in mine]
    return PipelineModule(parts, stages=stages, indices=mine, runner=runner, notes=notes)


def step(
    model: nn.Module,
    inputs: Any,
    target: Any,
    *,
    loss: Callable[[Any, Any], torch.Tensor],
    microbatches: int | None = None,
    scale: float | None = None,
    sync: bool = True,
    backward: bool = True,
) -> torch.Tensor:
    """Run one batch through the pipeline that `model` is a part of; `Runner.run` says the rest."""
    if not isinstance(model, PipelineModule) or model.runner is None:
        raise StageError(
            f"a pipeline step got a {type(model).__qualname__}; it takes what parallelize gave"
        )
    return model.runner.run(
        model,
        inputs,
        target,
        loss=loss,
        microbatches=microbatches,
        scale=scale,
        sync=sync,
        backward=backward,
    )


def _notes(model: nn.Module) -> list[str]:
    """What is not as it would be in one piece."""
    norms = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats
    ]
    if not norms:
        return []
    return [
        f"{norms[0]} and {len(norms) - 1} more normalise each microbatch by itself, and their "
        "running statistics move once a microbatch: results depend on microbatches"
    ]
