"""A member's way to every publisher rank that it gets bytes from."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final, Protocol

import numpy as np

from parallelkit.errors import EpochError, ProtocolError, TransportError
from parallelkit.protocols import SubscriberTransport
from parallelkit.weights.buckets import Workers, as_bytes, copy_all, copy_span, shifted
from parallelkit.weights.exports import ALIGNMENT
from parallelkit.weights.moves import kept_bytes
from parallelkit.weights.plan import Bucket, Piece, TransferPlan
from parallelkit.weights.regions import Bytes, Span, view

#: Publisher ranks that are pulled from at the same time.
PULLS: Final = 4
#: Bytes asked of one rank in one pull: bounds the memory for pieces that are no run at the member.
PULL_BYTES: Final = 64 << 20


class Memories(Protocol):
    """For each unique tensor of which something is kept, the memory of that: contiguous bytes."""

    def __getitem__(self, tensor: int, /) -> Bytes: ...


class Slices:
    """One memory as that of each tensor, each from its own start."""

    def __init__(self, memory: Bytes, starts: Sequence[int]) -> None:
        self._memory = memory
        self._starts = starts

    def __getitem__(self, tensor: int, /) -> Bytes:
        return self._memory[self._starts[tensor] :]


def grouped(buckets: Iterable[Bucket]) -> dict[int, list[Bucket]]:
    """Buckets by rank, which they are sorted by."""
    return {
        rank: list(some) for rank, some in itertools.groupby(buckets, lambda bucket: bucket.rank)
    }


class Timed(Protocol):
    """A way to one rank that says its epoch."""

    def epoch(self, *, deadline: float) -> int: ...


def check_epochs(ways: Mapping[int, Timed], epoch: int, version: int, deadline: float) -> None:
    """Raise `EpochError` unless every rank is at this epoch still."""
    for rank, way in ways.items():
        now = way.epoch(deadline=deadline)
        if now != epoch:
            raise EpochError(
                f"the publisher went on without this subscriber (epoch {now} of its rank "
                f"{rank} instead of {epoch}): it came too late for version {version}"
            )


class Readers:
    """Transports by publisher rank, and the plan that says what is read from each.

    Attributes:
        plan: of this member.
        mapped: whether every rank's arena is readable memory.
        by_rank: the plan's buckets, by rank ascending.
    """

    def __init__(
        self,
        plan: TransferPlan,
        transports: Mapping[int, SubscriberTransport],
        slot_bytes: Mapping[int, int],
    ) -> None:
        """
        Args:
            plan: what this member gets.
            transports: one for each of the plan's ranks.
            slot_bytes: of each of those ranks' arenas, the bytes of one slot.

        Raises:
            ProtocolError: an arena is smaller than the plan says.
        """
        self.plan = plan
        self.by_rank = grouped(plan.buckets)
        for rank, buckets in self.by_rank.items():
            end = max(piece.source.end for bucket in buckets for piece in bucket.pieces)
            if end > slot_bytes[rank]:
                raise ProtocolError(
                    f"the arena of the publisher's rank {rank} has {slot_bytes[rank]} bytes, the "
                    f"plan needs {end}"
                )
        self.mapped = all(t.memory is not None for t in transports.values())
        self._transports = dict(transports)
        self._slot_bytes = dict(slot_bytes)
        self._pool: ThreadPoolExecutor | None = None
        self._runs: dict[int, list[tuple[int, int, int]]] = {}

    @property
    def name(self) -> str:
        """`shm`, or `shm+tcp` where ranks are reached in different ways."""
        return "+".join(sorted({t.name for t in self._transports.values()})) or "none"

    def arena(self, rank: int, slot: int) -> Bytes:
        """One slot of a rank's mapped arena, for reading."""
        memory = self._transports[rank].memory
        if memory is None:
            raise TransportError(f"transport {self._transports[rank].name} has no readable arena")
        size = self._slot_bytes[rank]
        return as_bytes(memory)[slot * size : (slot + 1) * size]

    def check_epoch(self, epoch: int, version: int, deadline: float) -> None:
        """Raise `EpochError` unless every rank is at this epoch still."""
        check_epochs(self._transports, epoch, version, deadline)

    def follow(self, offers: Sequence[tuple[int, bytes]]) -> None:
        """Refuse: an arena stays where it is.

        Raises:
            ProtocolError: there are offers.
        """
        if offers:
            raise ProtocolError(
                f"the publisher says that the arenas of {len(offers)} of its ranks have moved"
            )

    def fill(
        self,
        memory: Bytes,
        starts: Sequence[int],
        workers: Workers,
        *,
        slot: int,
        epoch: int,
        deadline: float,
    ) -> None:
        """Bring everything into one memory, in which each tensor's kept bytes begin at a start."""
        pulled: list[Bucket] = []
        for rank, buckets in self.by_rank.items():
            if self._transports[rank].memory is None:
                pulled += buckets
                continue
            arena = self.arena(rank, slot)
            copy_all(
                [(memory[b : b + n], arena[a : a + n]) for a, b, n in self._joint(rank, starts)],
                workers,
            )
            for piece in (p for bucket in buckets for p in bucket.pieces):
                if piece.source.steps or piece.target.steps:
                    target = shifted(piece.target, starts[piece.tensor])
                    copy_span(memory, target, arena, piece.source)
        slices = Slices(memory, starts)
        self.bring(pulled, slices, workers, slot=slot, epoch=epoch, deadline=deadline)

    def bring(
        self,
        buckets: Sequence[Bucket],
        memories: Memories,
        workers: Workers,
        *,
        slot: int,
        epoch: int,
        deadline: float,
    ) -> None:
        """Bring some buckets into the memory of what is kept of each tensor.

        Raises:
            EpochError: the publisher is at another epoch.
            PeerLostError, UpdateTimeoutError: a rank is gone or too slow.
        """
        by_rank: dict[int, list[Piece]] = {}
        near: list[Bucket] = []
        for bucket in buckets:
            if self._transports[bucket.rank].memory is None:
                by_rank.setdefault(bucket.rank, []).extend(bucket.pieces)
            else:
                near.append(bucket)

        def copy(k: int) -> None:
            arena = self.arena(near[k].rank, slot)
            for piece in near[k].pieces:
                copy_span(memories[piece.tensor], piece.target, arena, piece.source)

        workers.map(copy, len(near), sum(bucket.nbytes for bucket in near))
        ranks = sorted(by_rank)
        if len(ranks) > 1 and self._pool is None:
            self._pool = ThreadPoolExecutor(PULLS, "parallelkit-pull")

        def pull(rank: int) -> None:
            self._pull(rank, by_rank[rank], memories, slot, epoch, deadline)

        if self._pool is None or len(ranks) < 2:
            for rank in ranks:
                pull(rank)
        else:
            pulls = [self._pool.submit(pull, rank) for rank in ranks]
            wait(pulls)  # every one: none may write any more once this has failed
            for done in pulls:
                done.result()

    def close(self) -> None:
        """Close every transport; harmless when repeated."""
        transports, self._transports = self._transports, {}
        for transport in transports.values():
            transport.close()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _pull(
        self,
        rank: int,
        pieces: Sequence[Piece],
        memories: Memories,
        slot: int,
        epoch: int,
        deadline: float,
    ) -> None:
        """Pull pieces of one rank; what is no run at the member comes by way of a packed copy."""
        base = slot * self._slot_bytes[rank]
        spans: list[Span] = []
        into: list[Bytes] = []
        strided: list[tuple[Piece, Bytes]] = []
        waiting = 0

        def flush() -> None:
            self._transports[rank].pull(spans, into, epoch=epoch, deadline=deadline)
            for piece, data in strided:
                out = view(memories[piece.tensor], piece.target)
                np.copyto(out, data.reshape(out.shape))
            spans.clear()
            into.clear()
            strided.clear()

        for piece in pieces:
            if waiting and waiting + piece.source.nbytes > PULL_BYTES:
                flush()
                waiting = 0
            waiting += piece.source.nbytes
            spans.append(shifted(piece.source, base))
            if piece.target.steps:
                data = np.empty(piece.target.nbytes, np.uint8)
                strided.append((piece, data))
                into.append(data)
            else:
                start = piece.target.offset
                into.append(memories[piece.tensor][start : start + piece.target.run])
        if spans:
            flush()

    def _joint(self, rank: int, starts: Sequence[int]) -> list[tuple[int, int, int]]:
        """Runs of a rank's arena, where they go, and how long they are; made once.

        Where arena and memory have the same gap between two tensors, one run covers both. The gap
        is padding then: one tensor ends at it, and the next begins behind it. Within a tensor it
        would hold what another rank hands out.
        """
        runs = self._runs.get(rank)
        if runs is not None:
            return runs
        runs = []
        sizes = kept_bytes(self.plan)
        ended = False
        for piece in (p for bucket in self.by_rank[rank] for p in bucket.pieces):
            if piece.source.steps or piece.target.steps:
                continue
            a, b, n = (
                piece.source.offset,
                starts[piece.tensor] + piece.target.offset,
                piece.source.run,
            )
            if runs:
                last_a, last_b, last_n = runs[-1]
                gap = a - last_a - last_n
                padding = gap == 0 or (0 < gap < ALIGNMENT and ended and not piece.target.offset)
                if a - last_a == b - last_b and padding:
                    a, b, n = last_a, last_b, last_n + gap + n
                    runs.pop()
            runs.append((a, b, n))
            ended = b + n == starts[piece.tensor] + sizes[piece.tensor]
        self._runs[rank] = runs
        return runs
