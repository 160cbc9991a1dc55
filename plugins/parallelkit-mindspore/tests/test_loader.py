"""Loaders by data coordinate: the same batches wherever the coordinate is the same."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
import pytest
from parallelkit_mindspore.loader import ShardLoader, make_loader

from parallelkit.errors import DataShardError, UnsupportedFeatureError


class Seeds:
    """Items that say what the generators of their worker give, and in which process."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, item: int) -> tuple[float, float]:
        return random.random(), float(np.random.rand())


def make(data: Any, index: int = 0, count: int = 2, **options: Any) -> ShardLoader:
    return make_loader(data, index=index, count=count, **options)


def items(loader: Any) -> list[int]:
    return [int(i) for (batch, *_) in loader for i in batch.asnumpy().reshape(-1)]


def shards(length: int, count: int, **options: Any) -> list[ShardLoader]:
    return [make(list(range(length)), i, count, **options) for i in range(count)]


def threads() -> int:
    """All threads of this process, also those of native code."""
    return len(list(Path("/proc/self/task").iterdir()))


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
    assert {sum(1 for _ in loader) for loader in loaders} == {len(loaders[0])}


def test_fewer_items_than_shards() -> None:
    assert [items(s) for s in shards(2, 5)] == [[0], [1], [0], [1], [0]]
    assert [items(s) for s in shards(2, 4, mode="uneven")] == [[0], [1], [], []]
    assert [items(s) for s in shards(0, 2)] == [[], []]
    with pytest.raises(DataShardError, match="drop"):
        shards(2, 5, mode="drop")
    with pytest.raises(DataShardError, match="part 3 of 4 has no items"):
        _ = shards(2, 4, mode="uneven")[3].native


def test_epochs_change_the_order_alike() -> None:
    loaders = shards(20, 2, shuffle=True, seed=3)
    first = [items(loader) for loader in loaders]
    assert sorted(first[0] + first[1]) == list(range(20))
    for loader in loaders:
        loader.set_epoch(1)
    second = [items(loader) for loader in loaders]
    assert sorted(second[0] + second[1]) == list(range(20))
    assert first != second
    again = make(list(range(20)), 1, shuffle=True, seed=3)
    again.set_epoch(1)
    assert items(again) == second[1]
    assert again.epoch == 1
    assert again.seed != loaders[0].seed


def test_the_order_is_that_of_torch_s_plugin() -> None:
    torch_loader = pytest.importorskip("parallelkit_torch.loader")
    options: dict[str, Any] = {"index": 1, "count": 3, "shuffle": True, "seed": 7}
    theirs = torch_loader.make_loader(list(range(23)), batch_size=4, **options)
    ours = make_loader(list(range(23)), batch_size=4, **options)
    assert [b[0].asnumpy().tolist() for b in ours] == [b.tolist() for b in theirs]
    assert len(ours) == len(theirs)
    assert ours.seed == theirs.seed
    assert ours.state_dict() == theirs.state_dict()


def test_columns_of_tuples_mappings_and_arrays() -> None:
    pairs = [(np.full((2, 2), i, np.float32), i) for i in range(4)]
    (batch,) = make(pairs, 1, batch_size=2)
    assert [type(column) for column in batch] == [ms.Tensor] * 2
    assert (batch[0].shape, batch[0].dtype) == ((2, 2, 2), ms.float32)
    assert batch[1].asnumpy().tolist() == [1, 3]
    rows = [{"text": f"t{i}", "x": ms.Tensor([i, i])} for i in range(4)]
    (named,) = make(rows, 1, batch_size=2, output="dict")
    assert list(named) == ["text", "x"]
    assert named["text"].tolist() == ["t1", "t3"]
    assert named["x"].asnumpy().tolist() == [[1, 1], [3, 3]]
    (chosen,) = make(rows, 0, batch_size=2, output="dict", column_names=["x", "text"])
    assert list(chosen) == ["x", "text"]
    (array,) = make(np.arange(6, dtype=np.int32).reshape(3, 2), 0, batch_size=2)
    assert array[0].asnumpy().tolist() == [[0, 1], [4, 5]]
    assert array[0].dtype == ms.int32


def test_batches_that_are_kept_stay_as_they_are() -> None:
    kept = list(make(np.arange(4000).reshape(400, 10), batch_size=10))
    found = np.concatenate([batch[0].asnumpy() for batch in kept])
    assert np.array_equal(found, np.arange(4000).reshape(400, 10)[::2])


@pytest.mark.parametrize("processes", [True, False])
def test_several_workers_give_the_same_and_end(processes: bool) -> None:
    options: dict[str, Any] = {"num_parallel_workers": 2, "python_multiprocessing": processes}
    data = [(i, i * i) for i in range(11)]
    alone = items(make(data, 1, batch_size=2, shuffle=True))
    loader = make(data, 1, batch_size=2, shuffle=True, **options)
    before = threads()
    assert items(loader) == alone
    begun = iter(loader)
    next(begun)
    assert threads() > before
    del begun  # the rest of a pass that is left goes, too; processes are seen by every test
    assert threads() <= before + 1  # Python may keep a thread that waits for queues


