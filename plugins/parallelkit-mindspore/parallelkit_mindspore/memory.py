"""Where a tensor's elements lie: by pointer on the host, by copies of MindSpore's elsewhere.

On a host everything here goes by address, shape and strides, without a MindSpore operation: none
covers every dtype, and `copy_` into a transposed parameter changes nothing (2.10, CPU). Whoever
reads or writes synchronises first. On Ascend and GPU a pointer is the device's, and is never
followed; MindSpore copies, through NumPy. That part was never run on such a device.
"""

from __future__ import annotations

import bisect
import ctypes
import math
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

import mindspore as ms
import numpy as np

from parallelkit.weights.manifest import DTYPE_BYTES
from parallelkit.weights.overlap import Span
from parallelkit_mindspore import tensors

#: The type that `parallel.divided` makes for a rank's part.
_DIVIDED: Final = "DividedParameter"

Elements = np.ndarray[Any, np.dtype[np.void]]


class Cut(NamedTuple):
    """Which part of a divided parameter a rank holds.

    Attributes:
        dim: that is divided; degree: into how many equal parts; place: which one this is.
    """

    dim: int
    place: int
    degree: int


def cut_of(tensor: Any) -> Cut | None:
    """How a parameter is divided over the tensor axis; None where it is not."""
    return tensor.cut if type(tensor).__name__ == _DIVIDED else None


def unreadable(tensor: Any, *, parts: bool = False) -> str | None:
    """Say why a tensor has no plain bytes in this process; None where it has.

    `parts`: one rank's part of a divided parameter will do.
    """
    if not isinstance(tensor, ms.Tensor):
        return f"is a {type(tensor).__qualname__}, which is not a plain dense tensor"
    if getattr(tensor, "is_meta", False):
        return "is on the meta device and has no data; materialise the model first"
    if tensor.has_init:
        return "is uninitialised; call the model's init_parameters_data() before publishing it"
    if getattr(tensor, "sliced", False) or (cut_of(tensor) is not None and not parts):
        return (
            "is one rank's part of a parameter that is divided over ranks by MindSpore; Cells are "
            "published and subscribed whole, or divided over the tensor axis of a context"
        )
    name = tensors.dtype_name(tensor)
    if name not in DTYPE_BYTES:
        return f"has dtype {name!r}; allowed are {', '.join(DTYPE_BYTES)}"
    return None


def device(tensor: Any) -> str:
    """`"cpu"`, or the device as MindSpore calls it, in lower case."""
    return str(tensor.device).lower()


def on_host(tensor: Any) -> bool:
    return device(tensor).startswith("cpu")


def identity(tensor: Any) -> Hashable:
    """Equal for two tensors exactly when they are the same elements in the same order."""
    shape = tuple(tensor.shape)
    if 0 in shape:  # no memory: the same only if it is the same object
        return id(tensor)
    # The stride of a dim of one element says nothing.
    strides = tuple(0 if n == 1 else s for n, s in zip(shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), shape, strides, tensors.dtype_name(tensor)


def span(name: str, tensor: Any) -> Span:
    """Where the elements of a tensor lie that has some."""
    where, item = tensor.data_ptr(), int(tensor.itemsize)
    return Span.strided(name, where, item, tensor.shape, tensor.stride(), device(tensor))


def elements(tensor: Any) -> Elements:
    """The live elements of a host tensor, whatever their strides, as opaque values.

    Valid as long as the tensor lives and its `data_ptr()` stays.
    """
    where = span("", tensor)
    memory = memoryview((ctypes.c_char * (where.end - where.start)).from_address(where.start))
    return np.ndarray(where.shape, f"V{where.item}", buffer=memory.cast("B"), strides=where.steps)


def copy_out(tensor: Any) -> memoryview:
    """Row-major bytes in memory of their own."""
    if math.prod(tensor.shape) == 0:
        return memoryview(b"")
    array = elements(tensor) if on_host(tensor) else tensor.asnumpy()
    flat: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return memoryview(flat)


def copy_in(tensor: Any, data: memoryview) -> None:
    """Write row-major bytes, as many as the tensor has, into the live tensor."""
    if len(data) == 0:
        return
    if on_host(tensor):
        values = np.frombuffer(data, f"V{tensor.itemsize}").reshape(tuple(tensor.shape))
        elements(tensor)[...] = values
    else:
        kind = ms.mint.zeros((1,), dtype=tensor.dtype).asnumpy().dtype  # NumPy has no bfloat16
        array = np.frombuffer(data, np.uint8).view(kind).reshape(tuple(tensor.shape))
        tensor.copy_(ms.Tensor(array))


def first_protected(spans: Iterable[Span]) -> str | None:
    """Name a host tensor whose pages this process may not write; None where all may be written.

    `Tensor.from_numpy` shares the memory of an array, also that of a file mapped for reading.
    """
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:  # not Linux
        return None
    starts, writable = [], []
    for line in lines:
        addresses, rights, *_ = line.split(maxsplit=2)
        starts.append(int(addresses.partition("-")[0], 16))
        writable.append(rights[1] == "w")
    for where in spans:
        if not str(where.space).startswith("cpu"):
            continue
        first = bisect.bisect_right(starts, where.start) - 1
        last = bisect.bisect_left(starts, where.end)
        if first >= 0 and not all(writable[first:last]):
            return where.name
    return None
