"""A whole backend in NumPy: a world of one, eager only, gradients by central differences.

It shows that the conformance suites ask for nothing that only a framework has, and with `broken`
that they find what is wrong.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from parallelkit import options as opts
from parallelkit import plain
from parallelkit.errors import (
    CollectiveError,
    ExecutionModeError,
    GroupClosedError,
    GroupError,
    ManifestError,
    PlanError,
)
from parallelkit.loader import PluginManager
from parallelkit.plugin import Candidate, ContextSpec, ExecutionSpec, GroupSpec, hookimpl
from parallelkit.specs import check_timeout
from parallelkit.testing.arrays import Arrays
from parallelkit.testing.conformance.planted import Planted

FEATURES = frozenset(
    {"group.cpu", "context.standalone", "execution.eager", "weights.source", "weights.sink"}
)
#: What `broken` can be told to do wrong.
FAULTS = frozenset(
    {
        "changes_inputs", "forgets_dtype", "takes_any_op", "takes_objects", "works_when_closed",
        "loses_scalars", "doubles_gradients", "wraps_in_eager", "takes_any_option", "loses_ties",
        "writes_elsewhere",
    }
)  # fmt: skip


class Group:
    """A process group of one."""

    framework, backend, device = "tiny", "memory", "cpu"

    def __init__(self, spec: GroupSpec, faults: frozenset[str]) -> None:
        self.rank, self.world_size, self.local_rank = spec.rank, spec.world_size, spec.local_rank
        self.timeout = spec.timeout
        self.faults = faults
        self.closed = False
        self.native = self

    def _check(self, x: Any = None, op: str = "sum", src: int = 0) -> None:
        if self.closed and "works_when_closed" not in self.faults:
            raise GroupClosedError("the group was closed")
        if op not in ("sum", "mean", "max", "min", "product") and "takes_any_op" not in self.faults:
            raise CollectiveError(f"op is {op!r}; allowed are sum, mean, max, min, product")
        if x is not None and not isinstance(x, np.ndarray):
            raise CollectiveError(f"got a {type(x).__name__}; it is an array")
        if op == "mean" and x is not None and x.dtype.kind in "iub":
            raise CollectiveError("mean of integers")
        if src != 0:
            raise CollectiveError(f"src is {src}; allowed is 0")

    def barrier(self, *, timeout: float | None = None) -> None:
        try:
            check_timeout(1.0 if timeout is None else timeout)
        except GroupError as error:
            raise CollectiveError(str(error)) from error
        self._check()

    def all_reduce(self, x: Any, op: str = "sum") -> Any:
        self._check(x, op)
        if "loses_scalars" in self.faults:
            return np.atleast_1d(x)
        result = x.astype(np.float64) if "forgets_dtype" in self.faults else x.copy()
        if "changes_inputs" in self.faults:
            x += 1
        return result

    def broadcast(self, x: Any, src: int = 0) -> Any:
        self._check(x, src=src)
        return x.copy()

    def all_gather(self, x: Any) -> list[Any]:
        self._check(x)
        return [x.copy()]

    def reduce_scatter(self, x: Any, op: str = "sum") -> Any:
        self._check(x, op)
        if x.ndim == 0:
            raise CollectiveError("dim 0 must divide by the number of ranks")
        return x.copy()

    def broadcast_object(self, obj: Any, src: int = 0, *, timeout: float | None = None) -> Any:
        self._check(src=src)
        if "takes_objects" not in self.faults:
            plain.encode(obj)
        return obj

    def subgroup(self, ranks: Sequence[int]) -> Group | None:
        self._check()
        if not isinstance(ranks, list) or ranks != [0]:
            raise GroupError(f"ranks is {ranks!r}; allowed is [0]")
        return self

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Model(Arrays):
    """Named arrays and a function of them."""

    def __init__(self, arrays: Mapping[str, Any], forward: Callable[..., Any]) -> None:
        super().__init__(arrays)
        self._forward = forward

    def __call__(self, x: Any) -> Any:
        return self._forward(self.arrays, x)

    def begin(self) -> None:
        if Arrays(self.arrays).manifest() != self.manifest():
            raise ManifestError("the arrays are not those of the manifest")


class Context:
    """A context of one rank."""

    def __init__(self, spec: ContextSpec, group: Any, faults: frozenset[str]) -> None:
        opts.check(spec.options, (), what="parallel_context")
        self.spec, self.group, self.plan = spec, group, spec.plan
        self.mode = self.effective = spec.mode
        self.reduce, self.native, self.faults = spec.reduce, None, faults
        self.gradients: dict[str, Any] = {}

    def parallelize(self, model: Any) -> Any:
        return model

    def train_step(
        self, model: Model, inputs: Any, target: Any = None, *, loss: Any, **_: Any
    ) -> Any:
        wide = copy.copy(model)
        wide.arrays = {name: a.astype(np.float64) for name, a in model.arrays.items()}
        for name, array in wide.arrays.items():
            gradient = np.zeros_like(array)
            for place in np.ndindex(array.shape):
                value, around = array[place], []
                for step in (1e-5, -1e-5):
                    array[place] = value + step
                    around.append(loss(wide(inputs), target))
                array[place] = value
                gradient[place] = (around[0] - around[1]) / 2e-5
            factor = 2 if "doubles_gradients" in self.faults else 1
            self.gradients[name] = self.gradients.get(name, 0) + factor * gradient
        return np.float32(loss(wide(inputs), target))

    def apply_gradients(self, model: Model, optimizer: Any) -> None:
        optimizer(self.gradients)
        self.gradients = {}

    def accumulate(self, model: Any, *, sync: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def clip_grad_norm_(self, model: Any, max_norm: float, *, norm_type: float = 2.0) -> float:
        raise PlanError("max_norm is not for this backend")

    def weighted_mean(self, total: Any, weight: float) -> Any:
        return total / weight

    def shard(self, dataset: Any, **options: Any) -> Any:
        return dataset

    def seed(self, base: int) -> int:
        return base

    def save(self, path: str, model: Any, optimizer: Any = None, **options: Any) -> None:
        raise PlanError("no checkpoints here")

    def load(self, path: str, model: Any, optimizer: Any = None, **options: Any) -> Any:
        raise PlanError("no checkpoints here")

    def reset(self) -> None:
        self.gradients = {}

    def explain(self) -> str:
        return f"mode {self.mode}, one rank, gradients by {self.reduce}"


class Eager:
    """The one mode there is."""

    requested = effective = "eager"
    reason = "nothing else"
    graphs = recompiles = graph_breaks = 0

    def __init__(self, spec: ExecutionSpec, faults: frozenset[str]) -> None:
        self.faults = faults
        if "takes_any_option" not in faults:
            opts.check(spec.options, (), what="execution mode 'eager'")

    def compile(self, target: Any) -> Any:
        if not callable(target):
            raise ExecutionModeError(f"a {type(target).__name__} cannot be called")
        if "wraps_in_eager" in self.faults:
            return lambda *args: target(*args)
        return target

    def explain(self) -> str:
        return "eager: nothing is done"

    def __enter__(self) -> Eager:
        return self

    def __exit__(self, *exc: object) -> None: ...


class WritesElsewhere(Arrays):
    """A sink whose destinations are copies."""

    def destination(self, index: int) -> memoryview | None:
        live = super().destination(index)
        return None if live is None else memoryview(bytearray(live))


class Plugin:
    """The plugin, perhaps with faults."""

    parallelkit_api = 1

    def __init__(self, faults: frozenset[str]) -> None:
        assert faults <= FAULTS
        self.faults = faults

    @hookimpl
    def parallelkit_probe(self) -> Candidate:
        return Candidate(
            name="tiny",
            framework="tiny",
            devices=("cpu",),
            backends={"cpu": "memory"},
            features=FEATURES,
            score=10,
            reason="NumPy is here",
        )

    @hookimpl
    def parallelkit_init_process_group(self, spec: GroupSpec) -> Group:
        return Group(spec, self.faults)

    @hookimpl
    def parallelkit_setup_parallel_context(self, spec: ContextSpec, group: Any) -> Context:
        return Context(spec, group, self.faults)

    @hookimpl
    def parallelkit_set_execution_mode(self, spec: ExecutionSpec) -> Eager:
        return Eager(spec, self.faults)

    @hookimpl
    def parallelkit_weight_source(self, model: Any) -> Any:
        if "loses_ties" in self.faults:
            return Arrays({name: array.copy() for name, array in model.arrays.items()})
        return model

    @hookimpl
    def parallelkit_weight_sink(self, target: Any) -> Any:
        return WritesElsewhere(target.arrays) if "writes_elsewhere" in self.faults else target


class Adapter:
    """An adapter of the plugin, perhaps with faults."""

    framework = "tiny"
    reopens = True
    reduced = frozenset({"int32", "int64", "float32", "float64"})
    moved = reduced | {"bool", "uint8", "float16"}
    model_dtypes = ("float32", "float16", "float64")
    graph_options: Mapping[str, Any] = {}

    def __init__(self, *faults: str) -> None:
        self.manager = PluginManager(environ={}, scan=False, builtin=False)
        self.manager.register(Plugin(frozenset(faults)), "tiny")

    def tensor(self, values: Any, dtype: str) -> Any:
        return np.asarray(values).astype(dtype)

    def array(self, tensor: Any) -> Any:
        return np.array(tensor)

    def dtype(self, tensor: Any) -> str:
        return str(tensor.dtype)

    def mlp(self, weights: Mapping[str, Any], dtype: str = "float32") -> Model:
        def forward(w: Mapping[str, Any], x: Any) -> Any:
            hidden = np.maximum(x @ w["first.weight"].T + w["first.bias"], 0)
            return hidden @ w["second.weight"].T + w["second.bias"]

        return Model({name: w.astype(dtype) for name, w in weights.items()}, forward)

    def scale(self, value: float) -> Model:
        return Model({"weight": np.array(value, np.float32)}, lambda w, x: w["weight"] * x)

    def tied(self, weights: Mapping[str, Any]) -> Model:
        arrays = {name: w.copy() for name, w in weights.items()}
        arrays["head.weight"] = arrays["embed.weight"]
        return Model(
            arrays, lambda w, x: w["embed.weight"][x] @ w["body.weight"].T @ w["head.weight"].T
        )

    def momentum(self, model: Model, lr: float, momentum: float) -> Any:
        velocity: dict[str, Any] = {}

        def step(gradients: Mapping[str, Any]) -> None:
            for name, gradient in gradients.items():
                velocity[name] = momentum * velocity.get(name, 0) + gradient
                model.arrays[name] -= lr * velocity[name]

        return step

    def parameters(self, model: Model) -> dict[str, Any]:
        return {name: array.copy() for name, array in model.arrays.items()}

    def gradients(self, context: Any, model: Model) -> dict[str, Any]:
        return dict(context.gradients)

    def set_parameter(self, model: Model, name: str, values: Any) -> None:
        model.arrays[name][...] = values

    def retype(self, model: Model) -> None:
        model.arrays["first.weight"] = model.arrays["first.weight"].astype(np.float64)

    def dataset(self, count: int) -> Any:
        return range(count)

    def numbers(self, batch: Any) -> list[int]:
        return list(batch)

    def draw(self) -> float:
        return float(np.random.rand())

    def global_mode(self) -> str:
        return "eager"

    def planted(self) -> Planted:
        raise NotImplementedError


adapter = Adapter()
