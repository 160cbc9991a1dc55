"""The search of mode `"auto"`: every possible plan, its memory and its time, ranked.

Pure, and exhaustive: the degrees that multiply to a world size are few enough to look at all of
them. Same input, same ranking, on every rank.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import attrs

from parallelkit import costs
from parallelkit.costs import Memory, Seconds
from parallelkit.errors import NoPlanError, PlanError
from parallelkit.plan import ParallelPlan, plan
from parallelkit.shapes import Hardware, ModelShape, Training, Unit

#: Axes whose degrees are searched; the others stay at 1.
SEARCHED: Final = ("pipeline", "data", "data_shard", "tensor")
_SHOWN = 8
_REASONS = 4


@attrs.frozen(kw_only=True)
class Estimate:
    """One plan with what it is reckoned to need.

    Attributes:
        plan: the degrees.
        microbatches: into how many parts each rank cuts its items.
        stages: names of units, by pipeline stage.
        memory: of the rank that needs most, at its peak.
        seconds: of one optimizer step.
        fits: the memory is within what a device has to spare.
    """

    plan: ParallelPlan
    microbatches: int
    stages: tuple[tuple[str, ...], ...]
    memory: Memory
    seconds: Seconds
    fits: bool

    @property
    def rank(self) -> tuple[bool, float, int, int, tuple[int, ...]]:
        """What the ranking goes by: fitting first, fast, few axes, little memory."""
        degrees = tuple(self.plan.degree(axis) for axis in SEARCHED)
        wide = sum(degree > 1 for degree in degrees)
        # nine digits: two ways to add up the same seconds are equal
        return (
            not self.fits,
            float(f"{self.seconds.total:.9g}"),
            wide,
            self.memory.total,
            degrees,
        )


@attrs.frozen(kw_only=True)
class Search:
    """What `search` found.

    Attributes:
        estimates: of every possible plan, best first; those that do not fit come last.
        impossible: why other degrees are no plan, and how many of them.
        model, hardware, training, world_size: what was asked.
    """

    estimates: tuple[Estimate, ...]
    impossible: Mapping[str, int]
    model: ModelShape
    hardware: Hardware
    training: Training
    world_size: int

    @property
    def best(self) -> Estimate:
        """The fastest plan that fits."""
        return self.estimates[0]

    def explain(self, most: int = _SHOWN) -> str:
        """Return the ranking as a table, `most` plans at most, and what was left out and why."""
        best, hardware = self.best, self.hardware
        shown = self.estimates[:most]
        lines = [
            f"{best.plan.title}, {best.microbatches} microbatch(es)",
            f"reckoned, not measured: {_gb(best.memory.total)} a device "
            f"({_said(best.memory, _gb)})",
            f"  and {_ms(best.seconds.total)} a step ({_said(best.seconds, _ms)})",
            f"for {self.world_size} x {_gb(hardware.memory)}, of which {_gb(hardware.usable)} are "
            f"used at most, {hardware.devices_per_host} a host; "
            f"{_gb(self.model.parameter_bytes)} of parameters in {len(self.model.units)} units; "
            f"batch {self.training.batch}",
            *_table(shown),
        ]
        if len(self.estimates) > len(shown):
            lines.append(f"... and {len(self.estimates) - len(shown)} more")
        if not self.model.measured:
            lines.append("activations count as nothing: no example to measure them with was given")
        return "\n".join([*lines, *self.model.notes, *_reasons(self.impossible)])

    def __str__(self) -> str:
        return self.explain()


def search(
    model: ModelShape,
    world_size: int,
    hardware: Hardware,
    training: Training,
    *,
    pinned: Mapping[str, int] | None = None,
) -> Search:
    """Reckon every way to spread a model over `world_size` devices, and rank them.

    Args:
        model: its sizes.
        world_size: number of ranks, one device each.
        hardware: devices and links.
        training: batch, optimizer, and microbatches if they are not to be searched.
        pinned: degrees that are not searched but taken; -1 is the same as left out.

    Raises:
        PlanError: `pinned` or `world_size` make no sense.
        NoPlanError: no plan is possible, or none fits; it names the smallest need.

    Example:
        >>> from parallelkit.shapes import Size
        >>> layer = Unit(name="layer", trainable=Size(8 * 10**9, 8 * 10**9), flops=10**12)
        >>> model = ModelShape(units=[layer], divisors=(8,))
        >>> hardware, training = Hardware(memory=20 * 10**9), Training(batch=8)
        >>> search(model, 8, hardware, training, pinned={"data": 1, "data_shard": 1}).best.plan
        ParallelPlan(world_size=8, mode='auto', pipeline=1, data=1, data_shard=1, context=1, \
tensor=8, expert=1, offset=0)
    """
    taken = _check_pinned(pinned or {}, plan(world_size).world_size)
    impossible: Counter[str] = Counter()
    found: list[Estimate] = []
    cuts: dict[int, tuple[tuple[Unit, ...], ...]] = {}
    for degrees in _shapes(world_size, taken):
        made = plan(world_size, "auto", **degrees)
        why = _impossible(made, model, training)
        if why:
            impossible[why] += 1
            continue
        cut = cuts.get(made.pipeline) or costs.stages(model, made.pipeline)
        cuts[made.pipeline] = cut
        found.append(_best_of(made, cut, hardware, training))
    found.sort(key=lambda one: one.rank)
    if not found or not found[0].fits:
        raise _no_plan(found, impossible, hardware, taken, world_size)
    return Search(
        estimates=tuple(found),
        impossible=dict(impossible),
        model=model,
        hardware=hardware,
        training=training,
        world_size=world_size,
    )


def _check_pinned(pinned: Mapping[str, int], world_size: int) -> dict[str, int]:
    taken = {axis: degree for axis, degree in pinned.items() if degree != -1}
    plan(world_size).degree(next(iter(set(pinned) - set(SEARCHED)), "data"))  # unknown axes
    for axis, degree in taken.items():
        if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
            raise PlanError(f"{axis} is {degree!r}; allowed is a positive integer, or -1")
        if axis not in SEARCHED and degree > 1:
            raise PlanError(
                f"{axis}={degree} with mode 'auto', which searches {', '.join(SEARCHED)}; use "
                f"mode 'hybrid'"
            )
    if world_size % math.prod(taken.values()):
        raise PlanError(
            f"the degrees given ({', '.join(f'{a}={n}' for a, n in taken.items())}) do not divide "
            f"world_size={world_size}"
        )
    return {axis: degree for axis, degree in taken.items() if axis in SEARCHED}


def _shapes(world_size: int, taken: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield every set of degrees whose product is the world size."""

    def extend(axes: tuple[str, ...], rest: int) -> Iterator[dict[str, int]]:
        axis, *others = axes
        if not others:
            if taken.get(axis, rest) == rest:
                yield {axis: rest}
            return
        for degree in [taken[axis]] if axis in taken else _divisors(rest):
            if rest % degree == 0:
                for more in extend(tuple(others), rest // degree):
                    yield {axis: degree, **more}

    return extend(SEARCHED, world_size)


def _impossible(made: ParallelPlan, model: ModelShape, training: Training) -> str:
    """Say why a plan cannot run, whatever the memory; empty if it can."""
    if made.tensor > 1 and not model.divisors:
        return "the model has no layers that a tensor axis divides"
    if any(divisor % made.tensor for divisor in model.divisors):
        numbers = ", ".join(map(str, sorted(set(model.divisors))))
        return f"tensor={made.tensor} does not divide all of {numbers} (heads, divided dims)"
    pieces = len(model.segments())
    if made.pipeline > pieces:
        return f"pipeline={made.pipeline} for a model of {pieces} pieces"
    parts = made.data_shard_count
    if training.batch % parts:
        return f"data x data_shard = {parts} does not divide the batch of {training.batch}"
    if not _microbatches(made, training):
        wanted = training.microbatches
        each = training.batch // parts
        return (
            f"microbatches={wanted}" if wanted else f"pipeline={made.pipeline}"
        ) + f" for {each} items a rank: it needs a divisor of them from {made.pipeline} on"
    return ""


def _microbatches(made: ParallelPlan, training: Training) -> list[int]:
    """Return the numbers of microbatches to look at, ascending: no stage may starve."""
    each = training.batch // made.data_shard_count
    wanted = training.microbatches
    return [
        count
        for count in _divisors(each)
        if count >= made.pipeline and (wanted is None or count == wanted)
    ]


def _best_of(
    made: ParallelPlan,
    cut: tuple[tuple[Unit, ...], ...],
    hardware: Hardware,
    training: Training,
) -> Estimate:
    """Return the best number of microbatches for a plan."""
    best: Estimate | None = None
    for count in _microbatches(made, training):
        needs = costs.memory(cut, made, training, count)
        one = Estimate(
            plan=made,
            microbatches=count,
            stages=tuple(tuple(unit.name for unit in units) for units in cut),
            memory=needs,
            seconds=costs.seconds(cut, made, hardware, training, count),
            fits=needs.total <= hardware.usable,
        )
        key = (not one.fits, one.seconds.total if one.fits else one.memory.total)
        if best is None or key < (
            not best.fits,
            best.seconds.total if best.fits else best.memory.total,
        ):
            best = one
        if one.fits and made.pipeline == 1:
            break  # more microbatches only add messages where no bubble shrinks
    assert best is not None  # `_impossible` saw to it
    return best


def _no_plan(
    found: list[Estimate],
    impossible: Mapping[str, int],
    hardware: Hardware,
    taken: Mapping[str, int],
    world_size: int,
) -> NoPlanError:
    within = f" with {', '.join(f'{a}={n}' for a, n in taken.items())}" if taken else ""
    if not found:
        reasons = "; ".join(impossible) or "no degrees multiply to it"
        return NoPlanError(f"no plan for {world_size} ranks{within} is possible: {reasons}")
    least = min(found, key=lambda one: (one.memory.total, one.rank))
    needed = math.ceil(least.memory.total / (1 - hardware.reserve))
    return NoPlanError(
        f"no plan for {world_size} ranks{within} fits {_gb(hardware.memory)} a device, of which "
        f"{_gb(hardware.usable)} can be used; the most frugal one ({least.plan.title}, "
        f"{least.microbatches} microbatch(es)) needs {_gb(least.memory.total)}, so a device of "
        f"{_gb(needed)}: use more or larger devices, a smaller batch, or more microbatches",
        needed_bytes=needed,
    )


def _table(shown: Sequence[Estimate]) -> list[str]:
    header = ["", *SEARCHED, "microbatches", "memory", "mostly", "step", "mostly"]
    rows = [header]
    for number, one in enumerate(shown, 1):
        rows.append(
            [
                f"{number}.",
                *(str(one.plan.degree(axis)) for axis in SEARCHED),
                str(one.microbatches),
                _gb(one.memory.total) + ("" if one.fits else " (too large)"),
                _mostly(one.memory),
                _ms(one.seconds.total),
                _mostly(one.seconds),
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return ["  ".join(map(str.rjust, row, widths)).rstrip() for row in rows]


def _mostly(parts: Memory | Seconds) -> str:
    values = attrs.asdict(parts)
    largest = max(values, key=lambda name: values[name])
    share = values[largest] / parts.total if parts.total else 0.0
    return f"{largest} {share:.0%}"


def _said(parts: Memory | Seconds, show: Callable[[float], str]) -> str:
    return ", ".join(
        f"{name} {show(value)}" for name, value in attrs.asdict(parts).items() if value
    )


def _reasons(impossible: Mapping[str, int]) -> list[str]:
    """Say why degrees are no plan, the most frequent reasons first."""
    ordered = sorted(impossible.items(), key=lambda item: -item[1])
    lines = [f"not possible, {count} plan(s): {why}" for why, count in ordered[:_REASONS]]
    left = sum(count for _, count in ordered[_REASONS:])
    return lines + ([f"not possible, {left} more, for like reasons"] if left else [])


def _gb(nbytes: float) -> str:
    """Show bytes in GB of 10^9, or MB where that says more."""
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.1f} MB"


def _ms(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _divisors(number: int) -> list[int]:
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)})
