"""What a stream is given to do, one after the other."""

from __future__ import annotations

from typing import Any

import attrs

from parallelkit_hccl import abi
from parallelkit_hccl.errors import HcclArgumentError
from parallelkit_hccl.library import Library


def _address(step: Any, attribute: attrs.Attribute[int], value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 64:
        raise HcclArgumentError(f"{attribute.name} is {value!r}; it is the address of memory")


def _amount(step: Any, attribute: attrs.Attribute[int], value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise HcclArgumentError(f"{attribute.name} is {value!r}; it is an integer of at least 0")


def _dtype(step: Any, attribute: attrs.Attribute[str], value: str) -> None:
    if value not in abi.DTYPES:
        raise HcclArgumentError(
            f"HCCL has no dtype {value!r}; it has {', '.join(abi.DTYPES)}. Send others as uint8"
        )


def _operation(step: Any, attribute: attrs.Attribute[str], value: str) -> None:
    if value not in abi.REDUCE_OPS:
        raise HcclArgumentError(
            f"HCCL has no operation {value!r}; it has {', '.join(abi.REDUCE_OPS)}"
        )


@attrs.frozen
class Broadcast:
    """Elements of the root's memory into everyone's.

    Attributes:
        name: what is being sent, for messages.
    """

    pointer: int = attrs.field(validator=_address)
    count: int = attrs.field(validator=_amount)
    dtype: str = attrs.field(validator=_dtype)
    root: int = attrs.field(default=0, validator=_amount)
    name: str = ""

    def enqueue(self, library: Library, communicator: int, stream: int) -> None:
        """Give it to the stream; returns before it is done."""
        dtype = abi.DTYPES[self.dtype]
        library.call(
            "HcclBroadcast", self.pointer, self.count, dtype, self.root, communicator, stream
        )

    def __str__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        return f"broadcast of{name} {self.count} x {self.dtype} from rank {self.root}"


@attrs.frozen
class AllReduce:
    """Elements of all ranks combined into everyone's `receive`."""

    send: int = attrs.field(validator=_address)
    receive: int = attrs.field(validator=_address)
    count: int = attrs.field(validator=_amount)
    dtype: str = attrs.field(validator=_dtype)
    op: str = attrs.field(default="sum", validator=_operation)

    def enqueue(self, library: Library, communicator: int, stream: int) -> None:
        """Give it to the stream; returns before it is done."""
        dtype, op = abi.DTYPES[self.dtype], abi.REDUCE_OPS[self.op]
        library.call(
            "HcclAllReduce", self.send, self.receive, self.count, dtype, op, communicator, stream
        )

    def __str__(self) -> str:
        return f"all-reduce ({self.op}) of {self.count} x {self.dtype}"


@attrs.frozen
class Copy:
    """Bytes from one place of the device's memory to another; not collective."""

    target: int = attrs.field(validator=_address)
    source: int = attrs.field(validator=_address)
    nbytes: int = attrs.field(validator=_amount)

    def enqueue(self, library: Library, communicator: int, stream: int) -> None:
        """Give it to the stream; returns before it is done."""
        if self.nbytes:
            library.call(
                "aclrtMemcpyAsync",
                self.target,
                self.nbytes,
                self.source,
                self.nbytes,
                abi.DEVICE_TO_DEVICE,
                stream,
            )

    def __str__(self) -> str:
        return f"copy of {self.nbytes} bytes on the device"


Step = Broadcast | AllReduce | Copy
