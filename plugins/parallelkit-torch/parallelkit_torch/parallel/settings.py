"""Options of a context: which there are, what they mean, and which plan uses them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs
from torch.nn.parallel import DistributedDataParallel

from parallelkit import options as opts
from parallelkit.errors import LayoutError, PlanError
from parallelkit.plan import AXES, ParallelPlan
from parallelkit_torch.parallel import replicate

SCHEDULES: Final = ("1f1b", "gpipe", "interleaved")


#: Options of our own, and under which plans each means something. They are taken under every
#: plan, so that changing a degree needs no other change.
_OWN: Final[Mapping[str, Callable[[ParallelPlan], bool]]] = {
    "layouts": lambda plan: plan.tensor > 1,
    "sequence": lambda plan: plan.tensor > 1,
    "blocks": lambda plan: needs_shards(plan),
    "stages": lambda plan: plan.pipeline > 1,
    "schedule": lambda plan: plan.pipeline > 1,
    "virtual_stages": lambda plan: plan.pipeline > 1,
    "example": lambda plan: plan.pipeline > 1,
}


@attrs.frozen(kw_only=True)
class Settings:
    """Options of a context, checked.

    Attributes:
        layouts: pattern of module names to `"colwise"`, `"rowwise"`, `"sequence"`,
            `"replicate"`, or a `torch.distributed.tensor.parallel.ParallelStyle`.
        sequence: divide activations between layers along the sequence too.
        blocks: patterns of the submodules that FSDP2 gathers one at a time.
        stages: names of modules, by pipeline stage.
        schedule: of the pipeline, one of `SCHEDULES`.
        virtual_stages: stages for each rank of the pipeline; above 1 with `"interleaved"`.
        example: inputs of a small batch, with which stages are compared with the whole model.
        replicas: further options, of `DistributedDataParallel`.
        shards: further options, of `fully_shard`.
        idle: options that were given and mean nothing under this plan.
    """

    layouts: Mapping[str, Any] | None = None
    sequence: bool = False
    blocks: Sequence[str] | None = None
    stages: Sequence[Sequence[str]] | None = None
    schedule: str = "1f1b"
    virtual_stages: int = 1
    example: Any = None
    replicas: Mapping[str, Any] = attrs.field(factory=dict)
    shards: Mapping[str, Any] = attrs.field(factory=dict)
    idle: tuple[str, ...] = ()

    @classmethod
    def of(cls, given: Mapping[str, Any], plan: ParallelPlan, mode: str) -> Settings:
        """Check options by name and value, and that the plan has a use for them.

        Raises:
            UnsupportedFeatureError: a name is unknown, or goes on to what this plan does not use.
            LayoutError: `"semi_auto"` over a tensor axis without layouts.
            PlanError: a value is not allowed.
        """
        allowed = _allowed(plan)
        what = f"mode {mode!r} with {_said(plan)}"
        kept = opts.check(
            given, [*_OWN, *allowed["replicas"], *allowed["shards"]], what=what, also=AXES
        )
        own = {name: kept.pop(name) for name in list(kept) if name in _OWN}
        if mode == "semi_auto" and plan.tensor > 1 and not own.get("layouts"):
            raise LayoutError(
                "mode 'semi_auto' takes your layouts: layouts={'layers.*.up': 'colwise', "
                "'layers.*.down': 'rowwise'}; mode 'hybrid' has built-in ones for models named "
                "as Qwen2 and Llama are"
            )
        _check_pipeline(own)
        for name in ("blocks", "stages"):
            value = own.get(name)
            if value is not None and (isinstance(value, str) or not _is_list(value, name)):
                kind = "names" if name == "blocks" else "lists of names, one a stage"
                raise PlanError(f"{name} is {value!r:.100}; it is a list of {kind}")
        if not isinstance(own.get("sequence", False), bool):
            raise PlanError(f"sequence is {own['sequence']!r}; it is True or False")
        if not isinstance(own.get("layouts", {}), Mapping):
            raise LayoutError(f"layouts is {own['layouts']!r:.100}; it maps patterns to styles")
        if own.get("schedule") == "interleaved":
            own.setdefault("virtual_stages", 2)
        idle = [name for name in own if not _OWN[name](plan)]
        shards = {name: kept[name] for name in kept if name in allowed["shards"]}
        replicas = {name: kept[name] for name in kept if name in allowed["replicas"]}
        return cls(**own, replicas=replicas, shards=shards, idle=tuple(idle))

    def fingerprint(self) -> dict[str, str]:
        """What has to be the same on every rank, as text."""
        said = {name: _plainly(getattr(self, name)) for name in _OWN if name != "example"}
        return said | {k: _plainly(v) for k, v in {**self.replicas, **self.shards}.items()}

    def lines(self) -> list[str]:
        """Options that were given, for `explain()`."""
        shown = [f"{k}={v!r}" for k, v in sorted({**self.replicas, **self.shards}.items())]
        shown += [
            f"{field.name}={getattr(self, field.name)!r:.200}"
            for field in attrs.fields(type(self))
            if field.name not in ("replicas", "shards", "idle")
            and field.name != "example"
            and getattr(self, field.name) != field.default
        ]
        lines = [f"options: {', '.join(shown)}"] if shown else []
        return lines + [f"not used under this plan: {', '.join(self.idle)}"] * bool(self.idle)


def _is_list(value: Any, name: str) -> bool:
    inner = str if name == "blocks" else (list, tuple, str)
    return isinstance(value, list | tuple) and all(isinstance(one, inner) for one in value)


def needs_shards(plan: ParallelPlan) -> bool:
    """Whether `fully_shard` is used.

    It also makes the replicas of what DDP cannot wrap: divided layers, and stages.
    """
    wide = plan.tensor > 1 or plan.pipeline > 1
    return plan.data_shard > 1 or (plan.data > 1 and wide)


def _allowed(plan: ParallelPlan) -> dict[str, list[str]]:
    """Names of the options that go on to DDP and to `fully_shard`, where the plan uses them."""
    if needs_shards(plan):
        from torch.distributed.fsdp import fully_shard

        from parallelkit_torch.parallel.shard import OURS

        return {"replicas": [], "shards": opts.accepted(fully_shard, ours=OURS)}
    replicas: list[str] = []
    if plan.tensor == plan.pipeline == 1:
        replicas = opts.accepted(DistributedDataParallel.__init__, ours=replicate.OURS)
    return {"replicas": replicas, "shards": []}


def _plainly(value: Any) -> str:
    """A value as text that is the same in every process: no addresses."""
    if isinstance(value, Mapping):
        return str({str(key): _plainly(one) for key, one in value.items()})
    if isinstance(value, list | tuple):
        return str([_plainly(one) for one in value])
    plain = value is None or isinstance(value, bool | int | float | str)
    return repr(value) if plain else type(value).__qualname__


def _said(plan: ParallelPlan) -> str:
    wide = [f"{axis}={degree}" for axis, degree in plan.degrees.items() if degree > 1]
    return ", ".join(wide) or "one rank"


def _check_pipeline(own: Mapping[str, Any]) -> None:
    schedule = own.get("schedule", "1f1b")
    if schedule not in SCHEDULES:
        raise PlanError(f"schedule is {schedule!r}; it is one of {', '.join(SCHEDULES)}")
    count = own.get("virtual_stages")
    if count is None:
        return
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise PlanError(f"virtual_stages is {count!r}; it is a positive integer")
    if (count > 1) != (schedule == "interleaved"):
        raise PlanError(
            f"virtual_stages={count} with schedule {schedule!r}: schedule 'interleaved' has two "
            "or more stages on each rank, the others have one"
        )
