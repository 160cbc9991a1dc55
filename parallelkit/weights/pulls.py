"""What every transport asks of a pull before it reads or sends anything."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from parallelkit.errors import ProtocolError
from parallelkit.weights.regions import Bytes, Span


def check_pull(spans: Sequence[Span], into: Sequence[Bytes], nbytes: int) -> None:
    """Refuse a pull that cannot be, from an arena of `nbytes` bytes.

    Raises:
        ProtocolError: a span reaches outside of the arena; or there is not for each span an array
            of uint8, writable, contiguous and of as many bytes.
    """
    if len(spans) != len(into):
        raise ProtocolError(f"{len(spans)} spans are to be pulled into {len(into)} arrays")
    for span, array in zip(spans, into, strict=True):
        span.check(nbytes)
        flags = array.flags
        if array.dtype != np.uint8 or not (flags.c_contiguous and flags.writeable):
            raise ProtocolError(
                f"an array to pull into is of {array.dtype}, contiguous: {flags.c_contiguous}, "
                f"writable: {flags.writeable}; it is to be of uint8 and both"
            )
        if array.nbytes != span.nbytes:
            raise ProtocolError(f"{span} has {span.nbytes} bytes, its array {array.nbytes}")
