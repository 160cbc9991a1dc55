"""Patterns and styles for cells, and what cannot be divided."""

from __future__ import annotations

import functools
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import mint, nn
from parallelkit_mindspore.parallel.checkpoint import State
from parallelkit_mindspore.parallel.divided import part_of
from parallelkit_mindspore.parallel.fused import fused
from parallelkit_mindspore.parallel.kept import carry, float_of
from parallelkit_mindspore.parallel.layouts import cells, check, resolve

from parallelkit.errors import LayoutError, UnsupportedFeatureError


class Block(nn.Cell):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Dense(4, 8)
        self.down = nn.Dense(8, 4)


class Net(nn.Cell):  # type: ignore[misc]
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.CellList([Block(), Block()])
        self.norm = nn.LayerNorm((4,))
        self.head = nn.Dense(4, 6, **options)


def test_patterns() -> None:
    found = cells(Net())
    styles = resolve({"layers.*.up": "colwise", "**.down": "rowwise", "head": "replicate"}, found)
    assert styles == {
        "layers.0.up": "colwise",
        "layers.0.down": "rowwise",
        "layers.1.up": "colwise",
        "layers.1.down": "rowwise",
    }
    exact = resolve({"layers.*.up": "colwise", "layers.1.up": "replicate"}, found)
    assert exact == {"layers.0.up": "colwise"}


@pytest.mark.parametrize(
    ("layouts", "match"),
    [
        ({"layers.*.upp": "colwise"}, r"fits no cell of the model; the nearest are 'layers.\*.up'"),
        ({"xyz": "colwise"}, "it has 'embed', 'layers.*.up'"),
        ({"head": "colwize"}, "did you mean 'colwise'"),
        ({"head": "sequence"}, "a style of the mindspore plugin is"),
        ({3: "colwise"}, "a pattern is a string"),
        ({"norm": "colwise"}, "is a LayerNorm; 'colwise' is for"),
        ({"head": "replicate"}, "divide nothing; the model has"),
        ({"layers.*.up": "colwise", "layers.0.*": "rowwise", "layers.?.up": "rowwise"}, "two"),
    ],
)
def test_layouts_that_are_wrong(layouts: Any, match: str) -> None:
    with pytest.raises(LayoutError, match=match):
        resolve(layouts, cells(Net()))


@pytest.mark.parametrize(
    ("style", "degree", "match"),
    [
        ({"head": "colwise"}, 4, "its 6 outputs do not divide by tensor=4; it can be 2, 3, 6"),
        ({"head": "rowwise"}, 3, "its 4 inputs do not divide by tensor=3"),
        ({"embed": "rowwise"}, 4, "its 10 rows do not"),
        ({"embed": "colwise"}, 3, "its 4 columns do not"),
    ],
)
def test_sizes_that_do_not_divide(style: dict[str, str], degree: int, match: str) -> None:
    with pytest.raises(LayoutError, match=match):
        check(Net(), style, degree)


def test_what_a_part_could_not_keep() -> None:
    with pytest.raises(LayoutError, match="activation Softmax, which needs all outputs"):
        check(Net(activation="softmax"), {"head": "colwise"}, 2)
    check(Net(activation="softmax"), {"head": "colwise_gather"}, 2)
    check(Net(activation="relu"), {"head": "colwise"}, 2)
    one_hot = nn.SequentialCell(nn.Embedding(4, 4, use_one_hot=True))
    with pytest.raises(LayoutError, match="use_one_hot"):
        check(one_hot, {"0": "rowwise"}, 2)
    padded = nn.SequentialCell(mint.nn.Embedding(4, 4, padding_idx=0))
    with pytest.raises(LayoutError, match="padding_idx=0"):
        check(padded, {"0": "rowwise"}, 2)


class Twice(nn.Dense):  # type: ignore[misc]
    def construct(self, x: Any) -> Any:
        return super().construct(x) * 2


class Linear(mint.nn.Linear):  # type: ignore[misc]
    def construct(self, x: Any) -> Any:
        return super().construct(x) * 2


class Table(nn.Embedding):  # type: ignore[misc]
    def construct(self, ids: Any) -> Any:
        return super().construct(ids) * 2


class Named(nn.Dense):  # type: ignore[misc]
    """Another name, and nothing else of its own."""


def compiled(cell: nn.Cell) -> nn.Cell:
    cell.construct = ms.jit(cell.construct)
    return cell


def hooked(cell: nn.Cell, how: str) -> nn.Cell:
    getattr(cell, f"register_{how}_hook")(lambda *given: given[-1])
    return cell


def hook_on_weight(cell: nn.Cell) -> nn.Cell:
    cell.weight.register_hook(lambda gradient: gradient * 2)
    return cell


def recomputed(cell: nn.Cell) -> nn.Cell:
    cell.recompute()
    return cell


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Twice(4, 4), "'0', a Twice with a construct of its own"),
        (lambda: Linear(4, 4), "'0', a Linear with a construct of its own"),
        (lambda: Table(4, 4), "'0', a Table with a construct of its own"),
        (lambda: compiled(nn.Dense(4, 4)), "'0', a Dense with a construct of its own"),
        (lambda: hooked(nn.Dense(4, 4), "forward"), "with hooks"),
        (lambda: hooked(nn.Embedding(4, 4), "forward_pre"), "with hooks"),
        (lambda: hooked(mint.nn.Linear(4, 4), "backward"), "with hooks"),
        (lambda: hooked(nn.Dense(4, 4), "backward_pre"), "with hooks"),
        (lambda: hook_on_weight(nn.Dense(4, 4)), "with hooks on its parameters"),
        (lambda: recomputed(nn.Dense(4, 4)), r"with recompute\(\)"),
    ],
)
def test_what_a_layer_does_on_its_own(make: Any, match: str) -> None:
    model = nn.SequentialCell(make(), nn.Dense(4, 4))
    with pytest.raises(LayoutError, match=match):
        check(model, {"0": "rowwise"}, 2)
    check(model, {"1": "rowwise"}, 2)


