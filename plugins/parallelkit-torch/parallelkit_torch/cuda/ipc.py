"""Sharing memory of a GPU with another process: exports on one side, imports on the other.

An allocation is exported once however many tensors lie in it, opened once by a reader however
often it is asked for, on the device that is to read it, and closed once. (Opened on its owner's
device, a kernel on another one cannot reach it.) The owner's device need not be visible to the
reader's process.
"""

from __future__ import annotations

import secrets
import threading
from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from parallelkit.errors import StateError
from parallelkit_torch.cuda.driver import Allocation, shown
from parallelkit_torch.cuda.errors import IpcError
from parallelkit_torch.cuda.sheet import Array, Handle, Sheet, sheet_of

_INVALID_CONTEXT = 201

#: Handles that this process exported: the driver does not open them here.
_own: dict[bytes, int] = {}
_own_lock = threading.Lock()


class Memory(Protocol):
    """What of `driver.Driver` is needed here."""

    def uuid(self, device: int) -> bytes: ...
    def device_of(self, address: int) -> int: ...
    def sharable(self, address: int) -> bool: ...
    def allocation(self, address: int) -> Allocation: ...
    def export(self, base: int) -> bytes: ...
    def open(self, handle: bytes, device: int) -> int: ...
    def close(self, base: int, device: int) -> None: ...


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Address of a tensor's first byte and bytes up to its last, whatever its strides."""
    if not tensor.numel():
        return tensor.data_ptr(), 0
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    reach = sum(stride * (size - 1) for stride, size in steps)
    return tensor.data_ptr(), (reach + 1) * tensor.element_size()


class Exports:
    """Memory that this process lets others read; it stays allocated until `close`."""

    def __init__(self, driver: Memory) -> None:
        self._driver = driver
        self._handles: dict[int, Handle] = {}
        self._bases: list[int] = []
        self._kept: list[Any] = []
        self._lock = threading.Lock()
        self._closed = False

    def tensors(self, tensors: Sequence[torch.Tensor]) -> Sheet:
        """Export tensors; span `i` of the sheet is where tensor `i` lies. See `memory`."""
        for position, tensor in enumerate(tensors):
            if not tensor.is_cuda:
                raise IpcError(
                    f"tensor {position} is on {tensor.device}; only memory of a CUDA device can "
                    "be exported"
                )
        return self.memory([extent(tensor) for tensor in tensors], kept=tensors)

    def memory(self, ranges: Sequence[tuple[int, int]], *, kept: Iterable[Any] = ()) -> Sheet:
        """Export ranges of memory, given by address and bytes.

        Args:
            ranges: ranges of no bytes are allowed at any address, if there are others.
            kept: what owns the memory, referred to until `close`.

        Raises:
            IpcError: some memory cannot be exported; nothing was.
            StateError: this was closed.
        """
        with self._lock:
            if self._closed:
                raise StateError("memory cannot be exported any more; the exports were closed")
            owners, before = list(kept), set(self._handles)
            try:
                bases = [self._base(*range_) if range_[1] else None for range_ in ranges]
            except IpcError:
                # nothing keeps the memory of these: it may be freed and be others' next
                self._forget(self._handles.keys() - before)
                raise
            self._kept.append(owners)
            order = {base: i for i, base in enumerate(dict.fromkeys(b for b in bases if b))}
            spans = [
                (order[base], address - base, nbytes) if base else (0, 0, 0)
                for base, (address, nbytes) in zip(bases, ranges, strict=True)
            ]
            return sheet_of([self._handles[base] for base in order], spans)

    def replace(self, ranges: Sequence[tuple[int, int]], *, kept: Iterable[Any] = ()) -> Sheet:
        """Export ranges of memory as `memory` does, and let everything else go.

        Allocations that were exported already keep their handles: what is kept of them until now
        shows that they are the same.
        """
        sheet = self.memory(ranges, kept=kept)
        with self._lock:
            used = set(sheet.handles)
            self._forget({base for base, handle in self._handles.items() if handle not in used})
            del self._kept[:-1]
        return sheet

    def close(self) -> None:
        """Let the memory go: readers must have closed theirs before. Harmless when repeated."""
        with self._lock:
            self._closed = True
            self._forget(set(self._handles))
            self._kept.clear()

    def _forget(self, bases: Iterable[int]) -> None:
        with _own_lock:
            for base in bases:
                handle = self._handles.pop(base).handle
                self._bases.remove(base)
                _own[handle] -= 1
                if not _own[handle]:
                    del _own[handle]

    def _base(self, address: int, nbytes: int) -> int:
        """The base of the allocation that a range is in, which has a handle from then on."""
        at = bisect_right(self._bases, address) - 1
        base = self._bases[at] if at >= 0 else 0
        handle = self._handles.get(base)
        if handle is None or address >= base + handle.nbytes:
            base, handle = self._new(address)
        if address + nbytes > base + handle.nbytes:
            raise IpcError(
                f"{nbytes} bytes at {address:#x} reach beyond the allocation that they begin in, "
                f"{handle.nbytes} bytes at {base:#x}: each range must be in one"
            )
        return base

    def _new(self, address: int) -> tuple[int, Handle]:
        if not self._driver.sharable(address):
            raise IpcError(
                f"the memory at {address:#x} cannot be exported: its allocator made it by virtual "
                "memory (torch: PYTORCH_CUDA_ALLOC_CONF with expandable_segments:True; vLLM: sleep "
                "mode). Switch that off, or choose another transport"
            )
        found = self._driver.allocation(address)
        gpu = self._driver.uuid(self._driver.device_of(address))
        serial = secrets.randbits(64)
        handle = Handle(gpu, self._driver.export(found.base), found.nbytes, serial)
        with _own_lock:
            _own[handle.handle] = _own.get(handle.handle, 0) + 1
        self._handles[found.base] = handle
        insort(self._bases, found.base)
        return found.base, handle

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()


