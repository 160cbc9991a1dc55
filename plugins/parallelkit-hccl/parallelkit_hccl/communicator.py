"""A communicator over HCCL: opened, used and closed with a deadline on each call.

Never run on an NPU: tested against a library of the same interface over shared memory.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from parallelkit.weights.endpoint import check_timeout
from parallelkit_hccl import abi
from parallelkit_hccl.errors import (
    HcclArgumentError,
    HcclError,
    HcclStateError,
    HcclTimeoutError,
    RootInfoError,
)
from parallelkit_hccl.library import Library
from parallelkit_hccl.steps import AllReduce, Broadcast, Step
from parallelkit_hccl.worker import Worker

T = TypeVar("T")

#: Gives every rank the root info of rank 0. Called once on each rank, with rank 0's on rank 0 and
#: None elsewhere, and with the seconds that it may take; returns what rank 0 was called with.
Exchange = Callable[[bytes | None, float], bytes]

#: Bytes of the small buffers for the first all-reduce and for comparisons.
_SCRATCH_BYTES: Final = 128
#: Seconds that closing a broken communicator may take; the library may hang in it.
_LAST_SECONDS: Final = 5.0
#: Part of the time left that the library is told, so that it can answer before we give it up.
_LIBRARYS_PART: Final = 0.9
#: Words of a digest that ranks compare, and bits of each: int32, never negative.
_WORDS, _WORD_BITS = 4, 31


class HcclCommunicator:
    """One rank of a communicator, on one device, with a stream of its own. A context manager.

    Everything runs in a thread of the communicator, so the caller's own device context stays as
    it is. After any failure but a wrong argument the communicator is broken and refuses work: HCCL
    has no way to say what state it is in. HCCL cannot abort a call either; a thread that is stuck
    in one, and the device memory that it uses, last until the process ends.

    Calls may come from any thread, one at a time. They are collective: every rank makes the same
    ones in the same order. A wrong argument is raised on its rank alone, before HCCL is called: the
    peers wait in that call, so make it again, rightly, before any other. `HcclSender` and
    `HcclReceiver` tell the peers.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        exchange: Exchange,
        *,
        device: int = 0,
        timeout: float = 60.0,
        library: Library | None = None,
    ) -> None:
        """Open. Collective over all ranks; blocks until all are here.

        The first call on a new communicator is an all-reduce of one float32, since vllm-ascend's
        workers begin with one.

        Args:
            rank, world_size: 0 makes the root info; there are 2 ranks at least.
            exchange: how the root info travels: `RootInfoServer` and `RootInfoTicket`, or
                `parallelkit_hccl.compat` for vllm-ascend's workers.
            device: the NPU's number as this process counts them (`ASCEND_RT_VISIBLE_DEVICES`).
            timeout: seconds that opening may take, and the default of each later call.
            library: None loads what `Library.load` finds.

        Raises:
            HcclArgumentError: rank, world size or device cannot be; nothing was called.
            HcclUnavailableError: HCCL is not installed.
            HcclTimeoutError: not every rank came; `missing` has those that are known.
            RootInfoError: what `exchange` returned is no root info.
            HcclError: HCCL or the device's runtime refused.
        """
        _check_place(rank, world_size, device)
        if not callable(exchange):
            raise HcclArgumentError(
                f"exchange is {exchange!r:.80}; it is a RootInfoServer, a RootInfoTicket, or a "
                "function of a root info and seconds"
            )
        check_timeout(timeout)
        self.rank, self.world_size, self.device, self.timeout = rank, world_size, device, timeout
        self._library = library or Library.load()
        self._why_broken: str | None = None
        self._closed = False
        self._handle = self._stream = self._scratch = 0
        self._allocated: dict[int, int] = {}
        self._worker = Worker(f"parallelkit-hccl-{rank}")
        try:
            self._open(exchange, time.monotonic() + timeout)
        except BaseException as error:
            self._why_broken = f"it could not be opened: {error}"
            self.close()
            raise

    @property
    def scratch(self) -> int:
        """Address of a little device memory, for calls that need one and move nothing."""
        return self._scratch

    @property
    def state(self) -> str:
        """`"open"`, `"broken"` or `"closed"`."""
        return "closed" if self._closed else "broken" if self._why_broken else "open"

    def broadcast(
        self, pointer: int, count: int, dtype: str, *, root: int = 0, timeout: float | None = None
    ) -> None:
        """Copy `count` elements from the root's memory into everyone's. Collective; blocks.

        Args:
            pointer: device address, written on all ranks but `root`. What writes or reads it on
                another stream has to be finished, on every rank.
            dtype: a key of `abi.DTYPES`.

        Raises:
            HcclArgumentError: as `Broadcast`, or the root is no rank.
            HcclStateError, HcclTimeoutError, HcclError: see `run`.
        """
        step = Broadcast(pointer, count, dtype, root)
        self.run([step], str(step), timeout=timeout)

    def all_reduce(
        self,
        send: int,
        receive: int,
        count: int,
        dtype: str,
        *,
        op: str = "sum",
        timeout: float | None = None,
    ) -> None:
        """Combine `count` elements of all ranks into everyone's `receive`. Collective; blocks.

        Raises:
            HcclArgumentError: as `AllReduce`.
            HcclStateError, HcclTimeoutError, HcclError: see `run`.
        """
        step = AllReduce(send, receive, count, dtype, op)
        self.run([step], str(step), timeout=timeout)

    def run(self, steps: Sequence[Step], what: str, *, timeout: float | None = None) -> None:
        """Give the stream these steps, in this order, and wait until they are done.

        Args:
            what: heads the messages of errors.
            timeout: seconds; None is the communicator's.

        Raises:
            HcclArgumentError: a root is no rank; nothing was called.
            HcclStateError: the communicator is closed or broken.
            HcclTimeoutError: some rank did not take part, or is too slow; which one is unknown.
            HcclError: the library refused a step. This and the former break the communicator.
        """
        for step in steps:
            if isinstance(step, Broadcast) and not 0 <= step.root < self.world_size:
                raise HcclArgumentError(f"{what}: the root of {step} is no rank {self._ranks()}")
        deadline = self._deadline(timeout)
        self._do(what, lambda: self._run_steps(steps, deadline), deadline)

    def allocate(self, nbytes: int) -> int:
        """Allocate device memory, freed by `free` or `close`. Not collective.

        Returns:
            Its address, aligned for any dtype.

        Raises:
            HcclError: there is no such memory; the communicator goes on working.
        """
        if not isinstance(nbytes, int) or isinstance(nbytes, bool) or not 0 < nbytes < 1 << 62:
            raise HcclArgumentError(
                f"{nbytes!r:.80} bytes of device memory were asked for; it is an integer of at "
                "least 1"
            )
        what = f"allocating {nbytes} bytes on device {self.device}"
        made = self._do(
            what, lambda: self._library.allocate(nbytes), self._deadline(None), breaks=False
        )
        self._allocated[made] = nbytes
        return made

    def free(self, pointer: int) -> None:
        """Free what `allocate` gave. Not collective."""
        if not isinstance(pointer, int) or pointer not in self._allocated:
            said = hex(pointer) if isinstance(pointer, int) else f"{pointer!r:.80}"
            raise HcclArgumentError(f"{said} was not allocated here, or was freed")
        del self._allocated[pointer]
        what = f"freeing device memory at {pointer:#x}"
        self._do(what, lambda: self._library.call("aclrtFree", pointer), self._deadline(None))

    def agree(self, digest: bytes, *, timeout: float | None = None) -> bool:
        """Whether all ranks gave the same digest, of 16 bytes. Collective; all learn the same."""
        if not isinstance(digest, bytes) or len(digest) != 4 * _WORDS:
            raise HcclArgumentError(f"the digest is {digest!r:.80}; it is {4 * _WORDS} bytes")
        mask = (1 << _WORD_BITS) - 1
        words = [word & mask for word in struct.unpack(f"<{_WORDS}I", digest)]
        # The largest of all x, and of all -x, are opposite only where all x are equal.
        largest = self._largest([*words, *(-word for word in words)], self._deadline(timeout))
        return all(a == -b for a, b in zip(largest[:_WORDS], largest[_WORDS:], strict=True))

    def close(self) -> None:
        """Free everything; harmless when repeated. Not collective, but end work on all ranks first.

        Raises:
            HcclError: the library refused, on a communicator that was not broken.
        """
        if self._closed:
            return
        self._closed = True
        seconds = self.timeout if self._why_broken is None else min(self.timeout, _LAST_SECONDS)
        try:
            if self._worker.stuck is None:
                self._worker.run("closing", self._release, time.monotonic() + seconds)
        except HcclError:
            if self._why_broken is None:
                raise
        finally:
            self._worker.stop()

    def __enter__(self) -> HcclCommunicator:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<HcclCommunicator rank {self.rank} of {self.world_size}, device {self.device}, "
            f"{self.state}>"
        )

    # --- in the caller's thread ----------------------------------------------------------------

    def _open(self, exchange: Exchange, deadline: float) -> None:
        do = self._worker.run
        do(f"taking device {self.device}", self._take_device, deadline)
        made = None
        if self.rank == 0:
            made = do("HcclGetRootInfo", self._library.root_info, deadline)
        info = exchange(made, max(0.001, deadline - time.monotonic()))
        check_root_info(info)
        if made is not None and info != made:
            raise RootInfoError("the exchange returned another root info to rank 0 than it got")
        what = f"HcclCommInitRootInfo as rank {self.rank} of {self.world_size}"
        try:
            self._handle = do(
                what, lambda: self._library.join(self.world_size, info, self.rank), deadline
            )
        except HcclTimeoutError as error:
            raise HcclTimeoutError(
                f"{error}. Every other rank {self._ranks()} must join, and the devices reach "
                "each other; HCCL does not say who is missing",
                function=error.function or "HcclCommInitRootInfo",
                code=error.code,
            ) from None
        self._stream = do("aclrtCreateStream", self._library.stream, deadline)
        self._scratch = do("aclrtMalloc", lambda: self._library.allocate(_SCRATCH_BYTES), deadline)
        first = AllReduce(self._scratch, self._scratch + _SCRATCH_BYTES // 2, 1, "float32")
        self._do("the first all-reduce", lambda: self._run_steps([first], deadline), deadline)

    def _do(self, what: str, work: Callable[[], T], deadline: float, *, breaks: bool = True) -> T:
        self._check_usable(what)
        try:
            return self._worker.run(what, work, deadline)
        except HcclTimeoutError as error:
            self._why_broken = str(error)
            raise error.within(
                f"{what}: rank {self.rank} waited for the others {self._ranks()}; HCCL does not "
                "say which one did not take part"
            ) from None
        except HcclError as error:
            if breaks:
                self._why_broken = str(error)
            raise error.within(what) from None
        except BaseException as error:  # Ctrl-C: what the thread does is unknown
            self._why_broken = f"{type(error).__name__} interrupted {what}"
            raise

    def _check_usable(self, what: str) -> None:
        if self._closed:
            raise HcclStateError(f"{what}: the communicator is closed")
        if self._why_broken is not None:
            raise HcclStateError(
                f"{what}: the communicator is broken since {self._why_broken}. Close it and open "
                "a new one, in a new process where a call of HCCL is stuck"
            )

    def _deadline(self, timeout: float | None) -> float:
        seconds = self.timeout if timeout is None else timeout
        check_timeout(seconds)
        return time.monotonic() + seconds

    def _ranks(self) -> str:
        return f"(0 to {self.world_size - 1})"

    def _largest(self, values: Sequence[int], deadline: float) -> list[int]:
        """Reduce int32 values by max over all ranks."""
        size, half = 4 * len(values), _SCRATCH_BYTES // 2
        host = (ctypes.c_int32 * len(values))(*values)
        at = ctypes.addressof(host)
        call, scratch = self._library.call, self._scratch

        def work() -> None:
            call("aclrtMemcpy", scratch, size, at, size, abi.HOST_TO_DEVICE)
            reduce = AllReduce(scratch, scratch + half, len(values), "int32", "max")
            self._run_steps([reduce], deadline)
            call("aclrtMemcpy", at, size, scratch + half, size, abi.DEVICE_TO_HOST)

        self._do("comparing digests", work, deadline)
        return list(host)

    # --- in the communicator's own thread ------------------------------------------------------

    def _take_device(self) -> None:
        # A framework in this process may have been first; nobody finalises what others use.
        self._library.call("aclInit", None, accept=(abi.ACL_REPEATED_INIT,))
        self._library.call("aclrtSetDevice", self.device)

    def _run_steps(self, steps: Sequence[Step], deadline: float) -> None:
        for step in steps:
            try:
                step.enqueue(self._library, self._handle, self._stream)
            except HcclError as error:
                raise error.within(str(step)) from None
        left = deadline - time.monotonic()
        self._library.synchronize(self._stream, max(1, int(1000 * left * _LIBRARYS_PART)))

    def _release(self) -> None:
        """Free what there is, all of it; then raise the first failure."""
        call, first = self._library.call, None
        todo = [("HcclCommDestroy", self._handle), ("aclrtDestroyStream", self._stream)]
        todo += [("aclrtFree", pointer) for pointer in (*self._allocated, self._scratch)]
        for function, handle in todo:
            if not handle:
                continue
            try:
                call(function, handle)
            except HcclError as error:
                first = first or error
        self._handle = self._stream = self._scratch = 0
        self._allocated.clear()
        if first is not None:
            raise first


def given(root_info: bytes) -> Exchange:
    """An exchange for ranks that have rank 0's root info already; not for rank 0 itself."""
    check_root_info(root_info)
    return lambda mine, seconds: root_info


def check_root_info(root_info: bytes) -> None:
    """Raise `RootInfoError` unless these bytes have the size of a root info."""
    if not isinstance(root_info, bytes) or len(root_info) != abi.ROOT_INFO_BYTES:
        size = f"{len(root_info)} bytes" if isinstance(root_info, bytes) else repr(root_info)[:80]
        raise RootInfoError(
            f"a root info of {size}; HCCL's has {abi.ROOT_INFO_BYTES} bytes. Nothing was called"
        )


def _check_place(rank: int, world_size: int, device: int) -> None:
    for name, value, least in (
        ("world_size", world_size, 2),
        ("rank", rank, 0),
        ("device", device, 0),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise HcclArgumentError(f"{name} is {value!r}; it is an integer of at least {least}")
    if rank >= world_size:
        raise HcclArgumentError(f"rank is {rank}; ranks go from 0 to {world_size - 1}")
