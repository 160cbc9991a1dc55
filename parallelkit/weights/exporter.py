"""One rank of a publisher: its parts, in an arena of their own, hashed for those who need them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import attrs
import numpy as np

from parallelkit.errors import ManifestError, StateError
from parallelkit.protocols import WeightSource
from parallelkit.weights.arena import Arena
from parallelkit.weights.buckets import (
    FULL,
    Digests,
    Load,
    Workers,
    as_bytes,
    hash_table,
    merged,
    pass_over,
    wanted_buckets,
)
from parallelkit.weights.exports import Export
from parallelkit.weights.finite import non_finite, refuse_non_finite
from parallelkit.weights.needs import Needs
from parallelkit.weights.plan import TransferPlan, plan_transfer
from parallelkit.weights.regions import Bytes


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
        buckets = self.plan.of(export.rank)
        self.loads = [
            Load(
                tuple(
                    (p.tensor, p.cut.source, p.base + p.cut.source.offset) for p in bucket.pieces
                ),
                bucket.nbytes,
            )
            for bucket in buckets
        ]
        self.table = [merged(p.source for p in bucket.pieces) for bucket in buckets]
        self.sizes = np.array([bucket.nbytes for bucket in buckets], np.int64)
        self.nbytes = int(self.sizes.sum())
        self.committed: Digests | None = None
        self.staged: Digests | None = None

    def changed(self, digests: Digests) -> int | None:
        """Bytes of buckets that are not as in the last committed version."""
        if self.committed is None:
            return None
        return int(self.sizes[digests != self.committed].sum())


class Exporter:
    """Stages and hashes what this rank hands out. Called by the thread that calls `update`."""

    def __init__(
        self,
        source: WeightSource,
        export: Export,
        arena: Arena,
        run_id: bytes,
        *,
        check_finite: bool = False,
    ) -> None:
        self.rank = export.rank
        self.export = export
        self.arena = arena
        self.workers = Workers()
        self._source = source
        self._run_id = run_id
        self._check_finite = check_finite
        self._unchecked: set[int] = set()
        self._bad: dict[str, int] = {}
        self._sides: dict[Needs, Side] = {}
        self._whole = Needs.whole(export.manifest)
        self._parts = {part.tensor: part.nbytes for part in export.parts()}
        self._side(self._whole)  # by which the arena is written: not made in the first update

    def stage(self, needs: Sequence[Needs], slot: int, verify: str, version: int) -> list[Hashed]:
        """Write every part into the arena, and hash the buckets of members of each kind.

        Digests are taken from the live tensors, so that they vouch for the copy too.

        Args:
            needs: what members keep, each kind of member once.
            slot: which part of the arena; version: what it will be; verify: what is hashed.

        Raises:
            ManifestError: a tensor has not the bytes that its manifest says.
            NonFiniteError: with `check_finite`, a part holds NaN or infinity.
        """
        todo = list(dict.fromkeys(needs))
        self._forget(todo)
        found: dict[Needs, Digests] = {}
        memory = self.arena.slot(slot)
        wanted = self._wanted(self._whole, verify, version, self._whole in todo)
        self._bad, self._unchecked = {}, set(self._parts) if self._check_finite else set()
        found[self._whole] = self._pass(self._side(self._whole), memory, wanted)
        refuse_non_finite(self._bad)
        for other in todo:
            if other not in found:
                wanted = self._wanted(other, verify, version, True)
                found[other] = self._pass(self._side(other), None, wanted)
        return [self._said(n, found[n], verify) for n in needs]

    def hash_arena(self, needs: Sequence[Needs], verify: str, version: int) -> list[Hashed]:
        """Hash what already lies in the arena, where the model itself lives there."""
        self._forget(needs)
        memory, found = self.arena.slot(0), {}
        for n in dict.fromkeys(needs):
            wanted = self._wanted(n, verify, version, True)
            found[n] = hash_table(memory, self._side(n).table, self.workers, wanted)
        return [self._said(n, found[n], verify) for n in needs]

    def check_arena(self) -> None:
        """With `check_finite`, look at the model where it lives in the arena.

        Raises:
            NonFiniteError: it holds NaN or infinity.
        """
        if self._check_finite:
            unique = self.export.manifest.unique
            found = {
                tensor.name: non_finite(span, tensor.dtype, self.workers)
                for tensor, span in zip(unique, self._spans(), strict=True)
            }
            refuse_non_finite({name: count for name, count in found.items() if count})

    def committed(self) -> None:
        """What was staged last is the version that later ones are compared with."""
        sides = self._sides.values()
        if any(side.staged is not None for side in sides):  # else nobody was there to get it
            for side in sides:
                side.committed, side.staged = side.staged, None

    def bump(self) -> int:
        """Nothing that was read or staged before counts any more; returns the arena's new epoch."""
        self.void()
        return self.arena.bump()

    def void(self) -> None:
        """What was staged last becomes no version."""
        for side in self._sides.values():
            side.staged = None

    def adopt(self) -> None:
        """Let the source's tensors live in the arena."""
        self._source.adopt([span.data for span in self._spans()])

    def check_adopted(self) -> None:
        """Raise `StateError` if a tensor does not live in the arena any more."""
        for tensor, span in enumerate(self._spans()):
            if len(span) and as_bytes(self._source.host_bytes(tensor)).ctypes.data != (
                span.ctypes.data
            ):
                raise StateError(
                    f"{self.export.manifest.unique[tensor].name!r} does not live in the published "
                    "segment any more: something gave it new storage after "
                    "publish_weights(aliased=True); publish again, or without aliased"
                )

    def close(self) -> None:
        """Drop the arena and end the threads; harmless when repeated."""
        self.arena.close()
        self.workers.close()

    def _side(self, needs: Needs) -> Side:
        side = self._sides.get(needs)
        if side is None:
            side = self._sides[needs] = Side(self.export, needs)
        return side

    def _forget(self, asked: Collection[Needs]) -> None:
        """Drop the sides with members that are gone, but what a version is compared with."""
        stays = {self._whole, *asked}
        self._sides = {
            needs: side
            for needs, side in self._sides.items()
            if needs in stays or side.committed is not None
        }

    def _wanted(self, needs: Needs, verify: str, version: int, asked: bool) -> list[bool]:
        count = len(self._side(needs).loads)
        if not asked:
            return [False] * count
        return wanted_buckets(verify, count, self._run_id, version, self.rank)

    def _said(self, needs: Needs, digests: Digests, verify: str) -> Hashed:
        side = self._side(needs)
        if verify not in FULL:
            return Hashed(digests, side.nbytes, None)
        side.staged = digests
        return Hashed(digests, side.nbytes, side.changed(digests))

    def _pass(self, side: Side, memory: Bytes | None, wanted: Sequence[bool]) -> Digests:
        """One pass over the source's tensors; see `pass_over`."""
        return pass_over(self._fetch, side.loads, memory, self.workers, wanted)

    def _fetch(self, tensor: int) -> Bytes:
        data: object = self._source.host_bytes(tensor)
        expected = self._parts[tensor]
        if not isinstance(data, memoryview | np.ndarray):
            raise ManifestError(
                f"the source gave a {type(data).__qualname__} for "
                f"{self.export.manifest.unique[tensor].name!r}; it is a memoryview of bytes"
            )
        if data.nbytes != expected:
            name = self.export.manifest.unique[tensor].name
            raise ManifestError(
                f"the source gave {data.nbytes} bytes for {name!r}, the manifest says {expected}: "
                "its shape or dtype changed after publish_weights"
            )
        found = as_bytes(data)
        if tensor in self._unchecked:
            self._unchecked.discard(tensor)
            spec = self.export.manifest.unique[tensor]
            count = non_finite(found, spec.dtype, self.workers)
            if count:
                self._bad[spec.name] = count
        return found

    def _spans(self) -> list[Bytes]:
        """The arena's memory of each unique tensor; of a rank that hands out all of them whole."""
        memory, sizes = self.arena.slot(0), [t.nbytes for t in self.export.manifest.unique]
        starts = self.export.offsets.tolist()
        return [memory[a : a + n] for a, n in zip(starts, sizes, strict=True)]
