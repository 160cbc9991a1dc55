"""Iterable data sets: every part the same with any number of workers, and nothing lost."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from parallelkit_torch.loader import ShardLoader, make_loader
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from parallelkit.errors import DataShardError, UnknownLengthError, UnsupportedFeatureError


class Lines(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


class Sized(Lines):
    def __len__(self) -> int:
        return self.length


class SelfSplitting(Lines):
    """As the documentation of torch shows it."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        if info is None:
            return iter(range(self.length))
        return iter(range(info.id, self.length, info.num_workers))


class Random(Lines):
    """Shuffles and augments with all generators, and hears of epochs."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = list(range(self.length))
        random.shuffle(order)
        for item in order:
            noise = float(torch.rand(())) + float(np.random.rand())
            yield torch.tensor([item, noise, self.epoch], dtype=torch.float64)


class Broken(Lines):
    def __iter__(self) -> Iterator[int]:
        yield from range(3)
        raise OSError("no disk")


def make(data: Any, index: int = 0, count: int = 2, **options: Any) -> ShardLoader:
    return make_loader(data, index=index, count=count, **options)


def batches(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


def test_five_items_two_parts() -> None:
    for mode, want in {
        "pad": [[[0], [2], [4]], [[1], [3], [0]]],
        "drop": [[[0], [2]], [[1], [3]]],
        "uneven": [[[0], [2], [4]], [[1], [3]]],
    }.items():
        assert [batches(make(Lines(5), index, mode=mode)) for index in (0, 1)] == want


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_any_number_of_workers_gives_the_same(workers: int) -> None:
    for length, options in (
        (23, {"batch_size": 3, "mode": "pad"}),
        (23, {"batch_size": 3, "mode": "drop", "drop_last": True}),
    ):
        alone = batches(make(Lines(length), 1, **options))
        assert batches(make(SelfSplitting(length), 1, num_workers=workers, **options)) == alone
        given = DataLoader(SelfSplitting(length), batch_size=3, num_workers=workers)
        if options["mode"] == "pad":
            assert batches(make(given, 1)) == alone


def test_random_streams_agree_everywhere() -> None:
    def items(epoch: int, index: int, **options: Any) -> list[Any]:
        loader = make(Random(10), index, mode="uneven", seed=1, **options)
        loader.set_epoch(epoch)
        return [item for batch in batches(loader) for item in batch]

    torch.manual_seed(9)
    whole = items(2, 0, count=1)
    assert sorted(int(item) for item, _, _ in whole) == list(range(10))
    assert len({noise for _, noise, _ in whole}) == 10
    assert {epoch for _, _, epoch in whole} == {2}
    for index in (0, 1):  # other seeds of this process, workers, parts: the same stream
        torch.manual_seed(index)
        assert items(2, index, batch_size=2) == whole[index::2]
        assert items(2, index, batch_size=2, num_workers=2) == whole[index::2]
    assert items(3, 0, count=1) != whole


def test_workers_that_live_on_hear_of_epochs() -> None:
    loader = make(Random(6), mode="drop", num_workers=1, persistent_workers=True)
    fresh = make(Random(6), mode="drop")
    for epoch in (0, 1, 4):
        loader.set_epoch(epoch)
        fresh.set_epoch(epoch)
        assert batches(loader) == batches(fresh)


def test_the_generators_of_this_process_are_left_alone() -> None:
    def states() -> list[Any]:
        return [
            random.getstate(),
            np.random.get_state()[1].tolist(),
            torch.get_rng_state().tolist(),
        ]

    before = states()
    loader = make(Random(7), batch_size=2)
    batches(loader)
    assert states() == before
    next(iter(loader))
    assert states() == before
    with pytest.raises(OSError, match="no disk"):
        batches(make(Broken(3), batch_size=2, mode="drop", count=1))
    assert states() == before


def test_collate_functions_see_the_worker_and_its_own_generators() -> None:
    def look(items: list[int]) -> list[Any]:
        info = get_worker_info()
        assert info is not None
        return [info.id, float(torch.rand(())), *items]

    def drawn(index: int) -> list[Any]:
        return list(make(Lines(8), index, batch_size=2, num_workers=2, collate_fn=look))

    first, other = drawn(0), drawn(1)
    assert [row[0] for row in first] == [0, 1]
    assert [row[2:] for row in first] == [[0, 2], [4, 6]]
    assert len({row[1] for row in first + other}) == 4  # by data coordinate and worker
    assert drawn(0) == first


def test_lengths() -> None:
    for mode in ("pad", "drop", "uneven"):
        for drop_last in (False, True):
            loader = make(Sized(11), 1, 2, mode=mode, batch_size=2, drop_last=drop_last)
            assert len(loader) == len(batches(loader))
    loader = make(Lines(11))
    with pytest.raises(UnknownLengthError, match="Lines has no __len__"):
        len(loader)
    with pytest.raises(TypeError):
        len(loader)
    assert len(list(loader)) == 6


def test_drop_rather_than_empty() -> None:
    with pytest.raises(DataShardError, match="2 items"):
        make(Sized(2), 0, 3, mode="drop")
    for workers in (0, 1):
        loader = make(Lines(2), 0, 3, mode="drop", num_workers=workers)
        with pytest.raises(DataShardError, match="ended after 2 items"):
            list(loader)


def test_shuffle_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedFeatureError, match="shuffle=True with Lines"):
        make(Lines(3), shuffle=True)


def test_no_batches_at_all() -> None:
    loader = make(DataLoader(Lines(5), batch_size=None), 1)
    assert list(loader) == [1, 3, 0]
