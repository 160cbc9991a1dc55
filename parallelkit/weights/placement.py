"""From the arena into a target: the subscriber's half of moving bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from parallelkit.errors import TransportError
from parallelkit.protocols import SubscriberTransport, WeightSink
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
        self._plan = plan
        self._order = _match(plan.manifest, needs)
        self._source: Bytes | None = None
        self._spare: Bytes | None = None
        self._staging: Bytes | None = None
        self.staged_version = 0

    @property
    def module(self) -> Any:
        """What the user works with."""
        return self._sink.module

    def check(self) -> None:
        """Raise if the target is not what it was when it joined; nothing is written."""
        self._sink.check()

    def allocate_staging(self) -> None:
        """Make room for two versions of our own, for `serve`."""
        if self._spare is None:
            self._spare = np.zeros(self._plan.nbytes, np.uint8)
            self._staging = np.zeros(self._plan.nbytes, np.uint8)

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
        return _wire(hash_arena(arena, self._plan, workers, wanted), wanted)

    def keep_staged(self, version: int) -> None:
        """The spare holds `version` now; what was staged before becomes the spare."""
        self._spare, self._staging = self._staging, self._spare
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
        """Hash live memory, in the publisher's order; returns the digests' wire form."""

        def fetch(tensor: int) -> memoryview:
            return self._sink.host_bytes(self._order[tensor])

        return _wire(stage(fetch, self._plan, None, workers, wanted), wanted)

    def release(self) -> None:
        """Let go of every view of the arena."""
        self._source = self._spare = self._staging = None

    def _copy(self, arena: Bytes, workers: Workers) -> None:
        pairs: list[tuple[Bytes, Bytes]] = []
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
