"""From the publisher's arenas into a target: the subscriber's half of moving bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import attrs
import numpy as np

from parallelkit.errors import CorruptionError, ProtocolError, TransportError
from parallelkit.protocols import FiniteSink, LoaderSink, LocatedSink, WeightSink
from parallelkit.weights import overlap as spans
from parallelkit.weights.buckets import (
    Load,
    Table,
    Workers,
    as_bytes,
    copy_all,
    copy_span,
    from_wire,
    hash_table,
    merged,
    pass_over,
    shifted,
    to_wire,
    wanted_buckets,
)
from parallelkit.weights.finite import non_finite
from parallelkit.weights.manifest import Manifest
from parallelkit.weights.moves import (
    Move,
    Moves,
    gathered,
    joint_moves,
    kept_bytes,
    laid_out,
    match,
)
from parallelkit.weights.plan import Bucket, TransferPlan
from parallelkit.weights.readers import Readers
from parallelkit.weights.regions import Bytes, Span

#: Buckets that are fetched in place before they are hashed.
PLACED_BUCKETS: Final = 16


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


class Received(NamedTuple):
    """A version's bytes: how each tensor is copied from them, and where they lie."""

    moves: list[Moves]
    memory: Callable[[Move], Bytes]

    def tensors(self) -> Iterator[tuple[int, Bytes]]:
        """Each tensor, and its bytes one after another."""
        for tensor, nbytes, parts in self.moves:
            yield tensor, gathered(parts, nbytes, self.memory)


def _unclaimed(target: Any, memory: Sequence[spans.Span]) -> None:
    """Nobody else is asked."""


