"""Run batches through a pipeline: GPipe, 1F1B and interleaved 1F1B of `torch.distributed`."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import attrs
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from parallelkit.errors import PlanError, RankMismatchError, StageError
from parallelkit_torch.group import TorchProcessGroup
from parallelkit_torch.parallel import activations
from parallelkit_torch.parallel.activations import Shape
from parallelkit_torch.parallel.agreement import same_everywhere
from parallelkit_torch.parallel.batches import Batch, Loss, key_of, loss_name, split_inputs
from parallelkit_torch.parallel.stage import Stage, make
from parallelkit_torch.parallel.staged import PipelineModule
from parallelkit_torch.parallel.step import cut as slice_items
from parallelkit_torch.parallel.step import items_in

SCHEDULES: Final = ("1f1b", "gpipe", "interleaved")
#: How many shapes of batches are kept ready. Each holds the buffers of one batch's activations.
_KEPT: Final = 4


@attrs.frozen(eq=False)
class _Ready:
    """A schedule for batches of one shape."""

    schedule: Any
    stages: list[Stage]


@final
class Runner:
    """Runs the batches of one pipeline. All ranks of `group` make the same calls.

    Args:
        group: over the pipeline axis; stage k of the model is on rank k modulo its size.
        schedule: one of `SCHEDULES`.
        virtual_stages: stages on each rank; above 1 with `"interleaved"` only.
    """

    def __init__(
        self, group: TorchProcessGroup, *, schedule: str = "1f1b", virtual_stages: int = 1
    ) -> None:
        if schedule not in SCHEDULES:
            raise PlanError(f"schedule is {schedule!r}; it is one of {', '.join(SCHEDULES)}")
        if (virtual_stages > 1) != (schedule == "interleaved"):
            raise PlanError(
                f"virtual_stages={virtual_stages} with schedule {schedule!r}: 'interleaved' has "
                "two or more stages on each rank, the others have one"
            )
        self.group = group
        self.schedule = schedule
        self.count = group.world_size * virtual_stages
        self._virtual = virtual_stages
        self._ready: OrderedDict[tuple[Any, ...], _Ready] = OrderedDict()
        self._batch: Batch | None = None
        self._ran: dict[tuple[int, int], int] = {}

    def run(
        self,
        module: PipelineModule,
        inputs: Any,
        target: Any,
        *,
        loss: Loss,
        microbatches: int | None = None,
        scale: float | None = None,
        sync: bool = True,
        backward: bool = True,
    ) -> torch.Tensor:
        """Run one batch through all stages, and back. Collective; blocks until this rank is done.

        Gradients are added to what is there. Every wait ends by the group's timeout.

        Args:
            module: this rank's stages.
            inputs: the same on every rank: a tensor, a tuple of the first stage's positional
                arguments, or a mapping, whose first value is that argument, and whose others
                go by name to every stage. Dim 0 is the items.
            target: handed to `loss`, on the last stage; tensors in it are cut like the inputs.
            loss: of the last stage's output and the target: a scalar.
            microbatches: into how many equal parts the batch is cut: `fitting` says how many it
                will be. None: the number of stages.
            scale: each microbatch's loss is a sum, to be multiplied by this. None: it is a mean
                over items, and the microbatches' are averaged.
            sync: reduce gradients over the data axes after the last backward pass.
            backward: False only evaluates, without gradients.

        Returns:
            The sum of the microbatches' losses as they were differentiated: detached, the same on
            every rank, in torch's default dtype.

        Raises:
            DataShardError: no items, or tensors that disagree about their number.
            PlanError: `microbatches` is no positive integer.
            RankMismatchError: ranks gave inputs of different shapes.
            StageError: a stage cannot be run.
            CollectiveTimeoutError, CollectiveError: a peer is late or gone.
            Exception: what the model or the loss raised, with a note saying where.
        """
        if module.runner is not self:
            raise StageError("a pipeline's module is run by the runner that it was made with")
        device = torch.device(self.group.device)
        arguments, named = split_inputs(inputs, device)
        items = items_in((arguments, named), target)
        parts = self.fitting(items, microbatches)
        self._ran[items, parts] = self._ran.get((items, parts), 0) + 1
        units = _sharded(module)
        key = key_of(arguments, named, parts, module.training, backward, device)
        self._compare((*key, sync, scale is None, loss_name(loss)))
        _gather(units)
        each = items // parts
        self._batch = Batch(
            loss,
            [slice_items(target, i * each, (i + 1) * each) for i in range(parts)],
            1.0 / parts if scale is None else float(scale),
        )
        try:
            ready = self._prepare(module, key, arguments, named, parts, each, backward=backward)
            value = self._go(ready, arguments, named, parts, sync=sync, backward=backward)
        finally:
            self._batch = None
            for unit in units:
                unit.reshard()
        return self._tell(value, device)

    def fitting(self, items: int, microbatches: int | None = None) -> int:
        """Into how many microbatches a batch of `items` is cut.

        The largest number not above `microbatches` that divides `items` and, interleaved, that
        the schedule takes. Results do not depend on it; with fewer, ranks idle longer.

        Raises:
            PlanError: `microbatches` is no positive integer.
        """
        wanted = self.count if microbatches is None else microbatches
        if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
            raise PlanError(f"microbatches is {microbatches!r}; it is a positive integer")
        return next(n for n in range(min(wanted, items), 0, -1) if self._takes(n, items))

    def explain(self) -> list[str]:
        """Say which schedule runs, and for the batches so far, in how many microbatches."""
        lines = [
            f"pipeline: {self.count} stages on {self.group.world_size} ranks, schedule "
            f"{self.schedule}, stage k on rank k modulo {self.group.world_size}"
        ]
        for (items, parts), times in sorted(self._ran.items(), reverse=True)[:8]:
            idle = (self.group.world_size - 1) / self._virtual
            lines.append(
                f"{times} batch(es) of {items} items: {parts} microbatches by "
                f"{self._kind(parts, backward=True).__name__}, of an ideal pipeline "
                f"{idle / (parts + idle):.0%} idle"
            )
        return lines

    def _blame(self, error: Exception, where: str) -> None:
        """Note that the user's code failed, the first time only."""
        if self._batch is not None and self._batch.failure is None:
            self._batch.failure = (error, where)

    # --- inner parts

    def _takes(self, parts: int, items: int) -> bool:
        rounds = max(1, parts // self.group.world_size)
        return items % parts == 0 and (self.schedule != "interleaved" or parts % rounds == 0)

    def _kind(self, parts: int, *, backward: bool) -> type[Any]:
        """torch's schedule; 1F1B with fewer microbatches than stages is GPipe."""
        if self.schedule == "interleaved":
            return ScheduleInterleaved1F1B
        steady = self.schedule == "1f1b" and backward and parts >= self.count
        return Schedule1F1B if steady else ScheduleGPipe

    def _compare(self, key: tuple[Any, ...]) -> None:
        """Find ranks that would run something else before anything hangs; on the CPU only."""
        if self.group.world_size == 1 or torch.device(self.group.device).type != "cpu":
            return
        same, told = same_everywhere(repr(key), self.group)
        if not same:
            raise RankMismatchError(
                "ranks of one pipeline were given different batches: this rank (stage "
                f"{self.group.rank}) has {key!r}, the first has {told!s}. All ranks of a data "
                "part take the same batch: context.shard does that"
            )

    def _prepare(
        self,
        module: PipelineModule,
        key: tuple[Any, ...],
        arguments: Sequence[torch.Tensor],
        named: Mapping[str, torch.Tensor],
        parts: int,
        each: int,
        *,
        backward: bool,
    ) -> _Ready:
        ready = self._ready.get(key)
        if ready is not None:
            self._ready.move_to_end(key)
            return ready
        mine = dict(zip(module.indices, module.stage_modules, strict=True))
        first, extra = slice_items((tuple(arguments), dict(named)), 0, each)
        between = activations.find(mine, self.count, self.group, first, extra, backward=backward)
        edges = [tuple(Shape.of(x) for x in first), *between, (Shape((), "float32", backward),)]
        stages = [
            make(mine[index], index, edges, self.group, self._blame) for index in module.indices
        ]
        kind = self._kind(parts, backward=backward)
        given: Any = stages if kind is ScheduleInterleaved1F1B else stages[0]
        schedule = kind(given, parts, loss_fn=self._loss, scale_grads=False)
        ready = self._ready[key] = _Ready(schedule, stages)
        if len(self._ready) > _KEPT:
            self._ready.popitem(last=False)
        return ready

    def _go(
        self,
        ready: _Ready,
        arguments: Sequence[torch.Tensor],
        named: Mapping[str, torch.Tensor],
        parts: int,
        *,
        sync: bool,
        backward: bool,
    ) -> torch.Tensor | None:
        """Run the schedule; the loss on the last stage's rank, None on the others."""
        for stage in ready.stages:
            stage.sync = sync
        run = ready.schedule.step if backward else ready.schedule.eval
        first = any(stage.is_first for stage in ready.stages)
        losses: list[torch.Tensor] = []
        began = time.monotonic()
        try:
            with torch.set_grad_enabled(backward):
                run(
                    *(arguments if first else ()),
                    **named,
                    target=torch.arange(parts),  # numbers, with which `_loss` finds the targets
                    losses=losses,
                    return_outputs=False,
                )
        except Exception as error:
            self._ready.clear()
            self._explain(error, time.monotonic() - began)
            raise
        return torch.stack([x.detach() for x in losses]).sum() if losses else None

    def _loss(self, output: Any, number: torch.Tensor) -> torch.Tensor:
        batch = self._batch
        assert batch is not None
        try:
            value = batch.loss(output, batch.targets[int(number)])
            if not isinstance(value, torch.Tensor) or value.dim():
                what = f"{list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
                raise StageError(f"loss gave {what:.80}; it gives a tensor without dims")
            return value * batch.factor
        except Exception as error:
            self._blame(error, "in the loss")
            raise

    def _explain(self, error: Exception, elapsed: float) -> None:
        """Raise the user's own error, or one that says which stage is gone."""
        failure = self._batch.failure if self._batch is not None else None
        if failure is not None:
            mistake, where = failure
            mistake.add_note(
                f"parallelkit: {where}, on rank {self.group.rank} of the pipeline; the other "
                f"ranks wait up to {self.group.timeout:g} s"
            )
            raise mistake
        if isinstance(error, RuntimeError):
            raise self.group.failed(
                error, f"a batch of the pipeline (rank k has stage k of {self.count})", elapsed
            ) from error

    def _tell(self, value: torch.Tensor | None, device: torch.device) -> torch.Tensor:
        """Give every rank the loss, which only the last stage's has."""
        dtype = torch.float32 if device.type == "mps" else torch.float64
        mine = torch.zeros((), device=device) if value is None else value
        told = self.group.broadcast(mine.to(dtype), (self.count - 1) % self.group.world_size)
        return told.to(torch.get_default_dtype())


def _sharded(module: PipelineModule) -> list[FSDPModule]:
    return [
        part
        for stage in module.stage_modules
        for part in stage.modules()
        if isinstance(part, FSDPModule)
    ]


def _gather(units: Sequence[FSDPModule]) -> None:
    """Gather parameters once a batch, in one order on every rank.

    Gathered once for every microbatch, data parts whose batches have different numbers of
    microbatches would wait for each other for ever.
    """
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard(async_op=True)
