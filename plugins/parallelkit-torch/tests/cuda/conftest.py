"""A driver of the imagination: allocations are numbers, and every call is counted."""

from __future__ import annotations

from collections import Counter

import attrs
import pytest
from parallelkit_torch.cuda.driver import Allocation
from parallelkit_torch.cuda.errors import IpcError

DEVICES = [b"0" * 16, b"1" * 16]


@attrs.define
class FakeDriver:
    """Two processes may share one: what `export` gives, `open` maps at another address.

    Attributes:
        allocations: what is allocated; device 0's are below `1 << 40`.
        virtual: bases of those that no handle can be made of.
        broken: handles that cannot be opened.
        calls: how often each function was called.
        mapped: how often each address is open.
    """

    allocations: list[Allocation] = attrs.field(factory=list)
    virtual: set[int] = attrs.field(factory=set)
    broken: set[bytes] = attrs.field(factory=set)
    calls: Counter[str] = attrs.field(factory=Counter)
    mapped: Counter[int] = attrs.field(factory=Counter)
    visible: list[bytes] = attrs.field(factory=lambda: list(DEVICES))

    def count(self) -> int:
        return len(self.visible)

    def uuid(self, device: int) -> bytes:
        return self.visible[device]

    def peers(self, device: int, other: int) -> bool:
        return True

    def device_of(self, address: int) -> int:
        return int(address >= 1 << 40)

    def sharable(self, address: int) -> bool:
        return self.allocation(address).base not in self.virtual

    def allocation(self, address: int) -> Allocation:
        self.calls["allocation"] += 1
        for found in self.allocations:
            if found.base <= address < found.base + found.nbytes:
                return found
        raise IpcError("no memory of CUDA's", function="cuPointerGetAttribute", code=1)

    def export(self, base: int) -> bytes:
        self.calls["export"] += 1
        return base.to_bytes(8, "little") * 8

    def open(self, handle: bytes, device: int) -> int:
        self.calls["open"] += 1
        if handle in self.broken:
            raise IpcError("gone", function="cuIpcOpenMemHandle_v2", code=1)
        address = int.from_bytes(handle[:8], "little") + (1 << 50)
        self.mapped[address] += 1
        return address

    def close(self, base: int, device: int) -> None:
        self.calls["close"] += 1
        assert self.mapped[base] > 0, "closed once too often"
        self.mapped[base] -= 1


@pytest.fixture
def driver() -> FakeDriver:
    """Three allocations of 1 MiB: two on device 0, next to one another, and one on device 1."""
    size = 1 << 20
    return FakeDriver([Allocation(at, size) for at in (1 << 30, (1 << 30) + size, 1 << 40)])
