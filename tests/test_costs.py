"""Sizes, stages, memory and time: what is refused, and the formulas by hand."""

from __future__ import annotations

import itertools
import math
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelkit import costs
from parallelkit.costs import Memory, Seconds
from parallelkit.errors import PlanError
from parallelkit.plan import plan
from parallelkit.shapes import Hardware, ModelShape, Size, Training, Unit


def layers(count: int, **changes: Any) -> tuple[Unit, ...]:
    values = {
        "trainable": Size(400, 320),
        "activations": Size(20, 12),
        "working": Size(10, 4),
        "output": 8,
        "reduced": 16,
        "reductions": 2,
        "flops": 1000,
    }
    return tuple(Unit(name=f"layers.{n}", **(values | changes)) for n in range(count))


def model(count: int = 4, divisors: tuple[int, ...] = (4,), **changes: Any) -> ModelShape:
    return ModelShape(units=layers(count, **changes), divisors=divisors)


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "mention"),
    [
        (lambda: Size(-1), "whole is -1"),
        (lambda: Size(1, 2), "divided is 2; it is at most whole, 1"),
        (lambda: Size(True), "whole is True"),
        (lambda: Unit(name="a", flops=1.5), "flops is 1.5"),
        (lambda: ModelShape(units=()), "at least one unit"),
        (lambda: ModelShape(units=[Unit(name="a"), Unit(name="a")]), "names of their own"),
        (lambda: ModelShape(units=[Unit(name="a")], divisors=(0,)), "divisors has 0"),
        (lambda: ModelShape(units=[Unit(name="a")], tied=(("a", "b"),)), "tied has ['b']"),
        (lambda: Hardware(memory=0), "memory is 0"),
        (lambda: Hardware(memory=1, reserve=1.0), "reserve is 1.0"),
        (lambda: Hardware(memory=1, flops=0), "flops is 0"),
        (lambda: Hardware(memory=1, inside=float("nan")), "inside is nan"),
        (lambda: Hardware(memory=1, between="fast"), "between is 'fast'"),
        (lambda: Training(batch=0), "batch is 0"),
        (lambda: Training(batch=1, microbatches=0), "microbatches is 0"),
        (lambda: Training(batch=1, state=-1), "state is -1"),
    ],
)
def test_wrong_values(make: Any, mention: str) -> None:
    with pytest.raises(PlanError) as caught:
        make()
    assert mention in str(caught.value)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 64))
def test_a_size_on_tensor_ranks(rest: int, divided: int, tensor: int) -> None:
    size = Size(rest + divided, divided)
    on = size.on(tensor)
    assert size.on(1) == size.whole
    assert on * tensor >= divided + rest * tensor
    assert (on - rest - 1) * tensor < divided or divided == 0


# --- stages ---------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.data())
def test_stages_are_as_even_as_can_be(flops: list[int], data: st.DataObject) -> None:
    units = [Unit(name=str(n), flops=f, trainable=Size(f)) for n, f in enumerate(flops)]
    shape = ModelShape(units=units)
    pipeline = data.draw(st.integers(1, len(units)))
    cut = costs.stages(shape, pipeline)
    assert [unit for stage in cut for unit in stage] == units
    assert len(cut) == pipeline
    assert all(cut)
    best = min(
        max(sum(flops[start:stop]) for start, stop in itertools.pairwise((0, *inner, len(units))))
        for inner in itertools.combinations(range(1, len(units)), pipeline - 1)
    )
    assert max(sum(unit.flops for unit in stage) for stage in cut) == best


def test_tied_units_share_a_stage() -> None:
    shape = ModelShape(units=layers(6), tied=(("layers.1", "layers.3"), ("layers.3", "layers.4")))
    assert shape.segments() == [(0, 1), (1, 5), (5, 6)]
    cut = costs.stages(shape, 3)
    assert [len(stage) for stage in cut] == [1, 4, 1]
    with pytest.raises(PlanError, match="3 pieces"):
        costs.stages(shape, 4)
    ends = attrs.evolve(shape, tied=(("layers.0", "layers.5"),))
    assert ends.segments() == [(0, 6)]


# --- memory, by hand ------------------------------------------------------------------------------

ADAM = Training(batch=8, state=2.0)
#: unit bytes: 400 of parameters, (20 + 10) an item of activations and work; 4 units


def needs(count: int, microbatches: int = 1, training: Training = ADAM, **degrees: int) -> Memory:
    shape = model(count)
    made = plan(math.prod(degrees.values()), "auto", **degrees)  # type: ignore[arg-type]
    return costs.memory(costs.stages(shape, made.pipeline), made, training, microbatches)


def test_memory_of_one_rank() -> None:
    # 100 items; the last unit's backward pass: all activations, its own gradient
    big = attrs.evolve(ADAM, batch=100)
    assert needs(4, training=big, data=1) == Memory(
        parameters=1600, optimizer=3200, gradients=400, activations=100 * (80 + 10)
    )
    # with small activations the first unit's: all gradients
    small = attrs.evolve(ADAM, batch=1)
    assert needs(4, training=small, data=1) == Memory(
        parameters=1600, optimizer=3200, gradients=1600, activations=20 + 10 + 8
    )
    # or the update, where that needs memory of its own
    at_once = attrs.evolve(small, update=1.0)
    assert needs(4, training=at_once, data=1) == Memory(
        parameters=1600, optimizer=4800, gradients=1600
    )
    # microbatches halve activations, and gradients of the others are there all the time
    assert needs(4, 2, training=big, data=1) == Memory(
        parameters=1600, optimizer=3200, gradients=1600, activations=50 * 90
    )


