"""Weights of a module of which every rank holds a part: `fully_shard`, tensor parallel, pipelines.

Each rank describes what it holds; together they make one manifest with the layout of every tensor
(`parallelkit.weights.assembly`), without moving one. For whole tensors rank 0 pulls the parts that
it lacks into the transport's arena (`parallelkit_torch.pull`), while the others serve.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Final, final

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from parallelkit.errors import (
    CorruptionError,
    ManifestError,
    ProtocolError,
    StateError,
    UnsupportedFeatureError,
    WeightTransferError,
)
from parallelkit.protocols import ProcessGroup, WeightSource
from parallelkit.weights.assembly import Entry, Roster, assemble
from parallelkit.weights.layout import region
from parallelkit.weights.manifest import Manifest
from parallelkit.weights.parcels import Bytes, Parcel, Part, inbound, parcels, place, window
from parallelkit_torch import pull, sharding, tensors
from parallelkit_torch.meeting import exchange, together
from parallelkit_torch.names import slots
from parallelkit_torch.weights import ModuleSource

_KEEP: Final = (
    "a model keeps its names, shapes, dtypes, ties and layouts while it is published; publish it "
    "again"
)
#: Parcels that rank 0 has asked for at once: one arrives while another is put in place.
_AHEAD: Final = 2
#: For what is left to say or hear once an update failed or ended, in seconds.
_LAST_SECONDS: Final = 5.0
_NOTHING: Final = np.empty(0, np.uint8)


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
        self._line: pull.Line | None = None
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
        self._line = pull.Line(wire) if wire is not None else None
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

        Memory beyond the buffers: two parcels of 16 MiB, or two parts where they are larger.

        Args:
            buffers: writable, contiguous, of the tensors' bytes.
            seconds: for all of it.
            check: compare a hash of every parcel taken where it comes from with one taken here
                (bytes in host memory only).

        Raises:
            PeerLostError, UpdateTimeoutError: a rank is gone, or did not answer in time; the
                group is broken.
            CorruptionError: bytes arrived changed.
            WeightTransferError: a rank could not read its part.
        """
        deadline = time.monotonic() + seconds
        wholes = [np.frombuffer(b, np.uint8) if b.nbytes else _NOTHING for b in buffers]
        for parcel in parcels(self.manifest(), self._rank):
            for part in parcel.parts:
                data = np.frombuffer(tensors.as_bytes(self._part(part)), np.uint8)
                self._place(wholes, part, data)
        if self._line is None:
            return
        waiting: deque[tuple[Parcel, pull.Pull]] = deque()
        numbers = [0] * self._line.world_size
        try:
            for parcel in inbound(self.manifest()):
                if len(waiting) == _AHEAD:
                    self._receive(*waiting[0], wholes, deadline)
                    waiting.popleft()
                number, into = numbers[parcel.rank], self._into(wholes, parcel)
                asked = pull.Pull(self._line, parcel.rank, number, into, check)
                waiting.append((parcel, asked))
                asked.start(deadline - time.monotonic())
                numbers[parcel.rank] += 1
            while waiting:
                self._receive(*waiting[0], wholes, deadline)
                waiting.popleft()
        except BaseException:
            self._drain([asked for _, asked in waiting])
            raise

    def serve(self, seconds: float) -> None:
        """Hand out what rank 0 asks for, until it says that it has ended. Ranks other than 0.

        Args:
            seconds: how long to wait for each word of rank 0.

        Raises:
            PeerLostError: rank 0 is gone, or says that another rank is.
            UpdateTimeoutError: rank 0 was silent, or says that another rank was too slow.
        """
        if self._line is None:
            return
        mine = enumerate(parcels(self.manifest(), self._rank))
        while True:
            word = self._line.hear(0, seconds)
            if word.kind == pull.END:
                return
            if word.kind in (pull.LOST, pull.LATE):
                raise self._line.give_up(word)
            number, parcel = next(mine, (-1, None))
            if word.kind not in (pull.PULL, pull.CHECK) or parcel is None or word.number != number:
                raise ProtocolError(
                    f"rank 0 asks rank {self._rank} for parcel {word.number} ({word.kind!r}) where "
                    f"parcel {number} is next: the ranks do not publish the same manifest"
                )
            self._answer(parcel, word.kind == pull.CHECK, seconds)

    def dismiss(self) -> bool:
        """Let the others leave `serve`. Rank 0, at the end of an update, however it went.

        Returns:
            Whether the group still works; if not, the others are told why.
        """
        if self._line is None:
            return True
        fault = self._line.fault
        self._line.say_all(pull.Word(pull.END) if fault is None else fault, _LAST_SECONDS)
        return fault is None

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

    def _part(self, part: Part) -> torch.Tensor:
        """The live tensor of a part, checked to have its bytes."""
        tensor = self._parts[part.tensor]
        if tensor.numel() * tensor.element_size() != part.nbytes:
            name = self.manifest().unique[part.tensor].name
            raise ManifestError(f"the part of {name!r} on rank {self._rank} changed; {_KEEP}")
        return tensor

    def _place(self, wholes: Sequence[Bytes], part: Part, data: Bytes) -> None:
        place(wholes[part.tensor], self.manifest().unique[part.tensor], part.region, data)

    def _into(self, wholes: Sequence[Bytes], parcel: Parcel) -> torch.Tensor:
        """Where a parcel is received: in place where it is one run of a tensor in host memory."""
        assert self._line is not None
        if len(parcel.parts) == 1 and self._line.device.type == "cpu":
            part = parcel.parts[0]
            spec = self.manifest().unique[part.tensor]
            run = window(wholes[part.tensor], spec, part.region)
            if run is not None:
                return torch.from_numpy(run)
        return pull.scratch(parcel.nbytes, self._line.device)

    def _receive(
        self, parcel: Parcel, asked: pull.Pull, wholes: Sequence[Bytes], deadline: float
    ) -> None:
        """Take a parcel to its place."""
        word = asked.finish(deadline - time.monotonic())
        if word.kind != pull.DONE:
            raise WeightTransferError(f"publisher rank {parcel.rank} could not read: {word.text}")
        if asked.check and word.number != pull.digest(asked.into):
            names = sorted({self.manifest().unique[p.tensor].name for p in parcel.parts})
            raise CorruptionError(
                f"bytes from publisher rank {parcel.rank} arrived changed, in "
                f"{', '.join(names[:6])}{' ...' if len(names) > 6 else ''}",
                tensors=names,
            )
        data, start = asked.into.cpu().numpy(), 0
        for part in parcel.parts:
            piece = data[start : start + part.nbytes]
            if not np.may_share_memory(piece, wholes[part.tensor]):
                self._place(wholes, part, piece)
            start += part.nbytes

    def _drain(self, waiting: Sequence[pull.Pull]) -> None:
        """Take what is on its way to nowhere, so that the others are free to hear of the end."""
        assert self._line is not None
        if self._line.fault is None:
            with contextlib.suppress(WeightTransferError):
                for asked in waiting:
                    asked.finish(_LAST_SECONDS)

    def _answer(self, parcel: Parcel, check: bool, seconds: float) -> None:
        """Send a parcel: as many bytes as rank 0 waits for, even where they cannot be read."""
        assert self._line is not None
        try:
            data = self._pack(parcel)
            closing = pull.Word(pull.DONE, pull.digest(data) if check else 0)
        except Exception as error:
            data = pull.scratch(parcel.nbytes, self._line.device)
            closing = pull.Word(pull.FAILED, 0, f"{type(error).__name__}: {error}")
        self._line.answer(data, closing, seconds)

    def _pack(self, parcel: Parcel) -> torch.Tensor:
        """A parcel's bytes on the group's device: the live memory where it is one whole part."""
        assert self._line is not None
        flats = (tensors.flat_bytes(self._part(part)) for part in parcel.parts)
        if len(parcel.parts) == 1:
            return next(flats).to(self._line.device)
        data, start = pull.scratch(parcel.nbytes, self._line.device), 0
        for flat in flats:
            data[start : start + flat.numel()].copy_(flat)
            start += flat.numel()
        return data


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