class Imports:
    """Memory of other processes that one device of this process reads."""

    def __init__(self, driver: Memory, device: int) -> None:
        """Begin with nothing open.

        Args:
            device: index of the device that is to read, as torch counts.
        """
        self._driver = driver
        self._device = device
        self._open: dict[Handle, tuple[int, int]] = {}  # address, and how many sheets use it
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """How many allocations are mapped."""
        return len(self._open)

    def open(self, sheet: Sheet) -> Array:
        """Map what a sheet says and give the address of each span here, int64.

        Allocations that are mapped already are not mapped again. Every `open` wants its `release`.

        Raises:
            IpcError: an allocation cannot be mapped; none of this sheet stays mapped by it.
        """
        for handle in sheet.handles:
            self._check(handle)
        with self._lock:
            done: list[Handle] = []
            try:
                for handle in sheet.handles:
                    address, users = self._open.get(handle) or (self._map(handle), 0)
                    self._open[handle] = (address, users + 1)
                    done.append(handle)
            except IpcError:
                self._drop(done)
                raise
            return sheet.addresses([self._open[handle][0] for handle in sheet.handles])

    def release(self, sheet: Sheet) -> None:
        """Give up one `open` of a sheet; what no other needs is unmapped.

        Nothing may read it any more: wait for the device first.

        Raises:
            StateError: it is not open.
        """
        with self._lock:
            if not all(handle in self._open for handle in sheet.handles):
                raise StateError("a sheet was released that is not open, or once too often")
            self._drop(sheet.handles)

    def close(self) -> None:
        """Unmap everything. Harmless when repeated."""
        with self._lock:
            for handle, (address, _) in list(self._open.items()):
                del self._open[handle]
                self._driver.close(address, self._device)

    @staticmethod
    def _check(handle: Handle) -> None:
        with _own_lock:
            own = handle.handle in _own
        if own:
            raise IpcError(
                "this process exported that memory itself, and CUDA maps memory in other processes "
                "only: a publisher and its reader must be two processes"
            )

    def _map(self, handle: Handle) -> int:
        try:
            return self._driver.open(handle.handle, self._device)
        except IpcError as error:
            hint = (
                "is it this process's own?"
                if error.code == _INVALID_CONTEXT
                else "has its owner ended, or does it run in another container?"
            )
            raise IpcError(
                f"{handle.nbytes} bytes on {shown(handle.gpu)} cannot be mapped for cuda:"
                f"{self._device}: {error}; {hint}",
                function=error.function,
                code=error.code,
            ) from error

    def _drop(self, handles: Iterable[Handle]) -> None:
        for handle in handles:
            address, users = self._open.pop(handle)
            if users > 1:
                self._open[handle] = (address, users - 1)
            else:
                self._driver.close(address, self._device)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()
