"""Weights of a module of which every rank holds a part: `fully_shard`, tensor parallel, pipelines.

Each rank describes what it holds; together they make one manifest with the layout of every tensor
(`parallelkit.weights.assembly`), without moving one. Each rank hands out the parts that it holds.
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
from parallelkit.specs import Accelerator
from parallelkit.weights.assembly import Entry, Roster, assemble
from parallelkit.weights.layout import region
from parallelkit.weights.manifest import Manifest
from parallelkit_torch import sharding, tensors
from parallelkit_torch.cuda.probe import accelerator_of
from parallelkit_torch.meeting import exchange, together
from parallelkit_torch.names import refuse_hidden_state
from parallelkit_torch.weights import ModuleSource

_KEEP: Final = (
    "a model keeps its names, shapes, dtypes, ties and layouts while it is published; publish it "
    "again"
)


def weight_source(module: nn.Module) -> WeightSource:
    """The source for a module: of parts where it is spread over ranks, else of a whole model.

    Raises:
        ManifestError: it keeps state that is no tensor of its own, or as the sources do.
    """
    _refuse_hidden_state(module)
    return ShardedModuleSource(module) if sharding.is_spread(module) else ModuleSource(module)


def _refuse_hidden_state(module: nn.Module) -> None:
    for _, part in sharding.stages(module) or [(0, module)]:
        refuse_hidden_state(part)


@final
class ShardedModuleSource:
    """The weights of a module spread over ranks; a `protocols.ShardedSource`.

    Tensors that are no `DTensor` are replicas: the lowest rank that has one serves it.
    """

    def __init__(self, module: nn.Module) -> None:
        """Take the module; `join` looks at it, with all ranks."""
        self._module = module
        self._group: ProcessGroup | None = None
        self._rank = 0
        self._spreads = sharding.Spreads([0], 0)
        self._roster = Roster(entries=())
        self._manifest: Manifest | None = None
        self._parts: dict[int, torch.Tensor] = {}
        self._views = tensors.LiveViews()

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
        with together(self._group):
            self._roster = self._describe()
        with together(self._group):
            self._manifest = assemble(*exchange(self._group, self._roster))
            self._find_parts()

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
                the manifest, or keeps state that is no tensor of its own; raised on every rank.
        """
        with together(self._group):
            _refuse_hidden_state(self._module)
            mine = self._describe()
            if mine != self._roster:
                raise ManifestError(f"{_difference(self._roster, mine)}; {_KEEP}")
            self._find_parts()
            tensors.settle(self._parts.values())

    def begin(self) -> None:
        """Nothing: every rank has called `look`."""

    def host_bytes(self, index: int) -> memoryview:
        """This rank's part of unique tensor `index`, row-major; valid until the next call.

        The live memory where the part is contiguous on the CPU, else a copy.

        Raises:
            StateError: this rank has no part of it.
        """
        part = self._parts.get(index)
        if part is None:
            raise StateError(
                f"tensor {self.manifest().unique[index].name!r} is not on rank {self._rank}; "
                f"this rank has {len(self._parts)} of {len(self.manifest().unique)} tensors"
            )
        view = self._views.of(index, part)
        return tensors.as_bytes(part) if view is None else view

    def live(self) -> Sequence[torch.Tensor | None]:
        """This rank's part of every unique tensor, as `look` found it."""
        return [self._parts.get(index) for index in range(len(self.manifest().unique))]

    def accelerator(self) -> Accelerator | None:
        """The GPU that the parts are on, and whether others can read it there; None: none is."""
        return accelerator_of(list(self._parts.values()), exported=True)

    def adopt(self, buffers: Sequence[memoryview]) -> None:
        """Refuse: parts cannot live where whole tensors do.

        Raises:
            UnsupportedFeatureError: always.
        """
        spread = [t for t in self.manifest().tensors if t.layout is not None]
        which = f" ({spread[0].name!r}: {spread[0].layout})" if spread else ""
        raise UnsupportedFeatureError(
            f"aliased=True with a model that is spread over ranks{which}: its parts cannot live "
            "in the segment for now; publish without aliased"
        )

    # --- inner parts

    def _walk(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        """Stage, name and tensor of everything here, each name once."""
        seen: set[str] = set()
        for stage, slot in sharding.held(self._module):
            if slot.name not in seen:
                seen.add(slot.name)
                yield stage, slot.name, slot.tensor

    def _describe(self) -> Roster:
        """What this rank holds, as it is now."""
        sharding.reshard(self._module)
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
