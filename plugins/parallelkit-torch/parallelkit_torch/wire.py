"""The calls that really reach the backend: one method a message, errors turned into ours.

What torch's stubs leave out of `torch.distributed` is named here once.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from parallelkit.errors import CollectiveError
from parallelkit_torch import faults

__all__ = ["OPS", "HashStore", "PrefixStore", "Store", "TCPStore", "Wire"]

_c10d: Any = torch._C._distributed_c10d

OPS: Final[dict[str, Any]] = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,  # divided by us: the same arithmetic on every backend
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}
_ROW_BYTES: Final = 192  # one rank's description of its call
_HEAD_BYTES: Final = 1024  # an object's header, with the object itself where it fits
_HEADER: Final = 9


class Wire:
    """One backend group. A failure breaks it for good: the backend's connections are gone."""

    def __init__(
        self, native: Any, device: torch.device, timeout: float, store: Store | None
    ) -> None:
        self.native: Any = native
        self.device = device
        self.timeout = timeout
        self.store: Store | None = store
        self.rank: int = native.rank()
        self.world_size: int = native.size()
        self.broken: str | None = None

    def release(self) -> None:
        """Let go of the backend's group and the store, so that sockets and the port close."""
        self.native = self.store = None

    # --- tensors; `what` describes the call in messages

    def all_reduce(self, what: str, x: torch.Tensor, op: str) -> None:
        options = _options(_c10d.AllreduceOptions(), self.timeout)
        options.reduceOp = OPS[op]
        self.run(what, self.timeout, lambda: self.native.allreduce([x], options))

    def reduce_scatter(
        self, what: str, out: torch.Tensor, parts: list[torch.Tensor], op: str
    ) -> None:
        options = _options(_c10d.ReduceScatterOptions(), self.timeout)
        options.reduceOp = OPS[op]
        self.run(what, self.timeout, lambda: self.native.reduce_scatter([out], [parts], options))

    def all_gather(self, what: str, out: Sequence[torch.Tensor], x: torch.Tensor) -> None:
        options = _options(_c10d.AllgatherOptions(), self.timeout)
        into, data = [_flat_bytes(t) for t in out], _flat_bytes(x)
        self.run(what, self.timeout, lambda: self.native.allgather([into], [data], options))

    def broadcast(self, what: str, x: torch.Tensor, src: int, timeout: float | None = None) -> None:
        seconds = timeout or self.timeout
        options = _options(_c10d.BroadcastOptions(), seconds)
        options.rootRank = src
        data = _flat_bytes(x)
        self.run(what, seconds, lambda: self.native.broadcast([data], options))

    def barrier(self, what: str, timeout: float) -> None:
        """The backend's own barrier, for an accelerator."""
        options = _options(_c10d.BarrierOptions(), timeout)
        options.device_ids = [self.device.index]
        self.run(what, timeout, lambda: self.native.barrier(options))

    # --- small things

    def agree(self, what: str, timeout: float) -> None:
        """Meet every rank, and raise on all of them unless all make the same call."""
        rows = self.exchange(what, what, timeout)
        if any(row != rows[0] for row in rows):
            calls: dict[str, list[int]] = {}
            for rank, row in enumerate(rows):
                calls.setdefault(row, []).append(rank)
            raise CollectiveError(
                "ranks made different calls; nothing was sent:\n"
                + "\n".join(f"  rank(s) {', '.join(map(str, r))}: {c}" for c, r in calls.items())
            )

    def exchange(self, text: str, what: str, timeout: float) -> list[str]:
        """Give every rank every rank's short text, by rank."""
        if self.world_size == 1:
            return [text]
        row = torch.frombuffer(bytearray(_row(text)), dtype=torch.uint8).to(self.device)
        rows = torch.empty(self.world_size * _ROW_BYTES, dtype=torch.uint8, device=self.device)
        options = _options(_c10d.AllgatherOptions(), timeout)
        self.run(what, timeout, lambda: self.native._allgather_base(rows, row, options))
        data = bytes(rows.cpu().numpy())
        cells = [data[i : i + _ROW_BYTES] for i in range(0, len(data), _ROW_BYTES)]
        return [cell.rstrip(b"\0").decode(errors="replace") for cell in cells]

    def send_bytes(
        self, what: str, data: bytes, ok: bool, src: int, timeout: float, limit: int
    ) -> tuple[bytes, bool]:
        """Broadcast bytes of a length that only `src` knows, and a flag; short ones in one go."""
        head = bytearray(_HEAD_BYTES)
        head[0] = ok
        head[1:_HEADER] = len(data).to_bytes(8, "little")
        if len(data) <= _HEAD_BYTES - _HEADER:
            head[_HEADER : _HEADER + len(data)] = data
        self._send_buffer(what, head, src, timeout)
        size = int.from_bytes(head[1:_HEADER], "little")
        if size > limit:
            raise CollectiveError(f"{what} failed: rank {src} announced {size} bytes")
        if size <= _HEAD_BYTES - _HEADER:
            return bytes(head[_HEADER : _HEADER + size]), bool(head[0])
        body = bytearray(data) if self.rank == src else bytearray(size)
        self._send_buffer(what, body, src, timeout)
        return bytes(body), bool(head[0])

    def _send_buffer(self, what: str, buffer: bytearray, src: int, timeout: float) -> None:
        data = torch.frombuffer(buffer, dtype=torch.uint8)
        on_device = data.to(self.device)
        self.broadcast(what, on_device, src, timeout)
        if on_device is not data:
            data.copy_(on_device)

    def run(self, what: str, timeout: float, start: Callable[[], Any]) -> None:
        """Run one backend call to its end, with its errors turned into ours."""
        if self.broken:
            raise CollectiveError(f"{what} was called on a broken group; earlier: {self.broken}")
        began = time.monotonic()
        try:
            work = start()
            if work is not None:
                work.wait()
        except (RuntimeError, ValueError) as error:
            raise self.failed(error, what, timeout, time.monotonic() - began) from error

    def failed(
        self, error: Exception, what: str, timeout: float, elapsed: float
    ) -> CollectiveError:
        """Turn the backend's error into ours, and take the group for broken from now on."""
        ours = faults.explain(
            error,
            what=what,
            timeout=timeout,
            elapsed=elapsed,
            store=self.store,
            rank=self.rank,
            world_size=self.world_size,
        )
        self.broken = str(ours)
        return ours


def _options(options: Any, timeout: float) -> Any:
    options.timeout = timedelta(seconds=timeout)
    return options


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes, so that every dtype can be moved."""
    return tensor.reshape(-1).view(torch.uint8)


def _row(text: str) -> bytes:
    """A text of fixed length; one that is too long ends with a hash of all of it."""
    data = text.encode()
    if len(data) > _ROW_BYTES:
        mark = hashlib.blake2b(data, digest_size=8).hexdigest().encode()
        data = data[: _ROW_BYTES - 20] + b"... " + mark
    return data.ljust(_ROW_BYTES, b"\0")
