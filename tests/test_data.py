"""Shards of data sets and seeds: the guarantees as properties, the reports as tables."""

from __future__ import annotations

import doctest
import itertools
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import parallelkit.data
from parallelkit.data import MODES, derive_seed, position_after, shard_indices
from parallelkit.errors import DataShardError
from parallelkit.plan import plan

LENGTHS = st.integers(0, 60)
COUNTS = st.integers(1, 12)
SEEDS = st.integers(-(2**70), 2**70)


def shards(length: int, count: int, **options: Any) -> list[list[int]]:
    return [list(shard_indices(length, index=i, count=count, **options)) for i in range(count)]


# --- tables --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "count", "mode", "want"),
    [
        (5, 2, "pad", [[0, 2, 4], [1, 3, 0]]),
        (5, 2, "drop", [[0, 2], [1, 3]]),
        (5, 2, "uneven", [[0, 2, 4], [1, 3]]),
        (4, 2, "pad", [[0, 2], [1, 3]]),
        (4, 2, "drop", [[0, 2], [1, 3]]),
        (4, 2, "uneven", [[0, 2], [1, 3]]),
        (1, 3, "pad", [[0], [0], [0]]),
        (2, 5, "pad", [[0], [1], [0], [1], [0]]),
        (2, 3, "uneven", [[0], [1], []]),
        (0, 2, "uneven", [[], []]),
        (0, 2, "pad", [[], []]),
        (3, 1, "pad", [[0, 1, 2]]),
        (3, 1, "drop", [[0, 1, 2]]),
        (3, 3, "drop", [[0], [1], [2]]),
    ],
)
def test_shards(length: int, count: int, mode: str, want: list[list[int]]) -> None:
    assert shards(length, count, mode=mode) == want


@pytest.mark.parametrize(("length", "count"), [(0, 1), (0, 4), (1, 2), (3, 4), (7, 100)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_drop_is_an_error_rather_than_empty(length: int, count: int, shuffle: bool) -> None:
    with pytest.raises(DataShardError) as caught:
        shard_indices(length, index=0, count=count, mode="drop", shuffle=shuffle)
    for mention in (f"{count} shards", f"{length} items", "'pad'", "'uneven'"):
        assert mention in str(caught.value)


@pytest.mark.parametrize(
    ("values", "mention"),
    [
        ({"length": -1}, "length is -1; allowed is an integer of at least 0"),
        ({"length": 2.0}, "length is 2.0"),
        ({"length": True}, "length is True"),
        ({"length": "5"}, "length is '5'"),
        ({"length": None}, "length is None"),
        ({"count": 0}, "count is 0; allowed is an integer of at least 1"),
        ({"count": -2}, "count is -2"),
        ({"count": 2.0}, "count is 2.0"),
        ({"count": True}, "count is True"),
        ({"index": 2}, "index is 2; with 2 shards it is 0 to 1"),
        ({"index": -1}, "index is -1"),
        ({"index": 0.5}, "index is 0.5"),
        ({"index": False}, "index is False"),
        ({"mode": "wrap"}, "mode is 'wrap'; it is one of 'pad', 'drop', 'uneven'"),
        ({"mode": None}, "mode is None"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"seed": None}, "seed is None"),
        ({"epoch": "1"}, "epoch is '1'"),
        ({"epoch": True}, "epoch is True"),
        ({"start": -1}, "start is -1; allowed is an integer of at least 0"),
        ({"start": 6}, "start is 6; with 5 items it is 0 to 5"),
        ({"start": 1.0}, "start is 1.0"),
    ],
)
@pytest.mark.parametrize("shuffle", [False, True])
def test_wrong_arguments(values: dict[str, Any], mention: str, shuffle: bool) -> None:
    arguments: dict[str, Any] = {"length": 5, "index": 0, "count": 2, "shuffle": shuffle} | values
    with pytest.raises(DataShardError) as caught:
        shard_indices(arguments.pop("length"), **arguments)
    assert mention in str(caught.value)


def test_numpy_integers_are_integers() -> None:
    assert list(shard_indices(np.int64(5), index=np.int32(1), count=np.uint8(2))) == [1, 3, 0]
    assert derive_seed(np.int64(1), np.int32(2)) == derive_seed(1, 2)


# --- guarantees ----------------------------------------------------------------------------------


@given(LENGTHS, COUNTS, st.sampled_from(MODES), st.booleans(), SEEDS, SEEDS)
def test_coverage_disjointness_and_length(
    length: int, count: int, mode: str, shuffle: bool, seed: int, epoch: int
) -> None:
    if mode == "drop" and length < count:
        return
    made = shards(length, count, mode=mode, shuffle=shuffle, seed=seed, epoch=epoch)
    times = Counter(itertools.chain(*made))
    sizes = [len(shard) for shard in made]
    assert set(times) <= set(range(length))
    if mode == "pad":
        assert len(set(sizes)) == 1
        assert set(times) == set(range(length))
        assert sum(sizes) - length < count
        assert not times or max(times.values()) - min(times.values()) <= 1
    elif mode == "drop":
        assert set(sizes) == {length // count}
        assert max(times.values()) == 1
        assert length - sum(sizes) < count
    else:
        assert times == Counter(range(length))
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)


@given(LENGTHS, COUNTS, st.sampled_from(["pad", "uneven"]), st.booleans(), st.data())
def test_a_shard_is_a_sequence(
    length: int, count: int, mode: str, shuffle: bool, data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, count - 1))
    shard = shard_indices(length, index=index, count=count, mode=mode, shuffle=shuffle)
    items = list(shard)
    assert len(shard) == len(items)
    assert [shard[at] for at in range(len(items))] == items
    assert [shard[at] for at in range(-len(items), 0)] == items
    assert list(shard[1:5:2]) == items[1:5:2]
    assert list(shard[::-1]) == items[::-1]
    assert list(reversed(shard)) == items[::-1]
    assert all(type(item) is int for item in items)
    assert all(type(shard[at]) is int for at in range(len(items)))
    for at in (len(items), -len(items) - 1):
        with pytest.raises(IndexError):
            shard[at]


