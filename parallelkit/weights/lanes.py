"""The lanes by which one rank of a publisher hands its parts out.

In the lane `host` parts are written into an arena of host memory, from which members take them. In
the lane `device` members read the live weights themselves, on a device. Each has digests of its
own, so what members want is told apart by lane.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, Final, Generic, NamedTuple, TypeVar

import attrs
import numpy as np

from parallelkit.weights.buckets import FULL, Digests
from parallelkit.weights.exports import Export
from parallelkit.weights.needs import Needs
from parallelkit.weights.plan import TransferPlan, plan_transfer

HOST: Final = "host"
DEVICE: Final = "device"


class Want(NamedTuple):
    """What a kind of members keeps, and by which lane they get it."""

    needs: Needs
    lane: str = HOST


@attrs.frozen
class Hashed:
    """What a rank says of one kind of members after an update was staged.

    Attributes:
        digests: one for each bucket of this rank that they get; 0 where none was wanted.
        nbytes: of those buckets.
        changed: bytes of buckets that differ from the last committed version; None if unknown.
    """

    digests: Digests
    nbytes: int
    changed: int | None


class Side:
    """A rank's side of the plan with members that keep the same. Made once, used in each update."""

    def __init__(self, export: Export, needs: Needs) -> None:
        self.plan: TransferPlan = plan_transfer(export.manifest, needs, ranks=(export.rank,))
        self.buckets = self.plan.of(export.rank)
        self.sizes = np.array([bucket.nbytes for bucket in self.buckets], np.int64)
        self.nbytes = int(self.sizes.sum())
        self.committed: Digests | None = None
        self.staged: Digests | None = None

    def changed(self, digests: Digests) -> int | None:
        """Bytes of buckets that are not as in the last committed version."""
        if self.committed is None:
            return None
        return int(self.sizes[digests != self.committed].sum())

    def said(self, digests: Digests, verify: str) -> Hashed:
        """What the rank says of a version with these digests."""
        if verify not in FULL:
            return Hashed(digests, self.nbytes, None)
        self.staged = digests
        return Hashed(digests, self.nbytes, self.changed(digests))


S = TypeVar("S", bound=Side)


class Lane(ABC, Generic[S]):
    """One lane of one rank."""

    def __init__(self, export: Export) -> None:
        self.rank = export.rank
        self.export = export
        self._sides: dict[Needs, S] = {}

    @property
    @abstractmethod
    def epoch(self) -> int:
        """Of what members read."""

    @abstractmethod
    def bump(self) -> int:
        """Advance the epoch: whatever was read before is void. Returns the new epoch."""

    @abstractmethod
    def offers(self) -> dict[str, bytes]:
        """By transport, how to reach what members read."""

    def encrypted(self) -> dict[str, bool]:
        """By transport, whether bytes are encrypted on their way, of those that use a network."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Free everything; harmless when repeated."""

    @abstractmethod
    def _new_side(self, needs: Needs) -> S: ...

    def advance(self, epoch: int) -> None:
        """Bump until the epoch is that of the others, which is never behind."""
        while self.epoch < epoch:
            self.bump()

    @property
    def staged(self) -> bool:
        """Whether anything was hashed since the last version that was committed."""
        return any(side.staged is not None for side in self._sides.values())

    def committed(self) -> None:
        """What was hashed last is the version that later ones are compared with."""
        for side in self._sides.values():
            side.committed, side.staged = side.staged, None

    def void(self) -> None:
        """What was hashed last becomes no version."""
        for side in self._sides.values():
            side.staged = None

    def _side(self, needs: Needs) -> S:
        side = self._sides.get(needs)
        if side is None:
            side = self._sides[needs] = self._new_side(needs)
        return side

    def _forget(self, asked: Collection[Needs]) -> None:
        """Drop the sides with members that are gone, but what a version is compared with."""
        self._sides = {
            needs: side
            for needs, side in self._sides.items()
            if needs in asked or side.committed is not None
        }


class Lanes:
    """All lanes of one rank, which have one epoch. Lanes may be added by another thread."""

    def __init__(self) -> None:
        self.epoch = 0
        self._lanes: dict[str, Lane[Any]] = {}
        self._lock = threading.Lock()

    def __contains__(self, name: str) -> bool:
        return name in self._lanes

    def __getitem__(self, name: str) -> Any:
        """A lane by its name."""
        return self._lanes[name]

    def add(self, name: str, lane: Lane[Any]) -> None:
        """Begin to hand out by one more lane."""
        with self._lock:
            lane.advance(self.epoch)
            self._lanes[name] = lane

    def bump(self) -> int:
        """Advance the epoch of all; returns it."""
        with self._lock:
            self.epoch += 1
            for lane in self._lanes.values():
                lane.advance(self.epoch)
            return self.epoch

    def advance(self, epoch: int) -> None:
        """Bump until the epoch is that of the other ranks, which is never behind."""
        while self.epoch < epoch:
            self.bump()

    def offers(self) -> Mapping[str, bytes]:
        """By transport, how to reach what members read."""
        with self._lock:
            return {k: v for lane in self._lanes.values() for k, v in lane.offers().items()}

    def void(self) -> None:
        """What was hashed last becomes no version."""
        with self._lock:
            for lane in self._lanes.values():
                lane.void()

    def encrypted(self) -> Mapping[str, bool]:
        """By transport, whether bytes are encrypted on their way, of those that use a network."""
        with self._lock:
            return {k: v for lane in self._lanes.values() for k, v in lane.encrypted().items()}

    def committed(self) -> None:
        """What was hashed last is the version that later ones are compared with."""
        with self._lock:
            if any(lane.staged for lane in self._lanes.values()):  # else nobody was there to get it
                for lane in self._lanes.values():
                    lane.committed()

    def close(self) -> None:
        """Close all; harmless when repeated."""
        with self._lock:
            for lane in self._lanes.values():
                lane.close()
