"""Parameters that lie in other memory than before: what was compiled goes on with the old one.

`Parameter.set_data`, which `mindspore.load_param_into_net` calls, gives a parameter other memory. A
graph that MindSpore has compiled goes on with the old one, and says nothing: an optimiser of
`mindspore.nn`, compiled in PyNative too, steps weights that nobody reads any more, and a forward
graph reads weights that nobody steps. Training stands still. To free what was compiled does not
heal it reliably (2.10: after some histories of a process it changed nothing), so it is an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, final
from weakref import WeakKeyDictionary

from mindspore import nn

from parallelkit.errors import MovedParameterError


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
        """Remember where they lie; what MindSpore moves within a step is not what `check` means."""
        known = self._known.get(owner)
        # listing a cell's parameters takes longer than looking at each
        parameters = tuple(owner.get_parameters()) if known is None else known.parameters
        self._known[owner] = _Places(parameters, _of(parameters))

    def check(self, owner: nn.Cell) -> None:
        """Raise if one lies elsewhere than noted; a cell that was not noted has no graphs of ours.

        Raises:
            MovedParameterError: with the first one's name.
        """
        known = self._known.get(owner)
        if known is None:
            return
        places = zip(known.parameters, known.at, _of(known.parameters), strict=True)
        moved = [one.name for one, before, now in places if before != now]
        if moved:
            raise MovedParameterError(
                f"{len(moved)} parameter(s) of a {type(owner).__qualname__}, the first "
                f"{moved[0]!r}, were given other memory after a train step, by set_data, "
                "load_checkpoint or load_param_into_net. What MindSpore has compiled goes on with "
                "the old memory, so training would stand still without an error. Load before the "
                "first train step, or in place: context.load(...), ops.assign(parameter, value)"
            )


def _of(parameters: Iterable[Any]) -> list[int]:
    """Addresses; 0 for a parameter that has no value yet."""
    return [0 if one.has_init else one.data_ptr() for one in parameters]
