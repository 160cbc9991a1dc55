"""What a process exports, as bytes of a fixed form: allocations with their handles, and spans.

Little-endian. A header (4 bytes `PKCU`, version, number of allocations, number of spans), then for
each allocation 16 bytes that name the GPU, the driver's handle of 64 bytes, its size and a serial
number, then for each span the allocation it is in, its offset and its size. Everything is bounded
and checked before the driver sees any of it. A handle is no secret, but who has it and runs as the
same user can map the memory: send it over the control channel only.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

import attrs
import numpy as np

from parallelkit_torch.cuda.driver import HANDLE_BYTES, UUID_BYTES
from parallelkit_torch.cuda.errors import SheetError

MOST_ALLOCATIONS: Final = 1 << 16
MOST_SPANS: Final = 1 << 20
MOST_BYTES: Final = 1 << 44

_MAGIC: Final = b"PKCU"
_VERSION: Final = 1
_HEADER: Final = struct.Struct("<4sIII")
_HANDLE: Final = np.dtype(
    {
        "names": ["gpu", "handle", "nbytes", "serial"],
        "formats": [f"V{UUID_BYTES}", f"V{HANDLE_BYTES}", "<u8", "<u8"],
    }
)
_SPAN: Final = np.dtype(
    {"names": ["allocation", "zero", "offset", "nbytes"], "formats": ["<u4", "<u4", "<u8", "<u8"]}
)

Array = np.ndarray[Any, np.dtype[np.int64]]


def _of_length(length: int) -> Any:
    def check(_: object, attribute: Any, value: bytes) -> None:
        if len(value) != length or not any(value):
            raise SheetError(
                f"{attribute.name} must be {length} bytes that are not all zero; it is "
                f"{len(value)} bytes"
            )

    return check


@attrs.frozen
class Handle:
    """One allocation of another process.

    Attributes:
        gpu: the 16 bytes of the UUID of the GPU that it lies on.
        handle: what the driver made of it.
        nbytes: its size.
        serial: says whether two handles are of the same export; memory that was freed and
            allocated anew gets another one.
    """

    gpu: bytes = attrs.field(validator=_of_length(UUID_BYTES))
    handle: bytes = attrs.field(validator=_of_length(HANDLE_BYTES), repr=False)
    nbytes: int = attrs.field()
    serial: int = attrs.field()

    @nbytes.validator
    def _check_nbytes(self, _: object, value: int) -> None:
        if not 0 < value <= MOST_BYTES:
            raise SheetError(f"an allocation of {value} bytes; it must have 1 to {MOST_BYTES}")


@attrs.frozen(eq=False)
class Sheet:
    """Allocations, and where in them the exported spans are.

    Attributes:
        handles: the allocations, each once.
        allocation, offset, nbytes: of each span: index of its allocation, first byte in it, size.
            A span of no bytes may be in allocation 0 where there is none.
    """

    handles: tuple[Handle, ...]
    allocation: Array
    offset: Array
    nbytes: Array

    def __attrs_post_init__(self) -> None:
        if len(self.handles) > MOST_ALLOCATIONS or len(self.allocation) > MOST_SPANS:
            raise SheetError(
                f"{len(self.handles)} allocations and {len(self.allocation)} spans; at most "
                f"{MOST_ALLOCATIONS} and {MOST_SPANS} are allowed"
            )
        if len(set(self.handles)) < len(self.handles):
            raise SheetError("an allocation is listed twice")
        sizes = np.array([h.nbytes for h in self.handles], np.int64)
        lost = (self.allocation < 0) | (
            self.allocation >= np.where(self.nbytes, len(sizes), max(len(sizes), 1))
        )
        if lost.any():
            span = int(np.argmax(lost))
            raise SheetError(
                f"span {span} is in allocation {self.allocation[span]} of {len(sizes)}"
            )
        room = sizes[self.allocation] if len(sizes) else np.zeros_like(self.offset)
        out = (self.offset < 0) | (self.nbytes < 0) | (self.nbytes > room - self.offset)
        if out.any():
            span = int(np.argmax(out))
            raise SheetError(
                f"span {span}, {self.nbytes[span]} bytes from {self.offset[span]}, reaches outside "
                f"its allocation of {room[span]} bytes"
            )

    def addresses(self, bases: Sequence[int]) -> Array:
        """Where the spans are, given where the allocations are; 0 for those of no bytes."""
        found = np.array([*bases, 0], np.int64)[self.allocation] + self.offset
        return np.where(self.nbytes, found, 0)

    def encode(self) -> bytes:
        """The sheet as bytes."""
        handles = np.zeros(len(self.handles), _HANDLE)
        for row, handle in zip(handles, self.handles, strict=True):
            row["gpu"], row["handle"] = np.void(handle.gpu), np.void(handle.handle)
            row["nbytes"], row["serial"] = handle.nbytes, handle.serial
        spans = np.zeros(len(self.allocation), _SPAN)
        spans["allocation"], spans["offset"] = self.allocation, self.offset
        spans["nbytes"] = self.nbytes
        header = _HEADER.pack(_MAGIC, _VERSION, len(handles), len(spans))
        return header + handles.tobytes() + spans.tobytes()

    @classmethod
    def decode(cls, data: bytes) -> Sheet:
        """Read a sheet that a peer sent.

        Raises:
            SheetError: it is none, of another version, or says what cannot be.
        """
        if len(data) < _HEADER.size:
            raise SheetError(
                f"a sheet of exports has {_HEADER.size} bytes at least, not {len(data)}"
            )
        magic, version, allocations, spans = _HEADER.unpack_from(data)
        if magic != _MAGIC or version != _VERSION:
            raise SheetError(
                f"bytes that begin with {magic!r} and version {version} are no sheet of exports; "
                f"this end reads {_MAGIC!r} and version {_VERSION}"
            )
        if allocations > MOST_ALLOCATIONS or spans > MOST_SPANS:
            raise SheetError(
                f"a sheet of {allocations} allocations and {spans} spans; at most "
                f"{MOST_ALLOCATIONS} and {MOST_SPANS} are allowed"
            )
        middle = _HEADER.size + allocations * _HANDLE.itemsize
        if len(data) != middle + spans * _SPAN.itemsize:
            raise SheetError(
                f"a sheet of {allocations} allocations and {spans} spans has "
                f"{middle + spans * _SPAN.itemsize} bytes, not {len(data)}"
            )
        rows = np.frombuffer(data, _HANDLE, allocations, _HEADER.size)
        found = np.frombuffer(data, _SPAN, spans, middle)
        if found["zero"].any():
            raise SheetError("a sheet of exports has bytes set that must be zero")
        if spans and int(max(found["offset"].max(), found["nbytes"].max())) > MOST_BYTES:
            raise SheetError(f"a span's offset or size is above {MOST_BYTES}")
        handles = tuple(
            Handle(bytes(r["gpu"]), bytes(r["handle"]), int(r["nbytes"]), int(r["serial"]))
            for r in rows
        )
        return cls(
            handles, *(found[n].astype(np.int64) for n in ("allocation", "offset", "nbytes"))
        )


def sheet_of(handles: Sequence[Handle], spans: Sequence[tuple[int, int, int]]) -> Sheet:
    """Make a sheet; a span is the index of its allocation, its offset and its size."""
    columns = np.array(spans, np.int64).reshape(-1, 3).T
    return Sheet(tuple(handles), *columns)
