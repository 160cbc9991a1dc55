"""Loaders that go on in mid-epoch: what was not given, in the same order, and no more."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from parallelkit_torch.loader import ShardLoader, make_loader
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from parallelkit.errors import DataStateError, UnsupportedFeatureError


class Rows(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, item: int) -> int:
        return item


class Draw(Rows):
    """Items that say what the generator of their worker gives."""

    def __init__(self) -> None:
        super().__init__(8)

    def __getitem__(self, item: int) -> int:
        return int(torch.randint(2**40, ()))


class Lines(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def batches(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def make(data: Any, index: int = 0, count: int = 2, **options: Any) -> ShardLoader:
    return make_loader(data, index=index, count=count, **({"batch_size": 2, "seed": 5} | options))


def stopped(loader: ShardLoader, after: int) -> tuple[list[list[int]], dict[str, Any]]:
    """Give `after` batches and the state then, through JSON, with batches still made ahead."""
    given: list[list[int]] = []
    passed = iter(loader)
    while len(given) < after:
        given.append(next(passed).tolist())
    state = json.loads(json.dumps(loader.state_dict()))
    return given, state


@pytest.mark.parametrize("mode", ["pad", "drop", "uneven"])
@pytest.mark.parametrize("data", [Rows(23), Lines(23)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_rest_of_an_epoch(data: Any, mode: str, drop_last: bool) -> None:
    options: dict[str, Any] = {"mode": mode, "drop_last": drop_last}
    if isinstance(data, Rows):
        options["shuffle"] = True
    for after in range(7):
        for index in (0, 1):
            first = make(data, index, **options)
            first.set_epoch(3)
            whole = batches(first)
            if after > len(whole):
                continue
            given, state = stopped(first, after)
            again = make(data, index, **options)
            again.load_state_dict(state)
            assert again.epoch == 3
            again.set_epoch(3)  # the usual loop sets the epoch that it is at
            assert again.state_dict() == state
            assert given + batches(again) == whole
            assert batches(again) == whole  # the pass after that is whole
            again.set_epoch(4)
            assert again.state_dict()["consumed"] == 0


@pytest.mark.parametrize("data", [Rows(40), Lines(40)])
def test_workers_make_ahead_and_nothing_is_lost(data: Any) -> None:
    options: dict[str, Any] = {"shuffle": True} if isinstance(data, Rows) else {}
    plain = make(data, 1, **options)
    whole = batches(plain)
    given, state = stopped(make(data, 1, num_workers=2, prefetch_factor=4, **options), 3)
    assert state["consumed"] == 12
    assert state == stopped(plain, 3)[1]
    again = make(data, 1, num_workers=1, persistent_workers=True, **options)
    again.load_state_dict(state)
    assert given + batches(again) == whole
    again.load_state_dict(state)  # workers that live on hear of it
    assert given + batches(again) == whole


@pytest.mark.parametrize("data", [Rows(41), Lines(41)])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 1), (1, 4)])
def test_another_number_of_ranks(data: Any, before: int, after: int) -> None:
    options: dict[str, Any] = {"shuffle": True} if isinstance(data, Rows) else {}
    parts = [stopped(make(data, i, before, **options), 3) for i in range(before)]
    states = [state for _, state in parts]
    assert all(state == states[0] for state in states)  # any one serves all
    done = [item for given, _ in parts for batch in given for item in batch]
    rest = []
    for index in range(after):
        loader = make(data, index, after, mode="pad", batch_size=5, **options)
        loader.load_state_dict(states[0])
        rest.append([item for batch in batches(loader) for item in batch])
    assert len({len(items) for items in rest}) == 1
    assert len(set(done)) == len(done) == 6 * before
    left = set(range(41)) - set(done)
    dealt = [item for items in rest for item in items]
    assert left <= set(dealt)
    assert len(dealt) - len(left) < after  # the fewest repeats


def test_draws_after_going_on_are_not_those_of_the_front() -> None:
    def drawn(state: dict[str, Any] | None) -> list[int]:
        loader = make(Draw(), num_workers=1, batch_size=1)
        if state is not None:
            loader.load_state_dict(state)
        return [int(batch) for batch in loader]

    _, state = stopped(make(Draw(), batch_size=1), 2)
    whole, rest = drawn(None), drawn(state)
    assert len(set(whole + rest)) == 4 + 2
    assert drawn(state) == rest


def test_states_are_plain_whatever_integers_came_in() -> None:
    loader = make(Rows(9), np.int64(1), np.int32(2), seed=np.int64(3))
    loader.set_epoch(np.int64(2))
    next(iter(loader))
    assert json.loads(json.dumps(loader.state_dict()))["consumed"] == 4


def test_an_epoch_that_was_over_stays_over() -> None:
    for data in (Rows(9), Lines(9)):
        for options in ({"mode": "drop"}, {"drop_last": True}, {}):
            loader = make(data, 0, 2, **options)
            batches(loader)
            state = loader.state_dict()
            assert state["finished"]
            again = make(data, 0, 3, **options)
            again.load_state_dict(state)
            assert batches(again) == []
            assert batches(again) != []


def test_a_state_counts_the_latest_pass() -> None:
    loader = make(Rows(20))
    assert loader.state_dict()["consumed"] == 0
    older = iter(loader)
    next(older)
    newer = iter(loader)
    assert loader.state_dict()["consumed"] == 0
    next(newer)
    next(newer)
    next(older)
    assert loader.state_dict()["consumed"] == 8
    loader.set_epoch(0)
    assert loader.state_dict()["consumed"] == 8
    loader.set_epoch(1)
    assert loader.state_dict()["consumed"] == 0


def test_passes_side_by_side_do_not_mix() -> None:
    loader = make(Rows(12), shuffle=True)
    whole = batches(loader)
    _, state = stopped(loader, 1)
    loader.load_state_dict(state)
    resumed, full = iter(loader), iter(loader)  # neither has read its order yet
    loader.set_epoch(1)
    assert batches(resumed) == whole[1:]
    assert batches(full) == whole


def test_leaving_a_loop_ends_its_workers() -> None:
    loader = make(Rows(40), num_workers=1)
    passed = iter(loader)
    next(passed)
    (worker,) = passed._batches._workers
    del passed
    worker.join(timeout=30)
    assert not worker.is_alive()


def test_a_state_of_something_else_changes_nothing() -> None:
    _, state = stopped(make(Rows(20)), 2)
    for data, options, said in (
        (Rows(21), {}, "length: saved 20, here 21"),
        (Rows(20), {"seed": 6}, "seed: saved 5, here 6"),
        (Rows(20), {"mode": "drop"}, "mode: saved 'pad', here 'drop'"),
        (Rows(20), {"shuffle": True}, "shuffle: saved False, here True"),
        (Lines(20), {}, "kind: saved 'items', here 'stream'"),
    ):
        loader = make(data, **options)
        before = loader.state_dict()
        with pytest.raises(DataStateError, match=said):
            loader.load_state_dict(state)
        assert loader.state_dict() == before
    for broken in ({**state, "consumed": -1}, {"consumed": 3}, {}, None):
        with pytest.raises(DataStateError, match="state of a loader"):
            make(Rows(20)).load_state_dict(broken)  # type: ignore[arg-type]


def test_out_of_order_has_no_state() -> None:
    loader = make(Rows(20), num_workers=2, in_order=False)
    with pytest.raises(UnsupportedFeatureError, match="in_order"):
        loader.state_dict()


class Draws(Sampler[int]):
    """Draws from the global generator; or from a generator that nobody seeds alike."""

    def __init__(self, own: int | None = None) -> None:
        self.mine = None if own is None else torch.Generator().manual_seed(own)

    def __len__(self) -> int:
        return 15

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(15, generator=self.mine).tolist())


class Pairs(Draws):
    def __iter__(self) -> Iterator[Any]:
        return ([item, item] for item in super().__iter__())


@pytest.mark.parametrize("option", ["sampler", "batch_sampler"])
def test_orders_of_the_caller(option: str) -> None:
    def loader(index: int = 0, own: int | None = None) -> ShardLoader:
        sampler = Draws(own) if option == "sampler" else Pairs(own)
        plain: Any = DataLoader(Rows(15), **{option: sampler})
        return make_loader(plain, index=index, count=2)

    for index in (0, 1):
        whole = batches(loader(index))
        given, state = stopped(loader(index), 2)
        again = loader(index)
        again.load_state_dict(state)
        assert given + batches(again) == whole
    _, state = stopped(loader(own=1), 2)
    other = loader(own=2)
    other.load_state_dict(state)
    with pytest.raises(DataStateError, match="another order for epoch 0"):
        iter(other)
