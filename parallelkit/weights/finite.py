"""Finding NaN and infinity in bytes: by the bits of the exponent, as integers, so that numpy needs
no type for bfloat16 or float8."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from parallelkit.errors import NonFiniteError
from parallelkit.weights.buckets import Workers
from parallelkit.weights.regions import Bytes

#: Bytes that are looked at together: what is computed with them stays in a core's cache.
_CHUNK_BYTES: Final = 1 << 18
#: Names in an error's text.
_NAMED: Final = 12

#: By dtype, integers of its size and the bits that are all set where a value is not finite.
_EXPONENT: Final[Mapping[str, tuple[Any, int]]] = {
    "float8_e4m3fn": (np.uint8, 0x7F),  # it has NaN and no infinity, which needs the mantissa too
    "float8_e5m2": (np.uint8, 0x7C),
    "float16": (np.uint16, 0x7C00),
    "bfloat16": (np.uint16, 0x7F80),
    "float32": (np.uint32, 0x7F80_0000),
    "float64": (np.uint64, 0x7FF0_0000_0000_0000),
    "complex64": (np.uint32, 0x7F80_0000),
    "complex128": (np.uint64, 0x7FF0_0000_0000_0000),
}


def non_finite(data: Bytes, dtype: str, workers: Workers) -> int:
    """How many values are NaN or infinite; of a complex number, each part counts.

    Args:
        data: contiguous bytes, uint8.
        dtype: a name of `DTYPE_BYTES`; integers and booleans are always finite.
    """
    if dtype not in _EXPONENT or not len(data):
        return 0
    kind, bits = _EXPONENT[dtype]
    mask = kind(bits)

    def one(chunk: int) -> int:
        part = data[chunk * _CHUNK_BYTES : (chunk + 1) * _CHUNK_BYTES].view(kind) & mask
        if part.max() != mask:  # nearly always, and much cheaper than counting
            return 0
        return int(np.count_nonzero(part == mask))

    count = -(-len(data) // _CHUNK_BYTES)
    return sum(workers.map(one, count, len(data)))


def refuse_non_finite(found: Mapping[str, int]) -> None:
    """Raise `NonFiniteError` with the names if any tensor has such values."""
    if not found:
        return
    listed = [f"{name!r} ({count} of them)" for name, count in list(found.items())[:_NAMED]]
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    raise NonFiniteError(
        f"NaN or infinity in {', '.join(listed)}{more}: nothing was sent, every member keeps its "
        "version. check_finite=False publishes such values",
        tensors=list(found),
    )
