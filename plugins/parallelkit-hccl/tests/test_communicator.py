"""What is wrong before any peer is involved; the rest is in `test_moves.py`, `test_faults.py`."""

from __future__ import annotations

import threading

import pytest
from parallelkit_hccl import errors
from parallelkit_hccl.communicator import HcclCommunicator, given
from parallelkit_hccl.errors import HcclArgumentError, HcclError, RootInfoError
from parallelkit_hccl.library import Library
from parallelkit_hccl.steps import AllReduce, Broadcast, Copy

from parallelkit.errors import ParallelKitError, StateError, TransportError, WeightTransferError


def never(root_info: bytes | None, seconds: float) -> bytes:
    raise AssertionError("there was no reason to ask")


@pytest.fixture
def library(fake: str) -> Library:
    return Library(fake, fake)


@pytest.mark.parametrize(
    ("rank", "world_size", "device", "said"),
    [
        (0, 1, 0, "world_size is 1; it is an integer of at least 2"),
        (0, "2", 0, "world_size is '2'"),
        (0, True, 0, "world_size is True"),
        (-1, 2, 0, "rank is -1"),
        (2, 2, 0, "rank is 2; ranks go from 0 to 1"),
        (None, 2, 0, "rank is None"),
        (0, 2, -1, "device is -1"),
        (0, 2, "npu:0", "device is 'npu:0'"),
    ],
)
def test_places_that_cannot_be(library, rank, world_size, device, said):
    with pytest.raises(HcclArgumentError, match=said):
        HcclCommunicator(rank, world_size, never, device=device, library=library)


@pytest.mark.parametrize("exchange", [None, b"info", 5])
def test_exchanges_that_cannot_be(library, exchange):
    with pytest.raises(HcclArgumentError, match="exchange is"):
        HcclCommunicator(1, 2, exchange, library=library)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "60", None, True])
def test_timeouts_that_cannot_be(library, timeout):
    with pytest.raises(WeightTransferError, match="timeout is"):
        HcclCommunicator(0, 2, never, timeout=timeout, library=library)


@pytest.mark.parametrize("info", [b"", bytes(4107), bytes(4109), bytearray(4108), None, "r" * 4108])
def test_a_root_info_of_another_size_never_reaches_the_library(library, info):
    called = []
    library._functions["HcclCommInitRootInfo"] = lambda *args: called.append(args)
    with pytest.raises(RootInfoError, match="4108 bytes. Nothing was called"):
        HcclCommunicator(1, 2, lambda mine, seconds: info, library=library)
    assert not called
    with pytest.raises(RootInfoError):
        given(info)


def test_an_exchange_that_changes_rank_0s_root_info(library):
    with pytest.raises(RootInfoError, match="another root info to rank 0"):
        HcclCommunicator(0, 2, lambda mine, seconds: bytes(4108), library=library)


def test_an_exchange_that_fails_leaves_nothing_behind(library):
    before = threading.active_count()

    def fail(root_info: bytes | None, seconds: float) -> bytes:
        assert 0 < seconds <= 5
        raise OSError("no network")

    with pytest.raises(OSError, match="no network"):
        HcclCommunicator(1, 2, fail, timeout=5.0, library=library)
    assert threading.active_count() == before


def test_a_device_that_is_not_there(library):
    with pytest.raises(HcclError, match="aclrtSetDevice failed with code 107000"):
        HcclCommunicator(1, 2, never, device=99, library=library)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Broadcast(0, 1, "uint8"), "pointer is 0; it is the address of memory"),
        (lambda: Broadcast(-8, 1, "uint8"), "pointer is -8"),
        (lambda: Broadcast(1 << 64, 1, "uint8"), "pointer is"),
        (lambda: Broadcast("8", 1, "uint8"), "pointer is '8'"),
        (lambda: Broadcast(8, -1, "uint8"), "count is -1"),
        (lambda: Broadcast(8, 1.0, "uint8"), "count is 1.0"),
        (lambda: Broadcast(8, 1, "float8_e5m2"), "no dtype 'float8_e5m2'.*Send others as uint8"),
        (lambda: Broadcast(8, 1, "uint8", -1), "root is -1"),
        (lambda: AllReduce(0, 8, 1, "float32"), "send is 0"),
        (lambda: AllReduce(8, 0, 1, "float32"), "receive is 0"),
        (lambda: AllReduce(8, 8, 1, "float32", "mean"), "no operation 'mean'; it has sum"),
        (lambda: Copy(8, 0, 1), "source is 0"),
        (lambda: Copy(8, 8, True), "nbytes is True"),
    ],
)
def test_steps_that_cannot_be(make, said):
    with pytest.raises(HcclArgumentError, match=said):
        make()


def test_steps_say_what_they_are():
    assert str(Broadcast(8, 3, "bfloat16", 1, "w")) == "broadcast of 'w' 3 x bfloat16 from rank 1"
    assert str(AllReduce(8, 8, 2, "int32", "max")) == "all-reduce (max) of 2 x int32"
    assert str(Copy(8, 16, 5)) == "copy of 5 bytes on the device"


def test_every_error_is_one_of_parallelkits():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    ours = [kind for kind in kinds if kind.__module__ == errors.__name__]
    assert len(ours) == 7
    assert all(issubclass(kind, TransportError | ParallelKitError) for kind in ours)
    assert issubclass(errors.HcclStateError, StateError)
