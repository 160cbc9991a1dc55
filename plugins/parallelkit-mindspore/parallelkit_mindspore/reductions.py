"""Combining the bytes of several ranks' tensors on the host, in the order of ranks.

Integers wrap around. Booleans: sum and max are `or`, min and product are `and`. float16 and
bfloat16 are combined as float32 and rounded once at the end. NaN wins in max and min.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from parallelkit.meeting.star import Fold

OPS: Final = ("sum", "mean", "max", "min", "product")
INTEGERS: Final = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
COMPLEX: Final = ("complex64", "complex128")
#: What can be combined. Anything can be moved.
DTYPES: Final = ("float16", "bfloat16", "float32", "float64", *COMPLEX, *INTEGERS, "bool")

_UFUNCS: Final[dict[str, Any]] = {
    "sum": np.add,
    "mean": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "product": np.multiply,
}
_BOOLEAN: Final[dict[str, Any]] = {
    "sum": np.logical_or,
    "max": np.logical_or,
    "min": np.logical_and,
    "product": np.logical_and,
}


def fold(op: str, dtype: str, world_size: int) -> Fold:
    """Return the function that combines all ranks' pieces into the first.

    Args:
        op: one of `OPS`; dtype: one of `DTYPES`.
        world_size: what a mean divides by.
    """
    narrow = {"float16": (_from_half, _to_half), "bfloat16": (_from_brain, _to_brain)}
    widen, round_ = narrow.get(dtype, (partial(np.frombuffer, dtype=dtype), None))
    ufunc = _BOOLEAN[op] if dtype == "bool" else _UFUNCS[op]
    divisor = world_size if op == "mean" else 1
    return partial(_fold, ufunc, divisor, widen, round_)


def _fold(
    ufunc: Any,
    divisor: int,
    widen: Callable[[memoryview], Any],
    round_: Callable[[Any], Any] | None,
    into: memoryview,
    others: Sequence[memoryview],
) -> None:
    total = widen(into)
    with np.errstate(all="ignore"):  # as devices do: infinities and wrapped integers are results
        for other in others:
            ufunc(total, widen(other), out=total)
        if divisor != 1:
            total /= divisor
        if round_ is not None:
            np.frombuffer(into, np.uint16)[:] = round_(total)


def _from_half(data: memoryview) -> Any:
    return np.frombuffer(data, np.float16).astype(np.float32)


def _to_half(values: Any) -> Any:
    return values.astype(np.float16).view(np.uint16)


def _from_brain(data: memoryview) -> Any:
    return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)


def _to_brain(values: Any) -> Any:
    """Round to the nearest, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)
