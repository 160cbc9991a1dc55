"""What a context is, in words."""

from __future__ import annotations

from collections.abc import Sequence

from parallelkit.protocols import ParallelContext
from parallelkit_mindspore.parallel.settings import Settings
from parallelkit_mindspore.parallel.settings_native import NativeSettings


def described(
    context: ParallelContext, settings: Settings, chosen: Sequence[str], native: NativeSettings
) -> list[str]:
    """Lines about a context, without its models.

    Args:
        chosen: lines that say why it is as it is.
        native: what the context has set.
    """
    plan, group = context.plan, context.group
    degrees = ", ".join(f"{a} {d}" for a, d in plan.degrees.items() if d > 1) or "one rank"
    said = ", ".join(f"{name}={value!r}" for name, value in native.values.items())
    other = f", effective {context.effective!r}" if context.effective != context.mode else ""
    lines = [
        f"mode {context.mode!r}{other} on {group.device} with {group.backend}: {degrees}",
        f"gradients: {context.reduce} over {plan.data_shard_count} data part(s)",
        f"data: part {plan.data_shard_index(group.rank)} of {plan.data_shard_count}",
        f"set_auto_parallel_context: {said or 'left alone'}",
        *native.changed_lines(),
        *settings.lines(),
        *chosen,
    ]
    if plan.world_size > 1 and not native.values:
        lines.append(
            "the group is not the whole world, over which MindSpore's own steps reduce: use "
            "train_step or grad_reducer"
        )
    return lines