@given(st.integers(2, 60), COUNTS, st.integers(0, 5), st.integers(0, 5))
def test_the_order_depends_on_length_seed_and_epoch_only(
    length: int, count: int, seed: int, epoch: int
) -> None:
    order = list(shard_indices(length, index=0, count=1, shuffle=True, seed=seed, epoch=epoch))
    assert sorted(order) == list(range(length))
    made = shards(length, count, mode="uneven", shuffle=True, seed=seed, epoch=epoch)
    assert made == [order[index::count] for index in range(count)]


def test_seeds_and_epochs_give_other_orders() -> None:
    orders = {
        tuple(shard_indices(50, index=0, count=1, shuffle=True, seed=seed, epoch=epoch))
        for seed in range(8)
        for epoch in range(8)
    }
    assert len(orders) == 64


def test_the_order_is_pinned() -> None:
    # a change here changes what a resumed run sees
    assert list(shard_indices(10, index=0, count=1, shuffle=True, seed=1, epoch=2)) == [
        1,
        0,
        5,
        4,
        3,
        9,
        2,
        8,
        6,
        7,
    ]
    assert derive_seed(0) == 10046440184932140234
    assert derive_seed(1, 2, 3) == 5426848785121077160


def test_every_place_of_an_item_is_as_likely() -> None:
    firsts = Counter(
        shard_indices(4, index=0, count=1, shuffle=True, seed=7, epoch=epoch)[0]
        for epoch in range(2000)
    )
    assert all(400 < firsts[item] < 600 for item in range(4))


def test_ranks_of_one_data_coordinate_load_the_same() -> None:
    made = plan(8, tensor=2, data_shard=2)
    loads = [
        tuple(
            shard_indices(
                11,
                index=made.data_shard_index(rank),
                count=made.data_shard_count,
                mode="uneven",
                shuffle=True,
            )
        )
        for rank in range(8)
    ]
    for group in made.groups("tensor"):
        assert len({loads[rank] for rank in group}) == 1
    for group in made.groups("data", "data_shard"):
        assert sorted(itertools.chain(*(loads[rank] for rank in group))) == list(range(11))


def test_without_shuffle_nothing_of_the_size_of_the_data_is_made() -> None:
    start = time.perf_counter()
    for mode in MODES:
        shard = shard_indices(10**15 + 1, index=1, count=2, mode=mode)
        assert len(shard) == 10**15 // 2 + (mode == "pad")
        assert shard[10**14] == 2 * 10**14 + 1
    assert shard_indices(10**15 + 1, index=1, count=2)[-1] == 0
    assert "shard of" in repr(shard_indices(10**15 + 1, index=1, count=2))
    assert time.perf_counter() - start < 0.1


# --- going on in mid-epoch -----------------------------------------------------------------------


def batches_of(items: list[int], size: int, drop_last: bool) -> list[list[int]]:
    made = [items[at : at + size] for at in range(0, len(items), size)]
    return [batch for batch in made if not drop_last or len(batch) == size]


@pytest.mark.parametrize(
    ("length", "count", "mode", "start", "want"),
    [
        (5, 2, "pad", 2, [[2, 4], [3, 0]]),
        (5, 2, "drop", 2, [[2], [3]]),
        (5, 2, "uneven", 2, [[2, 4], [3]]),
        (5, 2, "pad", 5, [[], []]),
        (5, 2, "drop", 4, [[], []]),  # an error only where nothing was given yet
        (5, 3, "pad", 4, [[4], [0], [1]]),
        (5, 3, "uneven", 4, [[4], [], []]),
    ],
)
def test_the_rest(length: int, count: int, mode: str, start: int, want: list[list[int]]) -> None:
    assert shards(length, count, mode=mode, start=start) == want


