"""`compare_modes` for torch: the same call eagerly and compiled, again and again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, final

import attrs
import torch
from torch import nn
from torch.utils import _pytree as pytree

from parallelkit.errors import ExecutionModeError, FunctionFailedError, UnsupportedFeatureError
from parallelkit.graphs import ModeComparison
from parallelkit.specs import ComparisonSpec, ExecutionSpec
from parallelkit_torch.execution import TorchExecutionMode, set_execution_mode
from parallelkit_torch.graph import apart, regions
from parallelkit_torch.graph.differences import compare
from parallelkit_torch.graph.watch import Tally


def compare_modes(spec: ComparisonSpec) -> ModeComparison:
    """Run `spec.function` `2 * repeat + 2` times, each from the same state, and compare.

    A model wrapped in `DistributedDataParallel` is run without the wrapper.

    Raises:
        FunctionFailedError: a run raised; the message says in which mode.
        ExecutionModeError: there is nothing to call backward on.
        UnsupportedFeatureError: graph mode cannot run here, an unknown option, an optimiser
            among the arguments, or a torch that cannot be watched.
    """
    mode = set_execution_mode(
        ExecutionSpec(mode="graph", framework="torch", options=dict(spec.options))
    )
    function = apart.plain(spec.function)
    call = _Call(spec, function)
    tallies: list[Tally] = []
    notes: list[str] = []
    with apart.apart(), apart.uncompiled_in_place(function), apart.same_random_state() as restore:
        compiled = _compiled(function, mode, tallies)
        # inductor draws numbers of its own otherwise, and dropout could not be compared at all
        with call.kept(), torch._inductor.config.patch(fallback_random=True):
            eager = call.run(function, restore, "eager")
            if eager.random:
                notes.append("it draws random numbers: the same in both modes, as eager draws them")
            graph = call.run(compiled, restore, "graph")
            before = sum(tally.recompiles for tally in tallies)
            eager_seconds, graph_seconds = [], []
            for _ in range(spec.repeat):
                eager_seconds.append(call.run(function, restore, "eager").seconds)
                graph_seconds.append(call.run(compiled, restore, "graph").seconds)
    recompiles = sum(tally.recompiles for tally in tallies)
    graphs = sum(tally.graphs for tally in tallies)
    if recompiles > before:
        notes.append("the repeated calls were compiled again, so graph's times contain that")
    if not graphs:
        notes.append("nothing was compiled; check_graph says why")
    return ModeComparison(
        function=apart.title(function),
        framework="torch",
        reason=mode.reason,
        outputs=compare(eager.outputs, graph.outputs),
        gradients=compare(eager.gradients, graph.gradients) if spec.gradients else None,
        eager_seconds=tuple(eager_seconds),
        graph_seconds=tuple(graph_seconds),
        compile_seconds=graph.seconds,
        graphs=graphs,
        recompiles=recompiles,
        breaks=sum(len(tally.breaks) for tally in tallies),
        notes=tuple(notes),
    )


@attrs.frozen(kw_only=True, eq=False)
class _Run:
    """What a run gave.

    Attributes:
        outputs, gradients: detached copies, gradients by name.
        seconds: wall time of the call, and of backward where that was asked for.
        random: whether it drew random numbers of torch's.
    """

    outputs: Any
    gradients: dict[str, torch.Tensor]
    seconds: float
    random: bool


@final
class _Call:
    """A function with its arguments, and the state of every model that it is given."""

    def __init__(self, spec: ComparisonSpec, function: Any) -> None:
        self._spec = spec
        given = (spec.args, dict(spec.kwargs))
        leaves, self._shape = pytree.tree_flatten(given)
        self._leaves = leaves
        for leaf in leaves:
            if isinstance(leaf, torch.optim.Optimizer):
                raise UnsupportedFeatureError(
                    "compare_modes cannot give an optimiser back as it was; compare a function of "
                    "model and batch, with gradients=True for the backward pass"
                )
        models = (function, getattr(function, "__self__", None), *leaves)
        self._models = [model for model in models if isinstance(model, nn.Module)]
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Remember the models' tensors and gradients, and put them back at the end."""
        self._reshard()
        self._saved = [(t, t.detach().clone()) for t in self._tensors()]
        gradients = [(p, p.grad) for m in self._models for p in m.parameters()]
        try:
            yield
        finally:
            self._restore_models()
            for parameter, gradient in gradients:  # not those of the last run
                parameter.grad = gradient
            self._saved = []

    def run(self, function: Callable[..., Any], restore: Callable[[], None], mode: str) -> _Run:
        """Call `function` on copies, from the state kept; time the call and its backward."""
        self._restore_models()
        for model in self._models:
            model.zero_grad(set_to_none=True)
        leaves = _copies(self._leaves)
        args, kwargs = pytree.tree_unflatten(leaves, self._shape)
        restore()
        drawn = _random_state()
        if mode == "graph" and apart.cuda_in_use():  # or the next outputs may be the last one's
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        _wait()
        start = time.perf_counter()
        try:
            outputs = function(*args, **kwargs)
            if self._spec.gradients:
                self._backward(outputs)
        except ExecutionModeError:
            raise
        except Exception as error:
            raise FunctionFailedError(
                f"{apart.title(self._spec.function)} raised {type(error).__name__} in mode "
                f"{mode!r}: {error}"
            ) from error
        _wait()
        seconds = time.perf_counter() - start
        # copies: a CUDA graph writes its next outputs into the same memory
        kept = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), outputs)
        moved = any(not torch.equal(a, b) for a, b in zip(drawn, _random_state(), strict=True))
        return _Run(outputs=kept, gradients=self._gradients(leaves), seconds=seconds, random=moved)

    def _backward(self, outputs: Any) -> None:
        leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        needing = [leaf for leaf in leaves if leaf.requires_grad]
        if not needing:
            raise ExecutionModeError(
                "gradients=True, yet no output needs a gradient: neither the arguments nor the "
                "models given have a tensor with requires_grad, or the function detaches it"
            )
        total = torch.stack([t.float().sum() for t in needing]).sum()
        total.backward()  # type: ignore[no-untyped-call]

    def _gradients(self, leaves: list[Any]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for number, model in enumerate(self._models):
            prefix = f"model {number}: " if len(self._models) > 1 else ""
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    found[prefix + name] = parameter.grad.detach().clone()
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and leaf.is_leaf and leaf.grad is not None:
                found[f"argument {number}"] = leaf.grad.detach().clone()
        return found

    def _tensors(self) -> Iterator[torch.Tensor]:
        seen: set[int] = set()
        for model in self._models:
            for tensor in (*model.parameters(), *model.buffers()):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield tensor

    def _reshard(self) -> None:
        """Have FSDP2 drop gathered parameters: a forward without backward leaves them in place
        of the shards, and their memory goes away with the next backward."""
        for model in self._models:
            for unit in regions.units(model):
                unit.reshard()

    def _restore_models(self) -> None:
        self._reshard()
        with torch.no_grad():
            for tensor, value in self._saved:
                tensor.copy_(value)


def _compiled(function: Any, mode: TorchExecutionMode, tallies: list[Tally]) -> Callable[..., Any]:
    """Compile as `mode.compile` would: as a whole, or in parts and only during the call."""
    parts = mode.parts_of(function)
    if not parts:
        tallies.append(Tally())
        return apart.compile_apart(function, tallies[0], **mode.compile_options)
    calls = []
    for _, part in parts:  # parts share no compiled code here, so each is counted by itself
        tallies.append(Tally())
        call = apart.compile_apart(part._call_impl, tallies[-1], **mode.compile_options)
        calls.append((part, call))

    def run(*args: Any, **kwargs: Any) -> Any:
        for part, compiled in calls:
            part._compiled_call_impl = compiled
        try:
            return function(*args, **kwargs)
        finally:
            for part, _ in calls:
                part._compiled_call_impl = None

    return run


def _copies(leaves: list[Any]) -> list[Any]:
    """Copy tensors, one given twice to one copy; everything else is handed on."""
    made: dict[int, torch.Tensor] = {}
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and id(leaf) not in made:
            copy = leaf.detach().clone()
            made[id(leaf)] = copy.requires_grad_(leaf.requires_grad)
    return [made.get(id(leaf), leaf) for leaf in leaves]


def _random_state() -> list[torch.Tensor]:
    on_cuda = torch.cuda.get_rng_state_all() if apart.cuda_in_use() else []
    return [torch.get_rng_state(), *on_cuda]


def _wait() -> None:
    if apart.cuda_in_use():
        torch.cuda.synchronize()
