"""The memory and the time of one training step under a plan: the formulas of docs/modes/auto.md.

Pure arithmetic over a `ModelShape`, nothing is measured here. Memory is the peak of the rank that
has most; time is that of the slowest stage. Both leave out what they do not know: other processes,
fragmentation, input pipelines, kernels slower or faster than `Hardware.flops` says.
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Final

import attrs

from parallelkit.errors import PlanError
from parallelkit.plan import ParallelPlan
from parallelkit.shapes import Hardware, ModelShape, Training, Unit

#: Bytes of gradients that replicas send at once (DDP's `bucket_cap_mb`).
BUCKET: Final = 25 * 2**20


@attrs.frozen(kw_only=True)
class Memory:
    """Bytes of one rank at its peak, by what they are for.

    Attributes:
        parameters: its part of the parameters, and buffers.
        optimizer: state of the optimizer, and what its step needs.
        gradients: gradients kept at that moment, and whole ones on the way to being sharded.
        buckets: communication buckets of replicas.
        gathered: parameters of other ranks, gathered for a while.
        activations: kept for backward passes, and working memory of the one that runs.
    """

    parameters: int = 0
    optimizer: int = 0
    gradients: int = 0
    buckets: int = 0
    gathered: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(attrs.astuple(self))


_PARTS: Final = tuple(field.name for field in attrs.fields(Memory))


@attrs.frozen(kw_only=True)
class Seconds:
    """Seconds of one optimizer step, by what they are spent on.

    Attributes:
        compute: floating-point work of the slowest stage.
        bubble: that stage waiting for others, at the pipeline's start and end.
        tensor: sums of activations over the tensor axis.
        pipeline: activations and their gradients handed from stage to stage.
        gather: parameters gathered, as far as computing does not hide it.
        reduce: gradients reduced over the data axes, as far as computing does not hide it.
    """

    compute: float = 0.0
    bubble: float = 0.0
    tensor: float = 0.0
    pipeline: float = 0.0
    gather: float = 0.0
    reduce: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return math.fsum(attrs.astuple(self))


def is_sharded(plan: ParallelPlan) -> bool:
    """Say whether parameters are gathered and gradients scattered, instead of replicated."""
    wide = plan.tensor > 1 or plan.pipeline > 1
    return plan.data_shard > 1 or (plan.data > 1 and wide)


# --- stages --------------------------------------------------------------------------------------


def stages(model: ModelShape, pipeline: int) -> tuple[tuple[Unit, ...], ...]:
    """Cut a model into stages so that the heaviest is as light as can be.

    A unit weighs its flops, or its parameters where no flops are known.

    Raises:
        PlanError: the model has fewer pieces than stages.
    """
    pieces = [model.units[start:stop] for start, stop in model.segments()]
    if pipeline > len(pieces):
        raise PlanError(
            f"pipeline={pipeline}, but the model has {len(pieces)} pieces to cut between"
        )
    by_flops = any(unit.flops for unit in model.units)
    weights = [
        sum(unit.flops if by_flops else unit.parameters.whole for unit in piece) for piece in pieces
    ]
    sums = [0, *itertools.accumulate(weights)]
    low, high = max(weights), sums[-1]
    while low < high:  # the lightest heaviest stage, by bisection
        middle = (low + high) // 2
        if len(_cuts(sums, middle)) <= pipeline:
            high = middle
        else:
            low = middle + 1
    ends = _cuts(sums, low)
    starts = [0, *ends[:-1]]
    while len(ends) < pipeline:  # room left: halve the longest, which makes none heavier
        longest = max(range(len(ends)), key=lambda n: ends[n] - starts[n])
        ends.insert(longest, (starts[longest] + ends[longest]) // 2)
        starts = [0, *ends[:-1]]
    return tuple(
        tuple(itertools.chain.from_iterable(pieces[start:end]))
        for start, end in zip(starts, ends, strict=True)
    )


def _cuts(sums: Sequence[int], most: int) -> list[int]:
    """Return ends of stages of at most `most` each, every one as long as can be."""
    ends, last = [0], len(sums) - 1
    while ends[-1] < last:
        ends.append(bisect.bisect_right(sums, sums[ends[-1]] + most) - 1)
    return ends[1:]


# --- memory --------------------------------------------------------------------------------------


def memory(
    cut: Sequence[Sequence[Unit]], plan: ParallelPlan, training: Training, microbatches: int
) -> Memory:
    """Return the peak of the rank that needs most.

    Args:
        cut: units by stage, as `stages` returns.
        plan: degrees; `context` and `expert` count as 1.
        training: its batch is divided by the data axes and by `microbatches`.
        microbatches: of each rank and step.
    """
    found = []
    for stage, units in enumerate(cut):
        in_flight = microbatches if plan.pipeline > 1 else 1
        if not training.all_in_flight:
            in_flight = min(microbatches, len(cut) - stage)
        held = units[-1].output if stage == len(cut) - 1 else 0
        found.append(_Stage(units, plan, training, microbatches, in_flight, held).peak())
    return max(found, key=lambda one: one.total)


class _Stage:
    """One rank of a stage: what it holds always, and what comes and goes in a step."""

    def __init__(
        self,
        units: Sequence[Unit],
        plan: ParallelPlan,
        training: Training,
        microbatches: int,
        in_flight: int,
        held: int,
    ) -> None:
        t, d = plan.tensor, plan.data_shard
        self.sharded = is_sharded(plan)
        self.several = microbatches > 1
        self.keeps_gathered = self.sharded and self.several and plan.pipeline > 1
        self.in_flight = in_flight
        items = training.batch / (plan.data * d * microbatches)
        self.held = held * items  # the model's output
        # by unit: whole on this tensor rank
        params = [unit.parameters_on(t) for unit in units]
        grads = [unit.trainable.on(t) for unit in units]
        acts = [unit.activations.on(t) * items for unit in units]
        blocks = [unit.block for unit in units]
        self.count = len(units)
        self.working = [unit.working.on(t) * items for unit in units]
        self.grads_before = [0, *itertools.accumulate(grads)]
        self.acts_before = [0.0, *itertools.accumulate(acts)]
        self.block_params: list[int] = list(map(operator.mul, params, blocks))
        self.block_grads: list[int] = list(map(operator.mul, grads, blocks))
        self.whole = sum(params)
        self.root_params = self.whole - sum(self.block_params)
        self.root_grads = sum(grads) - sum(self.block_grads)
        # of the rank
        self.parameters = -(-self.whole // d) + sum(unit.buffers for unit in units)
        trainable = -(-sum(grads) // d)
        self.state = training.state * trainable
        self.update = training.update * trainable
        replicas = plan.data > 1 and not self.sharded
        self.buckets = sum(grads) if replicas and not training.bucket_views else 0
        # gradients of several microbatches stay whole until the last one reduces them
        self.divide = 1 if self.sharded and self.several else d

    def peak(self) -> Memory:
        """Return the largest of the moments: each unit's backward pass, and the update."""
        moments = [self._update(), *map(self._backward, range(self.count))]
        return Memory(**dict(zip(_PARTS, max(moments, key=math.fsum), strict=True)))

    def _backward(self, at: int) -> tuple[int, ...]:
        """While the backward pass of unit `at` runs, in the last of the microbatches."""
        grads, acts = self.grads_before, self.acts_before
        kept = (grads[-1] - (0 if self.several else grads[at])) / self.divide
        in_full = 0
        if self.sharded and not self.several:
            # the unit's own before it is scattered, and its successor's being scattered
            in_full = self.root_grads + sum(self.block_grads[at : at + 2])
        kept_acts = acts[-1] * (self.in_flight - 1) + acts[at + 1]
        return (
            self.parameters,
            round(self.state),
            round(kept + in_full),
            self.buckets,
            self._gathered(at),
            round(kept_acts + self.working[at] + self.held * (at < self.count - 1)),
        )

    def _gathered(self, at: int) -> int:
        if not self.sharded:
            return 0
        if self.keeps_gathered:
            return self.whole
        # the unit's own, and its predecessor's, which is fetched ahead
        return self.root_params + sum(self.block_params[max(at - 1, 0) : at + 1])

    def _update(self) -> tuple[int, ...]:
        """While the optimizer steps."""
        gradients = round(self.grads_before[-1] / self.divide)
        return (self.parameters, round(self.state + self.update), gradients, self.buckets, 0, 0)


