"""A backend without a framework: a world of one in memory, for tests of what surrounds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from parallelkit.errors import GroupClosedError
from parallelkit.plan import ParallelPlan
from parallelkit.plugin import (
    API_VERSION,
    Candidate,
    ComparisonSpec,
    ContextSpec,
    Difference,
    ExecutionSpec,
    GraphReport,
    GraphSpec,
    GroupSpec,
    LaunchSpec,
    ModeComparison,
    ProbeRequest,
    Section,
    hookimpl,
)
from parallelkit.protocols import Plain, ProcessGroup

FEATURES = frozenset(
    {
        "group.cpu",
        "context.standalone",
        "context.data",
        "axis.data",
        "execution.eager",
        "execution.graph",
    }
)


class FakeGroup:
    """A `ProcessGroup` that gives back what it is given.

    `peers` stands in for the other ranks: rank to the function that makes its answer to this
    rank's object in `broadcast_object`.
    """

    def __init__(
        self, spec: GroupSpec, peers: Mapping[int, Callable[[Plain], Plain]] | None = None
    ) -> None:
        self.spec = spec
        self.peers = dict(peers or {})
        self.closed = False
        self.closes = 0
        self.native: Any = self

    rank = property(lambda self: self.spec.rank)
    world_size = property(lambda self: self.spec.world_size)
    local_rank = property(lambda self: self.spec.local_rank)
    device = property(lambda self: self.spec.device)
    backend = property(lambda self: self.spec.backend)
    framework = property(lambda self: self.spec.framework)
    timeout = property(lambda self: self.spec.timeout)

    def _alive(self) -> None:
        if self.closed:
            raise GroupClosedError("the group is closed")

    def barrier(self, *, timeout: float | None = None) -> None:
        self._alive()

    def all_reduce(self, x: Any, op: str = "sum") -> Any:
        self._alive()
        return x

    def broadcast(self, x: Any, src: int = 0) -> Any:
        self._alive()
        return x

    def all_gather(self, x: Any) -> list[Any]:
        self._alive()
        return [x] * int(self.world_size)

    def reduce_scatter(self, x: Any, op: str = "sum") -> Any:
        self._alive()
        return x

    def broadcast_object(self, obj: Plain, src: int = 0, *, timeout: float | None = None) -> Plain:
        self._alive()
        return self.peers[src](obj) if src in self.peers else obj

    def subgroup(self, ranks: Sequence[int]) -> ProcessGroup | None:
        self._alive()
        return self if self.rank in ranks else None

    def close(self) -> None:
        self.closed = True
        self.closes += 1

    def __enter__(self) -> FakeGroup:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class FakeContext:
    """A `ParallelContext` that leaves models and data as they are."""

    def __init__(self, spec: ContextSpec, group: ProcessGroup) -> None:
        self.spec = spec
        self.group = group
        self.plan: ParallelPlan = spec.plan
        self.mode = spec.mode
        self.effective = spec.mode
        self.reduce = spec.reduce
        self.native: Any = None

    def parallelize(self, model: Any) -> Any:
        return model

    def train_step(
        self, model: Any, inputs: Any, target: Any = None, *, loss: Any, **options: Any
    ) -> Any:
        return loss(model(inputs), target)

    def accumulate(self, model: Any, *, sync: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def apply_gradients(self, model: Any, optimizer: Any) -> None:
        pass

    def clip_grad_norm_(self, model: Any, max_norm: float, *, norm_type: float = 2.0) -> float:
        return 0.0

    def weighted_mean(self, total: Any, weight: float) -> Any:
        return total / weight

    def seed(self, base: int) -> int:
        return base

    def save(self, path: str, model: Any, optimizer: Any = None, **options: Any) -> None:
        pass

    def load(
        self, path: str, model: Any, optimizer: Any = None, *, timeout: float | None = None
    ) -> dict[str, Plain]:
        return {}

    def shard(self, dataset: Any, **options: Any) -> Any:
        return dataset

    def reset(self) -> None:
        pass

    def explain(self) -> str:
        return f"fake context, {self.mode}"


class FakeExecution:
    """An `ExecutionMode` that compiles nothing."""

    reason = "a fake"
    graphs = recompiles = graph_breaks = 0

    def __init__(self, spec: ExecutionSpec) -> None:
        self.spec = spec
        self.requested = self.effective = spec.mode

    def compile(self, target: Any) -> Any:
        return target

    def explain(self) -> str:
        return f"fake execution, {self.requested}"

    def __enter__(self) -> FakeExecution:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


class FakePlugin:
    """A plugin for a framework that does not exist.

    Args:
        name: candidate's name; framework: the framework it claims, `name` by default.
        score, devices, backends, features, reason: its candidate's fields.
        peers: for `FakeGroup`.
    """

    parallelkit_api = API_VERSION

    def __init__(
        self,
        name: str = "fake",
        *,
        framework: str = "",
        score: float = 10,
        devices: Sequence[str] = ("cpu",),
        backends: Mapping[str, str] | None = None,
        features: frozenset[str] = FEATURES,
        reason: str = "always there",
        peers: Mapping[int, Callable[[Plain], Plain]] | None = None,
    ) -> None:
        self.candidate = Candidate(
            name=name,
            framework=framework or name,
            score=score,
            devices=tuple(devices),
            backends=backends or {"cpu": "memory", "gpu": "wire"},
            features=features,
            reason=reason,
        )
        self.peers = peers
        self.groups: list[FakeGroup] = []

    @hookimpl
    def parallelkit_probe(self, request: ProbeRequest) -> Candidate:
        return self.candidate

    @hookimpl
    def parallelkit_init_process_group(self, spec: GroupSpec) -> ProcessGroup:
        group = FakeGroup(spec, self.peers)
        self.groups.append(group)
        return group

    @hookimpl
    def parallelkit_setup_parallel_context(
        self, spec: ContextSpec, group: ProcessGroup
    ) -> FakeContext:
        return FakeContext(spec, group)

    @hookimpl
    def parallelkit_set_execution_mode(self, spec: ExecutionSpec) -> FakeExecution:
        return FakeExecution(spec)

    @hookimpl
    def parallelkit_check_graph(self, spec: GraphSpec) -> GraphReport:
        spec.function(*spec.args, **spec.kwargs)
        return GraphReport(function=repr(spec.function), framework=spec.framework, graphs=1)

    @hookimpl
    def parallelkit_compare_modes(self, spec: ComparisonSpec) -> ModeComparison:
        for _ in range(2 * spec.repeat + 2):
            spec.function(*spec.args, **spec.kwargs)
        return ModeComparison(
            function=repr(spec.function),
            framework=spec.framework,
            reason="a fake",
            outputs=Difference(tensors=0),
            eager_seconds=(1.0,) * spec.repeat,
            graph_seconds=(1.0,) * spec.repeat,
        )

    @hookimpl
    def parallelkit_launch(self, spec: LaunchSpec) -> list[str]:
        return [spec.python, spec.script, *spec.args]

    @hookimpl
    def parallelkit_diagnostics(self) -> list[Section]:
        return [Section(title=self.candidate.name, facts={"kind": "fake"})]
