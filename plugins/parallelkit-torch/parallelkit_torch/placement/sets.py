"""Attributes that a loader sets on a module, beside the values that it writes into tensors.

Such as `self._fused = None`, by which `forward` makes a weight of others anew. No tensor operation
shows it, and a copy that is repeated without the loader does not do it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, ClassVar, final

from torch import nn


@final
class Sets:
    """Notes plain attributes that this thread sets or deletes on some modules; a context.

    Attributes:
        found: the first one, for people; empty if there is none.
    """

    _active: ClassVar[list[Sets]] = []
    _lock: ClassVar[threading.Lock] = threading.Lock()
    _kept: ClassVar[tuple[Any, Any]]

    def __init__(self, parts: Iterable[nn.Module], seen: Callable[[Any], bool]) -> None:
        """Take the modules, and what says whether a value's origin is known anyway."""
        self.found = ""
        self._seen = seen
        self._parts = {id(part): part for part in parts}  # kept, or another got its number
        self._thread = threading.get_ident()

    def __enter__(self) -> Sets:
        with Sets._lock:
            if not Sets._active:
                Sets._kept = (nn.Module.__setattr__, nn.Module.__delattr__)
                nn.Module.__setattr__ = _set  # type: ignore[assignment,method-assign]
                nn.Module.__delattr__ = _delete  # type: ignore[method-assign]
            Sets._active = [*Sets._active, self]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with Sets._lock:
            Sets._active = [other for other in Sets._active if other is not self]
            if not Sets._active:
                nn.Module.__setattr__, nn.Module.__delattr__ = Sets._kept  # type: ignore[method-assign]

    def _note(self, part: nn.Module, name: str, value: Any = None) -> None:
        mine = id(part) in self._parts and self._thread == threading.get_ident()
        if mine and not self.found and not self._seen(value):
            self.found = f"{name!r} of a {type(part).__qualname__}"


def _set(part: nn.Module, name: str, value: Any) -> None:
    Sets._kept[0](part, name, value)
    if name in part.__dict__:  # else a parameter, a buffer or a module, which are seen otherwise
        for sets in Sets._active:
            sets._note(part, name, value)


def _delete(part: nn.Module, name: str) -> None:
    if name in part.__dict__:
        for sets in Sets._active:
            sets._note(part, name)
    Sets._kept[1](part, name)
