"""The search of mode auto: exhaustive search by other means, and properties."""

from __future__ import annotations

import doctest
import itertools
import math
import re
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelkit import costs
from parallelkit.errors import NoPlanError, PlanError
from parallelkit.plan import plan
from parallelkit.search import SEARCHED, Search, search
from parallelkit.shapes import Hardware, ModelShape, Size, Training, Unit

GB = 10**9


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


ROOM = Hardware(memory=10**12, reserve=0.0)


@st.composite
def questions(draw: st.DrawFn) -> dict[str, Any]:
    def size(most: int) -> Size:
        whole = draw(st.integers(0, most))
        return Size(whole, draw(st.integers(0, whole)))

    units = [
        Unit(
            name=str(number),
            trainable=size(10_000),
            frozen=size(1_000),
            buffers=draw(st.integers(0, 100)),
            activations=size(500),
            working=size(500),
            output=draw(st.integers(0, 100)),
            reduced=draw(st.integers(0, 100)),
            reductions=draw(st.integers(0, 2)),
            flops=draw(st.integers(0, 10_000)),
            block=draw(st.booleans()),
        )
        for number in range(draw(st.integers(1, 5)))
    ]
    return {
        "model": ModelShape(units=units, divisors=draw(st.sampled_from([(), (4,), (6, 12)]))),
        "world_size": draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16])),
        "hardware": Hardware(
            memory=draw(st.integers(10_000, 200_000)),
            reserve=0.0,
            devices_per_host=draw(st.sampled_from([1, 2, 4, 8])),
            flops=draw(st.sampled_from([1e3, 1e6])),
            inside=1e6,
            between=1e4,
            latency=draw(st.sampled_from([0.0, 1e-3])),
        ),
        "training": Training(
            batch=draw(st.sampled_from([1, 4, 12, 16])),
            microbatches=draw(st.sampled_from([None, 1, 2, 4])),
            state=draw(st.sampled_from([0.0, 2.0])),
        ),
    }


def asked(question: dict[str, Any], **changes: Any) -> Search | None:
    try:
        return search(**(question | changes))
    except NoPlanError:
        return None


def exhaustive(question: dict[str, Any]) -> dict[tuple[int, ...], list[tuple[int, float]]]:
    """Degrees to (bytes, seconds) of every number of microbatches, by trying all numbers."""
    shape, world = question["model"], question["world_size"]
    training = question["training"]
    found: dict[tuple[int, ...], list[tuple[int, float]]] = {}
    for p, r, d in itertools.product(range(1, world + 1), repeat=3):
        t = world // (p * r * d) or 1
        heads = all(n % t == 0 for n in shape.divisors) and (t == 1 or bool(shape.divisors))
        if p * r * d * t != world or not heads or p > len(shape.units):
            continue
        for count in range(p, training.batch + 1):
            if training.batch % (r * d * count) or training.microbatches not in (None, count):
                continue
            made = plan(world, "auto", pipeline=p, data=r, data_shard=d, tensor=t)
            cut = costs.stages(shape, p)
            size = costs.memory(cut, made, training, count).total
            time = costs.seconds(cut, made, question["hardware"], training, count).total
            found.setdefault((p, r, d, t), []).append((size, time))
    return found


@given(questions())
@settings(max_examples=100, deadline=None)
def test_against_exhaustive_search(question: dict[str, Any]) -> None:
    everything = exhaustive(question)
    usable = question["hardware"].usable
    fitting = [time for ways in everything.values() for size, time in ways if size <= usable]
    try:
        found = search(**question)
    except NoPlanError as error:
        assert not fitting
        sizes = [size for ways in everything.values() for size, _ in ways]
        assert error.needed_bytes == (min(sizes) if sizes else None)
        return
    assert found.best.fits
    assert found.best.seconds.total == pytest.approx(min(fitting))
    assert len(found.estimates) == len(everything)
    for one in found.estimates:
        ways = everything[tuple(one.plan.degree(axis) for axis in SEARCHED)]
        fast = [time for size, time in ways if size <= usable]
        assert one.fits == bool(fast) == (one.memory.total <= usable)
        if fast:
            assert one.seconds.total == pytest.approx(min(fast))
        else:
            assert one.memory.total == min(size for size, _ in ways)
    assert list(found.estimates) == sorted(found.estimates, key=lambda one: one.rank)
    world = question["world_size"]
    shapes = itertools.product(range(1, world + 1), repeat=3)
    assert sum(found.impossible.values()) + len(found.estimates) == sum(
        world % math.prod(degrees) == 0 for degrees in shapes
    )


@given(questions(), st.sampled_from(["memory", "flops", "inside", "between", "latency"]))
@settings(max_examples=60, deadline=None)
def test_better_hardware_is_never_worse(question: dict[str, Any], what: str) -> None:
    before = asked(question)
    hardware = question["hardware"]
    value = getattr(hardware, what)
    better = attrs.evolve(hardware, **{what: value / 2 if what == "latency" else value * 2})
    after = asked(question, hardware=better)
    if before is not None:
        assert after is not None
        assert after.best.seconds.total <= before.best.seconds.total * (1 + 1e-9)


@given(questions())
@settings(max_examples=60, deadline=None)
def test_pinning_only_narrows(question: dict[str, Any]) -> None:
    free = asked(question)
    if free is None:
        return
    best = free.best.plan
    pinned = {axis: best.degree(axis) for axis in ("pipeline", "tensor")}
    narrow = search(**question, pinned=pinned)
    assert narrow.best == free.best
    assert set(narrow.estimates) <= set(free.estimates)


