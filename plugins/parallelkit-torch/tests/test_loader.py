"""Loaders by data coordinate: the same batches wherever the coordinate is the same."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from parallelkit_torch.loader import ShardLoader
from torch.utils.data import Dataset, TensorDataset

from parallelkit.errors import DataShardError, UnsupportedFeatureError


class Seeds(Dataset[Any]):
    """Items that say what the generators of their worker give."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, item: int) -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def items(loader: ShardLoader) -> list[int]:
    return [int(i) for batch in loader for i in batch]


def shards(length: int, count: int, **options: Any) -> list[ShardLoader]:
    data: Any = list(range(length))
    return [ShardLoader(data, index=i, count=count, **options) for i in range(count)]


def test_five_items_two_shards() -> None:
    assert [items(s) for s in shards(5, 2)] == [[0, 2, 4], [1, 3, 0]]
    assert [items(s) for s in shards(5, 2, mode="drop")] == [[0, 2], [1, 3]]
    assert [items(s) for s in shards(5, 2, mode="uneven")] == [[0, 2, 4], [1, 3]]


@pytest.mark.parametrize("mode", ["pad", "drop"])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("length", [3, 7, 8, 50])
def test_equal_numbers_of_batches(mode: str, drop_last: bool, length: int) -> None:
    loaders = shards(length, 3, mode=mode, batch_size=2, drop_last=drop_last)
    assert len({len(loader) for loader in loaders}) == 1
    assert len({sum(1 for _ in loader) for loader in loaders}) == 1


def test_fewer_items_than_shards() -> None:
    assert [items(s) for s in shards(2, 5)] == [[0], [1], [0], [1], [0]]
    with pytest.raises(DataShardError, match="drop"):
        shards(2, 5, mode="drop")


def test_epochs_change_the_order_alike() -> None:
    loaders = shards(20, 2, shuffle=True, seed=3)
    first = [items(loader) for loader in loaders]
    assert sorted(first[0] + first[1]) == list(range(20))
    for loader in loaders:
        loader.set_epoch(1)
    second = [items(loader) for loader in loaders]
    assert sorted(second[0] + second[1]) == list(range(20))
    assert first != second
    again = ShardLoader(
        list(range(20)),  # type: ignore[arg-type]
        index=1,
        count=2,
        shuffle=True,
        seed=3,
    )
    again.set_epoch(1)
    assert items(again) == second[1]
    assert again.epoch == 1


def test_tensor_data_sets_and_collate() -> None:
    data = TensorDataset(torch.arange(6.0))
    loader = ShardLoader(data, index=1, count=2, batch_size=3, collate_fn=lambda rows: rows)
    (batch,) = loader
    assert [float(row[0]) for row in batch] == [1, 3, 5]


def test_seeds_by_coordinate_and_worker() -> None:
    def draw(index: int, epoch: int = 0) -> list[tuple[float, ...]]:
        loader = ShardLoader(
            Seeds(), index=index, count=2, num_workers=2, collate_fn=lambda rows: tuple(rows[0])
        )
        loader.set_epoch(epoch)
        return list(loader)

    first, other, later = draw(0), draw(1), draw(0, epoch=1)
    drawn = {value for rows in (first, other, later) for row in rows for value in row}
    assert len(drawn) == 3 * 2 * 3  # all generators, workers, coordinates and epochs differ
    assert draw(0) == first  # and the same coordinate agrees


def test_the_generators_of_this_process_are_left_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    loader = ShardLoader(list(range(4)), index=0, count=2, shuffle=True)  # type: ignore[arg-type]
    items(loader)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": True}, "batch_size is True"),
        ({"mode": "cut"}, "mode is 'cut'"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"seed": 2**63}, "seed is 9223372036854775808; allowed is an integer of 64 bits"),
        ({"shuffle": 1}, "shuffle is 1"),
        ({"drop_last": "no"}, "drop_last is 'no'"),
        ({"num_workers": -1}, "num_workers is -1"),
        ({"prefetch_factor": 2}, "prefetch_factor"),
        ({"batch_size": None, "drop_last": True}, "drop_last"),
    ],
)
def test_wrong_values(options: dict[str, Any], said: str) -> None:
    with pytest.raises(DataShardError, match=said):
        shards(4, 2, **options)


@pytest.mark.parametrize("option", ["sampler", "batch_sampler", "generator", "num_worker"])
def test_unknown_options(option: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=f"no option '{option}'"):
        shards(4, 2, **{option: None})


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (iter([1]), "__len__"),
        ({"a": 1}, "keys"),
        ({1, 2}, "__len__"),
    ],
)
def test_what_cannot_be_sharded(data: Any, said: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=said):
        ShardLoader(data, index=0, count=1)


@pytest.mark.parametrize("epoch", ["1", 1.0, True, 2**63, -(2**63) - 1])
def test_wrong_epoch(epoch: Any) -> None:
    with pytest.raises(DataShardError, match="epoch is .*integer of 64 bits"):
        shards(4, 2)[0].set_epoch(epoch)