class Placement:
    """Fetches, hashes and places one version. Not safe to call from several threads."""

    def __init__(
        self, sink: WeightSink, needs: Manifest, readers: Readers, verify: str, run_id: bytes
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
        self._loading = sink if isinstance(sink, LoaderSink) else None
        self._located = sink if isinstance(sink, LocatedSink) else None
        self._direct: list[Bytes] = []  # live memory that it went straight to
        self._spans: tuple[spans.Span, ...] = ()  # where that lies
        self._noting = sink if isinstance(sink, FiniteSink) else None
        self._verify = verify
        self._run_id = run_id
        self._order = match(self.plan.manifest, needs)
        self._sizes = kept_bytes(self.plan)
        self._starts, self._room = laid_out(self._sizes)
        self._spare: Bytes | None = None
        self._staging: Bytes | None = None
        self._source: Received | None = None
        self._live: Received | None = None  # what was placed last
        self._fetched = self._placed = b""  # digests: as fetched last, and of what is placed next
        #: Whether all values are finite: as fetched last, and as staged. None: nobody asked.
        self._fetched_finite: bool | None = None
        self._staged_finite: bool | None = None
        self._hashed_live = 0  # tensors of which live memory was hashed, of what came last
        self._tables: dict[int, Table] = {}
        self._moves: list[Moves] | None = None
        self._moves_staged: list[Moves] | None = None

    @property
    def module(self) -> Any:
        """What the user works with."""
        return self._sink.module

    def explain(self) -> str:
        """Say how tensors reach the target."""
        if self._loading is not None:
            return self._loading.explain()
        kept = sum(1 for _ in self._kept())
        return f"{kept} tensors, each placed under its own name"

    @property
    def memory(self) -> Sequence[spans.Span]:
        """Live memory that the last version was written to, as far as that is known.

        The same object as long as it is the same memory.
        """
        if self._located is not None:
            return self._located.live_memory()
        found = tuple(_where(live) for live in self._direct if live.nbytes)
        if found != self._spans:
            self._spans = found
        return self._spans

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

    def allocate_staging(self, versions: int = 2) -> None:
        """Make room of our own for one version, or for two as `serve` needs it."""
        spare, staging = self._spare, self._staging
        if spare is None:
            spare = np.zeros(self._room, np.uint8)
        if staging is None and versions == 2:
            staging = np.zeros(self._room, np.uint8)
        # All or none: after a MemoryError for the second, a later call starts over.
        self._spare, self._staging = spare, staging

    def fetch(self, fetch: Fetch, workers: Workers, *, staged: bool) -> bytes:
        """Hash the bytes, where they lie or as received; returns the digests' wire form.

        They are brought into memory of our own where `staged`, or where an arena cannot be read.
        """
        wanted = self._wanted(fetch.version)
        if self.readers.mapped and not staged:
            arenas = {rank: self.readers.arena(rank, fetch.slot) for rank in self.readers.by_rank}
            self._source = Received(self._moves_direct(), lambda move: arenas[move.rank or 0])
            self._fetched = self._hashed(arenas, workers, wanted)
        else:
            self._fill(fetch, workers)
            assert self._spare is not None
            self._source = self._received_in(self._spare)
            digests = hash_table(self._spare, self._table_staged(), workers, wanted)
            self._fetched = to_wire(digests, wanted)
        self._fetched_finite = self._finite(self._source, workers)
        if not staged:
            self._placed = self._fetched
        return self._fetched

    def keep_staged(self, version: int) -> None:
        """The spare holds `version` now; what was staged before becomes the spare."""
        self._spare, self._staging = self._staging, self._spare
        self._placed, self._hashed_live = self._fetched, 0
        self._staged_finite = self._fetched_finite
        self.staged_version = version

    def place(self, workers: Workers) -> None:
        """Copy the fetched bytes into live memory."""
        assert self._source is not None
        self._copy(self._source, self._fetched_finite, workers)

    def place_staged(self, workers: Workers) -> None:
        """Copy the staged version into live memory."""
        assert self._staging is not None
        self._copy(self._received_in(self._staging), self._staged_finite, workers)

    def fetch_verified(self, fetch: Fetch, expected: bytes, workers: Workers) -> None:
        """Bring a decided version into memory of our own; see `place_fetched`."""
        self._fill(fetch, workers)
        assert self._spare is not None
        spare = self._spare
        slices = {t: spare[s : s + n] for t, s, n in self._kept()}
        self._verified(fetch, slices, self._expected(fetch.version, expected), workers)
        self._fetched = expected
        self._fetched_finite = self._finite(self._received_in(spare), workers)

    def place_fetched(self, fetch: Fetch, expected: bytes, workers: Workers) -> None:
        """Fetch a decided version straight into live memory, and compare its digests.

        A bucket that came changed is fetched once more.

        Args:
            expected: the source's digests, in wire form.

        Raises:
            CorruptionError: it came changed again; live memory is of no version.
            ProtocolError: there are not as many digests as buckets.
        """
        digests = self._expected(fetch.version, expected)
        self._begin()
        memories: dict[int, Bytes] = {}
        indirect: list[int] = []
        for tensor, _, size in self._kept():
            target = self._sink.destination(self._order[tensor])
            if target is None:
                indirect.append(tensor)
                memories[tensor] = np.empty(size, np.uint8)
            else:
                memories[tensor] = _writable(target, size)
                self._direct.append(memories[tensor])
        self._bring_verified(fetch, memories, digests, workers)
        for tensor in indirect:
            self._sink.write(self._order[tensor], memories[tensor].data)
        self._sink.finish()
        self._placed, self._live = expected, None
        self._hashed_live = len(memories) - len(indirect)
        loading = self._loading
        if self._verify == "readback" and loading is not None:
            unread = [t for t in memories if not loading.readable(self._order[t])]
            self._live = _alone({t: memories[t] for t in unread})

    def readback(self, version: int, workers: Workers) -> bytes:
        """Hash live memory, in the publisher's order; returns the digests' wire form.

        Raises:
            CorruptionError: they are not those of the version that was placed.
        """
        wanted = self._wanted(version)
        loads = [
            Load(tuple((p.tensor, p.target, 0) for p in bucket.pieces), bucket.nbytes)
            for bucket in self.plan.buckets
        ]

        loading, placed = self._loading, self._live
        received = {} if placed is None or loading is None else {x.tensor: x for x in placed.moves}

        def live(tensor: int) -> Bytes:
            index = self._order[tensor]
            if loading is not None and placed is not None and not loading.readable(index):
                _, nbytes, parts = received[tensor]  # as it came: a loader changed it on its way
                return gathered(parts, nbytes, placed.memory)
            return as_bytes(self._sink.host_bytes(index))

        found = pass_over(live, loads, None, workers, wanted)
        expected, now = self._expected(version, self._placed), found.tolist()
        bad = [i for i, digest in expected.items() if digest != now[i]]
        if bad:
            names, text = self._names(bad)
            raise CorruptionError(f"live memory differs after placement, in {text}", tensors=names)
        self._hashed_live = sum(
            loading is None or placed is None or loading.readable(self._order[tensor])
            for tensor, *_ in self._kept()
        )
        return to_wire(found, wanted)

    def release(self) -> None:
        """Let go of every view of the arenas."""
        self._source = self._live = self._spare = self._staging = None
        self._direct = []

    # --- fetching

    def _fill(self, fetch: Fetch, workers: Workers) -> None:
        self.allocate_staging(1)
        assert self._spare is not None
        self.readers.fill(
            self._spare,
            self._starts,
            workers,
            slot=fetch.slot,
            epoch=fetch.epoch,
            deadline=fetch.deadline,
        )

    def _hashed(self, arenas: dict[int, Bytes], workers: Workers, wanted: Sequence[bool]) -> bytes:
        digests, first = [], 0
        for rank, buckets in self.readers.by_rank.items():
            if rank not in self._tables:
                self._tables[rank] = [merged(p.source for p in b.pieces) for b in buckets]
            of_rank = wanted[first : first + len(buckets)]
            first += len(buckets)
            digests.append(hash_table(arenas[rank], self._tables[rank], workers, of_rank))
        return to_wire(np.concatenate(digests), wanted) if digests else b""

    def _bring_verified(
        self,
        fetch: Fetch,
        memories: dict[int, Bytes],
        expected: dict[int, int],
        workers: Workers,
    ) -> None:
        """Fetch and hash some buckets at a time, while they are at hand."""
        buckets = self.plan.buckets
        for first in range(0, len(buckets), PLACED_BUCKETS):
            batch = range(first, min(first + PLACED_BUCKETS, len(buckets)))
            self._bring(fetch, [buckets[i] for i in batch], memories, workers)
            some = {i: expected[i] for i in batch if i in expected}
            self._verified(fetch, memories, some, workers)

    def _verified(
        self,
        fetch: Fetch,
        memories: dict[int, Bytes],
        expected: dict[int, int],
        workers: Workers,
    ) -> None:
        """Compare digests of what was fetched; fetch what differs once more."""
        bad = self._differing(memories, expected, workers)
        if not bad:
            return
        self.repeated += len(bad)
        self._bring(fetch, [self.plan.buckets[i] for i in bad], memories, workers)
        bad = self._differing(memories, {i: expected[i] for i in bad}, workers)
        if bad:
            names, text = self._names(bad)
            raise CorruptionError(
                f"{len(bad)} of {len(self.plan.buckets)} buckets came changed twice, in {text}",
                tensors=names,
            )

    def _differing(
        self, memories: dict[int, Bytes], expected: dict[int, int], workers: Workers
    ) -> list[int]:
        chosen = list(expected)
        loads = [
            Load(tuple((p.tensor, p.target, 0) for p in bucket.pieces), bucket.nbytes)
            for bucket in (self.plan.buckets[i] for i in chosen)
        ]
        found = pass_over(memories.__getitem__, loads, None, workers, [True] * len(loads))
        return [
            i for i, digest in zip(chosen, found.tolist(), strict=True) if digest != expected[i]
        ]

    def _bring(
        self, fetch: Fetch, buckets: list[Bucket], memories: dict[int, Bytes], workers: Workers
    ) -> None:
        self.readers.bring(
            buckets,
            memories,
            workers,
            slot=fetch.slot,
            epoch=fetch.epoch,
            deadline=fetch.deadline,
        )

    def _expected(self, version: int, wire: bytes) -> dict[int, int]:
        """The source's digest of each bucket that is to be compared."""
        wanted, digests = self._wanted(version), from_wire(wire)
        count = len(wanted) if any(wanted) else 0
        if digests is None or len(digests) != count:
            raise ProtocolError(
                f"the publisher sent {len(wire)} bytes of digests for {count} buckets of 8 bytes"
            )
        return {i: digest for i, digest in enumerate(digests.tolist()) if wanted[i]}

    def _wanted(self, version: int) -> list[bool]:
        return [
            chosen
            for rank, buckets in self.readers.by_rank.items()
            for chosen in wanted_buckets(self._verify, len(buckets), self._run_id, version, rank)
        ]

    # --- placing

    def _begin(self) -> None:
        """Let the sink begin; until it has, nothing was written."""
        self._direct = []
        self._sink.begin()
        self.claims(
            self.module, self._spans if self._located is None else self._located.live_memory()
        )

    def _copy(self, received: Received, finite: bool | None, workers: Workers) -> None:
        """Copy moves into the sink's live memory, or hand it what it writes itself.

        Args:
            finite: whether all values are, as `_finite` found before.
        """
        moves, memory = received
        self._live, self._hashed_live = received, 0
        pairs: list[tuple[Bytes, Bytes]] = []
        strided: list[tuple[Bytes, Move]] = []
        self._begin()
        if self._noting is not None and finite is not None:
            self._noting.note_finite(finite)
        for tensor, size, parts in moves:
            target = self._sink.destination(self._order[tensor])
            if target is None:
                self._sink.write(self._order[tensor], gathered(parts, size, memory).data)
                continue
            live = _writable(target, size)
            self._direct.append(live)
            for move in parts:
                if move.source.steps or move.target.steps:
                    strided.append((live, move))
                    continue
                (a, n, _), b = move.source, move.target.offset
                pairs.append((live[b : b + n], memory(move)[a : a + n]))
        copy_all(pairs, workers)

        def one(k: int) -> None:
            live, move = strided[k]
            copy_span(live, move.target, memory(move), move.source)

        workers.map(one, len(strided), sum(move.source.nbytes for _, move in strided))
        self._sink.finish()

    def _finite(self, received: Received, workers: Workers) -> bool | None:
        """Whether all values are finite, where the sink has to know; else None."""
        if self._noting is None:
            return None
        specs = self.plan.manifest.unique
        return not any(
            non_finite(data, specs[tensor].dtype, workers) for tensor, data in received.tensors()
        )

    def _received_in(self, memory: Bytes) -> Received:
        return Received(self._moves_from_staging(), lambda move: memory)

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

    def _moves_direct(self) -> list[Moves]:
        """For each tensor, how it is copied from arenas."""
        if self._moves is None:
            found = joint_moves(p for bucket in self.plan.buckets for p in bucket.pieces)
            self._moves = [Moves(t, n, found[t]) for t, _, n in self._kept()]
        return self._moves

    def _moves_from_staging(self) -> list[Moves]:
        if self._moves_staged is None:
            self._moves_staged = [
                Moves(t, n, [Move(None, Span(start, n), Span(0, n))])
                for t, start, n in self._kept()
            ]
        return self._moves_staged

    def _table_staged(self) -> Table:
        if -1 not in self._tables:
            self._tables[-1] = [
                merged(shifted(p.target, self._starts[p.tensor]) for p in bucket.pieces)
                for bucket in self.plan.buckets
            ]
        return self._tables[-1]


def _alone(memories: dict[int, Bytes]) -> Received:
    """Tensors each in a memory of its own, in which the rank of a move is the tensor's number."""
    whole = {t: Span(0, data.nbytes) for t, data in memories.items()}
    moves = [Moves(t, span.run, [Move(t, span, span)]) for t, span in whole.items()]
    return Received(moves, lambda move: memories[move.rank or 0])


def _where(live: Bytes) -> spans.Span:
    """Where contiguous bytes of the host lie."""
    return spans.Span("", live.__array_interface__["data"][0], live.nbytes, (), ())


def _writable(target: memoryview, size: int) -> Bytes:
    data = as_bytes(target)
    if len(data) != size or not data.flags.writeable:
        raise TransportError(
            f"the target offers {len(data)} bytes, writable {data.flags.writeable}, where {size} "
            "are needed: its shape changed after subscribe_weights"
        )
    return data
