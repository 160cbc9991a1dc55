"""NVIDIA's driver by ctypes: the calls that say what an address is, and that share memory.

libcuda.so.1 has a stable interface and is wherever a GPU is usable; CUDA's runtime, which comes in
as many copies as packages bring, is not needed. Contexts are the primary ones, which torch uses.
"""

from __future__ import annotations

import ctypes
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from parallelkit_torch.cuda.errors import CudaUnavailableError, IpcError

HANDLE_BYTES: Final = 64
UUID_BYTES: Final = 16

_LIBRARY: Final = "libcuda.so.1"
_DEVICE_ORDINAL: Final = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_IPC_CAPABLE: Final = 10  # CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
_LAZY_PEER_ACCESS: Final = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class Allocation(NamedTuple):
    """What one call of the allocator gave: address of its first byte, and bytes."""

    base: int
    nbytes: int


class _Handle(ctypes.Structure):
    """CUipcMemHandle; passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


_INT, _ADDRESS, _SIZE = ctypes.c_int, ctypes.c_uint64, ctypes.c_size_t
_OUT = ctypes.c_void_p
_FUNCTIONS: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGetCount": (_OUT,),
    "cuDeviceGet": (_OUT, _INT),
    "cuDeviceGetUuid_v2": (_OUT, _INT),
    "cuDeviceCanAccessPeer": (_OUT, _INT, _INT),
    "cuDevicePrimaryCtxRetain": (_OUT, _INT),
    "cuCtxPushCurrent_v2": (ctypes.c_void_p,),
    "cuCtxPopCurrent_v2": (_OUT,),
    "cuPointerGetAttribute": (_OUT, _INT, _ADDRESS),
    "cuMemGetAddressRange_v2": (_OUT, _OUT, _ADDRESS),
    "cuIpcGetMemHandle": (_OUT, _ADDRESS),
    "cuIpcOpenMemHandle_v2": (_OUT, _Handle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (_ADDRESS,),
    "cuGetErrorName": (_INT, _OUT),
    "cuGetErrorString": (_INT, _OUT),
}


class Driver:
    """The calls that sharing memory needs, each checked. Devices are counted as torch counts them.

    Safe to call from several threads.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        """Use a loaded library; `load` finds it."""
        self._functions: dict[str, Any] = {}
        for name, arguments in _FUNCTIONS.items():
            function = getattr(library, name, None)
            if function is None:
                raise CudaUnavailableError(f"NVIDIA's driver has no {name}", function=name)
            function.argtypes, function.restype = arguments, _INT
            self._functions[name] = function
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._lock = threading.Lock()
        self._call("cuInit", 0)

    @classmethod
    def load(cls) -> Driver:
        """Load what the system has.

        Raises:
            CudaUnavailableError: there is no driver, or it is too old, or finds no device.
        """
        try:
            library = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise CudaUnavailableError(f"NVIDIA's driver cannot be loaded: {error}") from error
        try:
            return cls(library)
        except CudaUnavailableError:
            raise
        except IpcError as error:
            raise CudaUnavailableError(
                str(error), function=error.function, code=error.code
            ) from error

    def count(self) -> int:
        """How many devices this process sees."""
        found = _INT()
        self._call("cuDeviceGetCount", ctypes.byref(found))
        return found.value

    def uuid(self, device: int) -> bytes:
        """The 16 bytes that name a device on every host and in every process."""
        found = (ctypes.c_ubyte * UUID_BYTES)()
        self._call("cuDeviceGetUuid_v2", found, self._device(device))
        return bytes(found)

    def peers(self, device: int, other: int) -> bool:
        """Whether kernels on `device` can read the memory of `other`."""
        if device == other:
            return True
        found = _INT()
        self._call(
            "cuDeviceCanAccessPeer",
            ctypes.byref(found),
            self._device(device),
            self._device(other),
        )
        return bool(found.value)

    def device_of(self, address: int) -> int:
        """The device that memory is of.

        Raises:
            IpcError: it is no memory of CUDA's.
        """
        found = _INT()
        self._call("cuPointerGetAttribute", ctypes.byref(found), _DEVICE_ORDINAL, address)
        return found.value

    def sharable(self, address: int) -> bool:
        """Whether the memory at an address can be exported to another process by a handle."""
        found = _INT()  # the driver writes one byte
        self._call("cuPointerGetAttribute", ctypes.byref(found), _IPC_CAPABLE, address)
        return bool(found.value & 0xFF)

    def allocation(self, address: int) -> Allocation:
        """The allocation that an address is in."""
        base, size = _ADDRESS(), _SIZE()
        with self._on(self.device_of(address)):
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        return Allocation(base.value, size.value)

    def export(self, base: int) -> bytes:
        """The handle of an allocation, by the address of its first byte."""
        made = _Handle()
        with self._on(self.device_of(base)):
            self._call("cuIpcGetMemHandle", ctypes.byref(made), base)
        return bytes(made.reserved)

    def open(self, handle: bytes, device: int) -> int:
        """Map what another process exported, for `device` to read; returns its address."""
        given, found = _Handle.from_buffer_copy(handle), _ADDRESS()
        with self._on(device):
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(found), given, _LAZY_PEER_ACCESS)
        return found.value

    def close(self, base: int, device: int) -> None:
        """Undo one `open`. What still runs on the device is waited for by the driver."""
        with self._on(device):
            self._call("cuIpcCloseMemHandle", base)

    @contextmanager
    def _on(self, device: int) -> Iterator[None]:
        """With the device's primary context current in this thread."""
        with self._lock:
            context = self._contexts.get(device)
            if context is None:
                context = ctypes.c_void_p()
                self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device(device))
                self._contexts[device] = context  # for as long as the process lives, as torch does
        self._call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _device(self, index: int) -> int:
        found = _INT()
        self._call("cuDeviceGet", ctypes.byref(found), index)
        return found.value

    def _call(self, name: str, *arguments: Any) -> None:
        code = int(self._functions[name](*arguments))
        if code:
            raise IpcError(
                f"{name} failed with {self._text('cuGetErrorName', code)} "
                f"({self._text('cuGetErrorString', code)})",
                function=name,
                code=code,
            )

    def _text(self, function: str, code: int) -> str:
        found = ctypes.c_char_p()
        failed = self._functions[function](code, ctypes.byref(found))
        return str(code) if failed or not found.value else found.value.decode(errors="replace")


def shown(identity: bytes) -> str:
    """A device's UUID as nvidia-smi and CUDA_VISIBLE_DEVICES write it."""
    return f"GPU-{uuid.UUID(bytes=identity)}"
