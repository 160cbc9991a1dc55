"""The lane `device` at a publisher's rank: nothing is staged, members read the live weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from parallelkit.protocols import DeviceCopier, DevicePublisher
from parallelkit.weights.buckets import wanted_buckets
from parallelkit.weights.exports import Export
from parallelkit.weights.finite import refuse_non_finite
from parallelkit.weights.lanes import Hashed, Lane, Side
from parallelkit.weights.needs import Needs
from parallelkit.weights.runs import Runs, runs_of


class DeviceSide(Side):
    """With the runs that are digested, and what digests them while the weights stay there."""

    def __init__(self, export: Export, needs: Needs) -> None:
        super().__init__(export, needs)
        self.runs: Runs = runs_of(self.buckets)
        self.reader: DeviceCopier | None = None


class DeviceLane(Lane[DeviceSide]):
    """Says where this rank's parts lie, and digests them there.

    Called by the thread that calls `update`, but for offers and the epoch.
    """

    def __init__(
        self,
        export: Export,
        transport: DevicePublisher,
        run_id: bytes,
        *,
        check_finite: bool = False,
    ) -> None:
        super().__init__(export)
        self._transport = transport
        self._run_id = run_id
        self._check_finite = check_finite

    @property
    def epoch(self) -> int:
        return self._transport.epoch

    def bump(self) -> int:
        return self._transport.bump()

    def offers(self) -> dict[str, bytes]:
        return {self._transport.name: self._transport.offer()}

    def close(self) -> None:
        for side in self._sides.values():
            side.reader = None
        self._transport.close()

    def look(self) -> None:
        """An update begins: see where the weights lie now.

        Raises:
            TransportError: they cannot be read from outside any more.
            NonFiniteError: with `check_finite`, a part holds NaN or infinity.
        """
        if self._transport.refresh():
            for side in self._sides.values():
                side.reader = None
        if self._check_finite:
            unique = self.export.manifest.unique
            found = self._transport.non_finite()
            refuse_non_finite({unique[tensor].name: count for tensor, count in found.items()})

    def digest(self, needs: Sequence[Needs], verify: str, version: int) -> list[Hashed]:
        """Digest what members of each kind get, where it lies.

        Args:
            needs: what they keep, each kind once; verify: what is digested; version: what it is.
        """
        self._forget(set(needs))
        sides = [self._side(n) for n in needs]
        wanted = [
            np.array(wanted_buckets(verify, len(s.sizes), self._run_id, version, self.rank), bool)
            for s in sides
        ]
        readers = [
            self._started(side) if some.any() else None
            for side, some in zip(sides, wanted, strict=True)
        ]
        said = []
        for side, some, reader in zip(sides, wanted, readers, strict=True):
            digests = np.zeros(len(side.sizes), np.uint64)
            if reader is not None:
                found = reader.wait().source
                assert found is not None
                digests[some] = found[some]
            said.append(side.said(digests, verify))
        return said

    def _started(self, side: DeviceSide) -> DeviceCopier:
        """Let the device begin to digest what members of a kind get."""
        if side.reader is None:
            runs = side.runs
            side.reader = self._transport.reader(runs.tensor, runs.source, runs.nbytes, runs.bucket)
        side.reader.digest_source()
        return side.reader

    def _new_side(self, needs: Needs) -> DeviceSide:
        return DeviceSide(self.export, needs)
