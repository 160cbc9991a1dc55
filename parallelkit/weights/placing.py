"""The subscriber's half of moving bytes: what every way into a target has to do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import attrs

from parallelkit.errors import ProtocolError
from parallelkit.protocols import LocatedSink, WeightSink
from parallelkit.weights import overlap as spans
from parallelkit.weights.buckets import Digests, Workers, from_wire, wanted_buckets
from parallelkit.weights.manifest import Manifest
from parallelkit.weights.moves import kept_bytes, laid_out, match
from parallelkit.weights.plan import Bucket, TransferPlan


@attrs.frozen
class Fetch:
    """What one version's bytes are fetched by.

    Attributes:
        version, epoch, slot: as the publisher said.
        deadline: monotonic seconds.
    """

    version: int
    epoch: int
    slot: int
    deadline: float


class Ways(Protocol):
    """A member's ways to the publisher's ranks."""

    @property
    def plan(self) -> TransferPlan:
        """What this member gets."""

    @property
    def by_rank(self) -> Mapping[int, Sequence[Bucket]]:
        """The plan's buckets, by rank ascending."""

    def check_epoch(self, epoch: int, version: int, deadline: float) -> None:
        """Raise `EpochError` unless every rank is at this epoch still."""

    def follow(self, offers: Sequence[tuple[int, bytes]]) -> None:
        """Some ranks' weights lie elsewhere now: by rank, the new offer."""

    def close(self) -> None:
        """Close every way; harmless when repeated."""


def _unclaimed(target: Any, memory: Sequence[spans.Span]) -> None:
    """Nobody else is asked."""


class Placing(ABC):
    """Fetches, hashes and places one version. Not safe to call from several threads."""

    def __init__(
        self, sink: WeightSink, needs: Manifest, readers: Ways, verify: str, run_id: bytes
    ) -> None:
        """
        Args:
            sink: where to.
            needs: its manifest.
            readers: where from, and the plan.
            verify, run_id: which buckets are hashed, together with the version.
        """
        self.readers = readers
        self.plan: TransferPlan = readers.plan
        self.repeated = 0
        self.staged_version = 0
        #: Called when the sink has begun, with what is to be written; it may raise.
        self.claims: Callable[[Any, Sequence[spans.Span]], None] = _unclaimed
        self._sink = sink
        self._located = sink if isinstance(sink, LocatedSink) else None
        self._begun = False  # whether any live memory may have been written, by the last version
        self._verify = verify
        self._run_id = run_id
        self._order = match(self.plan.manifest, needs)
        self._sizes = kept_bytes(self.plan)
        self._starts, self._room = laid_out(self._sizes)
        self._fetched = self._placed = b""  # digests: as fetched last, and of what is placed next
        self._hashed_live = 0  # tensors of which live memory was hashed, of what came last

    @property
    def module(self) -> Any:
        """What the user works with."""
        return self._sink.module

    @abstractmethod
    def explain(self) -> str:
        """Say how tensors reach the target."""

    @property
    def memory(self) -> Sequence[spans.Span]:
        """Live memory that the last version was written to, as far as that is known.

        The same object as long as it is the same memory.
        """
        if self._located is None or not self._begun:
            return ()
        return self._located.live_memory()

    @property
    def verified(self) -> tuple[int, int]:
        """Of how many tensors live memory was hashed, and of how many others what was received.

        Of the version that was placed or staged last; none where nothing is hashed.
        """
        if self._verify == "off":
            return 0, 0
        return self._hashed_live, sum(1 for _ in self._kept()) - self._hashed_live

    def check(self) -> None:
        """Raise if the target is not what it was when it joined; nothing is written."""
        self._sink.check()

    @abstractmethod
    def allocate_staging(self, versions: int = 2) -> None:
        """Make room of our own for one version, or for two as `serve` needs it."""

    @abstractmethod
    def prepare(self, *, staged: bool) -> None:
        """In place: do what may fail before the decision falls, and write nothing."""

    @abstractmethod
    def fetch(self, fetch: Fetch, workers: Workers, *, staged: bool) -> bytes:
        """Bring the bytes near, as far as they have to be, and hash them.

        Args:
            staged: into memory of our own in any case.

        Returns:
            The digests' wire form.
        """

    @abstractmethod
    def keep_staged(self, version: int) -> None:
        """The spare holds `version` now; what was staged before becomes the spare."""

    @abstractmethod
    def place(self, workers: Workers) -> None:
        """Copy the fetched bytes into live memory."""

    @abstractmethod
    def place_staged(self, workers: Workers) -> None:
        """Copy the staged version into live memory."""

    @abstractmethod
    def fetch_verified(self, fetch: Fetch, expected: bytes, workers: Workers) -> None:
        """Bring a decided version into memory of our own; see `place_fetched`."""

    @abstractmethod
    def place_fetched(self, fetch: Fetch, expected: bytes, workers: Workers) -> None:
        """Fetch a decided version straight into live memory, and compare its digests.

        A bucket that came changed is fetched once more.

        Args:
            expected: the source's digests, in wire form.

        Raises:
            CorruptionError: it came changed again; live memory is of no version.
            ProtocolError: there are not as many digests as buckets.
        """

    @abstractmethod
    def readback(self, version: int, workers: Workers) -> bytes:
        """Hash live memory, in the publisher's order; returns the digests' wire form.

        Raises:
            CorruptionError: they are not those of the version that was placed.
        """

    @abstractmethod
    def release(self) -> None:
        """Let go of all memory."""

    # --- for those that do it

    def _begin(self) -> None:
        """Let the sink begin; until it has, nothing was written."""
        self._begun = False
        self._sink.begin()
        self.claims(self.module, () if self._located is None else self._located.live_memory())
        self._begun = True

    def _expected(self, version: int, wire: bytes) -> dict[int, int]:
        """The source's digest of each bucket that is to be compared."""
        wanted = self._wanted(version)
        digests = self._digests(wire, len(wanted) if any(wanted) else 0)
        return {i: digest for i, digest in enumerate(digests.tolist()) if wanted[i]}

    @staticmethod
    def _digests(wire: bytes, count: int) -> Digests:
        """So many digests as they were sent."""
        digests = from_wire(wire)
        if digests is None or len(digests) != count:
            raise ProtocolError(
                f"the publisher sent {len(wire)} bytes of digests for {count} buckets of 8 bytes"
            )
        return digests

    def _wanted(self, version: int) -> list[bool]:
        return [
            chosen
            for rank, buckets in self.readers.by_rank.items()
            for chosen in wanted_buckets(self._verify, len(buckets), self._run_id, version, rank)
        ]

    def _names(self, bad: Sequence[int]) -> tuple[list[str], str]:
        """Names of the tensors in some buckets, and some of them for people."""
        found = {n for i in bad[:64] for n in self.plan.names_in(self.plan.buckets[i])}
        names = sorted(found)
        return names, ", ".join(names[:6]) + (" ..." if len(names) > 6 else "")

    def _kept(self) -> Iterator[tuple[int, int, int]]:
        """Tensor, where it begins in staging memory, and bytes, of all of which any are kept."""
        for tensor, (start, size) in enumerate(zip(self._starts, self._sizes, strict=True)):
            if size:
                yield tensor, start, size