# --- time ----------------------------------------------------------------------------------------


def seconds(
    cut: Sequence[Sequence[Unit]],
    plan: ParallelPlan,
    hardware: Hardware,
    training: Training,
    microbatches: int,
) -> Seconds:
    """Return the time of one optimizer step, by its slowest stage.

    Args:
        cut, plan, training, microbatches: as for `memory`.
        hardware: rates of devices and links.
    """
    found = [
        _stage_seconds(units, number < len(cut) - 1, plan, hardware, training, microbatches)
        for number, units in enumerate(cut)
    ]
    return max(found, key=lambda one: one.total)


def _stage_seconds(
    units: Sequence[Unit],
    hands_on: bool,
    plan: ParallelPlan,
    hardware: Hardware,
    training: Training,
    microbatches: int,
) -> Seconds:
    items = training.batch / (plan.data * plan.data_shard * microbatches)
    t = plan.tensor
    # forward once, backward twice
    compute = 3 * sum(unit.flops for unit in units) * items / t / hardware.flops
    sums = sum(unit.reduced * items for unit in units)
    tensor = 0.0
    if t > 1:  # all-reduce in the forward pass, and the same amount in the backward pass
        calls = sum(unit.reductions for unit in units)
        rate = _rate(plan, hardware, "tensor")
        tensor = 4 * _ring(sums, t, rate, 0.0) + 4 * calls * (t - 1) * hardware.latency
    hand = 0.0
    if hands_on and units:
        rate = _rate(plan, hardware, "pipeline")
        hand = 2 * (units[-1].output * items / rate + hardware.latency)
    gather, cover = _gather_seconds(units, plan, hardware, microbatches, compute)
    turns = microbatches + plan.pipeline - 1
    return Seconds(
        compute=microbatches * compute,
        bubble=(turns - microbatches) * (compute + tensor + hand),
        tensor=microbatches * tensor,
        pipeline=microbatches * hand,
        gather=gather,
        reduce=_reduce_seconds(units, plan, hardware, cover),
    )


