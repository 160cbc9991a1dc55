"""Weights in shared memory of one host, handed over by plain handles.

A handle names a segment, a place in it, a shape, a dtype and a digest. It is data alone: who reads
it opens the segment, checks that it is one of ours and this user's, maps it read-only, copies,
and compares the digest.
"""

from __future__ import annotations

import os
import re
from typing import Any, Final, final

import msgspec
import torch
import xxhash

from parallelkit.errors import (
    CorruptionError,
    ManifestError,
    TransportError,
    UnsupportedFeatureError,
)
from parallelkit.protocols import ShardedSource, WeightSource
from parallelkit.weights.exports import export
from parallelkit.weights.identity import host_identity
from parallelkit.weights.manifest import TensorSpec
from parallelkit.weights.publishing import source_of
from parallelkit.weights.segments import HEADER_BYTES, Segment
from parallelkit_vllm.sink import DTYPES

_PATH: Final = re.compile(r"/proc/[1-9][0-9]*/fd/[0-9]+|/dev/shm/parallelkit-[0-9a-f-]+")


class Handle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a tensor lies.

    Attributes:
        segment: path of the segment, such as `/proc/4711/fd/12`.
        inode: of the segment, so that another file under that path is noticed.
        offset: first byte in the segment's arena.
        dtype, shape: of the tensor, row-major.
        digest: xxh3 of its bytes, in hexadecimal.
    """

    segment: str
    inode: int
    offset: int
    dtype: str
    shape: list[int]
    digest: str


Handles = dict[str, dict[str, dict[str, Any]]]


def device_id() -> str:
    """What names the memory of this host, to all of its processes alike."""
    return f"cpu:{host_identity().boot_id}"


def share_weights(model: Any, *, named: bool = False) -> SharedWeights:
    """Make shared memory for a model's weights, to be read by engines on this host.

    Args:
        model: whatever a plugin knows as a source of weights, such as an `nn.Module` or a
            MindSpore `Cell`; on any device.
        named: a file in `/dev/shm`, of this user's alone, instead of a nameless segment; needed
            where the engine's workers cannot see this process (another PID namespace).

    Raises:
        NoBackendError: no plugin knows the model's type.
        UnsupportedFeatureError: it is spread over ranks.
        TransportError: there is not enough memory.

    Example:
        >>> with share_weights(model) as shared:                          # doctest: +SKIP
        ...     llm.collective_rpc(
        ...         "update_weights_from_ipc_handles", args=(shared.handles(),)
        ...     )
    """
    return SharedWeights(model, named)


@final
class SharedWeights:
    """A model's weights in shared memory; made by `share_weights`.

    The memory lives until `close`, or until this process ends.
    """

    def __init__(self, model: Any, named: bool) -> None:
        source = _source(model)
        self._source = source
        self._manifest = self._source.manifest()
        self._plan = export(self._manifest, 0)
        self._segment = Segment.create(max(1, self._plan.nbytes), named=named)
        self._closed = False

    def handles(self) -> Handles:
        """Copy the model's weights as they are now, and say where; for one update.

        Earlier handles are void from then on: who reads by them is told so.

        Returns:
            By device id (see `report_device_id`), by name: plain tables, which any RPC carries.

        Raises:
            TransportError: `close` was called.
            ManifestError: the model has other names, dtypes or shapes than before.
        """
        if self._closed:
            raise TransportError("the shared weights were closed; call share_weights again")
        self._source.begin()
        digests: dict[str, str] = {}
        offsets: dict[str, int] = {}
        arena = self._segment.arena
        for index, spec in enumerate(self._manifest.unique):
            offsets[spec.name] = offset = self._plan.offset(index) if spec.nbytes else 0
            arena[offset : offset + spec.nbytes] = self._source.host_bytes(index)
            digests[spec.name] = xxhash.xxh3_128_hexdigest(arena[offset : offset + spec.nbytes])
        path = self._segment.path or f"/proc/{os.getpid()}/fd/{self._segment.fd}"
        inode = os.fstat(self._segment.fd).st_ino
        tables = {}
        for spec in self._manifest.tensors:
            owner = spec.alias_of or spec.name
            tables[spec.name] = msgspec.to_builtins(
                Handle(
                    segment=str(path),
                    inode=inode,
                    offset=offsets[owner],
                    dtype=spec.dtype,
                    shape=list(spec.shape),
                    digest=digests[owner],
                )
            )
        return {device_id(): tables}

    def close(self) -> None:
        """Free the memory. Harmless when repeated."""
        if not self._closed:
            self._closed = True
            self._segment.close()

    def __enter__(self) -> SharedWeights:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _source(model: Any) -> WeightSource:
    source = source_of(model)
    if isinstance(source, ShardedSource):
        source.join(None)
    if source.manifest().mesh is not None:
        raise UnsupportedFeatureError(
            "this model is spread over ranks, of which one alone cannot share it; use "
            "pk.publish_weights(model) and publisher.attach(engine)"
        )
    return source


# --- the reader --------------------------------------------------------------------------------


def parse(name: str, given: Any) -> tuple[Handle, TensorSpec]:
    """Check one handle and say what it is of; nothing is opened.

    Raises:
        ManifestError: it is no handle of `share_weights`.
    """
    try:
        handle = msgspec.convert(given, Handle)
    except msgspec.ValidationError as error:
        raise ManifestError(
            f"the handle of {name!r:.200} is none of parallelkit_vllm.share_weights: {error}. "
            "Handles of torch.multiprocessing are pickled functions, and are refused"
        ) from error
    if not _PATH.fullmatch(handle.segment) or handle.offset < 0:
        raise ManifestError(
            f"the handle of {name!r:.200} names {handle.segment!r:.200} at {handle.offset}, which "
            "is no segment of parallelkit's"
        )
    return handle, TensorSpec(name=name, dtype=handle.dtype, shape=handle.shape)


class Reader:
    """Opens segments, each once, and copies tensors out of them. A context manager."""

    def __init__(self) -> None:
        self._segments: dict[tuple[str, int], Segment] = {}

    def read(self, handle: Handle, spec: TensorSpec) -> torch.Tensor:
        """Return a copy of the tensor that a handle names.

        Raises:
            TransportError: the segment is gone, cannot be opened, or is not one of ours.
            CorruptionError: the bytes are others than when the handle was made.
        """
        arena = self._open(handle).arena
        if handle.offset + spec.nbytes > len(arena):
            raise TransportError(
                f"the handle of {spec.name!r} ends at byte {handle.offset + spec.nbytes} of "
                f"{len(arena)}"
            )
        data = bytearray(arena[handle.offset : handle.offset + spec.nbytes])
        if xxhash.xxh3_128_hexdigest(data) != handle.digest:
            raise CorruptionError(
                f"the bytes of {spec.name!r} in shared memory are others than when its handle was "
                "made: handles() was called again meanwhile. Use the newest handles",
                tensors=[spec.name],
            )
        if not data:
            return torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device="cpu")
        flat = torch.frombuffer(data, dtype=torch.uint8)
        return flat.view(DTYPES[spec.dtype]).reshape(spec.shape)

    def close(self) -> None:
        """Unmap what was opened."""
        for segment in self._segments.values():
            segment.close()
        self._segments = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open(self, handle: Handle) -> Segment:
        key = handle.segment, handle.inode
        if key not in self._segments:
            self._segments[key] = _attach(*key)
        return self._segments[key]


def _attach(path: str, inode: int) -> Segment:
    anonymous = path.startswith("/proc/")
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if anonymous else os.O_NOFOLLOW)
    try:
        fd = os.open(path, flags)
    except OSError as error:
        raise TransportError(
            f"the segment {path} cannot be opened ({error.strerror}): the trainer is gone or has "
            "closed it, runs as another user, or in another PID namespace; there "
            "share_weights(model, named=True) helps"
        ) from error
    facts = os.fstat(fd)
    if facts.st_ino != inode:
        os.close(fd)
        raise TransportError(f"{path} is another file than when the handles were made")
    return Segment.attach(fd, facts.st_size - HEADER_BYTES, sealed=anonymous)
