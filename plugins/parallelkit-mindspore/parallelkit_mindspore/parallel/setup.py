"""Make a context from what was asked for."""

from __future__ import annotations

from typing import Final

from parallelkit.errors import PlanError, UnsupportedFeatureError
from parallelkit.protocols import ParallelContext, ProcessGroup
from parallelkit.specs import ContextSpec
from parallelkit_mindspore import runtime

_MODES: Final = ("standalone", "data", "hybrid", "semi_auto", "auto")
#: Axes that this module's modes run.
_RUN: Final = ("data", "tensor")


def setup_parallel_context(spec: ContextSpec, group: ProcessGroup) -> ParallelContext:
    """Make the context that `spec` asks for. Nothing is sent.

    Modes `"standalone"`, `"data"` and `"hybrid"` are made here; `"semi_auto"` and `"auto"`, which
    MindSpore runs on Ascend and GPU only, by `semi_auto`.

    Raises:
        UnsupportedFeatureError: a mode, an axis or an option that is not supported, by name.
        PlanError: the plan is for another world size, or `reduce` is unknown.
        ContextOrderError: a training step exists that was built under other settings.
        WrongThreadError: another thread uses MindSpore.
    """
    runtime.mindspore("parallel_context")
    check(spec, group)
    if spec.mode in ("semi_auto", "auto"):
        from parallelkit_mindspore.parallel import semi_auto

        made: ParallelContext = semi_auto.setup(spec, group)
        return made
    wide = [a for a, n in spec.plan.degrees.items() if n > 1 and a not in _RUN and a != "expert"]
    wide += ["expert"] * (spec.plan.expert > 1)
    if wide:
        raise UnsupportedFeatureError(
            f"mode {spec.mode!r} of the mindspore plugin has no axis {wide[0]!r} "
            f"({wide[0]}={spec.plan.degree(wide[0])}); it runs {' and '.join(_RUN)}"
        )
    from parallelkit_mindspore.parallel.context import MindSporeParallelContext
    from parallelkit_mindspore.parallel.settings import Settings

    settings = Settings.of(spec.options, spec.plan, spec.mode, spec.reduce)
    return MindSporeParallelContext(spec, group, settings)


def check(spec: ContextSpec, group: ProcessGroup) -> None:
    """Raise for a spec that no mode can run; before anything is changed or sent."""
    if spec.plan.world_size != group.world_size:
        raise PlanError(
            f"the plan is for {spec.plan.world_size} ranks and the group has {group.world_size}"
        )
    if spec.reduce not in ("mean", "sum"):
        raise PlanError(f"reduce is {spec.reduce!r}; it is 'mean' or 'sum'")
    if spec.mode not in _MODES:
        raise UnsupportedFeatureError(
            f"the mindspore plugin has no mode {spec.mode!r}; it has {', '.join(_MODES)}"
        )
