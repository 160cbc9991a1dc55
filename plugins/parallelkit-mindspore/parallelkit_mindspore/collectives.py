"""The data of collectives: over parallelkit's own connections on the CPU, else by the backend.

On the CPU the control plane carries the tensors too. MindSpore's own MCCL lacks dtypes and
operations, moves a few MB/s where a socket moves hundreds, does not notice a dead rank, and gives
a rank that comes too late wrong values without an error (figures in docs/mindspore.md). It stays
what `group.native` names, for the user's own operators and for graphs.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

from parallelkit.errors import CollectiveError, CollectiveTimeoutError
from parallelkit.meeting import Star
from parallelkit_mindspore import native, reductions, runtime, tensors


class Collectives(Protocol):
    """How a group moves tensors. `what` describes the call, with dtype and shape.

    All are collective; none changes its input; results are new and contiguous.
    """

    def barrier(self, what: str, timeout: float) -> None: ...
    def all_reduce(self, what: str, x: Any, op: str) -> Any: ...
    def broadcast(self, what: str, x: Any, src: int) -> Any: ...
    def all_gather(self, what: str, x: Any) -> list[Any]: ...
    def reduce_scatter(self, what: str, x: Any, op: str) -> Any: ...


class HostCollectives:
    """Tensors in host memory, over the control plane, which compares every call first."""

    def __init__(self, star: Star) -> None:
        self._star = star

    def barrier(self, what: str, timeout: float) -> None:
        runtime.synchronize()
        self._star.agree(what, timeout)

    def all_reduce(self, what: str, x: Any, op: str) -> Any:
        out, data = _fresh(x)
        fold = reductions.fold(op, tensors.dtype_name(x), self._star.world_size)
        self._star.all_reduce(what, data, fold)
        return out

    def broadcast(self, what: str, x: Any, src: int) -> Any:
        out, data = _fresh(x)
        self._star.broadcast(what, data, src)
        return out

    def all_gather(self, what: str, x: Any) -> list[Any]:
        out = [_fresh(x) if r == self._star.rank else _empty(x) for r in range(self._world)]
        self._star.all_gather(what, [data for _, data in out])
        return [tensor for tensor, _ in out]

    def reduce_scatter(self, what: str, x: Any, op: str) -> Any:
        each = x.shape[0] // self._world
        shape = (each, *x.shape[1:])
        fold = reductions.fold(op, tensors.dtype_name(x), self._world)
        whole = memoryview(bytearray(_source(x)))
        size = len(whole) // self._world
        parts = [whole[r * size : (r + 1) * size] for r in range(self._world)]
        self._star.reduce_scatter(what, parts, fold)
        out, data = _empty(x, shape)
        data[:] = parts[self._star.rank]
        return out

    @property
    def _world(self) -> int:
        return self._star.world_size


class DeviceCollectives:
    """Tensors on a device, by HCCL or NCCL, in the order of its stream. Never run.

    Calls are not compared across ranks: that would stall the host at each. A failure shows when
    the stream is waited for.
    """

    def __init__(self, star: Star, group: str, world_ranks: list[int]) -> None:
        self._star = star
        self._group = group
        self._world_ranks = world_ranks

    def barrier(self, what: str, timeout: float) -> None:
        runtime.synchronize()
        self._star.agree(what, timeout)

    def all_reduce(self, what: str, x: Any, op: str) -> Any:
        out = self._run(what, lambda: native.all_reduce(_copy(x), op, self._group))
        return out / self._star.world_size if op == "mean" else out

    def broadcast(self, what: str, x: Any, src: int) -> Any:
        world_src = self._world_ranks[src]
        return self._run(what, lambda: native.broadcast(_copy(x), world_src, self._group))

    def all_gather(self, what: str, x: Any) -> list[Any]:
        world = self._star.world_size
        flat = _copy(x).reshape((-1,))
        found: list[Any] = self._run(what, lambda: native.all_gather(flat, world, self._group))
        return [part.reshape(x.shape) for part in found]

    def reduce_scatter(self, what: str, x: Any, op: str) -> Any:
        world = self._star.world_size
        out = self._run(what, lambda: native.reduce_scatter(_copy(x), op, world, self._group))
        return out / world if op == "mean" else out

    def _run(self, what: str, start: Any) -> Any:
        began = time.monotonic()
        try:
            return start()
        except (RuntimeError, ValueError) as error:
            seconds = time.monotonic() - began
            raise native_failure(self._star, error, what, seconds) from error


def native_failure(star: Star, error: Exception, what: str, elapsed: float) -> CollectiveError:
    """Turn an error of MindSpore's into ours, and take the group for broken from now on."""
    head, cause = f"rank {star.rank}: {what} failed", str(error).splitlines()[0]
    if elapsed >= 0.9 * star.timeout:
        ours: CollectiveError = CollectiveTimeoutError(
            f"{head}: it did not end within {star.timeout:g} s. Every rank must make the same "
            f"calls in the same order ({cause})"
        )
    else:
        ours = CollectiveError(f"{head}: {cause}")
    star.broken = star.broken or str(ours)
    return ours


def copied(x: Any, kind: str) -> Any:
    """What a collective over one rank gives: a contiguous copy without history."""
    return _fresh(x)[0] if kind == "cpu" else _copy(x)


def _copy(x: Any) -> Any:
    ms = runtime.mindspore()
    return ms.mint.clone(ms.ops.stop_gradient(x)).contiguous()


def _source(x: Any) -> memoryview:
    runtime.synchronize()
    return tensors.as_bytes(x)


def _empty(x: Any, shape: tuple[int, ...] | None = None) -> tuple[Any, memoryview]:
    """A new tensor like `x`, and its bytes."""
    ms = runtime.mindspore()
    out = ms.mint.empty(tuple(x.shape) if shape is None else shape, dtype=x.dtype)
    data = tensors.live_bytes(out)
    assert data is not None  # what was just made is contiguous
    return out, data


def _fresh(x: Any) -> tuple[Any, memoryview]:
    """A contiguous copy of the values, without history, and its bytes."""
    source = _source(x)
    out, data = _empty(x)
    data[:] = source
    return out, data