def test_memory_of_replicas() -> None:
    one = needs(4, data=2)  # 4 items a rank
    assert one == Memory(
        parameters=1600, optimizer=3200, gradients=1600, buckets=1600, activations=4 * (30 + 8)
    )
    views = attrs.evolve(ADAM, bucket_views=True)
    assert needs(4, training=views, data=2) == attrs.evolve(one, buckets=0)


def test_memory_of_shards() -> None:
    wide = attrs.evolve(ADAM, batch=400)
    # unit 3's backward pass: its own and the next unit's parameters whole, its gradient twice:
    # whole, and its shard
    assert needs(4, training=wide, data_shard=4) == Memory(
        parameters=400, optimizer=800, gradients=400 + 100, gathered=800, activations=100 * 90
    )
    # roots stay gathered, and so do their gradients
    units = (*layers(3), *(attrs.evolve(u, name="root", block=False) for u in layers(1)))
    made = plan(4, "auto", data_shard=4)
    assert costs.memory([units], made, wide, 1) == Memory(
        parameters=400, optimizer=800, gradients=400 + 100, gathered=800, activations=9000
    )
    # several microbatches: gradients whole until the last one
    assert needs(4, 2, training=wide, data_shard=4).gradients == 1600


def test_memory_of_tensor_parts() -> None:
    big = attrs.evolve(ADAM, batch=100)
    assert needs(4, training=big, tensor=4) == Memory(
        parameters=4 * 160,
        optimizer=8 * 160,
        gradients=160,
        activations=100 * (4 * 11) + 100 * 7,  # 20 - 12 + 3, and 10 - 4 + 1
    )


def test_memory_of_stages() -> None:
    big = attrs.evolve(ADAM, batch=100)
    # 4 microbatches of 25; the first of two stages keeps two of them
    one = needs(4, 4, training=big, pipeline=2)
    assert one == Memory(
        parameters=800, optimizer=1600, gradients=800, activations=25 * (2 * 40 + 10)
    )
    gpipe = attrs.evolve(big, all_in_flight=True)
    assert needs(4, 4, training=gpipe, pipeline=2).activations == 25 * (4 * 40 + 10)
    assert needs(4, 4, training=gpipe, data=1) == needs(4, 4, training=big, data=1)
    # sharded stages keep what they gathered from the first backward pass to the last
    both = needs(4, 4, training=big, pipeline=2, data_shard=2)
    assert both.gathered == 800
    assert both.parameters == 400
    assert both.gradients == 800


# --- time, by hand --------------------------------------------------------------------------------

LINKS = Hardware(memory=1, flops=100.0, inside=10.0, between=1.0, latency=0.5, devices_per_host=4)


def took(count: int, microbatches: int = 1, batch: int = 8, **degrees: int) -> Seconds:
    shape = model(count)
    made = plan(math.prod(degrees.values()), "auto", **degrees)  # type: ignore[arg-type]
    cut = costs.stages(shape, made.pipeline)
    return costs.seconds(cut, made, LINKS, Training(batch=batch), microbatches)


def test_time_of_one_rank() -> None:
    assert took(4, data=1) == Seconds(compute=3 * 4 * 1000 * 8 / 100)


def test_time_of_replicas() -> None:
    slow = took(4, data=2)  # one bucket, which nothing hides
    assert slow.compute == 480
    assert slow.reduce == pytest.approx(2 * (1 / 2) * 1600 / 10 + 2 * 0.5 + 0.5)
    far = took(4, batch=8, data=8)  # over the links between hosts
    assert far.reduce == pytest.approx(2 * (7 / 8) * 1600 / 1 + 14 * 0.5 + 0.5)
    # three buckets, of which computing hides what it can
    large = model(3, trainable=Size(costs.BUCKET), flops=10**6)
    made = plan(2, "auto", data=2)
    time = costs.seconds(costs.stages(large, 1), made, LINKS, Training(batch=2), 1)
    assert time.reduce == pytest.approx(3 * (costs.BUCKET / 10 + 1 + 0.5) - 90_000 * 2 / 3)


def test_time_of_shards() -> None:
    one = took(4, data_shard=4)  # 240 s of computing
    each = (3 / 4) * 400 / 10 + 3 * 0.5
    # a third of the time hides gathers of forward passes; two thirds those of backward passes,
    # and with what is left of them reductions
    assert one.gather == pytest.approx((4 * each - 80) + 0 + 8 * 0.5)
    assert one.reduce == pytest.approx(4 * each - (160 - 4 * each) + 4 * 0.5)
    both = took(4, batch=80, data=2, data_shard=4)
    scatter = (3 / 4) * 400 / 10 + 2 * (1 / 2) * 100 / 1 + (3 + 2) * 0.5
    assert both.reduce == pytest.approx(scatter + 8 * 0.5)


def test_time_of_tensor_parts() -> None:
    one = took(4, tensor=4)
    assert one.compute == 240
    assert one.tensor == pytest.approx(4 * (3 / 4) * (64 * 8) / 10 + 4 * 8 * 3 * 0.5)


def test_time_of_stages() -> None:
    one = took(4, 4, pipeline=2)
    assert one.compute == 480
    hand = 2 * (8 * 2 / 10 + 0.5)
    assert one.pipeline == pytest.approx(4 * hand)
    assert one.bubble == pytest.approx((480 / 4 + hand) * 1)
