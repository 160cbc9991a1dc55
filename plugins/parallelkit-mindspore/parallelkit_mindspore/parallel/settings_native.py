"""MindSpore's parallel settings, which belong to the process: set in layers, and put back.

`set_auto_parallel_context` changes what every step reads that is built later. Each context of ours
is one layer of values over what the user had set; the newest is in force. MindSpore cannot set
back everything that it can tell (an empty fusion list, `full_batch_is_set`), so going back means
its own reset, and then only what differs from the defaults.

`parallel_optimizer_config`, `pipeline_config` and `group_ckpt_save_file` cannot be read: what a
user set of these beforehand is lost once a layer was taken off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, final

from parallelkit.errors import ContextOrderError
from parallelkit_mindspore import runtime

#: What can be read and is put back.
READABLE: Final = (
    "parallel_mode",
    "device_num",
    "global_rank",
    "gradients_mean",
    "gradient_fp32_sync",
    "loss_repeated_mean",
    "pipeline_stages",
    "pipeline_result_broadcast",
    "search_mode",
    "parameter_broadcast",
    "strategy_ckpt_load_file",
    "strategy_ckpt_save_file",
    "strategy_ckpt_config",
    "dataset_strategy",
    "enable_parallel_optimizer",
    "force_fp32_communication",
    "all_reduce_fusion_config",
    "communi_parallel_mode",
    "optimizer_weight_shard_size",
    "optimizer_weight_shard_aggregated_save",
    "enable_alltoall",
    "comm_fusion",
)

_layers: list[NativeSettings] = []
_users: dict[str, Any] = {}


def snapshot() -> dict[str, Any]:
    """What MindSpore says of its settings now."""
    ms = runtime.mindspore("parallel_context")
    return {name: ms.get_auto_parallel_context(name) for name in READABLE}


@final
class NativeSettings:
    """One layer of settings.

    Attributes:
        values: keyword arguments of `set_auto_parallel_context`.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = dict(values)
        self._read: dict[str, Any] = {}  # as MindSpore tells them, which may be in other words

    def apply(self) -> None:
        """Put this layer in force, on top of the user's settings and in place of older layers.

        One without values leaves everything alone.
        """
        global _users
        if not self.values:
            return
        if not _layers:
            _users = snapshot()
        else:
            _back_to(_users)
        _layers.append(self)
        runtime.mindspore("parallel_context").set_auto_parallel_context(**self.values)
        self._read = self._live()

    def changed(self) -> dict[str, Any]:
        """Settings of this layer that have other values now; nothing if a newer layer is in force.

        So has a call of `set_auto_parallel_context` or `reset_auto_parallel_context` set them.
        Costs a microsecond for each.
        """
        if not _layers or _layers[-1] is not self:
            return {}
        live = self._live()
        return {name: value for name, value in live.items() if value != self._read[name]}

    def _live(self) -> dict[str, Any]:
        ms = runtime.mindspore("parallel_context")
        return {name: _now(ms, name) for name in self.values if name in READABLE}

    def changed_lines(self) -> list[str]:
        """What `explain()` says of it."""
        return [
            f"but {name} was set to {value!r} since, which steps that are built now follow"
            for name, value in self.changed().items()
        ]

    def refuse_changes(self, what: str) -> None:
        """Raise if a step that is built now would not reduce as the context does.

        Raises:
            ContextOrderError: with each setting, its value and the context's.
        """
        changed = self.changed()
        if changed:
            said = ", ".join(f"{n} is {v!r}, not {self._read[n]!r}" for n, v in changed.items())
            raise ContextOrderError(
                f"{what}: MindSpore's settings were changed after the context was made: {said}. A "
                "step that is built now follows these, and not the context. Remove that call of "
                "set_auto_parallel_context or reset_auto_parallel_context; to train otherwise, "
                "call reset() of the context and make another"
            )

    def restore(self) -> None:
        """Take this layer off: the one below is in force again, or what the user had set.

        Harmless when repeated. Steps that were built under it keep what they read.
        """
        if self not in _layers:
            return
        newest = _layers[-1] is self
        _layers.remove(self)
        if not newest:
            return
        _back_to(_users)
        if _layers:
            runtime.mindspore("parallel_context").set_auto_parallel_context(**_layers[-1].values)


def in_force() -> bool:
    """Whether settings of a context are in force, and not the user's own alone."""
    return bool(_layers)


@contextmanager
def kept() -> Iterator[None]:
    """Put the settings back at the end, whatever MindSpore does to them within.

    Compiling an `AutoParallel` sets its own, and then the defaults; if it fails, its own stay.
    """
    before = snapshot()
    try:
        yield
    finally:
        if snapshot() != before:
            _back_to(before)


def _back_to(values: Mapping[str, Any]) -> None:
    ms = runtime.mindspore("parallel_context")
    ms.reset_auto_parallel_context()
    differing = {name: value for name, value in values.items() if value != _now(ms, name)}
    if differing:
        ms.set_auto_parallel_context(**differing)


def _now(ms: Any, name: str) -> Any:
    return ms.get_auto_parallel_context(name)
