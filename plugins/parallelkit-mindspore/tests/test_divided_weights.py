"""Cells that a context divided over ranks, without ranks: parts, layouts, regions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from parallelkit_mindspore.divided_weights import (
    DividedCellSink,
    DividedCellSource,
    weight_sink,
    weight_source,
)
from parallelkit_mindspore.parallel.divided import part_of
from parallelkit_mindspore.weights import CellSink, CellSource

from parallelkit.errors import (
    ManifestError,
    RankMismatchError,
    StateError,
    UnsupportedFeatureError,
)
from parallelkit.launch import LaunchInfo
from parallelkit.protocols import LocatedSink, RegionSink, ShardedSource
from parallelkit.specs import GroupSpec
from parallelkit.testing.fake import FakeGroup
from parallelkit.weights.layout import Mesh, Region, ShardLayout, region


class Holder(nn.Cell):  # type: ignore[misc]
    def __init__(self, **given: ms.Parameter) -> None:
        super().__init__()
        for name, value in given.items():
            value.name = name
            self.insert_param_to_cell(name, value)


def counted(*shape: int) -> np.ndarray[Any, Any]:
    return np.arange(1, 1 + int(np.prod(shape)), dtype=np.float32).reshape(shape)


def parameter(array: np.ndarray[Any, Any]) -> ms.Parameter:
    return ms.Parameter(ms.Tensor(array), name="p")


def model_of(rank: int, degree: int = 2) -> Holder:
    return Holder(
        rows=part_of(parameter(counted(4, 3)), 0, rank, degree),
        columns=part_of(parameter(counted(2, 8)), 1, rank, degree),
        plain=parameter(counted(3)),
    )


WHOLE = {"rows": counted(4, 3), "columns": counted(2, 8), "plain": counted(3)}


def group_of(world: int, rank: int, framework: str = "mindspore", **peers: Any) -> FakeGroup:
    spec = GroupSpec(
        framework=framework,
        backend="memory",
        device="cpu",
        rank=rank,
        world_size=world,
        local_rank=rank,
        local_world_size=world,
        master_addr="127.0.0.1",
        timeout=5.0,
        launch=LaunchInfo(),
    )
    return FakeGroup(spec, {int(name[1:]): answer for name, answer in peers.items()})


def alike(world: int, rank: int) -> FakeGroup:
    """A group whose other ranks say what this one does."""
    others = {f"r{r}": (lambda obj: obj) for r in range(world) if r != rank}
    return group_of(world, rank, **others)


def test_whole_cells_keep_their_sources_and_sinks() -> None:
    model = Holder(w=parameter(counted(2)))
    assert isinstance(weight_source(model), CellSource)
    assert isinstance(weight_sink(model), CellSink)
    assert not isinstance(weight_sink(model), RegionSink)
    assert isinstance(weight_source(model_of(0)), ShardedSource)
    assert isinstance(weight_sink(model_of(0)), RegionSink)
    assert isinstance(weight_sink(model_of(0)), LocatedSink)


@pytest.mark.parametrize(("world", "rank"), [(2, 0), (2, 1), (4, 2), (4, 3)])
def test_what_a_rank_hands_out_is_what_its_layouts_say(world: int, rank: int) -> None:
    source = DividedCellSource(model_of(rank % 2))
    with pytest.raises(StateError, match="before join"):
        source.manifest()
    source.join(alike(world, rank))
    source.look()
    manifest = source.manifest()
    axes = ("tensor",) if world == 2 else ("replica", "tensor")
    assert manifest.mesh == Mesh(axes, (2,) * len(axes))
    layouts = {t.name: t.layout for t in manifest.tensors}
    assert layouts == {
        "rows": ShardLayout([("tensor", 0)]),
        "columns": ShardLayout([("tensor", 1)]),
        "plain": None,
    }
    for index, spec in enumerate(manifest.unique):
        array = WHOLE[spec.name]
        assert spec.shape == array.shape
        box = region(spec.layout or ShardLayout(), manifest.mesh, spec.shape, rank)
        assert box is not None
        inside = tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))
        assert bytes(source.host_bytes(index)) == array[inside].tobytes(), spec.name


@pytest.mark.parametrize("rank", range(2))
def test_a_rank_takes_its_own_parts_in_place(rank: int) -> None:
    model = model_of(rank)
    sink = DividedCellSink(model)
    assert {t.name: t.shape for t in sink.needs().unique} == {n: a.shape for n, a in WHOLE.items()}
    assert sink.regions() == (
        Region((2 * rank, 0), (2, 3)),
        Region((0, 4 * rank), (2, 4)),
        Region((0,), (3,)),
    )
    places = [p.data_ptr() for p in model.get_parameters()]
    sink.begin()
    for index, (spec, box) in enumerate(zip(sink.needs().unique, sink.regions(), strict=True)):
        inside = tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))
        into = sink.destination(index)
        assert into is not None
        into[:] = (WHOLE[spec.name][inside] * 10).tobytes()
        assert bytes(sink.host_bytes(index)) == (WHOLE[spec.name][inside] * 10).tobytes()
    sink.finish()
    assert np.array_equal(model.rows.asnumpy(), 10 * WHOLE["rows"][2 * rank : 2 * rank + 2])
    assert np.array_equal(
        model.columns.asnumpy(), 10 * WHOLE["columns"][:, 4 * rank : 4 * rank + 4]
    )
    assert [p.data_ptr() for p in model.get_parameters()] == places


def test_parts_that_are_not_those_of_a_ranks_place_are_refused() -> None:
    with pytest.raises(UnsupportedFeatureError, match="rank 0 of 2 holds part 1 of 2"):
        DividedCellSource(model_of(1)).join(alike(2, 0))
    with pytest.raises(UnsupportedFeatureError, match="rank 0 of 1 holds part 0 of 2"):
        DividedCellSource(model_of(0)).join(None)
    with pytest.raises(UnsupportedFeatureError, match="this one is of fake"):
        DividedCellSource(model_of(0)).join(group_of(1, 0, framework="fake"))


def test_another_model_on_rank_0_is_everyones_error() -> None:
    def other(obj: Any) -> Any:
        return b"another digest.." if isinstance(obj, bytes) else obj

    with pytest.raises(RankMismatchError, match="others than rank 0's"):
        DividedCellSource(model_of(1)).join(group_of(2, 1, r0=other))


def test_a_change_on_one_rank_is_the_error_of_the_others_too() -> None:
    said: list[Any] = [None, None]

    def there(obj: Any) -> Any:
        return said[0]

    source = DividedCellSource(model_of(0))
    source.join(group_of(2, 0, r1=there))
    source.look()
    said[0] = {"error": "ManifestError", "message": "tensor 'plain' is no longer there"}
    with pytest.raises(ManifestError, match=r"no longer there \(as rank 1 reports\)"):
        source.look()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda: part_of(parameter(counted(4, 3)), 0, 1, 2), "was part 0 of 2 of dim 0 and is now"),
        (lambda: parameter(counted(2, 3)), "was part 0 of 2 of dim 0 and is now whole"),
    ],
)
def test_a_part_that_became_another_is_refused(change: Callable[[], Any], said: str) -> None:
    model = model_of(0)
    source, sink = DividedCellSource(model), DividedCellSink(model)
    source.join(alike(2, 0))
    model.rows = change()
    for call in (source.look, sink.check, sink.begin, sink.needs):
        with pytest.raises(ManifestError, match=f"'rows' {said}"):
            call()