def test_a_class_with_nothing_of_its_own_is_divided() -> None:
    check(nn.SequentialCell(Named(4, 4)), {"0": "colwise"}, 2)


@pytest.mark.parametrize(
    "hold",
    [
        lambda cell: [cell],
        lambda cell: ({"key": [cell]},),
        lambda cell: cell.construct,
        lambda cell: functools.partial(cell),
        lambda cell: ms.ParameterTuple([cell.weight]),
    ],
)
def test_a_layer_that_is_held_where_it_cannot_be_replaced(hold: Any) -> None:
    model = nn.SequentialCell(Block())
    model[0].kept = hold(model[0].up)
    with pytest.raises(LayoutError, match=r"cell '0.up', and 0.kept, a .*holds it"):
        check(model, {"0.up": "colwise"}, 2)
    check(model, {"0.down": "rowwise"}, 2)


@pytest.mark.parametrize("dtype", [None, ms.float16, ms.float32, ms.bfloat16])
def test_a_part_computes_in_the_dtype_of_its_layer(dtype: Any) -> None:
    plain, part = nn.Dense(4, 4), nn.Dense(4, 2)
    if dtype is not None:
        nn.SequentialCell(plain).to_float(dtype)
    plain.set_train()
    carry(plain, part)
    x = ms.Tensor(np.ones((1, 4), np.float32))
    assert part.training
    assert float_of(part) == dtype
    assert dtype == ms.bfloat16 or part(x).dtype == plain(x).dtype


def test_tied_weights_are_not_divided() -> None:
    model = nn.SequentialCell(nn.Dense(4, 4, has_bias=False), nn.Dense(4, 4, has_bias=False))
    model[1].weight = model[0].weight
    with pytest.raises(LayoutError, match=r"is also '1.weight'; tied"):
        check(model, {"0": "colwise"}, 2)


def test_no_reducer_takes_a_divided_parameter() -> None:
    whole = ms.Parameter(ms.Tensor(np.arange(8).reshape(4, 2).astype(np.float32)), name="w")
    part = part_of(whole, 0, 1, 2)
    np.testing.assert_array_equal(part.asnumpy(), [[4, 5], [6, 7]])
    assert (part.name, part.requires_grad) == ("w", True)
    optimizer = nn.Momentum([part], 0.1, 0.9)
    optimizer((ms.Tensor(np.ones((2, 2), np.float32)),))
    np.testing.assert_allclose(part.asnumpy()[0], [3.9, 4.9], atol=1e-6)
    with pytest.raises(UnsupportedFeatureError, match="context.grad_reducer"):
        nn.DistributedGradReducer([part], degree=2)


class Nested(nn.Cell):  # type: ignore[misc]
    """Three layers whose names end alike, of which two are divided, in different dims."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.CellDict({"proj": nn.Dense(4, 4)})
        self.proj = nn.Dense(4, 4)
        self.tail = nn.CellDict({"proj": nn.Dense(4, 4)})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda given: nn.Adam(given), ("moment1", "moment2")),
        (lambda given: mint.optim.SGD(given, lr=0.1, momentum=0.9), ("momentum_buf",)),
    ],
)
def test_an_optimizers_state_is_divided_as_its_own_parameter(make: Any, words: Any) -> None:
    model = Nested()
    parameters = dict(model.parameters_and_names())
    dims = {"block.proj.weight": 0, "block.proj.bias": 0, "proj.weight": 1}
    state = State.of(parameters, dims, make(model.trainable_params()))
    expected = {f"{word}.{name}": dim for word in words for name, dim in dims.items()}
    assert state.dims["optimizer"] == expected


@pytest.mark.parametrize("limit", [1, 20, 1 << 20])
def test_fused_buffers(limit: int) -> None:
    sizes: list[int] = []

    def double(flat: Any) -> Any:
        assert flat.ndim == 1
        sizes.append(flat.size)
        return flat + flat

    given = [
        ms.Tensor(np.arange(6).reshape(2, 3).astype(np.float32)),
        ms.Tensor(np.arange(3).astype(np.int32)),
        ms.Tensor(np.zeros((0, 2), np.float32)),
        ms.Tensor(np.float32(5)),
        ms.Tensor(np.arange(2).astype(np.float32)),
    ]
    found = fused(given, double, limit=limit)
    for before, after in zip(given, found, strict=True):
        assert (after.shape, after.dtype) == (before.shape, before.dtype)
        np.testing.assert_array_equal(after.asnumpy(), 2 * before.asnumpy())
    assert len(sizes) == {1: 4, 20: 3, 1 << 20: 2}[limit]
    low = [ms.Tensor([1.5, -2.0]).astype(ms.bfloat16), ms.Tensor([3.0]).astype(ms.bfloat16)]
    halved = fused(low, lambda flat: flat / 2, limit=limit)
    assert [str(x.dtype) for x in halved] == ["BFloat16"] * 2
    assert halved[0].astype(ms.float32).asnumpy().tolist() == [0.75, -1.0]
    kept = given[0].copy()
    kept.copy_(found[0])  # a copy, no view into a buffer
    np.testing.assert_array_equal(kept.asnumpy(), found[0].asnumpy())
