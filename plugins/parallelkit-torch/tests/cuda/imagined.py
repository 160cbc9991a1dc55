"""Whole updates over `cuda_ipc` on a CPU: memory that is shared, GPUs and a driver are imagined.

Both ends are in this process, so that "mapping" memory is to know its address, and the copy goes by
torch's operations.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import torch
from parallelkit_torch.cuda.driver import Allocation
from parallelkit_torch.cuda.errors import IpcError
from torch import nn

from parallelkit.weights import publish_weights, subscribe_weights

SECONDS = 10.0
SEGMENT = 2 << 20
DEVICES = [b"0" * 16, b"1" * 16]


class Machine:
    """Memory of imagined GPUs: segments that parameters are moved into.

    Attributes:
        calls: how often each function of the driver was called.
        mapped: how often each segment is open.
        virtual: whether no handle can be made of any memory.
        gpu: the number of the GPU that the reader is on; the owner is on 0.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.mapped: Counter[int] = Counter()
        self.segments: list[torch.Tensor] = []
        self.virtual = False
        self.gpu = 0

    def home(self, module: nn.Module) -> None:
        """Move all tensors into new segments, as torch's allocator packs them."""
        segment, end = self._segment(), 0
        for tensor in (*module.parameters(), *module.buffers()):
            nbytes = tensor.numel() * tensor.element_size()
            if end + nbytes > SEGMENT:
                segment, end = self._segment(), 0
            into = segment[end : end + nbytes].view(tensor.dtype).view(tensor.shape)
            into.copy_(tensor.detach())
            tensor.data = into
            end += -(-nbytes // 512) * 512

    def tensor(self, octets: Any) -> torch.Tensor:
        """Some bytes in a segment of their own."""
        into = self._segment()[: len(octets)]
        into.copy_(torch.from_numpy(octets))
        return into

    def _segment(self) -> torch.Tensor:
        self.segments.append(torch.zeros(SEGMENT, dtype=torch.uint8))
        return self.segments[-1]

    # --- as the driver

    def count(self) -> int:
        return len(DEVICES)

    def uuid(self, device: int) -> bytes:
        return DEVICES[device]

    def peers(self, device: int, other: int) -> bool:
        return True

    def device_of(self, address: int) -> int:
        return 0

    def sharable(self, address: int) -> bool:
        return not self.virtual

    def allocation(self, address: int) -> Allocation:
        self.calls["allocation"] += 1
        for segment in self.segments:
            if 0 <= address - segment.data_ptr() < SEGMENT:
                return Allocation(segment.data_ptr(), SEGMENT)
        return Allocation(address, 4096)  # a copy that the transport has made

    def export(self, base: int) -> bytes:
        self.calls["export"] += 1
        if self.virtual:
            raise IpcError("virtual", function="cuIpcGetMemHandle", code=1)
        return base.to_bytes(8, "little") * 8

    def open(self, handle: bytes, device: int) -> int:
        self.calls["open"] += 1
        address = int.from_bytes(handle[:8], "little")
        self.mapped[address] += 1
        return address

    def close(self, base: int, device: int) -> None:
        self.calls["close"] += 1
        assert self.mapped[base] > 0, "closed once too often"
        self.mapped[base] -= 1


@attrs.define
class Follower:
    """A module that follows, and what its last step ended with."""

    module: nn.Module
    subscriber: Any
    pool: ThreadPoolExecutor
    error: BaseException | None = None
    step: Any = None

    def begin(self) -> None:
        """Step in a thread."""
        self.step = self.pool.submit(self.subscriber.step, SECONDS)

    def end(self) -> None:
        """Wait for that."""
        self.error = self.step.exception(SECONDS)


class Scene:
    """A publisher and its followers; a context manager."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.stack = contextlib.ExitStack()
        self.pool = self.stack.enter_context(ThreadPoolExecutor(4))
        self.followers: list[Follower] = []
        self.publisher: Any = None

    def publish(self, module: nn.Module, **options: Any) -> Any:
        """Publish a module over `cuda_ipc`, unless told otherwise."""
        self.machine.home(module)
        options = {"timeout": SECONDS / 2, "transport": "cuda_ipc"} | options
        self.publisher = self.stack.enter_context(publish_weights(module, **options))
        return self.publisher

    def follow(self, module: nn.Module, **options: Any) -> Follower:
        """Let a module follow."""
        ticket = self.publisher.new_ticket()
        subscriber = subscribe_weights(module, ticket, timeout=SECONDS / 2, **options)
        self.stack.enter_context(subscriber)
        self.followers.append(Follower(module, subscriber, self.pool))
        return self.followers[-1]

    def update(self) -> Any:
        """One update in which all step."""
        for follower in self.followers:
            follower.begin()
        try:
            return self.publisher.update()
        finally:
            for follower in self.followers:
                follower.end()


@contextlib.contextmanager
def imagined(monkeypatch: Any) -> Iterator[Scene]:
    """CPU tensors are on GPU 0, and whoever subscribes is another process."""
    from parallelkit_torch.cuda import backing
    from parallelkit_torch.cuda.ipc import Imports

    from parallelkit.weights import joining

    machine = Machine()
    real: Callable[[Any], Any] = joining.identity_of
    monkeypatch.setattr(backing, "driver", lambda: machine)
    monkeypatch.setattr(backing, "shares", lambda device: device.type == "cpu")
    monkeypatch.setattr(backing, "index_of", lambda device: 0)
    monkeypatch.setattr(Imports, "_check", staticmethod(lambda handle: None))

    def elsewhere(holder: Any) -> Any:
        here = real(holder)
        moved = here.accelerator
        if moved is not None and machine.gpu and moved.device:
            moved = attrs.evolve(moved, device=moved.sees[machine.gpu])
        return attrs.evolve(here, pid=here.pid + 1, accelerator=moved)

    monkeypatch.setattr(joining, "identity_of", elsewhere)
    scene = Scene(machine)
    with scene.stack:
        yield scene
    assert not any(machine.mapped.values()), "something stayed mapped"
