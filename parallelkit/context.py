"""Set up a parallel context: a plan, checked against the backend before anything is touched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast, get_args

from parallelkit import groups, hooks
from parallelkit.errors import GroupError, PlanError
from parallelkit.loader import PluginManager
from parallelkit.plan import AXES, ParallelPlan
from parallelkit.plan import plan as plan_degrees
from parallelkit.protocols import ParallelContext, ProcessGroup
from parallelkit.records import PluginInfo
from parallelkit.selection import require, select
from parallelkit.specs import Candidate, ContextSpec, ProbeRequest, Reduce


def parallel_context(
    mode: str | None = None,
    *,
    plan: ParallelPlan | None = None,
    pipeline: int | None = None,
    data: int | None = None,
    data_shard: int | None = None,
    context: int | None = None,
    tensor: int | None = None,
    expert: int | None = None,
    reduce: str = "mean",
    group: ProcessGroup | None = None,
    fallback: bool = False,
    manager: PluginManager | None = None,
    **options: Any,
) -> ParallelContext:
    """Spread training over a group's ranks as planned.

    Collective over the group: every rank makes the same call. It blocks while the framework
    makes its groups, up to the group's timeout. The plan and the backend's features are checked
    first, without communication.

    Args:
        mode: `"standalone"`, `"data"`, `"hybrid"`, `"semi_auto"`, `"auto"`; None: `"data"` or
            `"hybrid"`, by the degrees.
        plan: from `pk.plan`, in place of mode and degrees; with none of these, the plan that
            `init_process_group(plan=...)` was given, if it was.
        pipeline, data, data_shard, context, tensor, expert: degree of each axis; one may be -1
            and is inferred. None is 1, for `data` whatever the others leave; with `"auto"`, to be
            searched.
        reduce: `"mean"` or `"sum"` of the ranks' gradients, the same on every framework.
        group: the group to use, the current one by default.
        fallback: take the nearest mode that can run (see `.effective`) instead of an error.
        manager: plugins to use, the process's own by default.
        options: options of the framework's own, refused by name when unknown.

    Raises:
        NotInitializedError: no group is open.
        GroupError: `group` is no group.
        PlanError: degrees that do not fit the world size, or an unknown `reduce`.
        UnsupportedFeatureError: the backend cannot run the mode or an axis; says what it can.
    """
    group = group if group is not None else groups.current_group()
    if not {"world_size", "framework", "subgroup"} <= set(dir(group)):
        raise GroupError(
            f"group is {group!r:.100}; it is what init_process_group or subgroup returned"
        )
    if reduce not in get_args(Reduce):
        raise PlanError(f"reduce is {reduce!r}; it is 'mean' or 'sum'")
    degrees = {"pipeline": pipeline, "data": data, "data_shard": data_shard}
    degrees |= {"context": context, "tensor": tensor, "expert": expert}
    pinned = {axis: degree for axis, degree in degrees.items() if degree is not None}
    held = groups.open_group()
    if plan is None and mode is None and not pinned and held is not None and group is held:
        plan = held.plan
    if plan is not None:
        planned = _given(plan, group.world_size, mode, pinned)
    else:
        if mode == "auto":  # free is what -1 says there
            pinned = {axis: degree for axis, degree in pinned.items() if degree != -1}
        planned = plan_for(group.world_size, mode, pinned)
    if manager is None and held is not None:
        manager = held.manager
    plugin, candidate = backend_of(group, manager=manager)
    wanted = {*planned.features(), *(f"axis.{axis}" for axis, n in pinned.items() if n > 1)}
    mode_wanted = f"context.{planned.mode}"
    if fallback:
        wanted.discard(mode_wanted)
    advice = {mode_wanted: "fallback=True takes the nearest mode that can run"}
    require(candidate, plugin, wanted, advice=advice)
    spec = ContextSpec(
        plan=planned,
        mode=planned.mode,
        pinned=pinned,
        reduce=cast("Reduce", reduce),
        fallback=fallback,
        options=options,
    )
    made = hooks.setup_parallel_context(plugin, spec, group, manager=manager)
    if held is not None:
        held.context = made
    return made


def plan_for(world_size: int, mode: str | None, pinned: Mapping[str, int]) -> ParallelPlan:
    """The plan of the degrees given; mode `"auto"` starts from one that has them and is possible.

    Raises:
        PlanError: the degrees are impossible for the world size.
    """
    if mode != "auto":
        return plan_degrees(world_size, mode, **pinned)
    free = [axis for axis in ("data", *AXES) if axis not in pinned]
    return plan_degrees(world_size, mode, **{**pinned, **dict.fromkeys(free[:1], -1)})


def _given(
    plan: ParallelPlan, world_size: int, mode: str | None, pinned: Mapping[str, int]
) -> ParallelPlan:
    if not isinstance(plan, ParallelPlan):
        raise PlanError(f"plan is {plan!r:.100}; it is what pk.plan returned")
    plan.check_group(world_size, f"the group has {world_size}")
    if mode is not None or pinned:
        given = {"mode": mode, **pinned} if mode is not None else pinned
        said = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise PlanError(f"plan was given together with {said}; give one or the other")
    return plan


def backend_of(
    group: ProcessGroup, *, manager: PluginManager | None = None
) -> tuple[PluginInfo, Candidate]:
    """Return the plugin that opened `group`, else the one that serves its framework."""
    held = groups.open_group()
    if held is not None and (group is held or group.framework == held.framework):
        return held.selection.winner, held.selection.candidate
    request = ProbeRequest(framework=group.framework)
    selection = select(request, manager=manager)
    return selection.winner, selection.candidate