def test_seeds_by_coordinate_and_worker() -> None:
    def draw(index: int, epoch: int = 0) -> list[list[float]]:
        loader = make(Seeds(), index, num_parallel_workers=2)
        loader.set_epoch(epoch)
        return [[float(column.asnumpy()[0]) for column in batch] for batch in loader]

    first, other, later = draw(0), draw(1), draw(0, epoch=1)
    drawn = {value for rows in (first, other, later) for row in rows for value in row}
    assert len(drawn) == 3 * 2 * 2  # both generators, workers, coordinates and epochs differ
    assert draw(0) == first  # and the same coordinate agrees


def test_the_generators_of_this_process_are_left_alone() -> None:
    random.seed(1)
    np.random.seed(1)
    wanted = random.random(), np.random.rand()
    random.seed(1)
    np.random.seed(1)
    ds.config.set_seed(11)
    try:
        random.seed(1)
        np.random.seed(1)
        items(make(list(range(8)), shuffle=True))
        assert ds.config.get_seed() == 11
        assert (random.random(), np.random.rand()) == wanted
    finally:
        ds.config.set_seed(5489)  # MindSpore's own


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
        ({"drop_remainder": 1}, "drop_last is 1"),
        ({"drop_remainder": True, "drop_last": True}, "are one option"),
        ({"num_parallel_workers": 0}, "num_parallel_workers is 0"),
        ({"num_parallel_workers": True}, "num_parallel_workers is True"),
        ({"python_multiprocessing": "yes"}, "python_multiprocessing with value yes"),
        ({"output": "list"}, "output is 'list'; it is one of 'tuple', 'dict'"),
        ({"column_names": []}, "column_names is"),
        ({"column_names": ["a", "a"]}, "column_names is"),
        ({"column_names": 3}, "column_names is 3"),
    ],
)
def test_wrong_values(options: dict[str, Any], said: str) -> None:
    with pytest.raises(DataShardError, match=said):
        shards(4, 2, **options)


@pytest.mark.parametrize("option", ["sampler", "num_shards", "num_parallel_worker", "collate_fn"])
def test_unknown_options(option: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=f"no option '{option}'"):
        shards(4, 2, **{option: None})


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (iter([1]), "used up by one pass"),
        ((i for i in range(3)), "used up by one pass"),
        ({"a": 1}, "keys"),
        ({1, 2}, "no order that ranks agree on"),
        (3, "__len__"),
        ([object()], "a column of an item is a object"),
    ],
)
def test_what_cannot_be_sharded(data: Any, said: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=said):
        list(make(data, 0, 1))


def test_a_loader_is_not_divided_again() -> None:
    with pytest.raises(UnsupportedFeatureError, match="one part of its data already"):
        make(make([1, 2]))


def test_items_of_other_columns_say_so() -> None:
    with pytest.raises(DataShardError, match="an item has 1 columns; there are 2 names"):
        list(make([(1, 2), (3,)], 0, 1))
    with pytest.raises(DataShardError, match="an item has the keys 'b'; the columns are 'a'"):
        list(make([{"a": 1}, {"b": 1}], 0, 1))


@pytest.mark.parametrize("epoch", ["1", 1.0, True, 2**63, -(2**63) - 1])
def test_wrong_epoch(epoch: Any) -> None:
    with pytest.raises(DataShardError, match=r"epoch is .*integer of 64 bits"):
        shards(4, 2)[0].set_epoch(epoch)


class Source:
    """Items of a list, as a data set that worker processes can have."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> Any:
        return self.items[number]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([np.ones(number + 1) for number in range(4)], "not alike: Cannot batch tensors with diff"),
        ([1, 2, 2.5, 4], "not alike: Cannot batch tensors with diff"),
        ([(1, 2), (3, 4), (5,), (6, 7)], "an item has 1 columns; there are 2 names"),
        ([1, 2, np.complex64(1j), 4], "column 'column_0' of an item is complex64"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_items_that_do_not_make_a_batch(data: list[Any], said: str, workers: int) -> None:
    loader = make(Source(data), 0, 1, batch_size=4, num_parallel_workers=workers)
    with pytest.raises(DataShardError, match=said):
        list(loader)


def test_the_first_item_is_looked_at_before_anything_is_made() -> None:
    with pytest.raises(DataShardError, match="is complex64; MindSpore's pipelines take"):
        make([np.complex64(1j)] * 2)
    with pytest.raises(DataShardError, match="is bfloat16; MindSpore's pipelines take"):
        make([ms.Tensor([1, 2], ms.bfloat16)] * 2)


def test_errors_of_the_data_set_come_out_as_mindspore_tells_them() -> None:
    with pytest.raises(RuntimeError, match="IndexError"):
        list(make(Short(), 0, 1))


class Short(Source):
    def __init__(self) -> None:
        super().__init__([1])

    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize("data", [np.array(3), ms.Tensor(3)])
def test_an_array_without_dims(data: Any) -> None:
    with pytest.raises(DataShardError, match="without dims has no items"):
        make(data)


def test_a_batch_that_no_pipeline_takes() -> None:
    with pytest.raises(DataShardError, match=r"batch_size is 1099511627776; .* take 2147483647"):
        make([1, 2], batch_size=1 << 40)
    assert make(lambda: iter([1, 2]), batch_size=1 << 40).batch_size == 1 << 40
