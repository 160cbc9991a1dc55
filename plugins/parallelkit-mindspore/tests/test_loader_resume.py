"""Loaders that go on in mid-epoch: what was not given, in the same order, and no more."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import mindspore.dataset as ds
import numpy as np
import pytest
from parallelkit_mindspore.loader import ShardLoader, make_loader

from parallelkit.errors import DataStateError, UnsupportedFeatureError, WrongThreadError


class Lines:
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def rows(length: int) -> list[int]:
    return list(range(length))


def slices(length: int) -> Any:
    return ds.NumpySlicesDataset(np.arange(length), ["x"]).map(lambda x: x, ["x"])


def batches(loader: Any) -> list[list[int]]:
    return [batch[0].asnumpy().tolist() for batch in loader]


def make(data: Any, index: int = 0, count: int = 2, **options: Any) -> ShardLoader:
    if not isinstance(data, Lines):
        options.setdefault("shuffle", True)
    return make_loader(data, index=index, count=count, **({"batch_size": 2, "seed": 5} | options))


def stopped(loader: ShardLoader, after: int) -> tuple[list[list[int]], dict[str, Any]]:
    """Give `after` batches and the state then, through JSON, with batches still made ahead."""
    given: list[list[int]] = []
    passed = iter(loader)
    while len(given) < after:
        given.append(next(passed)[0].asnumpy().tolist())
    state = json.loads(json.dumps(loader.state_dict()))
    return given, state


@pytest.mark.parametrize("mode", ["pad", "drop", "uneven"])
@pytest.mark.parametrize("kind", [rows, slices, Lines])
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_rest_of_an_epoch(kind: Any, mode: str, drop_last: bool) -> None:
    options: dict[str, Any] = {"mode": mode, "drop_last": drop_last}
    for index, after in ((0, 0), (0, 2), (1, 2), (0, 5), (1, 5), (0, 6)):
        first = make(kind(23), index, **options)
        first.set_epoch(3)
        whole = batches(first)
        if after > len(whole):
            continue
        given, state = stopped(first, after)
        again = make(kind(23), index, **options)
        again.load_state_dict(state)
        assert again.epoch == 3
        again.set_epoch(3)  # the usual loop sets the epoch that it is at
        assert again.state_dict() == state
        assert given + batches(again) == whole
        assert batches(again) == whole  # the pass after that is whole
        again.set_epoch(4)
        assert again.state_dict()["consumed"] == 0


def test_workers_make_ahead_and_nothing_is_lost() -> None:
    plain = make(rows(40), 1)
    whole = batches(plain)
    given, state = stopped(make(rows(40), 1, num_parallel_workers=2), 3)
    assert state["consumed"] == 12
    assert state == stopped(plain, 3)[1]
    again = make(rows(40), 1)
    again.load_state_dict(state)
    assert given + batches(again) == whole


@pytest.mark.parametrize("kind", [rows, Lines])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 1), (1, 4)])
def test_another_number_of_ranks(kind: Any, before: int, after: int) -> None:
    parts = [stopped(make(kind(41), i, before), 3) for i in range(before)]
    states = [state for _, state in parts]
    assert all(state == states[0] for state in states)  # any one serves all
    done = [item for given, _ in parts for batch in given for item in batch]
    rest = []
    for index in range(after):
        loader = make(kind(41), index, after, mode="pad", batch_size=5)
        loader.load_state_dict(states[0])
        rest.append([item for batch in batches(loader) for item in batch])
    assert len({len(items) for items in rest}) == 1
    assert len(set(done)) == len(done) == 6 * before
    assert set(done) | {item for items in rest for item in items} == set(range(41))
    assert 41 <= len(done) + sum(map(len, rest)) < 41 + after  # fewest repeats, from the front


def test_a_state_of_torch_s_plugin_goes_on_here() -> None:
    torch_loader = pytest.importorskip("parallelkit_torch.loader")
    options: dict[str, Any] = {"index": 1, "count": 2, "batch_size": 2, "shuffle": True, "seed": 5}
    theirs = torch_loader.make_loader(rows(23), **options)
    passed = iter(theirs)
    given = [next(passed).tolist() for _ in range(2)]
    ours = make(rows(23), 1)
    ours.load_state_dict(theirs.state_dict())
    assert given + batches(ours) == batches(make(rows(23), 1))


def test_an_epoch_that_is_over_gives_one_empty_pass() -> None:
    first = make(rows(9))
    whole = batches(first)
    again = make(rows(9))
    again.load_state_dict(first.state_dict())
    assert batches(again) == []
    assert batches(again) == whole


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"length": 22}, "length: saved 22, here 23"),
        ({"mode": "drop"}, "mode: saved 'drop', here 'pad'"),
        ({"kind": "sampler"}, "kind: saved 'sampler', here 'items'"),
        ({"seed": 1}, "seed: saved 1, here 5"),
        ({"format": "x"}, "format is 'x'"),
        ({"consumed": "1"}, "Expected `int`"),
    ],
)
def test_states_of_other_loaders_change_nothing(change: dict[str, Any], said: str) -> None:
    loader = make(rows(23))
    _, state = stopped(make(rows(23)), 2)
    before = loader.state_dict()
    with pytest.raises(DataStateError, match=said):
        loader.load_state_dict(state | change)
    assert loader.state_dict() == before


def test_native_gives_whole_epochs_only() -> None:
    loader = make(rows(23))
    loader.load_state_dict(stopped(loader, 2)[1])
    with pytest.raises(UnsupportedFeatureError, match="goes on at position 8 of epoch 0"):
        _ = loader.native
    rest = batches(loader)
    assert rest
    whole = batches(make(rows(23)))
    assert batches(loader.native.create_tuple_iterator(num_epochs=1)) == whole
    begun = iter(loader)
    next(begun)
    assert batches(loader.native.create_tuple_iterator(num_epochs=1)) == whole


def test_two_passes_at_once() -> None:
    loader = make(rows(23))
    whole = batches(loader)
    first, second = iter(loader), iter(loader)
    found = [[next(first)[0].asnumpy().tolist()], [next(second)[0].asnumpy().tolist()]]
    loader.set_epoch(1)
    assert found[0] + batches(first) == whole
    assert found[1] + batches(second) == whole


def test_another_thread_is_refused() -> None:
    loader = make(rows(4))
    found: list[BaseException] = []

    def use() -> None:
        try:
            iter(loader)
        except WrongThreadError as error:
            found.append(error)

    thread = threading.Thread(target=use, name="other")
    thread.start()
    thread.join()
    assert "a pass over a loader was called in thread 'other'" in str(found[0])
