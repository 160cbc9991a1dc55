"""Parameters that lie in other memory than before: what was compiled is compiled anew.

`Parameter.set_data`, which `mindspore.load_param_into_net` calls, gives a parameter other memory. A
graph that MindSpore has compiled goes on with the old one, and says nothing: an optimiser of
`mindspore.nn`, compiled in PyNative too, steps weights that nobody reads any more, and a forward
graph reads weights that nobody steps. Training stands still.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, NamedTuple, final
from weakref import WeakKeyDictionary

from mindspore import nn

log = logging.getLogger("parallelkit")


class _Places(NamedTuple):
    """Parameters, and where each lies."""

    parameters: tuple[Any, ...]
    at: list[int]


@final
class Addresses:
    """Where the parameters of some cells lay when we last looked.

    Looking costs about a microsecond for each parameter.
    """

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[nn.Cell, _Places] = WeakKeyDictionary()

    def note(self, owner: nn.Cell) -> None:
        """Remember where they lie; what MindSpore moves within a step is no reason to compile."""
        known = self._known.get(owner)
        # listing a cell's parameters takes longer than looking at each
        parameters = tuple(owner.get_parameters()) if known is None else known.parameters
        self._known[owner] = _Places(parameters, _of(parameters))

    def follow(self, owner: nn.Cell) -> bool:
        """Forget all compiled graphs if one lies elsewhere than noted; say whether so.

        A cell that was not noted is one that nothing of ours was compiled for.
        """
        known = self._known.get(owner)
        if known is None or known.at == _of(known.parameters):
            return False
        log.info(
            "parameters of a %s were given other memory (set_data, load_param_into_net): graphs "
            "are compiled anew; parameter.copy_() and context.load() need not",
            type(owner).__qualname__,
        )
        forget_graphs()
        return True


def _of(parameters: Iterable[Any]) -> list[int]:
    """Addresses; 0 for a parameter that has no value yet."""
    return [0 if one.has_init else one.data_ptr() for one in parameters]


def forget_graphs() -> None:
    """Free all that MindSpore has compiled in this process; the next calls compile again.

    Not `mindspore.ms_memory_recycle()`, which also drops what was parsed: functions made later
    then failed to compile, since they were taken for others.
    """
    from mindspore.graph import api

    from parallelkit_mindspore.graph import apart

    apart.drop(apart.phases())
    for keys in api.cells_compile_cache.values():
        if keys:
            api._cell_graph_executor.del_net_res(None, keys)
            keys.clear()
