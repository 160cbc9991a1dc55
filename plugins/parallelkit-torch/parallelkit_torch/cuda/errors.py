"""What can go wrong when weights go from one GPU's memory to another's on one host."""

from __future__ import annotations

from parallelkit.errors import ProtocolError, TransportError


class TableError(TransportError):
    """Pairs of memory that no table can be made of: they overlap, or are no memory at all."""


class SheetError(ProtocolError):
    """Bytes that should say what a peer exported are malformed; CUDA was not called with them."""


class IpcError(TransportError):
    """Memory cannot be exported or opened.

    Attributes:
        function: the driver's function that failed, `""` where it was none.
        code: what it returned, 0 where it was none.
    """

    def __init__(self, message: str, *, function: str = "", code: int = 0) -> None:
        super().__init__(message)
        self.function = function
        self.code = code


class CudaUnavailableError(IpcError):
    """The driver's library, a function in it, or a device is missing."""
