"""One fault a start: every rank ends within its deadlines, with an error of its own class."""

from __future__ import annotations

import os
import time

import harness as h
import pytest
from parallelkit_hccl import (
    HcclCommunicator,
    HcclError,
    HcclReceiver,
    HcclSender,
    HcclStateError,
    HcclTimeoutError,
    given,
)

#: Seconds for a call that cannot succeed; the fake's own patience is ten times as long or more.
SHORT = 3.0
#: As `SHORT`, where no rank has to do anything within it but what is under way on all already.
SHORTEST = 1.5
SPECS = [h.spec(f"layer.{n}", "float32", 1000) for n in range(4)]


def spoil(what: str, rank: int = 1) -> None:
    """Spoil a call of one rank; see the fake library."""
    if rank == h.RANK:
        os.environ["FAKEHCCL_FAULT"] = what


def move(communicator: HcclCommunicator, specs: list = SPECS, timeout: float = SHORTEST) -> None:
    memory = h.Memory(specs)
    if h.RANK == 0:
        HcclSender(communicator, compare=False).send(memory.tensors, timeout=timeout)
    else:
        HcclReceiver(communicator, compare=False).receive(memory.tensors, timeout=timeout)


def opened_in_vain() -> None:
    """Open when every rank is up, so that little time is enough."""
    h.note(f"here{h.RANK}", "")
    for rank in range(h.WORLD):
        h.read(f"here{rank}")
    h.opened(timeout=SHORT)


def broken(communicator: HcclCommunicator) -> None:
    """What is left of a communicator after a failure: it refuses work, and closes."""
    assert communicator.state == "broken"
    with pytest.raises(HcclStateError, match="broken since"):
        communicator.broadcast(8, 1, "uint8")
    communicator.close()
    assert communicator.state == "closed"


def absent() -> None:
    """The last rank never asks for the root info: all others learn which one it is."""
    if h.RANK == h.WORLD - 1:
        return
    start = h.exchange()
    if h.RANK:
        h.note(f"ready{h.RANK}", "")
    else:
        for rank in range(1, h.WORLD - 1):
            h.read(f"ready{rank}")
    alone = h.WORLD == 2  # else the others have to ask within it
    patience = h.SECONDS if h.RANK else SHORTEST if alone else SHORT
    with pytest.raises(HcclTimeoutError, match="did not come within") as caught:
        HcclCommunicator(h.RANK, h.WORLD, start, timeout=patience)
    assert caught.value.missing == (h.WORLD - 1,)
    assert h.live() == 0


def hanging_init() -> None:
    """A rank that fetched the root info hangs in joining."""
    spoil("HcclCommInitRootInfo:1:hang")
    with pytest.raises(HcclTimeoutError, match="HCCL does not say who is missing") as caught:
        opened_in_vain()
    assert caught.value.function == "HcclCommInitRootInfo"


def failing_init() -> None:
    """Joining fails on one rank; the other waits for it no longer than it may."""
    spoil("HcclCommInitRootInfo:1:error=11")
    kind = HcclTimeoutError if h.RANK == 0 else HcclError
    with pytest.raises(kind, match="HcclCommInitRootInfo") as caught:
        opened_in_vain()
    assert type(caught.value) is kind
    if h.RANK == 1:
        assert caught.value.code == 11


def failing_warm_up() -> None:
    """A rank joins and cannot make the first all-reduce; what it made is freed."""
    spoil("HcclAllReduce:1:error=5")
    kind = HcclTimeoutError if h.RANK == 0 else HcclError
    with pytest.raises(kind, match="the first all-reduce") as caught:
        opened_in_vain()
    assert type(caught.value) is kind
    assert h.live() == 0


def death() -> None:
    """Rank 1 is killed in the middle of an update."""
    communicator = h.opened()
    move(communicator, timeout=h.SECONDS)
    spoil("execute:3:die")
    with pytest.raises(HcclTimeoutError, match="'layer.0' to 'layer.3'"):
        move(communicator)
    broken(communicator)


def failing_call() -> None:
    """Rank 1's third broadcast is refused: it says which, rank 0 gives it up."""
    communicator = h.opened()
    spoil("HcclBroadcast:3:error=15")
    if h.RANK == 0:
        with pytest.raises(HcclTimeoutError, match="does not say which"):
            move(communicator)
    else:
        with pytest.raises(HcclError, match=r"code 15.*library|broadcast of 'layer\.2'") as caught:
            move(communicator)
        assert type(caught.value) is HcclError
        assert (caught.value.function, caught.value.code) == ("HcclBroadcast", 15)
        assert "'layer.2'" in str(caught.value)
    broken(communicator)
    assert h.live() == 0


def stuck_call() -> None:
    """Rank 1's stream hangs in C, deaf to its own timeout: the thread is given up."""
    communicator = h.opened()
    spoil("execute:2:hang")
    began = time.monotonic()
    with pytest.raises(HcclTimeoutError):
        move(communicator)
    broken(communicator)
    assert time.monotonic() - began < float(os.environ["FAKEHCCL_SECONDS"]) / 2


def other_sizes() -> None:
    """Ranks that do not compare and differ: the fake says so, and no rank waits."""
    communicator = h.opened()
    sizes = [1000, 1000 + h.RANK]
    with pytest.raises(HcclError, match="Synchronize.* failed with code 1 ") as caught:
        move(communicator, [h.spec(f"x{i}", "float32", n) for i, n in enumerate(sizes)], h.SECONDS)
    assert not isinstance(caught.value, HcclTimeoutError)
    broken(communicator)


def failing_close() -> None:
    """Closing says what failed, and frees the rest."""
    communicator = h.opened()
    spoil("HcclCommDestroy:1:error=4", rank=0)
    if h.RANK == 0:
        with pytest.raises(HcclError, match="HcclCommDestroy failed with code 4"):
            communicator.close()
        assert h.live() == 1
    communicator.close()
    assert communicator.state == "closed"


def no_memory() -> None:
    """Device memory runs out: nothing is broken by that."""
    communicator = h.opened()
    spoil("aclrtMalloc:1:error=207001")
    if h.RANK == 1:
        with pytest.raises(HcclError, match="aclrtMalloc failed with code 207001"):
            communicator.allocate(1 << 20)
        assert communicator.state == "open"
    move(communicator, timeout=h.SECONDS)
    communicator.close()


def foreign_root_info() -> None:
    """Bytes of the right size that no library made."""
    if h.RANK == 0:
        return
    with pytest.raises(HcclError, match="HcclCommInitRootInfo failed with code 1"):
        HcclCommunicator(1, 2, given(bytes(4108)), timeout=h.SECONDS)


{f.__name__: f for f in list(globals().values()) if callable(f)}[h.ARGS[0]]()
