"""What the publisher's ranks say of the bytes that members which keep the same get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from parallelkit.errors import ProtocolError
from parallelkit.weights.buckets import FULL, Digests, from_wire, to_wire, wanted_buckets
from parallelkit.weights.lanes import Hashed
from parallelkit.weights.manifest import Manifest
from parallelkit.weights.needs import Needs
from parallelkit.weights.plan import plan_transfer


@attrs.frozen(eq=False)
class Truth:
    """The source's digests for one kind of members, in the order of their plan.

    Attributes:
        manifest, needs: what their plan is made of.
        digests: one for each bucket, by rank ascending; 0 where none was wanted.
        wanted: which are compared.
        by_rank: bytes that come from each of the publisher's ranks; counts: how many buckets.
        changed: bytes of buckets that differ from the last committed version; None if unknown.
    """

    manifest: Manifest
    needs: Needs
    digests: Digests
    wanted: np.ndarray[Any, np.dtype[np.bool_]]
    by_rank: dict[int, int]
    counts: dict[int, int]
    changed: int | None

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        needs: Needs,
        said: Mapping[int, Hashed],
        verify: str,
        run_id: bytes,
        version: int,
    ) -> Truth:
        """Join what ranks said of their own buckets."""
        parts = [(rank, said[rank]) for rank in sorted(said) if len(said[rank].digests)]
        wanted = [
            w
            for rank, part in parts
            for w in wanted_buckets(verify, len(part.digests), run_id, version, rank)
        ]
        changes = [part.changed for _, part in parts]
        known = [n for n in changes if n is not None]
        return cls(
            manifest=manifest,
            needs=needs,
            digests=np.concatenate([np.zeros(0, np.uint64), *(p.digests for _, p in parts)]),
            wanted=np.array(wanted, bool),
            by_rank={rank: part.nbytes for rank, part in parts},
            counts={rank: len(part.digests) for rank, part in parts},
            changed=sum(known) if verify in FULL and len(known) == len(changes) else None,
        )

    @property
    def nbytes(self) -> int:
        """Bytes that a member gets."""
        return sum(self.by_rank.values())

    @property
    def wire(self) -> bytes:
        """The digests as a member is told them."""
        return to_wire(self.digests, self.wanted.tolist())

    def problem(self, data: bytes) -> tuple[str, list[str]]:
        """What is wrong with a member's digests, and of which tensors; `""` if nothing is."""
        theirs, count = from_wire(data), len(self.digests)
        if theirs is None or len(theirs) != (count if self.wanted.any() else 0):
            got = "malformed digests" if theirs is None else f"{len(theirs)} digests"
            return f"sent {got} for {count} buckets", []
        mask = self.wanted[: len(theirs)]
        bad = np.flatnonzero(mask & (theirs != self.digests[: len(theirs)]))
        if not len(bad):
            return "", []
        names = self._names(bad[:64].tolist())
        more = " ..." if len(names) > 6 else ""
        return f"{len(bad)} of {count} buckets arrived changed, in " + (
            ", ".join(names[:6]) + more
        ), names

    def _names(self, bad: Sequence[int]) -> list[str]:
        """Names of the tensors in some buckets, ascending; plans the ranks they are of alone."""
        names, first = set[str](), 0
        for rank, count in self.counts.items():
            inside = [i - first for i in bad if first <= i < first + count]
            first += count
            if inside:
                plan = plan_transfer(self.manifest, self.needs, ranks=(rank,))
                buckets = plan.of(rank)
                names.update(name for i in inside for name in plan.names_in(buckets[i]))
        return sorted(names)


def misplaced(truth: Truth, readback: bytes) -> str:
    """What is wrong with a member's digests of live memory, or `""`."""
    reason, names = truth.problem(readback)
    if not reason:
        return ""
    if not names:
        return f"its read-back digests are malformed: it {reason}"
    return f"live memory differs after placement, in {', '.join(names[:6])}"


def hashed_to_plain(hashed: Sequence[Hashed]) -> list[Any]:
    """Plain form, for rank 0."""
    return [[h.digests.astype("<u8").tobytes(), h.nbytes, h.changed] for h in hashed]


def hashed_from_plain(plain: Any, count: int) -> list[Hashed]:
    """Read what another rank of the publisher said of `count` kinds of members.

    Raises:
        ProtocolError: it is none of that; the ranks are out of step.
    """
    found = []
    for row in plain if isinstance(plain, list) else []:
        digests = from_wire(row[0])
        if digests is not None:
            found.append(Hashed(digests, int(row[1]), row[2]))
    if len(found) != count:
        raise ProtocolError(
            f"a rank of the publisher answered for {len(found)} kinds of members instead of "
            f"{count}: are all ranks in the same call of update()?"
        )
    return found