def _gather_seconds(
    units: Sequence[Unit],
    plan: ParallelPlan,
    hardware: Hardware,
    microbatches: int,
    compute: float,
) -> tuple[float, float]:
    """Parameters gathered for each forward and backward pass, as far as these do not hide it.

    The first gather is never hidden, and neither is the launch of a message, for which
    `Hardware.latency` is counted again.

    Returns:
        These seconds, and what the last backward pass has left to hide reductions.
    """
    forward, backward = compute / 3, compute * 2 / 3
    if not is_sharded(plan):
        return 0.0, backward
    rate = _rate(plan, hardware, "data_shard")
    each = [
        _ring(unit.parameters_on(plan.tensor), plan.data_shard, rate, hardware.latency)
        for unit in units
    ]
    again = sum(one for one, unit in zip(each, units, strict=True) if unit.block)
    launch = hardware.latency * (plan.data_shard > 1)
    blocks = sum(unit.block for unit in units)
    kept = plan.pipeline > 1 and microbatches > 1  # from the first backward pass on
    times = 1 if kept else microbatches
    total = microbatches * (max(max(each), sum(each) - forward) + len(units) * launch)
    total += times * (max(0.0, again - backward) + blocks * launch)
    return total, backward if kept else max(0.0, backward - again)


def _reduce_seconds(
    units: Sequence[Unit], plan: ParallelPlan, hardware: Hardware, cover: float
) -> float:
    """Gradients reduced once a step; `cover` seconds hide all but the last message.

    They hide no launch, as with gathers.
    """
    if not is_sharded(plan):
        rate = _rate(plan, hardware, "data")
        total = sum(unit.trainable.on(plan.tensor) for unit in units)
        buckets = math.ceil(total / BUCKET)
        steps = 2 * (plan.data - 1) * buckets * hardware.latency
        last = 2 * _ring(min(total, BUCKET), plan.data, rate, hardware.latency)
        hidden = max(last, 2 * _ring(total, plan.data, rate, 0.0) + steps - cover)
        return hidden + buckets * hardware.latency * (plan.data > 1)
    each = []
    near, far = _rate(plan, hardware, "data_shard"), _rate(plan, hardware, "data")
    steps = (plan.data_shard - 1) + 2 * (plan.data - 1)
    for unit in units:
        size = unit.trainable.on(plan.tensor)
        scatter = _ring(size, plan.data_shard, near, 0.0)
        among = 2 * _ring(size / plan.data_shard, plan.data, far, 0.0)
        each.append(scatter + among + steps * hardware.latency * (size > 0))
    messages = (plan.data_shard > 1) + (plan.data > 1)
    launches = messages * sum(unit.trainable.whole > 0 for unit in units)
    return max(max(each), sum(each) - cover) + launches * hardware.latency


def _ring(nbytes: float, ranks: int, rate: float, latency: float) -> float:
    """Seconds of an all-gather or a reduce-scatter of `nbytes` in all; an all-reduce is two."""
    if ranks == 1 or not nbytes:
        return 0.0
    return (ranks - 1) * (nbytes / ranks / rate + latency)


def _rate(plan: ParallelPlan, hardware: Hardware, axis: str) -> float:
    """Bytes per second within a group of an axis: the slowest link on its ring."""
    if plan.world_size <= hardware.devices_per_host:
        return hardware.inside
    strides = {"tensor": 1, "data_shard": plan.context * plan.tensor}
    strides["data"] = strides["data_shard"] * plan.data_shard
    strides["pipeline"] = strides["data"] * plan.data
    reach = strides[axis] * plan.degree(axis)
    fits = reach <= hardware.devices_per_host and hardware.devices_per_host % reach == 0
    return hardware.inside if fits else hardware.between
