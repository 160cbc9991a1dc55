"""Covering and doubling of boxes, against sets of single bytes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parallelkit_torch.placement.boxes import Box, doubled, missing_rows


def bytes_of(box: Box) -> set[int]:
    """Every byte, one by one."""
    found = set()
    for place in itertools.product(*map(range, box.shape)):
        first = box.start + sum(i * step for i, step in zip(place, box.steps, strict=True))
        found |= set(range(first, first + box.item))
    return found


def dense(start: int, item: int, *shape: int) -> Box:
    steps, step = [], item
    for n in reversed(shape):
        steps.append(step)
        step *= n
    return Box(start, item, shape, tuple(reversed(steps)))


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    item = draw(st.sampled_from([1, 2, 4]))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    steps = tuple(item * draw(st.integers(0, 12)) for _ in shape)
    return Box(item * draw(st.integers(0, 20)), item, shape, steps)


@given(boxes())
def test_the_smallest_form_has_the_same_bytes(box: Box) -> None:
    if box.count:
        assert bytes_of(box.as_set()) == bytes_of(box)
        assert max(bytes_of(box)) + 1 == box.end


@given(st.lists(boxes(), max_size=5))
@settings(max_examples=200)
def test_doubled_finds_exactly_those_with_a_byte_in_common(several: list[Box]) -> None:
    sets = [bytes_of(box) for box in several]
    common = {i for i, j in itertools.permutations(range(len(several)), 2) if sets[i] & sets[j]}
    assert doubled(several) == common


@given(boxes(), st.lists(boxes(), max_size=4))
@settings(max_examples=200)
def test_missing_rows_are_those_that_lack_a_byte(tensor: Box, covering: list[Box]) -> None:
    have = set().union(*map(bytes_of, covering))
    rows = []
    if tensor.count:
        for row in range(tensor.shape[0] if tensor.shape else 1):
            step = tensor.steps[0] if tensor.steps else 0
            one = Box(tensor.start + row * step, tensor.item, tensor.shape[1:], tensor.steps[1:])
            if not bytes_of(one) <= have:
                rows.append(row)
    found = missing_rows(tensor, covering)
    assert [row for a, b in found for row in range(a, b)] == rows
    assert all(a < b for a, b in found)


@pytest.mark.parametrize(
    ("parts", "rows"),
    [
        ([dense(0, 2, 8, 4), dense(64, 2, 4, 4)], []),
        ([dense(0, 2, 8, 4)], [(8, 12)]),
        ([dense(0, 2, 2, 4), dense(32, 2, 4, 4), dense(90, 2, 1)], [(2, 4), (8, 12)]),
        ([Box(0, 2, (12, 2), (8, 2)), Box(4, 2, (12, 2), (8, 2))], []),
        ([Box(0, 2, (12, 3), (8, 2))], [(0, 12)]),
        ([], [(0, 12)]),
    ],
)
def test_a_fused_parameter(parts: list[Box], rows: list[tuple[int, int]]) -> None:
    assert missing_rows(dense(0, 2, 12, 4), parts) == rows


def test_large_tensors_in_whole_rows_need_no_flag_for_each_element() -> None:
    rows, row = 1 << 20, 1 << 14  # 16 GiB; flags for all elements would not be made in time
    tensor = dense(0, 2, rows, row)
    halves = [dense(i * row * rows, 2, rows // 2, row) for i in range(2)]
    assert missing_rows(tensor, halves) == []
    assert doubled([*halves, dense(0, 2, 1)]) == {0, 2}
    columns = [Box(i * row, 2, (rows, row // 2), (2 * row, 2)) for i in range(2)]
    assert missing_rows(tensor, columns) == []
    assert doubled(columns) == set()