@given(
    LENGTHS,
    COUNTS,
    st.sampled_from(MODES),
    st.booleans(),
    st.integers(1, 5),
    st.booleans(),
    st.integers(0, 20),
)
def test_the_same_shards_go_on_with_what_they_were_not_given(
    length: int, count: int, mode: str, shuffle: bool, size: int, drop_last: bool, given_: int
) -> None:
    if mode == "drop" and length < count:
        return
    options: dict[str, Any] = {"mode": mode, "shuffle": shuffle, "seed": 3, "epoch": 1}
    start = position_after(
        given_, length=length, count=count, mode=mode, batch_size=size, drop_last=drop_last
    )
    whole = shards(length, count, **options)
    rest = shards(length, count, start=start, **options)
    for items, left in zip(whole, rest, strict=True):
        batches = batches_of(items, size, drop_last)
        assert batches[given_:] == batches_of(left, size, drop_last)


@given(LENGTHS, COUNTS, COUNTS, st.sampled_from(MODES), st.integers(1, 5), st.integers(0, 20))
def test_other_shards_take_over_the_rest(
    length: int, before: int, after: int, mode: str, size: int, given_: int
) -> None:
    if mode == "drop" and length < before:
        return
    options: dict[str, Any] = {"shuffle": True, "seed": 3}
    start = position_after(given_, length=length, count=before, mode=mode, batch_size=size)
    done = [
        item
        for items in shards(length, before, mode=mode, **options)
        for item in items[: given_ * size]
    ]
    left = [
        i for items in shards(length, after, mode="uneven", start=start, **options) for i in items
    ]
    if start < length:
        assert sorted(done + left) == list(range(length))  # disjoint and complete
    else:
        assert left == []
        assert mode == "drop" or set(done) == set(range(length))
    padded = shards(length, after, mode="pad", start=start, **options)
    assert len({len(items) for items in padded}) == 1
    assert set(left) <= {item for items in padded for item in items}


@given(LENGTHS, COUNTS, st.sampled_from(MODES), st.integers(1, 5), st.data())
def test_positions_add_up(
    length: int, count: int, mode: str, size: int, data: st.DataObject
) -> None:
    first, second = data.draw(st.integers(0, 10)), data.draw(st.integers(0, 10))
    options: dict[str, Any] = {"length": length, "count": count, "mode": mode, "batch_size": size}
    at_once = position_after(first + second, **options)
    half = position_after(first, **options)
    assert position_after(second, start=half, **options) == at_once
    assert 0 <= half <= at_once <= length


@pytest.mark.parametrize(
    ("values", "mention"),
    [
        ({"batches": -1}, "batches is -1"),
        ({"length": 1.5}, "length is 1.5"),
        ({"count": 0}, "count is 0"),
        ({"mode": "wrap"}, "mode is 'wrap'"),
        ({"start": 9}, "start is 9; with 8 items it is 0 to 8"),
        ({"batch_size": 0}, "batch_size is 0"),
    ],
)
def test_wrong_positions(values: dict[str, Any], mention: str) -> None:
    arguments: dict[str, Any] = {"batches": 1, "length": 8, "count": 2} | values
    with pytest.raises(DataShardError) as caught:
        position_after(arguments.pop("batches"), **arguments)
    assert mention in str(caught.value)


# --- seeds ---------------------------------------------------------------------------------------


def test_seeds_differ_over_data_coordinates_and_workers_and_agree_over_tensor() -> None:
    made = plan(32, tensor=4)
    seeds = {
        (rank, worker): derive_seed(1234, made.data_shard_index(rank), worker)
        for rank in range(32)
        for worker in range(4)
    }
    assert len(set(seeds.values())) == made.data_shard_count * 4
    for group in made.groups("tensor"):
        assert len({seeds[rank, 0] for rank in group}) == 1


@given(SEEDS, st.lists(SEEDS, max_size=4))
def test_a_seed_has_64_bits_whatever_goes_in(base: int, coordinates: list[int]) -> None:
    seed = derive_seed(base, *coordinates)
    assert 0 <= seed < 2**64
    assert seed == derive_seed(base, *coordinates)
    assert seed != derive_seed(base, *coordinates, 0)
    assert seed != derive_seed(base + 1, *coordinates)


def test_no_collisions_over_a_grid() -> None:
    edges = [-(2**64), -1, 0, 1, 2, 10, 11, 2**31, 2**32, 2**63, 2**64 - 1, 2**64, 10**30]
    seeds = [
        derive_seed(*place) for size in (1, 2, 3) for place in itertools.product(edges, repeat=size)
    ]
    assert len(set(seeds)) == len(seeds)
    assert (
        len({derive_seed(0, rank, worker) % 2**32 for rank in range(64) for worker in range(8)})
        == 512
    )


@pytest.mark.parametrize("value", [1.0, True, "1", None, float("inf"), b"1"])
def test_a_seed_needs_integers(value: Any) -> None:
    for arguments in ((value,), (0, value), (0, 1, value)):
        with pytest.raises(DataShardError, match="an integer"):
            derive_seed(*arguments)


def test_examples_run() -> None:
    failed, attempted = doctest.testmod(parallelkit.data)
    assert attempted > 0
    assert failed == 0