@given(questions())
@settings(max_examples=40, deadline=None)
def test_the_same_question_has_the_same_answer(question: dict[str, Any]) -> None:
    one, other = asked(question), asked(question)
    assert one == other
    assert one is None or one.explain() == str(other)


def test_a_large_model_is_spread_and_a_small_one_replicated() -> None:
    training = Training(batch=64)
    hardware = Hardware(memory=80 * GB)

    def shape(scale: int) -> ModelShape:
        part = Size(scale, scale)
        return ModelShape(
            units=layers(
                32, trainable=part, activations=Size(GB // 10), flops=1000 * scale, reduced=10**7
            ),
            divisors=(8,),
        )

    small = search(shape(10**6), 8, hardware, training)
    assert small.best.plan.degrees == plan(8, "auto").degrees
    large = search(shape(GB), 8, hardware, training)
    assert large.best.plan.data_shard * large.best.plan.tensor * large.best.plan.pipeline > 1
    assert large.best.memory.total <= hardware.usable
    with pytest.raises(NoPlanError) as caught:
        search(shape(100 * GB), 8, hardware, training)
    assert caught.value.needed_bytes is not None
    enough = Hardware(memory=caught.value.needed_bytes)
    assert search(shape(100 * GB), 8, enough, training).best.fits


def test_a_tensor_axis_stays_inside_a_host() -> None:
    shape = model(8, divisors=(16,), trainable=Size(10**9, 10**9), reduced=10**8, flops=10**12)
    hardware = Hardware(memory=10 * GB, devices_per_host=4)
    found = search(shape, 16, hardware, Training(batch=64))
    assert found.best.plan.tensor <= 4


@pytest.mark.parametrize(
    ("pinned", "mention"),
    [
        ({"tensor": 3}, "do not divide world_size=8"),
        ({"tensor": 4, "data": 4}, "tensor=4, data=4"),
        ({"tensor": 0}, "tensor is 0"),
        ({"tensor": True}, "tensor is True"),
        ({"context": 2}, "context=2 with mode 'auto'"),
        ({"model": 2}, "no axis 'model'"),
    ],
)
def test_impossible_pins(pinned: dict[str, int], mention: str) -> None:
    with pytest.raises(PlanError) as caught:
        search(model(), 8, ROOM, Training(batch=8), pinned=pinned)
    assert mention in str(caught.value)


def test_pins_that_leave_nothing() -> None:
    with pytest.raises(NoPlanError, match="tensor=8 does not divide all of 4") as caught:
        search(model(), 8, ROOM, Training(batch=8), pinned={"tensor": 8})
    assert caught.value.needed_bytes is None
    with pytest.raises(NoPlanError, match="data x data_shard = 8 does not divide the batch of 7"):
        search(model(), 8, ROOM, Training(batch=7), pinned={"tensor": 1, "pipeline": 1})
    with pytest.raises(NoPlanError, match="no layers that a tensor axis divides"):
        search(model(divisors=()), 8, ROOM, Training(batch=8), pinned={"tensor": 8})
    with pytest.raises(NoPlanError, match="pipeline=8 for a model of 4 pieces"):
        search(model(), 8, ROOM, Training(batch=8), pinned={"pipeline": 8})
    with pytest.raises(NoPlanError, match="pipeline=4 for 2 items a rank"):
        search(model(), 8, ROOM, Training(batch=4), pinned={"pipeline": 4, "data": 2})
    with pytest.raises(NoPlanError, match="microbatches=3 for 8 items a rank"):
        search(model(), 1, ROOM, Training(batch=8, microbatches=3))
    free = search(model(), 8, ROOM, Training(batch=8), pinned={"data": -1, "tensor": 2})
    assert {one.plan.tensor for one in free.estimates} == {2}
    assert len({one.plan.data for one in free.estimates}) > 1


def test_explain() -> None:
    shape = attrs.evolve(model(), measured=False)
    found = search(shape, 8, ROOM, Training(batch=8))
    text = found.explain(most=3)
    lines = text.splitlines()
    assert lines[0].startswith("auto: 8 ranks = ")
    assert "reckoned, not measured" in lines[1]
    assert "parameters" in lines[1]
    assert "compute" in lines[2]
    assert "8 x 1,000.0 GB" in lines[3]
    assert [line.split()[0] for line in lines[5:8]] == ["1.", "2.", "3."]
    assert f"... and {len(found.estimates) - 3} more" in lines
    assert any("activations count as nothing" in line for line in lines)
    assert "not possible, 1 plan(s): tensor=8 does not divide all of 4" in text
    assert "activations count" not in search(model(), 8, ROOM, Training(batch=8)).explain()


def test_examples_run() -> None:
    failed, attempted = doctest.testmod(sys.modules["parallelkit.search"])
    assert attempted > 0
    assert failed == 0


def test_the_example_of_the_document_runs(capsys: pytest.CaptureFixture[str]) -> None:
    document = Path(__file__).resolve().parents[1] / "docs" / "modes" / "auto.md"
    blocks = re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "from parallelkit.search" in block]
    exec(compile(code, str(document), "exec"), {})
    assert capsys.readouterr().out.startswith("auto: 64 ranks = data 8 x tensor 8")


def test_tied_units_are_not_spread_over_stages() -> None:
    tied = attrs.evolve(model(6), tied=(("layers.0", "layers.5"),))
    found = search(tied, 4, ROOM, Training(batch=8))
    assert {one.plan.pipeline for one in found.estimates} == {1}
