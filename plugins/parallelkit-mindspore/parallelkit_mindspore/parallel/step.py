"""One batch: microbatches, forward, loss, and gradients, compiled in graph mode."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, final

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from parallelkit.errors import ExecutionModeError, PlanError, RankMismatchError
from parallelkit.protocols import ProcessGroup
from parallelkit_mindspore.parallel import autograd
from parallelkit_mindspore.parallel.trees import cut, leaves

_numbers: Final = itertools.count()


def check_microbatches(count: object) -> int:
    """Raise `PlanError` unless `count` is a positive integer."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise PlanError(f"microbatches is {count!r}; it is a positive integer")
    return count


def total_weight(weight: float, group: ProcessGroup) -> float:
    """Sum of the weights of all data parts. Collective over `group`.

    Raises:
        PlanError: `weight` is no finite number of at least 0.
        RankMismatchError: the weights add up to nothing.
    """
    number = _number(weight)
    if not 0 <= number < math.inf:
        raise PlanError(f"weight is {weight!r:.80}; it is one number of items or tokens, 0 or more")
    rows = group.all_gather(ms.Tensor([number], ms.float64))
    found = [float(row.asnumpy()[0]) for row in rows]
    if not sum(found) > 0:
        raise RankMismatchError(
            f"the weights of all data parts add up to {sum(found)}, not above 0: {found}"
        )
    return sum(found)


def _number(given: Any) -> float:
    """A number of Python's or NumPy's, or a tensor or array of one; NaN for all else."""
    if isinstance(given, ms.Tensor | np.ndarray | np.integer | np.floating) and given.size == 1:
        given = given.item()
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    return float(given) if is_number else math.nan


def in_graph_mode() -> bool:
    """Whether MindSpore's mode is graph now."""
    return bool(ms.get_context("mode") == ms.GRAPH_MODE)


class _Kind(NamedTuple):
    """What a step function was made for; another kind is another function."""

    loss: tuple[int, ...]
    trained: tuple[int, ...]
    graph: bool
    training: tuple[bool, ...]
    named: bool
    backward: bool


@final
class Steps:
    """The step functions of one model, each made once and kept.

    A function is made for a loss, the parameters that are trained, and the mode; in graph mode it
    is compiled, and compiled again for inputs of other shapes, and another one for cells of which
    `set_train` changed any: a graph keeps what it saw of them. Give the same `loss` in every call:
    a function defined anew is another one; a method of the same object is the same.
    """

    #: Functions that are kept; a loss that is made anew in each call must not fill the memory.
    KEPT: Final = 16

    def __init__(self) -> None:
        self._made: dict[_Kind, tuple[Any, Callable[..., Any]]] = {}

    def function(
        self,
        model: Any,
        loss: Callable[[Any, Any], Any],
        weights: Sequence[Any],
        *,
        named: bool,
        backward: bool,
    ) -> Callable[..., tuple[Any, Sequence[Any]]]:
        """Return what maps (inputs, target, share) to the loss times share, and gradients.

        Args:
            weights: parameters to differentiate by, in the order of the gradients.
            named: whether inputs is a mapping of keyword arguments, else a tuple.
            backward: whether gradients are wanted; else there are none.
        """
        trained = tuple(map(id, weights)) if backward else ()
        graph = in_graph_mode()
        training = _training(model, loss) if graph else ()
        kind = _Kind(_identity(loss), trained, graph, training, named, backward)
        # What is kept refers to the loss, so that its id stays its own; the model has one spread.
        if kind not in self._made:
            while len(self._made) >= self.KEPT:
                self._made.pop(next(iter(self._made)))
            self._made[kind] = (loss, _make(model, loss, weights, kind))
        return self._made[kind][1]


def _identity(loss: Callable[..., Any]) -> tuple[int, ...]:
    """Tell a loss from others; a bound method is made anew at each look, its parts are not."""
    owner, function = getattr(loss, "__self__", None), getattr(loss, "__func__", None)
    return (id(loss),) if function is None else (id(owner), id(function))


def _training(model: nn.Cell, loss: Callable[..., Any]) -> tuple[bool, ...]:
    """Which cells are in training mode, those of a loss that is a cell or a cell's method too."""
    owner = getattr(loss, "__self__", loss)
    roots = (model, owner) if isinstance(owner, nn.Cell) else (model,)
    return tuple(cell.training for root in roots for _, cell in root.cells_and_names())


def _make(model: Any, loss: Any, weights: Sequence[Any], kind: _Kind) -> Callable[..., Any]:
    if kind.graph:
        return _compiled(lambda fixed: _function(model, loss, weights, kind, fixed), loss)
    step = _function(model, loss, weights, kind, {})

    def call(inputs: Any, target: Any, share: Any) -> Any:
        return step(target, share, *((inputs,) if kind.named else inputs))

    return call


