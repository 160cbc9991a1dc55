"""Cells that hold a part of a layer, one rank of the tensor axis each.

They work in PyNative and in Graph mode. Their collectives are MindSpore's own operators, inside
forward and backward, so a rank that is late by more than MindSpore's limit for collectives may get
wrong values without an error: only collectives of the process group itself can notice that.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, Final

import mindspore as ms
from mindspore import nn, ops

from parallelkit.errors import UnsupportedFeatureError
from parallelkit_mindspore.memory import Cut
from parallelkit_mindspore.parallel.layouts import divided_dim, weight_of

_may_reduce: Final[list[bool]] = []


class _Enter(nn.Cell):  # type: ignore[misc]
    """Where whole activations enter a divided layer: their gradients are summed over ranks."""

    def __init__(self, group: str) -> None:
        super().__init__()
        self.all_reduce = ops.AllReduce(group=group)

    def construct(self, x: Any) -> Any:
        return x

    def bprop(self, x: Any, out: Any, dout: Any) -> Any:
        return (self.all_reduce(dout),)


class _Leave(nn.Cell):  # type: ignore[misc]
    """Where terms of a sum leave a divided layer: they are summed, and gradients pass as they are.

    MindSpore's own gradient of AllReduce is a sum again, which counts each rank's loss once more.
    """

    def __init__(self, group: str) -> None:
        super().__init__()
        self.all_reduce = ops.AllReduce(group=group)

    def construct(self, x: Any) -> Any:
        return self.all_reduce(x)

    def bprop(self, x: Any, out: Any, dout: Any) -> Any:
        return (dout,)


class _Gather(nn.Cell):  # type: ignore[misc]
    """Where divided outputs become whole: gathered in the last dim, gradients cut the same way.

    On the CPU, whose AllGather knows the whole world only, as a sum of parts at their places.
    """

    def __init__(self, group: str, rank: int, degree: int) -> None:
        super().__init__()
        self.rank = rank
        self.degree = degree
        self.summed = ms.get_context("device_target") == "CPU"
        if self.summed:
            self.all_reduce = ops.AllReduce(group=group)
            here = [[1.0] if place == rank else [0.0] for place in range(degree)]
            self.here = ms.Tensor(here, ms.float32)
        else:
            self.all_gather = ops.AllGather(group=group)

    def construct(self, x: Any) -> Any:
        if self.summed:
            parts = ops.expand_dims(x, -2) * ops.cast(self.here, x.dtype)
            whole = self.all_reduce(parts)
        else:
            whole = ops.movedim(self.all_gather(ops.expand_dims(x, 0)), 0, -2)
        return ops.reshape(whole, (*x.shape[:-1], self.degree * x.shape[-1]))

    def bprop(self, x: Any, out: Any, dout: Any) -> Any:
        size = x.shape[-1]
        return (dout[..., self.rank * size : (self.rank + 1) * size],)


class DividedLinear(nn.Cell):  # type: ignore[misc]
    """A part of `nn.Dense` or `mint.nn.Linear`.

    Args:
        plain: the whole layer, whose parameters have the values to take.
        style: `"colwise"`, `"colwise_gather"` or `"rowwise"`.
        group: MindSpore's name of the tensor axis' group; rank: place in it; degree: its size.

    Inputs are `[..., inputs]`, for `"rowwise"` this rank's part of them; outputs `[..., outputs]`,
    for `"colwise"` this rank's part.
    """

    def __init__(self, plain: Any, style: str, group: str, rank: int, degree: int) -> None:
        super().__init__()
        self.style = style
        self.weight = part_of(plain.weight, divided_dim(plain, style), rank, degree)
        whole_bias = getattr(plain, "bias", None)
        self.bias: Any = whole_bias
        if whole_bias is not None and style != "rowwise":
            self.bias = part_of(whole_bias, 0, rank, degree)
        self.has_bias = whole_bias is not None
        self.activation: Any = getattr(plain, "activation", None)
        self.activated = self.activation is not None
        self.matmul = ops.MatMul(transpose_b=True)
        self.bias_add = ops.BiasAdd()
        self.rowwise = style == "rowwise"
        self.gathers = style == "colwise_gather"
        if self.rowwise:
            self.leave = _Leave(group)
        else:
            self.enter = _Enter(group)
        if self.gathers:
            self.gather = _Gather(group, rank, degree)

    def construct(self, x: Any) -> Any:
        if not self.rowwise:
            x = self.enter(x)
        shape = x.shape
        y = self.matmul(ops.reshape(x, (-1, shape[-1])), self.weight)
        if self.rowwise:
            y = self.leave(y)
        if self.has_bias:
            y = self.bias_add(y, self.bias)
        y = ops.reshape(y, (*shape[:-1], y.shape[-1]))
        if self.gathers:
            y = self.gather(y)
        if self.activated:
            y = self.activation(y)
        return y

    def extend_repr(self) -> str:
        return f"{self.style}, weight={tuple(self.weight.shape)}"


class DividedEmbedding(nn.Cell):  # type: ignore[misc]
    """A part of `nn.Embedding` or `mint.nn.Embedding`: some rows, or some columns.

    Arguments are those of `DividedLinear`. Inputs are integers of any shape; outputs have one dim
    more, for `"colwise"` this rank's part of it.
    """

    def __init__(self, plain: Any, style: str, group: str, rank: int, degree: int) -> None:
        super().__init__()
        self.style = style
        table = part_of(weight_of(plain), divided_dim(plain, style), rank, degree)
        self.hugging = hasattr(plain, "weight")  # which of the two names the table has
        if self.hugging:
            self.weight = table
        else:
            self.embedding_table = table
        self.rowwise = style == "rowwise"
        self.gathers = style == "colwise_gather"
        rows = int(table.shape[0])
        self.first, self.stop = rank * rows, (rank + 1) * rows
        if self.rowwise:
            self.leave = _Leave(group)
        if self.gathers:
            self.gather = _Gather(group, rank, degree)

    def construct(self, ids: Any) -> Any:
        table = self.weight if self.hugging else self.embedding_table
        if self.rowwise:
            here = ops.logical_and(ids >= self.first, ids < self.stop)
            rows = ops.select(here, ids - self.first, ops.zeros_like(ids))
            found = ops.gather(table, rows, 0)
            return self.leave(found * ops.expand_dims(ops.cast(here, found.dtype), -1))
        found = ops.gather(table, ids, 0)
        return self.gather(found) if self.gathers else found

    def extend_repr(self) -> str:
        return f"{self.style}, table={self.first} to {self.stop}" if self.rowwise else self.style


@contextlib.contextmanager
def reducing() -> Iterator[None]:
    """Within, a `DistributedGradReducer` may be built over divided parameters.

    For who gives it the right group; others would add up parts of different ranks.
    """
    _may_reduce.append(True)
    try:
        yield
    finally:
        _may_reduce.pop()


def part_of(parameter: Any, dim: int, rank: int, degree: int) -> Any:
    """A parameter with this rank's part of another, and its name."""
    size = int(parameter.shape[dim]) // degree
    index = [slice(None)] * len(parameter.shape)
    index[dim] = slice(rank * size, (rank + 1) * size)
    part = ms.Tensor(parameter.value())[tuple(index)].contiguous().copy()
    made = ms.Parameter(part, name=parameter.name, requires_grad=parameter.requires_grad)
    kind: Any = type(made)
    made.__class__ = _guarded(kind, Cut(dim, rank, degree))
    return made


@functools.cache
def _guarded(kind: Any, cut: Cut) -> Any:
    """The type of a divided parameter: the same, but no reducer takes it by mistake.

    It says which part of which dim it is, for those who publish weights.
    """

    def reduce_ex(parameter: Any, protocol: Any) -> Any:  # an optimiser copies parameters
        with reducing():
            return kind.__reduce_ex__(parameter, protocol)

    own = {"cut": cut, "layerwise_parallel": property(_refuse, _set), "__reduce_ex__": reduce_ex}
    return type("DividedParameter", (kind,), own)


def _refuse(parameter: Any) -> bool:
    if not _may_reduce:
        raise UnsupportedFeatureError(
            f"the parameter {parameter.name!r} is divided over the tensor axis, and Model, "
            "TrainOneStepCell and DistributedGradReducer add gradients up over all ranks. Use "
            "context.train_step, or in a step of your own context.grad_reducer(parameters)"
        )
    return bool(parameter.param_info.layerwise_parallel)


def _set(parameter: Any, value: bool) -> None:
    parameter.param_info.layerwise_parallel = value
