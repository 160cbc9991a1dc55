"""From the arena into a target: the subscriber's half of moving bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from parallelkit.errors import CorruptionError, TransportError
from parallelkit.protocols import LoaderSink, SubscriberTransport, WeightSink
from parallelkit.weights.blocks import (
    Bytes,
    Digests,
    Workers,
    as_bytes,
    copy_all,
    hash_arena,
    stage,
)
from parallelkit.weights.manifest import Manifest
from parallelkit.weights.plan import TransferPlan


class Placement:
    """Fetches, hashes and places one version. Not safe to call from several threads."""

    def __init__(self, sink: WeightSink, needs: Manifest, plan: TransferPlan) -> None:
        self._sink = sink
        self._loading = sink if isinstance(sink, LoaderSink) else None
        self._plan = plan
        self._order = _match(plan.manifest, needs)
        self._source: Bytes | None = None
        self._spare: Bytes | None = None
        self._staging: Bytes | None = None
        self._live: Bytes | None = None  # what was placed last
        self.staged_version = 0
        self._fetched = self._placed = b""  # digests: as fetched last, and of what is placed next

    @property
    def module(self) -> Any:
        """What the user works with."""
        return self._sink.module

    def explain(self) -> str:
        """Say how tensors reach the target."""
        if self._loading is not None:
            return self._loading.explain()
        return f"{len(self._order)} tensors, each placed under its own name"

    def check(self) -> None:
        """Raise if the target is not what it was when it joined; nothing is written."""
        self._sink.check()

    def allocate_staging(self) -> None:
        """Make room for two versions of our own, for `serve`."""
        if self._spare is None:
            # Both or none: after a MemoryError for the second, a later call starts over.
            spare, staging = (np.zeros(self._plan.nbytes, np.uint8) for _ in range(2))
            self._spare, self._staging = spare, staging

    def fetch(
        self,
        transport: SubscriberTransport,
        workers: Workers,
        wanted: Sequence[bool],
        *,
        staged: bool,
    ) -> bytes:
        """Hash the arena, after copying it where `staged`; returns the digests' wire form."""
        if transport.buffer is None:
            raise TransportError(f"transport {transport.name} has no readable arena")
        arena = as_bytes(transport.buffer)
        if staged:
            assert self._spare is not None
            copy_all([(self._spare, arena)], workers)
            arena = self._spare
        self._source = arena
        self._fetched = _wire(hash_arena(arena, self._plan, workers, wanted), wanted)
        if not staged:
            self._placed = self._fetched
        return self._fetched

    def keep_staged(self, version: int) -> None:
        """The spare holds `version` now; what was staged before becomes the spare."""
        self._spare, self._staging = self._staging, self._spare
        self._placed = self._fetched
        self.staged_version = version

    def place(self, workers: Workers) -> None:
        """Copy the fetched bytes into live memory."""
        assert self._source is not None
        self._copy(self._source, workers)

    def place_staged(self, workers: Workers) -> None:
        """Copy the staged version into live memory."""
        assert self._staging is not None
        self._copy(self._staging, workers)

    def readback(self, workers: Workers, wanted: Sequence[bool]) -> bytes:
        """Hash live memory, in the publisher's order; returns the digests' wire form.

        Raises:
            CorruptionError: they are not those of the version that was placed.
        """

        def fetch(tensor: int) -> memoryview:
            index = self._order[tensor]
            if self._loading is not None and not self._loading.readable(index):
                return self._received(tensor)  # a loader changed it on its way
            return self._sink.host_bytes(index)

        live = stage(fetch, self._plan, None, workers, wanted)
        bad = np.flatnonzero(live != np.frombuffer(self._placed, "<u8"))
        if len(bad):
            names = sorted({n for block in bad[:8] for n in self._plan.names_in(int(block))})
            raise CorruptionError(
                f"live memory differs after placement, in {', '.join(names[:6])}", tensors=names
            )
        return _wire(live, wanted)

    def release(self) -> None:
        """Let go of every view of the arena."""
        self._source = self._spare = self._staging = self._live = None

    def _received(self, tensor: int) -> memoryview:
        """The bytes that were placed last, as they came."""
        assert self._live is not None
        offset = self._plan.offsets[tensor]
        return self._live[offset : offset + self._plan.sizes[tensor]].data

    def _copy(self, arena: Bytes, workers: Workers) -> None:
        pairs: list[tuple[Bytes, Bytes]] = []
        self._live = arena
        self._sink.begin()
        for tensor, (offset, size) in enumerate(
            zip(self._plan.offsets, self._plan.sizes, strict=True)
        ):
            if size == 0:
                continue
            data = arena[offset : offset + size]
            target = self._sink.destination(self._order[tensor])
            if target is None:
                self._sink.write(self._order[tensor], data.data)
            else:
                pairs.append((_writable(target, size), data))
        copy_all(pairs, workers)
        self._sink.finish()


def _match(published: Manifest, needed: Manifest) -> list[int]:
    """For each unique tensor published, its index among the target's unique tensors."""
    owner = {t.name: t.alias_of or t.name for t in needed.tensors}
    index = {t.name: i for i, t in enumerate(needed.unique)}
    return [index[owner[t.name]] for t in published.unique]


def _writable(target: memoryview, size: int) -> Bytes:
    data = as_bytes(target)
    if len(data) != size or not data.flags.writeable:
        raise TransportError(
            f"the target offers {len(data)} bytes, writable {data.flags.writeable}, where {size} "
            "are needed: its shape changed after subscribe_weights"
        )
    return data


def _wire(digests: Digests, wanted: Sequence[bool]) -> bytes:
    return digests.astype("<u8").tobytes() if any(wanted) else b""