def _function(
    model: Any, loss: Any, weights: Sequence[Any], kind: _Kind, fixed: Mapping[str, Any]
) -> Callable[..., Any]:
    """Make what maps target, share and inputs to the scaled loss and gradients.

    Args:
        fixed: inputs by name that are constants of the graph, for the model besides the others.
    """

    def forward(target: Any, share: Any, *inputs: Any) -> Any:
        value = loss(model(*inputs), target)
        if not isinstance(value, ms.Tensor):
            return value  # a mistake, which `run` names: a graph cannot raise an error of ours
        return value * ops.cast(share, value.dtype)

    def forward_named(target: Any, share: Any, inputs: Any) -> Any:
        value = loss(model(**inputs, **fixed), target)
        if not isinstance(value, ms.Tensor):
            return value
        return value * ops.cast(share, value.dtype)

    chosen = forward_named if kind.named else forward
    if not (kind.backward and weights):

        def evaluate(target: Any, share: Any, *inputs: Any) -> Any:
            return chosen(target, share, *inputs), ()

        return evaluate
    differentiate = ms.value_and_grad(chosen, None, ms.ParameterTuple(weights))

    def step(target: Any, share: Any, *inputs: Any) -> Any:
        return differentiate(target, share, *inputs)

    return step


def _compiled(
    make: Callable[[Mapping[str, Any]], Callable[..., Any]], loss: Any
) -> Callable[..., Any]:
    """Compile on first use, one graph for each set of constants among inputs by name."""
    made: dict[tuple[tuple[str, Any], ...], Callable[..., Any]] = {}

    def call(inputs: Any, target: Any, share: Any) -> Any:
        named = isinstance(inputs, dict)
        fixed = {key: x for key, x in inputs.items() if _is_constant(x)} if named else {}
        key = tuple(sorted(fixed.items()))
        if key not in made:
            step = make(fixed)
            # MindSpore warns of a function that is compiled under a name twice; these differ.
            step.__name__ = f"train_step_{next(_numbers)}"
            made[key] = ms.jit(step)
        given = (
            [_variable({name: x for name, x in inputs.items() if name not in fixed})]
            if named
            else map(_variable, inputs)
        )
        try:
            return made[key](_variable(target), share, *given)
        except TypeError as error:
            # MindSpore's message does not name the mistake: a lambda within another expression
            if getattr(loss, "__name__", "") != "<lambda>" or "Lambda" not in str(error):
                raise
            raise ExecutionModeError(
                "loss is a lambda that was written inside another expression, which MindSpore "
                "cannot compile; define it as a function, or on a line of its own"
            ) from error

    return call


def _is_constant(given: Any) -> bool:
    return given is None or isinstance(given, bool | str)


def _variable(given: Any) -> Any:
    """Without this, MindSpore takes numbers, and tensors in a tuple or dict, for constants of the
    graph, and compiles it again for each batch.

    Raises:
        ExecutionModeError: a tuple, list or dict holds what cannot vary.
    """
    if isinstance(given, tuple | list | dict):
        strange = [x for x in leaves(given) if not isinstance(x, ms.Tensor | int | float)]
        if strange:
            raise ExecutionModeError(
                f"in graph mode a tuple, list or dict inside the batch holds {strange[0]!r:.80}; "
                "it holds tensors and numbers alone. The model's own arguments may be None or "
                "strings"
            )
        return ms.mutable(given)
    number = isinstance(given, int | float) and not isinstance(given, bool)
    return ms.mutable(given) if number else given


def run(
    function: Callable[..., tuple[Any, Sequence[Any]]],
    inputs: Any,
    target: Any,
    *,
    items: int,
    microbatches: int,
    scale: float | None,
) -> tuple[Any, list[Any]]:
    """Run a batch in microbatches, as even as can be.

    A batch of fewer items than microbatches runs its first item again, with no weight, in place of
    the empty ones: ranks that compute one model together have to make the same number of passes.

    Args:
        function: of `Steps.function`.
        inputs: a mapping, or a tuple of positional arguments, or one of them.
        items: what `items_in` says of the batch.
        microbatches: what `check_microbatches` let pass.
        scale: by what each microbatch's loss, a sum, is multiplied; None: losses are means, and
            weighed by their numbers of items.

    Returns:
        The sum of the scaled losses, and the gradients of it.

    Raises:
        PlanError: the loss has dims.
    """
    count = microbatches
    bounds = [items * number // count for number in range(count + 1)]
    total: Any = None
    gradients: list[Any] = []
    for start, stop in itertools.pairwise(bounds):
        share = (stop - start) / items if scale is None else scale
        if start == stop:
            start, stop, share = 0, 1, 0.0
        part = inputs if count == 1 else cut(inputs, start, stop)
        given = dict(part) if isinstance(part, Mapping) else part
        given = given if isinstance(given, dict | tuple) else (given,)
        goal = target if count == 1 else cut(target, start, stop)
        with autograd.ended():
            value, found = function(given, goal, _scalar(share))
        if not isinstance(value, ms.Tensor) or value.ndim:
            raise PlanError(f"loss gave {value!r:.80}; it gives one tensor without dims")
        total = value if total is None else total + value
        added = [a + b for a, b in zip(gradients, found, strict=True)] if gradients else found
        gradients = list(added)
    return total, gradients


def _scalar(value: float) -> Any:
    """As a tensor, so that another value is no other graph; float64 where devices have it."""
    wide = ms.get_context("device_target") == "CPU"
    return ms.Tensor(value, ms.float64 if wide else ms.float32)
