"""What a search for degrees needs to know: a model's sizes, the hardware, the training.

Integers, rates and names only, so that a plan for a cluster is searched on a laptop. Sizes are
bytes unless a name says otherwise; *an item* is one element of the batch: a sequence, an image.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import attrs

from parallelkit.errors import PlanError


def _count(least: int) -> Any:
    """Return a validator for an integer from `least` on."""

    def check(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        try:
            number = None if isinstance(value, bool) else operator.index(value)
        except TypeError:
            number = None
        if number is None or number < least:
            raise PlanError(f"{attribute.name} is {value!r}; it is an integer from {least} on")

    return check


def _number(low: float, high: float = float("inf")) -> Any:
    """Return a validator for a number from `low` to `high`; not for infinity, unless allowed."""

    def check(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        real = isinstance(value, int | float) and not isinstance(value, bool)
        if not real or not low <= value <= high:
            raise PlanError(f"{attribute.name} is {value!r}; it is a number from {low} to {high}")

    return check


@attrs.frozen
class Size:
    """Bytes, and how many of them a tensor axis divides; the rest is on each of its ranks.

    Attributes:
        whole: all bytes, on one device without a tensor axis.
        divided: the part that `tensor` ranks share.
    """

    whole: int = attrs.field(default=0, validator=_count(0))
    divided: int = attrs.field(default=0, validator=_count(0))

    def __attrs_post_init__(self) -> None:
        if self.divided > self.whole:
            raise PlanError(f"divided is {self.divided}; it is at most whole, {self.whole}")

    def on(self, tensor: int) -> int:
        """Return the bytes on one of `tensor` ranks, rounded up."""
        return self.whole - self.divided + -(-self.divided // tensor)

    def __add__(self, other: Size) -> Size:
        return Size(self.whole + other.whole, self.divided + other.divided)


@attrs.frozen(kw_only=True)
class Unit:
    """A piece of a model that is not cut between pipeline stages: a layer, an embedding, a head.

    Attributes:
        name: plain module name.
        trainable, frozen: parameters with and without a gradient.
        buffers: bytes of buffers; every rank of the stage has them whole.
        activations: bytes kept for the backward pass, per item.
        working: bytes needed on top of that while its backward pass runs, per item.
        output: bytes handed to the next unit, per item; of the last unit, those of the model's
            output, which the caller's loop holds during the whole backward pass.
        reduced: bytes that a tensor axis adds up in its forward pass, per item: the outputs of
            row-wise layers; `reductions`: how many of these there are.
        flops: floating-point operations of its forward pass, per item.
        block: under sharding its parameters are gathered for its own passes only; those of
            other units stay gathered from forward to backward.
    """

    name: str
    trainable: Size = Size()
    frozen: Size = Size()
    buffers: int = attrs.field(default=0, validator=_count(0))
    activations: Size = Size()
    working: Size = Size()
    output: int = attrs.field(default=0, validator=_count(0))
    reduced: int = attrs.field(default=0, validator=_count(0))
    reductions: int = attrs.field(default=0, validator=_count(0))
    flops: int = attrs.field(default=0, validator=_count(0))
    block: bool = True

    @property
    def parameters(self) -> Size:
        """All parameters."""
        return self.trainable + self.frozen

    def parameters_on(self, tensor: int) -> int:
        """Return the bytes of parameters on one of `tensor` ranks."""
        return self.trainable.on(tensor) + self.frozen.on(tensor)


def _units(values: Iterable[Unit]) -> tuple[Unit, ...]:
    return tuple(values)


def _integers(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values)


def _texts(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(values)


@attrs.frozen(kw_only=True)
class ModelShape:
    """A model as the search sees it.

    Attributes:
        units: in the order of the forward pass, with different names.
        divisors: numbers that the degree of `tensor` has to divide: attention heads, heads of
            keys and values, sizes of divided dims. None of them: no tensor axis is possible.
        tied: groups of unit names that share parameters, counted in the first; a stage has all
            units from the first to the last of a group.
        measured: activations were measured; without, they count as nothing and `explain` says so.
        notes: what `explain` should say too, such as why an axis is not possible.
    """

    units: tuple[Unit, ...] = attrs.field(converter=_units)
    divisors: tuple[int, ...] = attrs.field(default=(), converter=_integers)
    tied: tuple[tuple[str, ...], ...] = ()
    measured: bool = True
    notes: tuple[str, ...] = attrs.field(default=(), converter=_texts)

    def __attrs_post_init__(self) -> None:
        names = [unit.name for unit in self.units]
        if not names or len(set(names)) != len(names):
            raise PlanError(
                f"a model has at least one unit, with names of their own; got {names!r:.200}"
            )
        for divisor in self.divisors:
            if isinstance(divisor, bool) or not isinstance(divisor, int) or divisor < 1:
                raise PlanError(f"divisors has {divisor!r}; they are positive integers")
        unknown = {name for group in self.tied for name in group} - set(names)
        if unknown:
            raise PlanError(f"tied has {sorted(unknown)}; the units are {', '.join(names[:12])}")

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(unit.parameters.whole for unit in self.units)

    def segments(self) -> list[tuple[int, int]]:
        """Return half-open ranges of units that a stage has together, in order."""
        place = {unit.name: number for number, unit in enumerate(self.units)}
        spans = sorted(
            (min(places), max(places) + 1)
            for group in self.tied
            if (places := [place[name] for name in group])
        )
        found: list[tuple[int, int]] = []
        at = 0
        for start, stop in _joined(spans):
            found += [(number, number + 1) for number in range(at, start)]
            found.append((start, stop))
            at = stop
        return found + [(number, number + 1) for number in range(at, len(self.units))]


@attrs.frozen(kw_only=True)
class Hardware:
    """Devices and links. Every rate is that of one device and direction.

    Attributes:
        memory: bytes of one device.
        reserve: share of it that is left alone: allocator, communication buffers, the context.
        devices_per_host: ranks that reach each other over the links inside a host.
        flops: floating-point operations per second that training reaches, not the peak.
        inside, between: bytes per second inside a host and from host to host.
        latency: seconds of one message.
    """

    memory: int = attrs.field(validator=_count(1))
    reserve: float = attrs.field(default=0.1, validator=_number(0.0, 0.99))
    devices_per_host: int = attrs.field(default=8, validator=_count(1))
    flops: float = attrs.field(default=4e14, validator=_number(1.0, 1e30))
    inside: float = attrs.field(default=4e11, validator=_number(1.0, 1e30))
    between: float = attrs.field(default=5e10, validator=_number(1.0, 1e30))
    latency: float = attrs.field(default=1e-5, validator=_number(0.0, 1e6))

    @property
    def usable(self) -> int:
        """Bytes of one device that a plan may use."""
        return int(self.memory * (1 - self.reserve))


@attrs.frozen(kw_only=True)
class Training:
    """How the model is trained.

    Attributes:
        batch: items of one optimizer step, over all ranks.
        microbatches: into how many parts a rank cuts its items; None: the search chooses.
        state: bytes of optimizer state for a byte of trainable parameters: 0 for SGD, 1 with
            momentum, 2 for Adam.
        update: bytes that the optimizer's step needs besides, for a byte of trainable
            parameters: 1 for Adam that updates all tensors at once (torch's on a GPU).
        bucket_views: gradients of replicas live in the communication buckets, instead of being
            copied there (`gradient_as_bucket_view` of DDP).
        all_in_flight: a stage runs the forward passes of all microbatches before the first
            backward pass (GPipe), instead of as few as can be (1F1B).
    """

    batch: int = attrs.field(validator=_count(1))
    microbatches: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(_count(1))
    )
    state: float = attrs.field(default=2.0, validator=_number(0.0, 100.0))
    update: float = attrs.field(default=0.0, validator=_number(0.0, 100.0))
    bucket_views: bool = False
    all_in_flight: bool = False


def _joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join ranges that overlap; `spans` ascend."""
    joined: list[tuple[int, int]] = []
    for start, stop in spans:
        if joined and start < joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined
