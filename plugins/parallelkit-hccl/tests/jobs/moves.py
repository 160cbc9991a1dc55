"""Any number of ranks: transfers of every kind arrive bit for bit; arguments, states, the end."""

from __future__ import annotations

import ctypes
import sys
import threading

import harness as h
import pytest
from parallelkit_hccl import (
    HcclArgumentError,
    HcclReceiver,
    HcclSender,
    HcclStateError,
    Packing,
)

from parallelkit.errors import ManifestError, ManifestMismatchError, WeightTransferError

SPECS = [
    h.spec("layer.weight", "bfloat16", 33, 7),
    h.spec("flags", "bool", 5),
    h.spec("nothing", "float32", 0, 4),
    h.spec("layer.bias", "float32", 100),
    h.spec("larger than the fake's buffer", "int64", 180_000),
    h.spec("scalar", "float64"),
    h.spec("byte", "uint8", 1),
    h.spec("eighth", "float8_e4m3fn", 3),
    h.spec("complex", "complex64", 9),
    h.spec("last and empty", "int8", 0),
]
ORDERS = [None, *(Packing(buffer_bytes=n) for n in (1, 64, 1000, 1_500_000, 1 << 30))]
memory = h.Memory(SPECS)
expected = h.Memory(SPECS)


def move(root: int, packing: Packing | None, seed: int) -> int:
    """One update; returns how many broadcasts it took."""
    expected.fill(seed)
    memory.fill(seed if root == h.RANK else -1)
    if root == h.RANK:
        mover = HcclSender(communicator, packing=packing)
        report = mover.send(memory.tensors)
    else:
        mover = HcclReceiver(communicator, root=root, packing=packing)
        report = mover.receive(memory.tensors)
    mover.close()
    assert memory.bytes() == expected.bytes(), (root, packing)
    assert report.nbytes == sum(spec.nbytes for spec in SPECS)
    assert report.seconds > 0
    return report.broadcasts


def transfers() -> None:
    taken = [
        {move(root, packing, 10 * number + root) for root in range(h.WORLD)}
        for number, packing in enumerate(ORDERS)
    ]
    assert all(len(counts) == 1 for counts in taken)
    # One a tensor; each that has bytes ends a buffer; ...; one buffer.
    assert taken[0] == {len(SPECS)}
    assert taken[-1] == {1}
    counts = [max(c) for c in taken[1:]]
    assert counts == sorted(counts, reverse=True)


def updates_with_one_sender() -> None:
    """Staging is kept between updates."""
    packing = Packing(buffer_bytes=500)
    mover = (
        HcclSender(communicator, packing=packing)
        if h.RANK == 0
        else HcclReceiver(communicator, packing=packing)
    )
    before = h.live()
    for seed in range(3):
        expected.fill(seed)
        memory.fill(seed if h.RANK == 0 else -1)
        mover.send(memory.tensors) if h.RANK == 0 else mover.receive(memory.tensors)
        assert memory.bytes() == expected.bytes()
    assert h.live() == before + 1
    mover.close()
    assert h.live() == before


def mismatches() -> None:
    last = h.RANK == h.WORLD - 1
    changed = [*SPECS[:-1], h.spec("last and empty", "int8", 1)]
    for specs, packing in (
        (changed if last else SPECS, None),
        (list(reversed(SPECS)) if last else SPECS, None),
        (SPECS, Packing(buffer_bytes=64 if last else 65)),
        (SPECS, Packing() if last else None),
    ):
        tensors = h.Memory(specs).tensors
        memory.fill(7)
        untouched = memory.bytes()
        call = (
            HcclSender(communicator, packing=packing).send
            if h.RANK == 0
            else HcclReceiver(communicator, packing=packing).receive
        )
        with pytest.raises(ManifestMismatchError, match="Nothing was moved"):
            call(tensors)
        assert memory.bytes() == untouched
        assert communicator.state == "open"
    move(0, None, 99)


def failures_of_one_rank() -> None:
    """A call that fails on one rank fails on all: its next call is not taken for it."""
    last = h.RANK == h.WORLD - 1
    twice = [*memory.tensors, memory.tensors[0]]
    for bad, options, kind in (
        (twice, {}, ManifestError),
        ([("w", 5)], {}, HcclArgumentError),
        (5, {}, HcclArgumentError),
        (memory.tensors, {"timeout": -1.0}, WeightTransferError),
    ):
        memory.fill(5)
        untouched = memory.bytes()
        mover = HcclSender(communicator) if h.RANK == 0 else HcclReceiver(communicator)
        call = mover.send if h.RANK == 0 else mover.receive
        with pytest.raises(kind if last else ManifestMismatchError):
            call(bad, **options) if last else call(memory.tensors)
        assert memory.bytes() == untouched
        assert communicator.state == "open"
        move(0, None, 11)  # and the next one is that of all


def collectives() -> None:
    values = (ctypes.c_float * 3)(1.5, h.RANK, -2)
    result = (ctypes.c_float * 3)()
    communicator.all_reduce(ctypes.addressof(values), ctypes.addressof(result), 3, "float32")
    assert list(result) == [1.5 * h.WORLD, sum(range(h.WORLD)), -2 * h.WORLD]
    word = ctypes.create_string_buffer(b"root" if h.RANK == 1 else b"....", 4)
    at = ctypes.addressof(word)
    # The device belongs to a thread; that of the caller does not matter.
    caller = threading.Thread(target=lambda: communicator.broadcast(at, 2, "bfloat16", root=1))
    caller.start()
    caller.join(h.SECONDS)
    assert word.raw == b"root"
    same = communicator.agree(bytes(16))
    other = communicator.agree(bytes(15) + bytes([h.RANK]))
    assert (same, other) == (True, False)


def arguments() -> None:
    for call in (
        lambda: communicator.broadcast(0, 1, "uint8"),
        lambda: communicator.broadcast(8, -1, "uint8"),
        lambda: communicator.broadcast(8, 1, "bool"),
        lambda: communicator.broadcast(8, 1, "uint8", root=h.WORLD),
        lambda: communicator.broadcast(8, 1, "uint8", root=-1),
        lambda: communicator.all_reduce(8, 8, 1, "float32", op="average"),
        lambda: communicator.agree(b"short"),
        lambda: communicator.agree(16),
        lambda: communicator.allocate(0),
        lambda: communicator.allocate("a"),
        lambda: communicator.allocate(1 << 70),
        lambda: communicator.free(8),
        lambda: communicator.free("a"),
        lambda: communicator.free([8]),
        lambda: HcclReceiver(communicator, root="a"),
        lambda: HcclReceiver(communicator, root=h.WORLD),
        lambda: HcclReceiver(communicator, root=h.RANK),
    ):
        with pytest.raises(HcclArgumentError):
            call()
    assert communicator.state == "open"


def ends() -> None:
    pointer = communicator.allocate(10)
    communicator.free(pointer)
    with pytest.raises(HcclArgumentError, match="freed"):
        communicator.free(pointer)
    communicator.allocate(10)  # close frees it
    communicator.close()
    communicator.close()
    assert communicator.state == "closed"
    assert h.live() == 0
    for call in (
        lambda: communicator.broadcast(8, 1, "uint8"),
        lambda: communicator.agree(bytes(16)),
        lambda: communicator.allocate(1),
        lambda: HcclSender(communicator).send([]),
    ):
        with pytest.raises(HcclStateError, match="closed"):
            call()


communicator = h.opened()
assert communicator.state == "open"
collectives()
transfers()
updates_with_one_sender()
mismatches()
failures_of_one_rank()
arguments()
ends()
with h.opened("second") as communicator:  # a process may have several, one after the other
    move(0, Packing(), 1)
assert h.live() == 0
assert not {"torch", "mindspore", "numpy"} & set(sys.modules)
