"""`compare_modes` for MindSpore: the same call in PyNative and compiled, again and again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, final

import attrs
import mindspore as ms
from mindspore import nn

from parallelkit.errors import ExecutionModeError, FunctionFailedError
from parallelkit.graphs import Difference, ModeComparison
from parallelkit.specs import ComparisonSpec
from parallelkit_mindspore import memory, runtime
from parallelkit_mindspore.graph import apart
from parallelkit_mindspore.graph.compiled import Tally, compile_call, title, undone
from parallelkit_mindspore.graph.differences import compare
from parallelkit_mindspore.graph.reach import LIMIT, reach
from parallelkit_mindspore.graph.settings import problem, refusal, settle
from parallelkit_mindspore.graph.tree import leaves, replaced

_TOO_MUCH: Final = (
    f"the function comes to more than {LIMIT} objects; cells and parameters behind the rest were "
    "not given back"
)


def compare_modes(spec: ComparisonSpec) -> ModeComparison:
    """Run `spec.function` `2 * repeat + 3` times, each from the same state, and compare.

    The state is that of every cell and parameter that the function comes to: what it is, is bound
    to, is given, and names from outside (`graph.reach`); an optimiser is a cell. Gradients are
    those of the sum of all floating-point outputs, by the trainable parameters of these cells;
    where they have none, by the tensors among the positional arguments.

    Raises:
        FunctionFailedError: a run raised; the message says in which mode.
        ExecutionModeError: there is nothing to differentiate, or the modes' outputs are not
            alike; a value of an option that is not allowed.
        UnsupportedFeatureError: graph mode cannot run here, or an unknown option.
        WrongThreadError: another thread uses MindSpore.
    """
    runtime.mindspore("compare_modes")
    settings = settle(spec.options)
    reason = problem(settings)
    if reason is not None:
        raise refusal(reason)
    function = undone(spec.function)
    tally = Tally()
    compiled = compile_call(function, settings.options, tally)
    call = _Call(spec, function)
    with (
        apart.apart(),
        apart.cells_kept(call.cells),
        apart.same_random_state() as restore,
        call.kept(),
    ):
        eager = call.run(function, restore, "eager")
        again = call.run(function, restore, "eager")
        graph = call.run(compiled, restore, "graph")
        before = tally.recompiles
        eager_seconds, graph_seconds = [], []
        for _ in range(spec.repeat):
            eager_seconds.append(call.run(function, restore, "eager").seconds)
            graph_seconds.append(call.run(compiled, restore, "graph").seconds)
        outputs = compare(eager.outputs, graph.outputs)
        gradients = compare(eager.gradients, graph.gradients) if spec.gradients else None
        notes = _notes(tally, before, compare(eager.outputs, again.outputs)) + call.notes
    return ModeComparison(
        function=title(function),
        framework="mindspore",
        reason=f"mindspore.jit with capture_mode {settings.capture_mode!r}",
        outputs=outputs,
        gradients=gradients,
        eager_seconds=tuple(eager_seconds),
        graph_seconds=tuple(graph_seconds),
        compile_seconds=graph.seconds,
        graphs=tally.graphs,
        recompiles=tally.recompiles,
        breaks=tally.breaks,
        notes=notes,
    )


def _notes(tally: Tally, before: int, repeated: Difference) -> tuple[str, ...]:
    notes = []
    if repeated.max_abs:
        notes.append(
            f"two eager runs from the same state differ by {repeated.max_abs:.3e}: it draws random "
            "numbers from a kernel's own state, which nothing can set; so do the modes"
        )
    if tally.recompiles > before:
        notes.append("the repeated calls were compiled again, so graph's times contain that")
    if not tally.graphs:
        notes.append("nothing was compiled; check_graph says why")
    return tuple(notes)


@attrs.frozen(kw_only=True, eq=False)
class _Run:
    """What a run gave.

    Attributes:
        outputs, gradients: copies, gradients by name.
        seconds: wall time of the call, with the gradient where that was asked for.
    """

    outputs: Any
    gradients: dict[str, Any]
    seconds: float


@final
class _Call:
    """A function with its arguments, and the state of every cell that it uses."""

    def __init__(self, spec: ComparisonSpec, function: Any) -> None:
        self._spec = spec
        given = (spec.args, dict(spec.kwargs))
        found = reach(function, given)
        self.cells = list(found.cells)
        self._given = given
        self._saved: list[tuple[Any, Any, bytes]] = []
        self._tensors = found.tensors
        self.notes = () if found.complete else (_TOO_MUCH,)
        models = [cell for cell in self.cells if not isinstance(cell, nn.Optimizer)]
        trained = {id(p): p for cell in models for p in cell.trainable_params()}
        self._trained = list(trained.values())

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Remember parameters and buffers, and put them back at the end."""
        runtime.synchronize()
        self._saved = [
            (tensor, _home(tensor), bytes(memory.copy_out(tensor)))
            for tensor in self._tensors
            if memory.unreadable(tensor) is None
        ]
        try:
            yield
        finally:
            self._restore_cells()
            self._saved = []

    def run(self, function: Callable[..., Any], restore: Callable[[], None], mode: str) -> _Run:
        """Call `function` on copies, from the state kept; time the call and its gradient."""
        self._restore_cells()
        args, kwargs = replaced(self._given, _copy_of(self._given))
        restore()
        runtime.synchronize()
        compiling = apart.compiling() if mode == "graph" else contextlib.nullcontext()
        start = time.perf_counter()
        try:
            with compiling:
                if self._spec.gradients:
                    outputs, gradients = self._differentiate(function, args, kwargs)
                else:
                    outputs, gradients = function(*args, **kwargs), {}
                runtime.synchronize()
        except ExecutionModeError:
            raise
        except Exception as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            advice = "check_graph says more" if mode == "graph" else "Make it run eagerly first"
            raise FunctionFailedError(
                f"{title(self._spec.function)} raised {type(error).__name__} in mode {mode!r}: "
                f"{first}. {advice}"
            ) from error
        seconds = time.perf_counter() - start
        kept = replaced(outputs, _copied)
        return _Run(outputs=kept, gradients=replaced(gradients, _copied), seconds=seconds)

    def _differentiate(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        kept: list[Any] = []

        def total(*args: Any) -> Any:
            outputs = function(*args, **kwargs)
            kept.append(outputs)
            parts = [leaf for _, leaf in leaves(outputs) if _is_float(leaf)]
            if not parts:
                raise ExecutionModeError(
                    "gradients=True, yet there is no floating-point tensor among the outputs"
                )
            return sum((part.astype(ms.float32).sum() for part in parts[1:]), _sum(parts[0]))

        if self._trained:
            names = _distinct([parameter.name for parameter in self._trained])
            _, found = ms.value_and_grad(total, None, weights=self._trained)(*args)
            return kept[-1], dict(zip(names, found, strict=True))
        places = tuple(n for n, arg in enumerate(args) if _is_float(arg))
        if not places:
            raise ExecutionModeError(
                "gradients=True, yet nothing needs a gradient: the function uses no cell with "
                "trainable parameters, and no positional argument is a floating-point tensor"
            )
        _, found = ms.value_and_grad(total, places)(*args)
        found = (found,) if isinstance(found, ms.Tensor) else found  # of one argument
        return kept[-1], {f"argument {n}": g for n, g in zip(places, found, strict=True)}

    def _restore_cells(self) -> None:
        """Put back values, and the memory they were in: graphs go on with that.

        Adam's `beta1_power` moves with each step that is not compiled. Values go by bytes, since
        `ops.assign` takes neither bfloat16 nor what is transposed (2.10, CPU).
        """
        runtime.synchronize()
        for tensor, home, value in self._saved:
            if tensor.data_ptr() != home.data_ptr() or tensor.shape != home.shape:
                tensor.assign_value(home)
            memory.copy_in(tensor, memoryview(value))


def _home(tensor: Any) -> Any:
    """A tensor over the same memory, which stays when `tensor` moves."""
    made = ms.Tensor(0, tensor.dtype)
    made.assign_value(tensor)
    return made


def _distinct(names: list[str]) -> list[str]:
    """Names of parameters, those of another cell's that are equal with a number."""
    seen: dict[str, int] = {}
    made = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        made.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return made


def _copy_of(tree: Any) -> Callable[[Any], Any]:
    """How to copy the leaves of `tree`: one tensor given twice to one copy."""
    made = {id(leaf): _copied(leaf) for _, leaf in leaves(tree)}
    return lambda leaf: made[id(leaf)]


def _copied(leaf: Any) -> Any:
    is_plain = isinstance(leaf, ms.Tensor) and not isinstance(leaf, ms.Parameter)
    return leaf.copy() if is_plain else leaf


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, ms.Tensor) and leaf.is_floating_point()


def _sum(tensor: Any) -> Any:
    return tensor.astype(ms.float32).sum()
