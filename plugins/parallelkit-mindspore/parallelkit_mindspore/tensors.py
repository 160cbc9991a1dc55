"""Facts about one MindSpore tensor: its dtype's name, its bytes, and the memory it lies in.

Bytes are reached by pointer, never through NumPy's own dtypes, so that bfloat16 and float8 are
moved like any other. Whoever reads them calls `runtime.synchronize` first: PyNative mode runs
behind the caller.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, Final

import mindspore as ms

from parallelkit.errors import ManifestError
from parallelkit.weights.manifest import DTYPE_BYTES

#: Our name of each dtype that can be moved, where it is not MindSpore's in lower case.
_NAMES: Final = {"Bool": "bool", "Float8E4M3FN": "float8_e4m3fn", "Float8E5M2": "float8_e5m2"}
_DTYPES: Final = {
    name: getattr(ms, "bool_" if name == "bool" else name)
    for name in DTYPE_BYTES
    if hasattr(ms, "bool_" if name == "bool" else name)
}


def dtype_name(tensor: Any) -> str:
    """Return the dtype's name as manifests have it: `"bfloat16"`, `"bool"`."""
    said = str(tensor.dtype)
    return _NAMES.get(said, said.lower())


def dtype_of(name: str) -> Any:
    """Return MindSpore's dtype of a manifest's name.

    Raises:
        ManifestError: MindSpore has no such dtype.
    """
    if name not in _DTYPES:
        raise ManifestError(f"MindSpore has no dtype {name!r}; it has {', '.join(_DTYPES)}")
    return _DTYPES[name]


def nbytes(tensor: Any) -> int:
    """Bytes of the elements."""
    return int(math.prod(tensor.shape)) * int(tensor.itemsize)


def live_bytes(tensor: Any) -> memoryview | None:
    """The tensor's own memory as writable row-major bytes; None where it is not contiguous.

    Valid as long as the tensor lives and its `data_ptr()` stays.
    """
    size = nbytes(tensor)
    if size == 0:
        return memoryview(bytearray())
    if not tensor.is_contiguous():
        return None
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def as_bytes(tensor: Any) -> memoryview:
    """Row-major bytes: the tensor's own memory if it is contiguous, else those of a copy."""
    live = live_bytes(tensor)
    if live is not None:
        return live
    copy = tensor.contiguous()
    copied = live_bytes(copy)
    assert copied is not None
    return memoryview(bytes(copied))


def from_bytes(data: memoryview | bytes, dtype: str, shape: Sequence[int]) -> Any:
    """Make a tensor of a copy of row-major bytes.

    Raises:
        ManifestError: the number of bytes is not what dtype and shape need, or the dtype is
            unknown here.
    """
    size = math.prod(shape) * DTYPE_BYTES[dtype]
    if len(data) != size:
        raise ManifestError(f"{dtype}{list(shape)} has {size} bytes, {len(data)} were given")
    made = ms.mint.empty(tuple(shape), dtype=dtype_of(dtype))
    into = live_bytes(made)
    assert into is not None
    into[:] = memoryview(data).cast("B")
    return made
