"""`torch.distributed.checkpoint` without its pickles: plans and results go over our own group,
and a load builds torch's metadata from our index.

Each rank runs torch's save and load by itself (`no_dist`); what ranks must know of each other is
exchanged at three points: regions held, regions written, and the end.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

import msgspec
import torch
import xxhash
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
    _StoragePrefix,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from parallelkit.errors import CheckpointError, ParallelKitError
from parallelkit_torch.parallel.checkpoint_format import Chunk, Entry
from parallelkit_torch.parallel.checkpoint_peers import Peers
from parallelkit_torch.parallel.checkpoint_spread import Piece, Place, assign
from parallelkit_torch.parallel.checkpoint_state import DTYPES

_BLOCK: Final = 4 << 20


class Written(msgspec.Struct, frozen=True, array_like=True):
    """A region that a rank has written."""

    key: str
    chunk: Chunk


def write(
    folder: Path,
    tensors: Mapping[str, Mapping[str, torch.Tensor]],
    *,
    buffers: frozenset[str],
    peers: Peers,
) -> dict[str, Entry]:
    """Write tensors of all ranks into `folder`, each region once. Collective.

    Args:
        folder: exists, is empty, and is the same for all ranks.
        tensors: of this rank, by part (`model`, `optim`) and name: plain ones whole, DTensors as
            their local shards. The key of one is `part.name`.
        buffers: keys of which one rank's replicas are to be taken together.
        peers: of whom one that cannot write stops all.

    Returns:
        Where every tensor is, by key, the same on every rank.

    Raises:
        ParallelKitError: this or another rank could not write.
    """
    planner = _SavePlanner(buffers, peers)
    writer = _Writer(folder, peers)
    with _own_errors(f"writing to {folder}"), _alone():
        save(
            {
                part: {name: tensor.detach() for name, tensor in held.items()}
                for part, held in tensors.items()
            },
            storage_writer=writer,
            planner=planner,
            no_dist=True,
        )
    chunks: dict[str, list[Chunk]] = {}
    for part in writer.written:
        chunks.setdefault(part.key, []).append(part.chunk)
    return {
        key: Entry(piece.dtype, piece.shape, tuple(chunks[key]))
        for key, piece in planner.known.items()
    }


def read(folder: Path, tensors: dict[str, torch.Tensor], entries: Mapping[str, Entry]) -> None:
    """Fill tensors from a checkpoint. Not collective; each rank reads what its shards need.

    Args:
        folder: of the checkpoint.
        tensors: by key; plain ones are filled whole, DTensors their local shards.
        entries: where each key's tensor is.

    Raises:
        CheckpointError: bytes are missing, or not those that were written.
    """
    with _own_errors(f"reading {folder}"), _alone():
        load(
            dict(tensors),
            storage_reader=_Reader(folder, {key: entries[key] for key in tensors}),
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=True,
        )


class _SavePlanner(DefaultSavePlanner):
    """Plans this rank's part by what all ranks hold.

    Attributes:
        known: a piece of each tensor, of whatever rank, once planned.
    """

    def __init__(self, buffers: frozenset[str], peers: Peers) -> None:
        super().__init__(flatten_state_dict=True, flatten_sharded_tensors=False)
        self._buffers, self._peers = buffers, peers
        self.known: dict[str, Piece] = {}

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        (plan,) = all_plans
        mine = [self._piece(item) for item in plan.items]
        held = self._peers.meet("comparing what ranks hold", mine, list[Piece])
        owners = assign(held)
        items = [
            item
            for item, piece in zip(plan.items, mine, strict=True)
            if owners.get(Place(piece.key, piece.offsets)) == self._peers.rank
        ]
        regions: dict[str, dict[tuple[int, ...], Piece]] = {}
        for piece in (piece for pieces in held for piece in pieces):
            self.known.setdefault(piece.key, piece)
            if Place(piece.key, piece.offsets) in owners:
                regions.setdefault(piece.key, {})[piece.offsets] = piece
        metadata = Metadata(
            {key: _described(self.known[key], parts.values()) for key, parts in regions.items()},
            planner_data={key: tuple(key.split(".", 1)) for key in regions},
        )
        return [dataclasses.replace(plan, items=items)], metadata

    def _piece(self, item: WriteItem) -> Piece:
        data, key = item.tensor_data, item.index.fqn
        assert data is not None, "only tensors are planned"
        return Piece(
            key,
            str(data.properties.dtype).removeprefix("torch."),
            tuple(data.size),
            tuple(data.chunk.offsets),
            tuple(data.chunk.sizes),
            key in self._buffers,
        )


class _Writer(FileSystemWriter):
    """Writes this rank's file, and on rank 0 torch's metadata of all.

    Attributes:
        written: every region of every rank.
    """

    def __init__(self, folder: Path, peers: Peers) -> None:
        super().__init__(folder, single_file_per_rank=True, thread_count=1, overwrite=False)
        self._folder, self._peers = folder, peers
        self._sizes: dict[Place, tuple[int, ...]] = {}
        self.written: list[Written] = []

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        prefix = _StoragePrefix(f"__{self._peers.rank}_")
        return [dataclasses.replace(plan, storage_data=prefix) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        problem: Exception | None = None
        mine: list[Written] = []
        for item in plan.items:
            assert item.tensor_data is not None, "only tensors are planned"
            chunk = item.tensor_data.chunk
            self._sizes[Place(item.index.fqn, tuple(chunk.offsets))] = tuple(chunk.sizes)
        try:
            if plan.items:
                results = super().write_data(plan, planner).wait()
            mine = [self._read_back(result) for result in results]
        except Exception as error:
            problem = CheckpointError(f"cannot write to {self._folder}: {_reason(error)}")
        step = "writing the tensors"
        rows = self._peers.meet(step, mine, list[Written], problem=problem)
        self.written = [part for row in rows for part in row]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        if self._peers.rank == 0:
            super().finish(metadata, [[_result(part) for part in self.written]])

    def _read_back(self, result: WriteResult) -> Written:
        """Digest what the file now has."""
        info: _StorageInfo = result.storage_data
        with (self._folder / info.relative_path).open("rb") as file:
            mark = _digest(file, info)
        index = result.index
        assert index.offset is not None
        offsets = tuple(index.offset)
        sizes = self._sizes[Place(index.fqn, offsets)]
        where = (info.relative_path, info.offset, info.length)
        return Written(index.fqn, Chunk(offsets, sizes, *where, mark))


class _Reader(FileSystemReader):
    """Reads by our index, and compares every region's bytes with their digest."""

    def __init__(self, folder: Path, entries: Mapping[str, Entry]) -> None:
        super().__init__(folder)
        self._entries = entries
        self._digests: dict[tuple[str, int], int] = {}

    def read_metadata(self) -> Metadata:
        tensors: dict[str, Any] = {}
        places: dict[MetadataIndex, _StorageInfo] = {}
        for key, entry in self._entries.items():
            tensors[key] = _described(entry, entry.chunks)
            for chunk in entry.chunks:
                info = _StorageInfo(chunk.file, chunk.start, chunk.length)
                places[MetadataIndex(key, chunk.offsets)] = info
                self._digests[chunk.file, chunk.start] = chunk.digest
        return Metadata(tensors, storage_data=places)

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> IO[bytes]:
        if _digest(file, sinfo) != self._digests[sinfo.relative_path, sinfo.offset]:
            raise CheckpointError(
                f"bytes {sinfo.offset} to {sinfo.offset + sinfo.length} of {sinfo.relative_path} "
                "are not those that were written"
            )
        return super()._slice_file(file, sinfo)


