"""Make a context from what was asked for: check the plan, or search for one."""

from __future__ import annotations

from typing import Any, Final

from parallelkit.errors import PlanError, RankMismatchError, UnsupportedFeatureError
from parallelkit.plan import ParallelPlan
from parallelkit.protocols import Plain, ProcessGroup
from parallelkit.specs import ContextSpec
from parallelkit_torch.parallel.agreement import same_everywhere
from parallelkit_torch.parallel.context import TorchParallelContext
from parallelkit_torch.parallel.settings import Settings

_MODES: Final = ("standalone", "data", "hybrid", "semi_auto", "auto")
#: Axes that are planned and validated, and executed in a later version.
_LATER: Final = ("context", "expert")


def setup_parallel_context(spec: ContextSpec, group: ProcessGroup) -> TorchParallelContext:
    """Make the context that `spec` asks for. Nothing is sent, but with mode `"auto"`.

    Raises:
        UnsupportedFeatureError: a mode, an axis or an option that is not supported, by name.
        PlanError: the plan is for another world size, `reduce` is unknown, or no plan fits.
        LayoutError: `"semi_auto"` without layouts.
        RankMismatchError: the ranks' searches of mode `"auto"` came to different plans.
    """
    plan = spec.plan
    if plan.world_size != group.world_size:
        raise PlanError(
            f"the plan is for {plan.world_size} ranks and the group has {group.world_size}"
        )
    if spec.reduce not in ("mean", "sum"):
        raise PlanError(f"reduce is {spec.reduce!r}; it is 'mean' or 'sum'")
    later = [axis for axis in _LATER if plan.degree(axis) > 1]
    if later:
        raise UnsupportedFeatureError(
            f"the torch plugin plans the axis {later[0]!r} ({later[0]}={plan.degree(later[0])}) "
            "but cannot run it yet; it runs pipeline, data, data_shard and tensor"
        )
    if spec.mode not in _MODES:
        raise UnsupportedFeatureError(
            f"the torch plugin has no mode {spec.mode!r}; it has {', '.join(_MODES)}"
        )
    chosen: list[str] = []
    options = dict(spec.options)
    if spec.mode == "auto":
        plan, chosen, options = _search(spec, group)
    settings = Settings.of(options, plan, spec.mode)
    return TorchParallelContext(spec, plan, group, settings, chosen)


def _search(
    spec: ContextSpec, group: ProcessGroup
) -> tuple[ParallelPlan, list[str], dict[str, Any]]:
    """Mode auto: search on every rank, and see that all came to the same."""
    from parallelkit_torch.parallel.auto import choose

    search, rest = choose(spec, group)
    best = search.best.plan
    mine: list[Plain] = [best.degree(axis) for axis in best.degrees]
    same, first = same_everywhere(mine, group)
    if not same:
        there = "another on another rank" if first == mine else f"{first!r} on rank 0"
        raise RankMismatchError(
            f"mode 'auto' found the degrees {mine} on rank {group.rank} and {there}: give every "
            "rank the same model, memory and options"
        )
    return best, search.explain().splitlines(), rest
