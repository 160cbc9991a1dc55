"""Options of a context: which there are, what they mean, and which plan uses them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs

from parallelkit import options as opts
from parallelkit.errors import LayoutError, PlanError
from parallelkit.plan import AXES, ParallelPlan

#: Options, and under which plans each means something. They are taken under every plan, so that
#: changing a degree or the mode needs no other change.
_USES: Final[Mapping[str, Callable[[ParallelPlan], bool]]] = {
    "layouts": lambda plan: plan.tensor > 1,
    "gradients_mean": lambda plan: plan.world_size > 1,
    "parameter_broadcast": lambda plan: plan.data == plan.world_size > 1,
    "all_reduce_fusion_config": lambda plan: plan.data == plan.world_size > 1,
    # of modes "semi_auto" and "auto"
    "api": lambda plan: False,
    "search_mode": lambda plan: False,
    "dataset_strategy": lambda plan: False,
    "strategy_save": lambda plan: False,
    "strategy_load": lambda plan: False,
}


@attrs.frozen(kw_only=True)
class Settings:
    """Options of a context, checked.

    Attributes:
        layouts: pattern of cell names to a style of `layouts.STYLES`.
        gradients_mean: MindSpore's word for `reduce="mean"`; both may be given if they agree.
        parameter_broadcast: let `Model.train` give rank 0's values to all at its start, which
            `parallelize` does anyhow.
        all_reduce_fusion_config: indices at which MindSpore's own steps cut the gradients into
            fused all-reduces.
        idle: options that were given and mean nothing under this plan.
    """

    layouts: Mapping[str, str] | None = None
    gradients_mean: bool | None = None
    parameter_broadcast: bool | None = None
    all_reduce_fusion_config: Sequence[int] | None = None
    idle: tuple[str, ...] = ()

    @classmethod
    def of(cls, given: Mapping[str, Any], plan: ParallelPlan, mode: str, reduce: str) -> Settings:
        """Check options by name and value.

        Raises:
            UnsupportedFeatureError: a name is unknown.
            LayoutError: `layouts` is no mapping.
            PlanError: a value is not allowed, or contradicts `reduce`.
        """
        kept = opts.check(given, _USES, what=f"mode {mode!r}", also=AXES)
        if not isinstance(kept.get("layouts") or {}, Mapping):
            raise LayoutError(f"layouts is {kept['layouts']!r:.100}; it maps patterns to styles")
        for name in ("gradients_mean", "parameter_broadcast"):
            if not isinstance(kept.get(name, False), bool):
                raise PlanError(f"{name} is {kept[name]!r:.100}; it is True or False")
        if kept.get("gradients_mean", reduce == "mean") != (reduce == "mean"):
            raise PlanError(
                f"gradients_mean={kept['gradients_mean']} contradicts reduce={reduce!r}; "
                "leave gradients_mean out, reduce says it on every framework"
            )
        _check_fusion(kept.get("all_reduce_fusion_config"))
        idle = tuple(name for name in kept if not _USES[name](plan))
        own = {field.name for field in attrs.fields(cls)} & set(kept)
        return cls(**{name: kept[name] for name in own}, idle=idle)

    def native(self, plan: ParallelPlan, reduce: str, *, whole_world: bool) -> dict[str, Any]:
        """What `set_auto_parallel_context` is given; nothing where MindSpore has no part in it.

        Args:
            whole_world: whether the context's group is MindSpore's world, over which its own steps
                reduce.
        """
        if plan.world_size == 1 or not whole_world:
            return {}
        values: dict[str, Any] = {
            "parallel_mode": "hybrid_parallel" if plan.tensor > 1 else "data_parallel",
            "gradients_mean": reduce == "mean",
            "device_num": plan.world_size,
        }
        for name in ("parameter_broadcast", "all_reduce_fusion_config"):
            value = getattr(self, name)
            if value is not None and name not in self.idle:
                values[name] = list(value) if isinstance(value, Sequence) else value
        return values

    def lines(self) -> list[str]:
        """Options that were given, for `explain()`."""
        shown = [
            f"{field.name}={getattr(self, field.name)!r:.200}"
            for field in attrs.fields(type(self))
            if field.name != "idle" and getattr(self, field.name) is not None
        ]
        lines = [f"options: {', '.join(shown)}"] if shown else []
        return lines + [f"not used under this plan: {', '.join(self.idle)}"] * bool(self.idle)


def _check_fusion(value: Any) -> None:
    if value is None:
        return
    whole = isinstance(value, list | tuple) and all(
        isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in value
    )
    if not whole or any(b <= a for a, b in itertools.pairwise(value)):
        raise PlanError(
            f"all_reduce_fusion_config is {value!r:.100}; it is a list of ascending indices of "
            "parameters, such as [20, 35]"
        )
