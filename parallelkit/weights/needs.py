"""What one member keeps of the published tensors: a region of each, or nothing.

Held as a table of the distinct regions and a number for each tensor, since a model has many tensors
and few shapes; members that keep the same are equal and have the same digest, however it was said.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, Final

import attrs
import numpy as np

from parallelkit.errors import ManifestError, NeedsError
from parallelkit.weights.layout import Mesh, Region, ShardLayout, region
from parallelkit.weights.manifest import Manifest
from parallelkit.weights.regions import inside, whole

Numbers = np.ndarray[Any, np.dtype[np.int32]]
#: The wire form of the table: first elements and extents.
Rows = list[tuple[list[int], list[int]]]
#: Rows from the wire, for each unique tensor.
_MOST_ROWS: Final = 4


@attrs.frozen(slots=False, eq=False)
class Needs:
    """A region of each unique tensor of a manifest, or None.

    Made by `whole`, `of`, `sharded` or `from_wire`, which number regions by first use and keep no
    others, so that equal needs have equal tables. Equal by value, and hashable.

    Attributes:
        regions: the distinct regions, in global coordinates of the tensors.
        which: int32, for each unique tensor the number of its region, or -1.
    """

    regions: tuple[Region, ...]
    which: Numbers

    @classmethod
    def whole(cls, manifest: Manifest) -> Needs:
        """All of every tensor."""
        kinds, which = manifest.kinds
        table = [whole(kind.shape) for kind in kinds]
        return cls._numbered(table, np.frombuffer(which, np.int32))

    @classmethod
    def of(cls, manifest: Manifest, regions: Iterable[Region | None]) -> Needs:
        """One region, or None, for each unique tensor of the manifest, in its order.

        Raises:
            NeedsError: too many or too few, or a region that is not inside its tensor.
        """
        numbers: dict[Region, int] = {}
        which = [-1 if r is None else numbers.setdefault(r, len(numbers)) for r in regions]
        needs = cls._numbered(list(numbers), np.array(which, np.int32))
        needs.check(manifest)
        return needs

    @classmethod
    def sharded(
        cls, manifest: Manifest, layouts: Sequence[ShardLayout | None], mesh: Mesh, rank: int
    ) -> Needs:
        """What a rank of another mesh holds.

        Args:
            manifest: what is published.
            layouts: how each unique tensor is spread over `mesh`; None: whole on every rank.
            mesh, rank: the member's ranks, and which it is.

        Raises:
            NeedsError: a layout that does not fit its tensor, or no such rank.
        """
        unique, layouts = manifest.unique, tuple(layouts)  # kept: told apart by identity below
        if len(layouts) != len(unique) or not 0 <= rank < mesh.size:
            raise NeedsError(
                f"rank {rank} of {mesh.size} with {len(layouts)} layouts needs {len(unique)} "
                "tensors: give one layout for each unique tensor, and a rank of the mesh"
            )
        kinds, which = manifest.kinds
        ids = np.fromiter(map(id, layouts), np.uint64, len(layouts))
        different = np.unique(ids, return_inverse=True)[1].reshape(-1)
        keys = different * max(len(kinds), 1) + np.frombuffer(which, np.int32)
        _, first, numbers = np.unique(keys, return_index=True, return_inverse=True)
        table, places = list[Region](), np.full(len(first), -1, np.int32)
        for place in np.argsort(first).tolist():  # by tensor, for the first that is wrong
            tensor = unique[first[place]]
            box = _part(layouts[first[place]], mesh, tensor.shape, rank, tensor.name)
            if box is not None:
                places[place] = len(table)
                table.append(box)
        return cls._numbered(table, places[numbers.reshape(-1)])

    @classmethod
    def from_wire(cls, manifest: Manifest, regions: Rows, which: Sequence[int | None]) -> Needs:
        """Read what `to_wire` gave; every number is checked.

        Raises:
            NeedsError: they are not regions of the manifest's tensors.
        """
        tensors = len(manifest.unique)
        # Before anything is done for each. A table need not be tidy, but not much longer either.
        if len(which) != tensors or len(regions) > _MOST_ROWS * tensors:
            raise NeedsError(
                f"there are {len(regions)} regions for {len(which)} tensors; the manifest has "
                f"{tensors} unique tensors, each with a region or None, and {_MOST_ROWS} times as "
                "many rows at most"
            )
        for number, row in enumerate(regions):
            if len(row) != 2 or any(type(n) is not int for part in row for n in part):
                raise NeedsError(f"region {number} is {row!r:.200}, not two lists of integers")
        if any(n is not None and not (type(n) is int and 0 <= n < len(regions)) for n in which):
            raise NeedsError(f"a tensor keeps a region that is none of the {len(regions)} given")
        table = [Region(tuple(low), tuple(size)) for low, size in regions]
        numbers = np.array([-1 if n is None else n for n in which], np.int32)
        needs = cls._numbered(table, numbers)
        needs.check(manifest)
        return needs

    def to_wire(self) -> tuple[Rows, list[int | None]]:
        """Plain lists: the table, and a number or None for each unique tensor."""
        rows = [(list(low), list(size)) for low, size in self.regions]
        return rows, [None if n < 0 else n for n in self.which.tolist()]

    @classmethod
    def _numbered(cls, table: Sequence[Region], which: Numbers) -> Needs:
        """Give regions numbers by first use, equal ones the same, and drop those without use."""
        distinct: dict[Region, int] = {}
        same = np.array([distinct.setdefault(r, len(distinct)) for r in table] + [-1], np.int32)
        merged = same[which]  # number -1 takes the last, which is -1
        used, first = np.unique(merged, return_index=True)
        order = [int(n) for n in used[np.argsort(first)] if n >= 0]
        renamed = np.full(len(distinct) + 1, -1, np.int32)
        renamed[order] = np.arange(len(order), dtype=np.int32)
        numbers = renamed[merged]
        numbers.flags.writeable = False
        regions = list(distinct)
        return cls(tuple(regions[n] for n in order), numbers)

    def check(self, manifest: Manifest) -> None:
        """Raise `NeedsError` unless these are regions of the manifest's tensors."""
        kinds, which = manifest.kinds
        if len(self.which) != len(which):
            raise NeedsError(
                f"there are regions for {len(self.which)} tensors; the manifest has {len(which)} "
                "unique tensors, and each has a region or None"
            )
        for first, kind, number in self.pairs(manifest):
            shape = kinds[kind].shape
            if number >= 0 and not inside(self.regions[number], whole(shape)):
                low, size = self.regions[number]
                raise NeedsError(
                    f"of tensor {manifest.unique[first].name!r} a box is kept that begins at "
                    f"{list(low)!r:.200} with sizes {list(size)!r:.200}: not inside its shape "
                    f"{list(shape)}"
                )

    def pairs(self, manifest: Manifest) -> list[tuple[int, int, int]]:
        """Each combination of a kind and a region, with the first tensor that has it.

        Returns:
            First tensor, number of the kind, number of the region or -1; ascending.
        """
        _, first, _ = self._combined(manifest)
        kinds = np.frombuffer(manifest.kinds[1], np.int32)
        return [(int(i), int(kinds[i]), int(self.which[i])) for i in first]

    def classes(self, manifest: Manifest) -> Numbers:
        """For each unique tensor, the number of its combination among `pairs`."""
        return self._combined(manifest)[2]

    def _combined(self, manifest: Manifest) -> tuple[Any, Any, Numbers]:
        kinds = np.frombuffer(manifest.kinds[1], np.int32).astype(np.int64)
        keys = kinds * (len(self.regions) + 1) + self.which + 1
        used, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        order = np.argsort(first)
        rank = np.empty(len(order), np.int32)
        rank[order] = np.arange(len(order), dtype=np.int32)
        return used, first[order], rank[inverse]

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that are equal exactly where the needs are."""
        h = hashlib.blake2b(repr(self.regions).encode(), digest_size=16)
        h.update(self.which.astype("<i4").tobytes())
        return h.digest()

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, Needs) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __getitem__(self, tensor: int) -> Region | None:
        """What is kept of unique tensor number `tensor`."""
        number = int(self.which[tensor])
        return None if number < 0 else self.regions[number]

    def __len__(self) -> int:
        return len(self.which)


def _part(
    layout: ShardLayout | None, mesh: Mesh, shape: tuple[int, ...], rank: int, name: str
) -> Region | None:
    if layout is None:
        return whole(shape)
    try:
        layout.check(mesh, shape)
    except ManifestError as error:
        raise NeedsError(f"tensor {name!r}: {error}") from None
    return region(layout, mesh, shape, rank)
