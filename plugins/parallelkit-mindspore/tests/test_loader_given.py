"""MindSpore data sets that are given to be sharded: read, copied, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
import pytest
from mindspore import nn
from mindspore.dataset import vision
from mindspore.mindrecord import FileWriter
from parallelkit_mindspore.loader import ShardLoader, make_loader

from parallelkit.errors import DataShardError, UnsupportedFeatureError


def make(data: Any, index: int = 0, count: int = 2, **options: Any) -> ShardLoader:
    return make_loader(data, index=index, count=count, **options)


def items(loader: Any) -> list[int]:
    return [int(i) for (batch, *_) in loader for i in batch.asnumpy().reshape(-1)]


def slices(length: int = 5, **options: Any) -> Any:
    return ds.NumpySlicesDataset(np.arange(length), ["x"], **options)


def test_the_promise_is_ours_not_mindspore_s() -> None:
    data = slices(shuffle=False)
    for mode, want in {
        "pad": [[0, 2, 4], [1, 3, 0]],
        "drop": [[0, 2], [1, 3]],
        "uneven": [[0, 2, 4], [1, 3]],
    }.items():
        assert [items(make(data, index, mode=mode)) for index in (0, 1)] == want
    assert items(data.create_tuple_iterator(num_epochs=1)) == [0, 1, 2, 3, 4]  # not changed


def test_shuffle_is_the_data_set_s_unless_said() -> None:
    assert items(make(slices(9, shuffle=False), 0, 1)) == list(range(9))
    plain = make(list(range(9)), 0, 1, shuffle=True, seed=2)
    assert items(make(slices(9), 0, 1, seed=2)) == items(plain)  # MindSpore's default
    assert items(make(slices(9, shuffle=True), 0, 1, seed=2)) == items(plain)
    assert items(make(slices(9), 0, 1, shuffle=False)) == list(range(9))
    assert items(make(slices(9, num_shards=1, shard_id=0), 0, 1, seed=2)) == items(plain)


def test_operations_and_batches_go_on() -> None:
    data = slices(10, shuffle=False).map(lambda x: x * 10, ["x"]).rename(["x"], ["y"])
    assert items(make(data, 1)) == [10, 30, 50, 70, 90]
    batched = data.batch(2, drop_remainder=True).map(lambda y: y + 1, ["y"])
    assert batched.get_dataset_size() == 5  # remembered by MindSpore
    loader = make(batched, 1)
    assert (loader.batch_size, loader.drop_last, len(loader)) == (2, True, 2)
    assert [batch[0].asnumpy().tolist() for batch in loader] == [[11, 31], [51, 71]]
    (first, _) = make(batched, 1, output="dict", batch_size=2, drop_last=True)
    assert first["y"].asnumpy().tolist() == [11, 31]
    assert items(data.create_tuple_iterator(num_epochs=1)) == list(range(0, 100, 10))


def test_one_source_may_have_several_users() -> None:
    source = slices(4, shuffle=False)
    doubled = source.map(lambda x: x * 2, ["x"])
    negated = source.map(lambda x: -x, ["x"])
    assert items(make(doubled, 0)) == [0, 4]
    assert items(make(negated, 1)) == [-1, -3]


@pytest.mark.parametrize(
    ("chosen", "want"),
    [
        ({"sampler": [5, 3, 1, 0]}, [5, 3, 1, 0]),
        ({"sampler": ds.SequentialSampler(2, 3)}, [2, 3, 4]),
        ({"num_samples": 4, "shuffle": False}, [0, 1, 2, 3]),
    ],
)
def test_samplers_that_choose(chosen: dict[str, Any], want: list[int]) -> None:
    assert items(make(slices(6, **chosen), 0, 1)) == want
    halves = [items(make(slices(6, **chosen), i, mode="uneven")) for i in (0, 1)]
    assert halves == [want[::2], want[1::2]]
    mixed = items(make(slices(6, **chosen), 0, 1, shuffle=True))
    assert sorted(mixed) == sorted(want)
    assert items(make(slices(6, **chosen), 0, 1).native) == want


def test_splits() -> None:
    first, second = slices(10, shuffle=False).split([6, 4], randomize=False)
    assert items(make(first, 0, 1)) == list(range(6))
    assert [items(make(second, i)) for i in (0, 1)] == [[6, 8], [7, 9]]
    first, _ = slices(10, shuffle=False).split([6, 4])
    with pytest.raises(UnsupportedFeatureError, match="randomize=False"):
        make(first)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (lambda: slices(num_shards=2, shard_id=0), "sharded already"),
        (lambda: slices(sampler=ds.DistributedSampler(2, 1)), "sharded already"),
        (lambda: slices().shuffle(4), r"ShuffleDataset .*shuffle=True"),
        (lambda: slices().repeat(2), r"RepeatDataset .*each pass is an epoch"),
        (lambda: slices().filter(lambda x: x > 1, ["x"]), "FilterDataset"),
        (lambda: slices().take(2), "TakeDataset"),
        (lambda: slices().skip(2), "SkipDataset"),
        (lambda: slices() + slices(), "ConcatDataset"),
        (lambda: slices().zip(slices().rename(["x"], ["y"])), "ZipDataset"),
        (lambda: slices().batch(2).batch(2), "batches of batches"),
        (lambda: slices(sampler=ds.WeightedRandomSampler([1] * 5)), "WeightedRandomSampler"),
        (lambda: slices(num_samples=3), "RandomSampler, whose order would not be alike"),
        (lambda: slices(sampler=ds.SubsetRandomSampler([1, 2])), "SubsetRandomSampler"),
        (lambda: ds.GeneratorDataset(lambda: iter([(1,)]), ["x"]), "made of an iterable"),
        (lambda: ds.GeneratorDataset([1, 2], ["x"], batch_sampler=[[0, 1]]), "batch_sampler"),
        (lambda: ds.TextFileDataset(__file__), "TextFileDataset cannot be read at chosen places"),
    ],
)
def test_what_cannot_be_sharded(data: Any, said: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=said):
        make(data())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 3}, "batch_size=3 contradicts the data set, which has batch_size=2"),
        ({"drop_last": True}, "drop_last=True contradicts"),
        ({"column_names": ["x"]}, "column_names belongs to the BatchDataset"),
        ({"num_parallel_workers": 2}, "num_parallel_workers belongs to the BatchDataset"),
    ],
)
def test_what_contradicts_the_data_set(options: dict[str, Any], said: str) -> None:
    with pytest.raises(DataShardError, match=said):
        make(slices().batch(2), **options)
    with pytest.raises(DataShardError, match="no fixed size"):
        make(slices().batch(lambda info: 2))


def test_mindspore_s_random_operations_differ_by_part_and_epoch() -> None:
    images = np.arange(8 * 12 * 12 * 3).reshape(8, 12, 12, 3).astype(np.uint8)

    def draw(index: int, epoch: int = 0) -> list[int]:
        data = ds.NumpySlicesDataset([images[0]] * 8, ["x"], shuffle=False)
        data = data.map(vision.RandomCrop(4), ["x"], num_parallel_workers=1)
        loader = make(data, index)
        loader.set_epoch(epoch)
        return [int(batch[0].asnumpy().sum()) for batch in loader]

    first, other, later = draw(0), draw(1), draw(0, epoch=1)
    assert len({tuple(first), tuple(other), tuple(later)}) == 3
    assert draw(0) == first


def test_files(tmp_path: Path) -> None:
    imaging = pytest.importorskip("PIL.Image")
    for label in (0, 1):
        (tmp_path / "images" / str(label)).mkdir(parents=True)
        for number in range(3):
            pixels = np.full((4, 4, 3), 10 * label + number, np.uint8)
            imaging.fromarray(pixels).save(tmp_path / "images" / str(label) / f"{number}.png")
    data = ds.ImageFolderDataset(str(tmp_path / "images"), shuffle=False, decode=True)
    data = data.map(vision.HWC2CHW(), ["image"])
    parts = [list(make(data, i, batch_size=3, output="dict")) for i in (0, 1)]
    found = [part["image"].asnumpy()[:, 0, 0, 0].tolist() for (part,) in parts]
    assert found == [[0, 2, 11], [1, 10, 12]]
    assert parts[0][0]["label"].asnumpy().tolist() == [0, 0, 1]


def test_mindrecord(tmp_path: Path) -> None:
    path = str(tmp_path / "rows.mindrecord")
    writer = FileWriter(path, 1)
    writer.add_schema({"x": {"type": "int32"}})
    writer.write_raw_data([{"x": number} for number in range(7)])
    writer.commit()
    data = ds.MindDataset(path, ["x"])
    plain = make(list(range(7)), 1, shuffle=True, seed=4)
    assert items(make(data, 1, seed=4)) == items(plain)
    assert items(make(data, 1, shuffle=False)) == [1, 3, 5, 0]
    assert items(make(data, 1, shuffle=False).native) == [1, 3, 5, 0]
    with pytest.raises(UnsupportedFeatureError, match="MindDataset cannot be given another order"):
        _ = make(data, 1).native


class Sum(nn.Cell):
    def construct(self, out: Any, y: Any) -> Any:
        return y.mean() + 0 * out.mean()


class Recorder(ms.train.Callback):
    """Keeps what each step was given: the loss is the mean of the batch's labels."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def step_end(self, run_context: Any) -> None:
        loss = run_context.original_args().net_outputs
        self.seen.append(float(loss.asnumpy()))


@pytest.mark.parametrize("mode", [ms.PYNATIVE_MODE, ms.GRAPH_MODE])
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_native_in_model_train(mode: int, sink: bool, given: bool) -> None:
    rows = [(np.float32([i]), np.float32([i * 2])) for i in range(11)]
    data: Any = rows
    if given:
        columns = tuple(np.stack(column) for column in zip(*rows, strict=True))
        data = ds.NumpySlicesDataset(columns, ["x", "y"])
    loader = make(data, 1, batch_size=2, shuffle=True, seed=9, mode="drop")
    loader.set_epoch(2)
    net = nn.Dense(1, 1)
    optimizer = nn.Momentum(net.trainable_params(), 0.0, 0.9)
    recorder = Recorder()
    before = ms.get_context("mode")
    ms.set_context(mode=mode)
    try:
        model = ms.Model(net, Sum(), optimizer)
        model.train(3, loader.native, callbacks=[recorder], dataset_sink_mode=sink)
    finally:
        ms.set_context(mode=before)
    want = []
    for epoch in (2, 3, 4):
        loader.set_epoch(epoch)
        want += [float(y.asnumpy().mean()) for _, y in loader]
    assert len(want) == 3 * len(loader) == 9
    assert recorder.seen == want