def _described(tensor: Piece | Entry, regions: Iterable[Piece | Chunk]) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        TensorProperties(dtype=DTYPES[tensor.dtype]),
        torch.Size(tensor.shape),
        [ChunkStorageMetadata(torch.Size(r.offsets), torch.Size(r.sizes)) for r in regions],
    )


def _digest(file: IO[bytes], where: _StorageInfo) -> int:
    """xxh3-64 of some bytes of a file, read a block at a time."""
    file.seek(where.offset)
    mark, left = xxhash.xxh3_64(), where.length
    while left:
        block = file.read(min(left, _BLOCK))
        if not block:
            raise CheckpointError(f"{where.relative_path} ends before what was written to it")
        mark.update(block)
        left -= len(block)
    return mark.intdigest()


def _result(part: Written) -> WriteResult:
    chunk = part.chunk
    return WriteResult(
        MetadataIndex(part.key, chunk.offsets),
        chunk.length,
        _StorageInfo(chunk.file, chunk.start, chunk.length),
    )


@contextmanager
def _alone() -> Iterator[None]:
    """Without torch's warning that each rank works by itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


@contextmanager
def _own_errors(what: str) -> Iterator[None]:
    """Raise what happened inside torch's wrapper of it, which is no `Exception`."""
    try:
        yield
    except CheckpointException as wrapped:
        error = next(iter(wrapped.failures.values()))[0]
        if isinstance(error, ParallelKitError) or not isinstance(error, Exception):
            raise error from None
        raise CheckpointError(f"{what} failed: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
