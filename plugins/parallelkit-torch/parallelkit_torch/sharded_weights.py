"""Weights of a module of which every rank holds a part: `fully_shard`, tensor parallel, pipelines.

Each rank describes what it holds; together they make one manifest with the layout of every tensor
(`parallelkit.weights.assembly`), without moving one. For whole tensors rank 0 pulls the parts that
it lacks into the transport's arena (`parallelkit_torch.parcel_stream`), while the others serve.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Final, final

import torch
import torch.distributed as dist
from torch import nn

from parallelkit.errors import (
    ManifestError,
    StateError,
    UnsupportedFeatureError,
)
from parallelkit.protocols import ProcessGroup, WeightSource
from parallelkit.weights.assembly import Entry, Roster, assemble
from parallelkit.weights.layout import region
from parallelkit.weights.manifest import Manifest
from parallelkit.weights.parcels import Part
from parallelkit_torch import pull, sharding, tensors
from parallelkit_torch.meeting import exchange, together
from parallelkit_torch.names import slots
from parallelkit_torch.parcel_stream import ParcelStream
from parallelkit_torch.weights import ModuleSource

_KEEP: Final = (
    "a model keeps its names, shapes, dtypes, ties and layouts while it is published; publish it "
    "again"
)


def weight_source(module: nn.Module) -> WeightSource:
    """The source for a module: of parts where it is spread over ranks, else of a whole model."""
    return ShardedModuleSource(module) if sharding.is_spread(module) else ModuleSource(module)


@final
class ShardedModuleSource:
    """The weights of a module spread over ranks; a `protocols.ShardedSource`.

    Tensors that are no `DTensor` are replicas: the lowest rank that has one serves it.
    """

    def __init__(self, module: nn.Module) -> None:
        """Take the module; `join` looks at it, with all ranks."""
        self._module = module
        self._group: ProcessGroup | None = None
        self._stream: ParcelStream | None = None
        self._rank = 0
        self._spreads = sharding.Spreads([0], 0)
        self._roster = Roster(entries=())
        self._manifest: Manifest | None = None
        self._parts: dict[int, torch.Tensor] = {}

    @property
    def device(self) -> str:
        """Where the parts are: `"cpu"`, `"cuda:0"`; of the first one, if they differ."""
        return next((str(part.device) for part in self._parts.values()), "cpu")

    def join(self, group: ProcessGroup | None) -> None:
        """Make one manifest of what all ranks hold. Collective over `group`.

        Costs an exchange of hashes, and a broadcast for each different roster: one in all, or
        one for each stage of a pipeline.

        Raises:
            UnsupportedFeatureError: not a group of torch's; or a tensor lies on ranks outside the
                group, or is divided in a way that is no arithmetic over one mesh, by name.
            RankMismatchError: the ranks hold different models.
            ManifestError: a tensor has no bytes on some rank, or its dtype is not allowed.
        """
        if group is not None and group.framework != "torch":
            raise UnsupportedFeatureError(
                f"a sharded torch model needs a group of torch; this one is of {group.framework}"
            )
        self._group = group if group is not None and group.world_size > 1 else None
        self._rank = group.rank if group is not None else 0
        known = dist.get_process_group_ranks(group.native) if group is not None else [0]
        self._spreads = sharding.Spreads(known, self._rank)
        wire = getattr(self._group, "wire", None)  # of a group of ours, whoever holds it
        line = pull.Line(wire) if wire is not None else None
        with together(self._group):
            self._roster = self._describe()
        with together(self._group):
            self._manifest = assemble(*exchange(self._group, self._roster))
            self._find_parts()
        self._stream = ParcelStream(self._manifest, self._rank, line, self._live)

    def manifest(self) -> Manifest:
        """That of the whole model, the same on every rank; after `join`."""
        if self._manifest is None:
            raise StateError("manifest() of a sharded model before join(), where its ranks meet")
        return self._manifest

    def look(self) -> None:
        """Look at the module again: an update begins. Collective.

        Whole copies that a forward of `fully_shard` left are dropped first.

        Raises:
            ManifestError: on any rank it has other names, dtypes, shapes, ties or layouts than
                the manifest; raised on every rank.
        """
        with together(self._group):
            mine = self._describe()
            if mine != self._roster:
                raise ManifestError(f"{_difference(self._roster, mine)}; {_KEEP}")
            self._find_parts()

    def begin(self) -> None:
        """Nothing: every rank has called `look`."""

    def host_bytes(self, index: int) -> memoryview:
        """A tensor's bytes, where this rank has all of them.

        Raises:
            UnsupportedFeatureError: it is divided, or on other ranks.
        """
        spec = self.manifest().unique[index]
        if spec.layout is not None:
            raise UnsupportedFeatureError(
                f"tensor {spec.name!r} is spread over ranks ({spec.layout}); rank 0 gathers it"
            )
        return tensors.as_bytes(self._parts[index])

    def adopt(self, buffers: Sequence[memoryview]) -> None:
        """Refuse: parts cannot live where whole tensors do.

        Raises:
            UnsupportedFeatureError: always.
        """
        spread = [t for t in self.manifest().tensors if t.layout is not None]
        which = f" ({spread[0].name!r}: {spread[0].layout})" if spread else ""
        raise UnsupportedFeatureError(
            f"aliased=True with a model that is spread over ranks{which}: its parts cannot live "
            "in a segment of whole tensors; publish without aliased"
        )

    # --- the stream

    def gather(self, buffers: Sequence[memoryview], *, seconds: float, check: bool) -> None:
        """Fill each buffer with the whole unique tensor of its index. Rank 0; others `serve`.

        Args and Raises: as `parcel_stream.ParcelStream.gather`.
        """
        self._opened().gather(buffers, seconds=seconds, check=check)

    def serve(self, seconds: float) -> None:
        """Hand out what rank 0 asks for, until it says that it has ended. Ranks other than 0.

        Args and Raises: as `parcel_stream.ParcelStream.serve`.
        """
        self._opened().serve(seconds)

    def dismiss(self) -> bool:
        """Let the others leave `serve`. Rank 0, at the end of an update, however it went.

        Returns:
            Whether the group still works; if not, the others are told why.
        """
        return self._opened().dismiss()

    def _opened(self) -> ParcelStream:
        if self._stream is None:
            raise StateError("a sharded model was not joined by its ranks; call join() first")
        return self._stream

    # --- inner parts

    def _walk(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        """Stage, name and tensor of everything here, each name once."""
        seen: set[str] = set()
        stages = sharding.stages(self._module)
        for stage, module in stages if stages is not None else [(0, self._module)]:
            sharding.reshard(module)
            for slot in slots(module):
                if slot.name not in seen:
                    seen.add(slot.name)
                    yield stage, slot.name, slot.tensor

    def _describe(self) -> Roster:
        """What this rank holds, as it is now."""
        entries: list[Entry] = []
        owners: dict[object, str] = {}
        for stage, name, tensor in self._walk():
            part = sharding.local_part(tensor)
            tensors.refuse_unreadable(name, part)
            spread = self._spreads.of(name, tensor)
            shape = tuple(tensor.shape)
            # An empty part is another object at each look; the tensor it is part of is not.
            what = tensors.identity(part) if part.numel() else id(tensor)
            owner = owners.setdefault((what, shape, spread), name)
            entries.append(
                Entry(
                    name=name,
                    dtype=tensors.dtype_name(part),
                    shape=shape,
                    alias_of=None if owner == name else owner,
                    stage=stage,
                    held=spread.held,
                    mesh=spread.mesh,
                    shards=spread.shards,
                )
            )
        stages = sharding.stages(self._module)
        return Roster(
            entries=tuple(entries), stages=tuple(stage for stage, _ in stages) if stages else ()
        )

    def _find_parts(self) -> None:
        """Find what this rank holds of every unique tensor, and check that layouts tell its shape.

        Raises:
            UnsupportedFeatureError: the part has another shape than the layout says.
        """
        manifest = self.manifest()
        index_of = {t.name: i for i, t in enumerate(manifest.unique)}
        self._parts = {}
        for _, name, tensor in self._walk():
            index = index_of.get(name)
            if index is None:
                continue
            spec, part = manifest.unique[index], sharding.local_part(tensor)
            self._parts[index] = part
            if spec.layout is None or manifest.mesh is None or not spec.nbytes:
                continue
            box = region(spec.layout, manifest.mesh, spec.shape, self._rank)
            if box is not None and box.sizes != tuple(part.shape):
                raise UnsupportedFeatureError(
                    f"tensor {name!r} {list(spec.shape)} has a part of shape {list(part.shape)} "
                    f"on rank {self._rank}, where {spec.layout} gives {list(box.sizes)}: parts "
                    "are chunks of the rounded-up size, in order"
                )

    def _live(self, part: Part) -> torch.Tensor:
        """The live tensor of a part, checked to have its bytes."""
        tensor = self._parts[part.tensor]
        if tensor.numel() * tensor.element_size() != part.nbytes:
            name = self.manifest().unique[part.tensor].name
            raise ManifestError(f"the part of {name!r} on rank {self._rank} changed; {_KEEP}")
        return tensor


def _difference(was: Roster, now: Roster) -> str:
    """The first thing that changed."""
    old = next((e for e, o in zip_longest(was.entries, now.entries) if e and e != o), None)
    new = next((e for e, o in zip_longest(now.entries, was.entries) if e and e != o), None)
    if old is not None and new is not None and old.name == new.name:
        if old.alias_of != new.alias_of:
            return f"tensor {new.name!r} was tied to {old.alias_of!r} and is to {new.alias_of!r}"
        return f"tensor {new.name!r} was {old.where()} and is now {new.where()}"
    if old is not None and old.name not in {entry.name for entry in now.entries}:
        return f"tensor {old.name!r} is no longer there"
    return f"tensor {new.name!r} is new" if new is not None else "the order is another"
