"""Streams of Python: every rank reads all, keeps its part, and draws alike."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from parallelkit_mindspore.loader import ShardLoader, make_loader

from parallelkit.errors import DataShardError, UnknownLengthError, UnsupportedFeatureError


class Lines:
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.length))


class Sized(Lines):
    def __len__(self) -> int:
        return self.length


class Random(Lines):
    """Shuffles and augments with all generators, and hears of epochs."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = list(range(self.length))
        random.shuffle(order)
        for item in order:
            yield {"item": item, "noise": random.random() + np.random.rand(), "epoch": self.epoch}


class Broken(Lines):
    def __iter__(self) -> Iterator[int]:
        yield from range(3)
        raise OSError("no disk")


def make(data: Any, index: int = 0, count: int = 2, **options: Any) -> ShardLoader:
    return make_loader(data, index=index, count=count, **options)


def batches(loader: Any) -> list[Any]:
    return [batch[0].asnumpy().tolist() for batch in loader]


def test_five_items_two_parts() -> None:
    for data in (Lines(5), lambda: iter(range(5))):
        for mode, want in {
            "pad": [[[0], [2], [4]], [[1], [3], [0]]],
            "drop": [[[0], [2]], [[1], [3]]],
            "uneven": [[[0], [2], [4]], [[1], [3]]],
        }.items():
            assert [batches(make(data, index, mode=mode)) for index in (0, 1)] == want


def test_it_is_dealt_as_a_list_is() -> None:
    for options in ({"batch_size": 3}, {"batch_size": 3, "mode": "drop", "drop_last": True}):
        for index in (0, 1):
            dealt = batches(make(list(range(23)), index, **options))
            assert batches(make(Lines(23), index, **options)) == dealt


def test_tensors_and_columns() -> None:
    rows = [(np.float32([i, -i]), str(i)) for i in range(4)]
    (batch,) = make(lambda: iter(rows), 1, batch_size=2)
    assert isinstance(batch[0], ms.Tensor)
    assert (batch[0].dtype, batch[0].shape) == (ms.float32, (2, 2))
    assert batch[1].tolist() == ["1", "3"]
    (named,) = make(lambda: iter(rows), 1, batch_size=2, output="dict", column_names=["x", "t"])
    assert list(named) == ["x", "t"]


def test_random_streams_agree_everywhere() -> None:
    def items(epoch: int, index: int, **options: Any) -> list[Any]:
        loader = make(Random(10), index, mode="uneven", seed=1, output="dict", **options)
        loader.set_epoch(epoch)
        found = []
        for batch in loader:
            random.random()  # the loop draws, too
            found += zip(*(column.asnumpy().tolist() for column in batch.values()), strict=True)
        return found

    random.seed(9)
    whole = items(2, 0, count=1)
    assert sorted(item for item, _, _ in whole) == list(range(10))
    assert len({noise for _, noise, _ in whole}) == 10
    assert {epoch for _, _, epoch in whole} == {2}
    for index in (0, 1):  # other seeds of this process, parts, batches: the same stream
        random.seed(index)
        assert items(2, index) == whole[index::2]
        assert items(2, index, batch_size=2) == whole[index::2]
    assert items(3, 0, count=1) != whole


def test_the_generators_of_this_process_are_left_alone() -> None:
    random.seed(1)
    np.random.seed(1)
    wanted = random.random(), np.random.rand()
    random.seed(1)
    np.random.seed(1)
    begun = iter(make(Random(6), output="dict"))
    next(begun)
    assert (random.random(), np.random.rand()) == wanted


def test_length_is_known_where_the_stream_knows_it() -> None:
    assert len(make(Sized(11), batch_size=2)) == 3
    assert len(make(Sized(11), batch_size=4, mode="drop", drop_last=True)) == 1
    with pytest.raises(UnknownLengthError, match="Lines has no __len__"):
        len(make(Lines(11)))
    with pytest.raises(DataShardError, match="drop"):
        make(Sized(2), 0, 3, mode="drop")


def test_drop_says_at_the_end_that_all_parts_are_empty() -> None:
    with pytest.raises(DataShardError, match="ended after 2 items"):
        list(make(Lines(2), 0, 3, mode="drop"))


def test_errors_of_the_stream_come_out_as_they_are() -> None:
    begun = iter(make(Broken(9)))
    next(begun)
    with pytest.raises(OSError, match="no disk"):
        list(begun)


def test_items_that_do_not_make_a_batch() -> None:
    ragged = [np.zeros(2), np.zeros(3)]
    with pytest.raises(DataShardError, match=r"column 'column_0': \[2\], \[3\]"):
        list(make(lambda: iter(ragged), 0, 1, batch_size=2))
    with pytest.raises(DataShardError, match="2 columns; there are 1 names"):
        list(make(lambda: iter([(1, 2)]), 0, 1, column_names="x"))
    with pytest.raises(UnsupportedFeatureError, match="is a object"):
        list(make(lambda: iter([object()]), 0, 1))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shuffle": True}, "shuffle=True with Lines"),
        ({"num_parallel_workers": 2}, "num_parallel_workers with Lines"),
        ({"python_multiprocessing": False}, "python_multiprocessing with Lines"),
    ],
)
def test_what_a_stream_cannot(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=said):
        make(Lines(4), **options)
    with pytest.raises(UnsupportedFeatureError, match="stream has no native data set"):
        _ = make(Lines(4)).native
