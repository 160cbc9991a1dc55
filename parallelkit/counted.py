"""The default group as users hold it: shared, counted, closed by the last close."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any, Final

from parallelkit.errors import GroupError
from parallelkit.loader import PluginManager
from parallelkit.plan import ParallelPlan
from parallelkit.protocols import Plain, ProcessGroup, Tensor
from parallelkit.selection import Selection
from parallelkit.specs import GroupSpec

#: Held while a group is opened or closed, so that the two never overlap.
LIFE: Final = threading.RLock()


class CountedGroup:
    """The default group as users hold it: the plugin's group, closed by the last close.

    Each `init_process_group` with the same specification returns this very object and counts one
    more; each `close`, or end of a `with` block, counts one less. Everything else goes straight
    to the plugin's group.
    """

    def __init__(
        self,
        inner: ProcessGroup,
        spec: GroupSpec,
        selection: Selection,
        manager: PluginManager,
    ) -> None:
        self.inner = inner
        self.spec = spec
        self.selection = selection
        self.manager = manager
        self.plan: ParallelPlan | None = None  #: what the group was opened for, where said
        self.context: Any = None  #: the parallel context opened last, for `explain()`
        self._count = 1

    # --- facts

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def world_size(self) -> int:
        return self.inner.world_size

    @property
    def local_rank(self) -> int:
        return self.inner.local_rank

    @property
    def device(self) -> str:
        return self.inner.device

    @property
    def backend(self) -> str:
        return self.inner.backend

    @property
    def framework(self) -> str:
        return self.inner.framework

    @property
    def timeout(self) -> float:
        return self.inner.timeout

    @property
    def closed(self) -> bool:
        return self._count == 0 or self.inner.closed

    @property
    def native(self) -> Any:
        return self.inner.native

    # --- collectives

    def barrier(self, *, timeout: float | None = None) -> None:
        self.inner.barrier(timeout=timeout)

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        return self.inner.all_reduce(x, op)

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        return self.inner.broadcast(x, src)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return self.inner.all_gather(x)

    def reduce_scatter(self, x: Tensor, op: str = "sum") -> Tensor:
        return self.inner.reduce_scatter(x, op)

    def broadcast_object(self, obj: Plain, src: int = 0, *, timeout: float | None = None) -> Plain:
        return self.inner.broadcast_object(obj, src, timeout=timeout)

    def subgroup(self, ranks: Sequence[int]) -> ProcessGroup | None:
        return self.inner.subgroup(ranks)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not set yet: a copy being made
            raise AttributeError(name)
        return getattr(self.inner, name)  # what a plugin's own group has beyond the protocol

    # --- life

    def open_again(self) -> CountedGroup:
        """Count one more user."""
        self._count += 1
        return self

    def close(self) -> None:
        """Leave the group; the last of as many calls as there were inits closes it."""
        with LIFE:
            if self._count == 0:
                return
            self._count -= 1
            if self._count == 0:
                self.inner.close()

    def close_for_all(self) -> None:
        """Close however often it was opened; what the backend says to that is dropped."""
        with LIFE, contextlib.suppress(GroupError):
            if self._count:
                self._count = 0
                self.inner.close()

    def __enter__(self) -> CountedGroup:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"rank {self.rank} of {self.world_size}"
        return f"<group {self.spec.framework}/{self.spec.backend} on {self.spec.device}, {state}>"
