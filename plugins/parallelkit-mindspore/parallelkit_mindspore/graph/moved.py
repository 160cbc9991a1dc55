"""Whether parameters lie in other memory than when a graph was compiled with them.

`set_data`, and with it `load_checkpoint`, `load_param_into_net` and `load_state_dict`, give a
parameter other memory. What `mindspore.jit` compiled before goes on with the old one (2.10, CPU),
so a graph has to be compiled again after that.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, final

import mindspore as ms

from parallelkit_mindspore.graph.reach import reach


@final
class Addresses:
    """Where the parameters that graphs compute with were, for each cell the code is bound to.

    A look costs about a microsecond a parameter.
    """

    def __init__(self) -> None:
        # a copied cell shares its compiled function with the cell that it was copied from
        self._kept: weakref.WeakKeyDictionary[Any, tuple[tuple[Any, ...], list[int]]] = (
            weakref.WeakKeyDictionary()
        )

    def note(self, key: Any, roots: Iterable[Any]) -> None:
        """Remember where all parameters and buffers are that `roots` come to."""
        found = reach(*roots).tensors
        self._kept[key] = (found, _pointers(found))

    def moved(self, key: Any) -> bool:
        """Whether one is elsewhere now; False where nothing was noted."""
        kept = self._kept.get(key)
        return kept is not None and _pointers(kept[0]) != kept[1]

    def forget(self, key: Any) -> None:
        """Drop what was noted."""
        self._kept.pop(key, None)


def _pointers(tensors: Iterable[Any]) -> list[int]:
    from mindspore._c_expression import TensorPy

    return list(map(getattr(TensorPy, "_data_ptr", ms.Tensor.data_ptr), tensors))
