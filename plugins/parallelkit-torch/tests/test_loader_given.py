"""A `DataLoader` that is given: made anew over a part, with what it says, or refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from parallelkit_torch.loader import ShardLoader, make_loader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from parallelkit.errors import DataShardError, UnsupportedFeatureError


class Rows(Dataset[int]):
    epoch = -1

    def __len__(self) -> int:
        return 12

    def __getitem__(self, item: int) -> int:
        return item

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Own(Sampler[int]):
    """An order of its own, from all global generators."""

    said = 9
    epochs: list[int]

    def __init__(self) -> None:
        self.epochs = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __len__(self) -> int:
        return self.said

    def __iter__(self) -> Iterator[int]:
        order = list(range(9))
        random.shuffle(order)
        np.random.shuffle(order)
        return iter(order[i] for i in torch.randperm(9).tolist())


class Chunks(BatchSampler):
    """Batches of growing size."""

    def __init__(self) -> None:
        super().__init__(RandomSampler(range(10)), 1, False)

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.sampler)
        return iter([order[:1], order[1:3], order[3:6], order[6:]])


class NoLength(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


class Strange(DataLoader[int]):
    def __iter__(self) -> Any:
        return iter(())


def shards(loader: Any, count: int = 2, **options: Any) -> list[ShardLoader]:
    return [make_loader(loader, index=index, count=count, **options) for index in range(count)]


def items(loader: Any) -> list[int]:
    return [int(item) for batch in loader for item in batch]


def test_what_a_loader_says_goes_on() -> None:
    def collate(rows: list[int]) -> list[int]:
        return rows

    def prepare(worker: int) -> None:
        pass

    plain = DataLoader(
        Rows(),
        batch_size=3,
        num_workers=1,
        collate_fn=collate,
        drop_last=True,
        worker_init_fn=prepare,
        persistent_workers=True,
        prefetch_factor=3,
        timeout=60,
        multiprocessing_context="fork",
    )
    made = make_loader(plain, index=1, count=2)
    assert (made.batch_size, made.num_workers, made.drop_last) == (3, 1, True)
    assert (made.persistent_workers, made.prefetch_factor, made.timeout) == (True, 3, 60)
    assert made.collate_fn is collate
    assert made.dataset is plain.dataset
    assert made.multiprocessing_context is plain.multiprocessing_context
    assert list(made) == [[1, 3, 5], [7, 9, 11]]
    assert plain.worker_init_fn is prepare


def test_order_by_the_kind_of_sampler() -> None:
    alike = [make_loader(Rows(), index=i, count=2, shuffle=True, seed=4) for i in (0, 1)]
    with_generator = DataLoader(Rows(), shuffle=True, generator=torch.Generator())
    for plain in (DataLoader(Rows(), shuffle=True), with_generator):
        made = shards(plain, seed=4)
        assert [items(loader) for loader in made] == [items(loader) for loader in alike]
    made = shards(DataLoader(Rows(), sampler=SequentialSampler(Rows())))
    assert [items(loader) for loader in made] == [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]]


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler([1.0] * 12, 20),
        WeightedRandomSampler([1.0] * 12, 20, generator=torch.Generator()),
        RandomSampler(Rows(), replacement=True, num_samples=20),
        RandomSampler(Rows(), num_samples=7, generator=torch.Generator()),
        SubsetRandomSampler([1, 5, 7, 8, 9]),
        Own(),
    ],
)
def test_random_samplers_agree_on_all_ranks(sampler: Any) -> None:
    def dealt(epoch: int, seed: int = 0) -> list[int]:
        parts = []
        for index in (0, 1):
            torch.manual_seed(index)  # ranks whose generators differ
            random.seed(index)
            loader = make_loader(plain, index=index, count=2, mode="uneven", seed=seed)
            loader.set_epoch(epoch)
            before = torch.get_rng_state()
            parts.append(items(loader))
            assert torch.equal(torch.get_rng_state(), before)
        return [parts[at % 2][at // 2] for at in range(len(sampler))]

    plain: Any = DataLoader(Rows(), sampler=sampler)
    held = getattr(sampler, "generator", None)
    state = None if held is None else held.get_state()
    order = dealt(0)
    assert dealt(0) == order
    assert dealt(1) != order
    assert dealt(0, seed=1) != order
    assert getattr(sampler, "generator", None) is held
    assert held is None or torch.equal(held.get_state(), state)


def test_whole_batches_are_dealt() -> None:
    plain: Any = DataLoader(Rows(), batch_sampler=Chunks())
    first, second = shards(plain, mode="drop", seed=2)
    assert [len(batch) for batch in first] == [1, 3]
    assert [len(batch) for batch in second] == [2, 4]
    assert sorted(items(first) + items(second)) == list(range(10))
    assert len(first) == 2
    assert [len(batch) for batch in shards(plain, 3)[1]] == [2, 1]  # padded by whole batches
    whole: Any = DataLoader(Rows(), batch_sampler=BatchSampler(range(7), 3, False))
    assert [[b.tolist() for b in part] for part in shards(whole, mode="uneven")] == [
        [[0, 1, 2], [6]],
        [[3, 4, 5]],
    ]


def test_epochs_go_on_to_data_set_and_sampler() -> None:
    data, sampler = Rows(), Own()
    loader = make_loader(DataLoader(data, sampler=sampler), index=0, count=2)
    loader.set_epoch(3)
    assert data.epoch == 3
    assert sampler.epochs == [0, 3]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 2}, "batch_size=2 contradicts.*batch_size=3"),
        ({"shuffle": True}, "shuffle=True contradicts.*shuffle=False"),
        ({"num_workers": 2}, "num_workers=2 contradicts.*num_workers=0"),
        ({"drop_last": True}, "drop_last=True contradicts"),
        ({"collate_fn": list}, "collate_fn=.*contradicts"),
    ],
)
def test_contradictions(options: dict[str, Any], said: str) -> None:
    plain = DataLoader(Rows(), batch_size=3)
    with pytest.raises(DataShardError, match=said):
        make_loader(plain, index=0, count=2, **options)
    agreed = make_loader(plain, index=0, count=2, batch_size=3, shuffle=False, num_workers=0)
    assert agreed.batch_size == 3


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_sampler_and_shuffle(shuffle: bool) -> None:
    with pytest.raises(DataShardError, match="shuffle=.*comes from its Own"):
        make_loader(DataLoader(Rows(), sampler=Own()), index=0, count=2, shuffle=shuffle)


@pytest.mark.parametrize(
    ("plain", "said"),
    [
        (DataLoader(Rows(), sampler=DistributedSampler(Rows(), 2, 0)), "DistributedSampler.*twice"),
        (
            DataLoader(
                Rows(), batch_sampler=BatchSampler(DistributedSampler(Rows(), 2, 0), 2, False)
            ),
            "DistributedSampler.*twice",
        ),
        (make_loader(Rows(), index=0, count=2), "one part of its data already"),
        (Strange(Rows()), "__iter__ of its own"),
        (DataLoader(Rows(), sampler=NoLength()), "NoLength needs __len__"),
    ],
)
def test_refused(plain: Any, said: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=said):
        make_loader(plain, index=0, count=2)


def test_a_sampler_that_miscounts() -> None:
    for said, gave in ((8, "gives more"), (10, "gives 9")):
        sampler = Own()
        sampler.said = said
        with pytest.raises(DataShardError, match=f"Own says it has {said} elements and {gave}"):
            iter(make_loader(DataLoader(Rows(), sampler=sampler), index=0, count=2))


def test_fewer_elements_than_parts() -> None:
    with pytest.raises(DataShardError, match="drop"):
        make_loader(DataLoader(Rows(), batch_sampler=Chunks()), index=0, count=5, mode="drop")


def test_data_without_a_length_but_a_sampler() -> None:
    class Keyed(Dataset[int]):
        def __getitem__(self, item: str) -> int:
            return ord(item)

    made = shards(DataLoader(Keyed(), sampler="abcd"))  # type: ignore[arg-type]
    assert [items(loader) for loader in made] == [[97, 99], [98, 100]]


def test_iterable_in_a_loader() -> None:
    class Lines(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(5))

    made = shards(DataLoader(Lines(), batch_size=2), mode="uneven")
    assert [items(loader) for loader in made] == [[0, 2, 4], [1, 3]]
