"""Dealing streams: the same parts as for a data set of the same items, whatever the workers."""

from __future__ import annotations

import doctest
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import parallelkit.streams
from parallelkit.data import MODES, shard_indices
from parallelkit.errors import DataShardError
from parallelkit.streams import deal

LENGTHS = st.integers(0, 40)
COUNTS = st.integers(1, 9)


@given(LENGTHS, COUNTS, st.sampled_from(MODES), st.data())
def test_parts_are_those_of_a_data_set(
    length: int, count: int, mode: str, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, length))
    if mode == "drop" and length < count and not start:
        return
    for index in range(count):
        options: dict[str, Any] = {"index": index, "count": count, "mode": mode, "start": start}
        assert list(deal(range(length), **options)) == list(shard_indices(length, **options))


@given(LENGTHS, COUNTS, st.sampled_from(MODES), st.integers(1, 4), st.integers(1, 4), st.data())
def test_workers_in_turn_give_what_one_gives(
    length: int, count: int, mode: str, size: int, workers: int, data: st.DataObject
) -> None:
    if mode == "drop" and length < count:
        return
    options: dict[str, Any] = {
        "index": data.draw(st.integers(0, count - 1)),
        "count": count,
        "mode": mode,
        "batch_size": size,
        "start": data.draw(st.integers(0, length)),
    }
    lanes = [
        iter(list(deal(range(length), worker=worker, workers=workers, **options)))
        for worker in range(workers)
    ]
    got: list[int] = []
    for batch in itertools.count():
        items = list(itertools.islice(lanes[batch % workers], size))
        got += items
        if not items:
            break
    assert got == list(deal(range(length), **options))
    assert all(next(lane, None) is None for lane in lanes)


def test_a_start_behind_the_end_leaves_nothing() -> None:
    for mode in MODES:
        assert list(deal(range(3), index=0, count=2, mode=mode, start=4)) == []


def test_no_more_is_read_than_the_round() -> None:
    read: list[int] = []

    def endless() -> Iterator[int]:
        for number in itertools.count():
            read.append(number)
            yield number

    mine = deal(endless(), index=1, count=3)
    assert [next(mine), next(mine)] == [1, 4]
    assert read == [0, 1, 2, 3, 4, 5]


def test_drop_is_an_error_rather_than_empty() -> None:
    for index in range(3):
        with pytest.raises(DataShardError, match=r"ended after 2 items.*'pad'.*'uneven'"):
            list(deal(range(2), index=index, count=3, mode="drop"))


@pytest.mark.parametrize(
    ("values", "mention"),
    [
        ({"index": 2}, "index is 2"),
        ({"count": 0}, "count is 0"),
        ({"mode": "wrap"}, "mode is 'wrap'"),
        ({"start": -1}, "start is -1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"workers": 0}, "workers is 0"),
        ({"worker": 2, "workers": 2}, "worker is 2; with 2 workers it is 0 to 1"),
    ],
)
def test_wrong_arguments_before_anything_is_read(values: dict[str, Any], mention: str) -> None:
    def never() -> Iterator[int]:
        raise AssertionError("read")
        yield 0

    with pytest.raises(DataShardError) as caught:
        deal(never(), **({"index": 0, "count": 2} | values))
    assert mention in str(caught.value)


def test_examples_run() -> None:
    failed, attempted = doctest.testmod(parallelkit.streams)
    assert attempted > 0
    assert failed == 0
