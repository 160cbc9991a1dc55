"""Boxes and spans: always the bytes that numpy's own slicing gives, never others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelkit.errors import ProtocolError
from parallelkit.weights.layout import Region
from parallelkit.weights.regions import Span, inside, intersection, span_of, view, whole


def indices(box, within):
    """Slices of an array that holds the box `within`."""
    starts = zip(box.offsets, box.sizes, within.offsets, strict=True)
    return tuple(slice(low - start, low - start + n) for low, n, start in starts)


@st.composite
def boxes(draw, within):
    """A box inside another; often all of a dim, sometimes nothing of it."""
    low, size = [], []
    for start, extent in zip(*within, strict=True):
        first = draw(st.sampled_from([0, draw(st.integers(0, extent))]))
        most = extent - first
        low.append(start + first)
        size.append(draw(st.sampled_from([most, draw(st.integers(0, most))])))
    return Region(tuple(low), tuple(size))


@st.composite
def nested(draw):
    """A box, and one inside of it."""
    sizes = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    outer = Region(tuple(draw(st.integers(0, 9)) for _ in sizes), sizes)
    return outer, draw(boxes(outer))


@settings(max_examples=200, deadline=None)
@given(nested(), st.sampled_from([1, 2, 4, 8, 16]), st.integers(0, 40))
def test_a_span_is_what_slicing_gives(case, itemsize, base):
    outer, box = case
    rng = np.random.default_rng(0)
    memory = rng.integers(0, 256, base + outer.elements * itemsize + 3, np.uint8)
    array = memory[base : base + outer.elements * itemsize].reshape(*outer.sizes, itemsize)
    span = span_of(box, outer, itemsize, base)
    assert span.nbytes == box.elements * itemsize
    assert span.offset <= span.end <= base + outer.elements * itemsize
    expected = array[indices(box, outer)].reshape(-1)
    np.testing.assert_array_equal(view(memory, span).reshape(-1), expected)
    for held in (memory.data, memoryview(bytearray(memory))):
        np.testing.assert_array_equal(view(held, span).reshape(-1), expected)


@settings(max_examples=200, deadline=None)
@given(nested(), st.sampled_from([1, 2, 16]))
def test_runs_are_as_long_as_they_can_be(case, itemsize):
    """The bytes' places, listed one by one, break exactly where one run ends and another begins."""
    outer, box = case
    places = np.arange(outer.elements * itemsize).reshape(*outer.sizes, itemsize)
    listed = places[indices(box, outer)].reshape(-1)
    span = span_of(box, outer, itemsize)
    runs = 1 + int((np.diff(listed) != 1).sum()) if len(listed) else 0
    assert (span.nbytes // span.run if span.run else 0) == runs


@settings(max_examples=100, deadline=None)
@given(nested(), nested())
def test_what_is_shared_is_inside_of_both(one, other):
    outer, box = one
    _, second = other
    if len(box.sizes) != len(second.sizes):
        assert not inside(box, second)
        return
    ours = set(np.ndindex(*box.sizes)) if box.sizes else {()}
    ours = {tuple(np.add(i, box.offsets)) for i in ours}
    theirs = {tuple(np.add(i, second.offsets)) for i in np.ndindex(*second.sizes)}
    shared = intersection(box, second)
    assert intersection(second, box) == shared
    if shared is None:
        assert not ours & theirs
        return
    listed = {tuple(np.add(i, shared.offsets)) for i in np.ndindex(*shared.sizes)}
    assert listed == ours & theirs
    assert inside(shared, box)
    assert inside(shared, second)
    assert inside(box, outer)


def test_writing_through_a_view_changes_its_bytes_alone():
    memory = np.zeros(24, np.uint8)
    view(memory, Span(1, 2, ((3, 8),)))[...] = 7
    assert np.flatnonzero(memory).tolist() == [1, 2, 9, 10, 17, 18]
    assert not view(memoryview(bytes(24)), Span(0, 4)).flags.writeable


@pytest.mark.parametrize(
    "span",
    [
        Span(-1, 4),
        Span(0, -4),
        Span(0, 25),
        Span(25, 0),
        Span(21, 4),
        Span(0, 4, ((4, 7),)),
        Span(0, 4, ((-2, 8),)),
        Span(0, 4, ((2, -8),)),
        Span(8, 4, ((2, -8),)),
        Span(0, 4, ((2, 3),)),
        Span(0, 1, ((10**12, 0),)),
        Span(0, 1, ((2, 2), (4, 1))),
        Span(0, 1, ((2, 1 << 62),)),
        Span(1 << 80, 4),
        Span(0, 1, ((1, 1),) * 17),
    ],
    ids=str,
)
def test_a_span_that_reaches_outside_or_reads_twice_is_refused(span):
    with pytest.raises(ProtocolError, match="is not inside a memory of 24 bytes"):
        view(np.zeros(24, np.uint8), span)
    with pytest.raises(ProtocolError, match="none shorter than what it repeats"):
        span.check(24)


@pytest.mark.parametrize("steps", [(), ((0, 8),), ((0, 1 << 80), (1 << 80, 1 << 80))])
@pytest.mark.parametrize("offset", [0, 24])
def test_empty_spans_are_empty_arrays(offset, steps):
    span = Span(offset, 0, steps)
    assert (span.nbytes, span.end) == (0, offset)
    assert view(np.zeros(24, np.uint8), span).shape == (0,)
    assert view(memoryview(b""), Span(0, 0)).shape == (0,)


def test_a_message_about_a_huge_span_is_short():
    with pytest.raises(ProtocolError) as caught:
        Span(0, 1, ((10**9, 1),) * 100_000).check(8)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("box", "within"),
    [
        (Region((0,), (4,)), (3,)),
        (Region((-1,), (1,)), (3,)),
        (Region((1,), (-1,)), (3,)),
        (Region((0, 0), (1, 1)), (3,)),
        (Region((0,), (1, 1)), (3, 3)),
        (Region((0,), (2,)), Region((1,), (3,))),
        (Region((), ()), (3,)),
    ],
)
def test_a_box_that_is_not_inside(box, within):
    with pytest.raises(ProtocolError, match="is not inside"):
        span_of(box, within, 4)


def test_scalars_and_whole_tensors_are_one_run():
    assert span_of(Region((), ()), (), 8, 64) == Span(64, 8)
    assert span_of(whole((3, 4, 5)), (3, 4, 5), 2) == Span(0, 120)
    assert span_of(Region((1, 0, 0), (2, 4, 5)), (3, 4, 5), 2) == Span(40, 80)
    assert span_of(Region((0, 1, 0), (3, 2, 5)), (3, 4, 5), 2) == Span(10, 20, ((3, 40),))
    assert span_of(Region((0, 0, 2), (3, 4, 1)), (3, 4, 5), 2) == Span(4, 2, ((12, 10),))
    assert span_of(Region((0, 2, 0), (3, 0, 5)), (3, 4, 5), 2).nbytes == 0
