"""Bytes that say what a peer exported: any that are not well formed are refused, by name."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parallelkit_torch.cuda.errors import SheetError
from parallelkit_torch.cuda.sheet import MOST_BYTES, Handle, Sheet, sheet_of

GPU, HANDLE = bytes(range(16)), bytes(range(64))


def handle(seed: int = 1, nbytes: int = 1 << 21) -> Handle:
    return Handle(GPU, bytes([seed]) * 64, nbytes, seed)


def sheet() -> Sheet:
    return sheet_of([handle(1), handle(2)], [(0, 0, 100), (1, 512, 4096), (1, 0, 0)])


def test_a_sheet_comes_back_as_it_was() -> None:
    data = sheet().encode()
    again = Sheet.decode(data)
    assert again.encode() == data
    assert again.handles == sheet().handles
    assert again.offset.tolist() == [0, 512, 0]
    assert again.addresses([1 << 30, 1 << 40]).tolist() == [1 << 30, (1 << 40) + 512, 0]


def test_spans_of_no_bytes_need_no_allocation() -> None:
    again = Sheet.decode(sheet_of([], [(0, 0, 0)]).encode())
    assert again.addresses([]).tolist() == [0]
    assert Sheet.decode(sheet_of([], []).encode()).handles == ()


def test_many_spans_of_one_allocation_cost_its_handle_once() -> None:
    data = sheet_of([handle()], [(0, i, 8) for i in range(1000)]).encode()
    assert len(data) == 16 + 96 + 24 * 1000


@given(st.binary(max_size=400))
@settings(max_examples=100, deadline=None)
def test_noise_is_refused(data: bytes) -> None:
    with pytest.raises(SheetError):
        Sheet.decode(data)


@given(st.integers(0, 279), st.integers(1, 255))
@settings(max_examples=150, deadline=None)
def test_an_altered_sheet_is_refused_or_within_its_bounds(at: int, change: int) -> None:
    data = bytearray(sheet().encode())
    assert len(data) == 280
    data[at] ^= change
    try:
        found = Sheet.decode(bytes(data))
    except SheetError:
        return
    sizes = np.array([h.nbytes for h in found.handles])
    assert (found.offset + found.nbytes <= sizes[found.allocation]).all()


@given(st.integers(0, 279))
@settings(max_examples=60, deadline=None)
def test_a_short_sheet_is_refused(length: int) -> None:
    with pytest.raises(SheetError):
        Sheet.decode(sheet().encode()[:length])


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        (0, b"X", "no sheet of exports"),
        (4, b"\2", "version 2"),
        (8, b"\xff\xff\xff\x00", "at most 65536"),
        (12, b"\xff\xff\xff\x00", "at most 65536 and 1048576"),
        (16, bytes(16), "gpu must be 16 bytes that are not all zero"),
        (32, bytes(64), "handle must be 64 bytes that are not all zero"),
        (96, bytes(8), "an allocation of 0 bytes"),
        (96, b"\xff" * 8, "an allocation of 18446744073709551615 bytes"),
        (208, b"\5", "span 0 is in allocation 5 of 2"),
        (212, b"\1", "must be zero"),
        (216, b"\xff" * 8, "offset or size is above"),
        (224, (1 << 22).to_bytes(8, "little"), "reaches outside its allocation of 2097152 bytes"),
        (216, (1 << 21).to_bytes(8, "little"), "span 0, 100 bytes from 2097152, reaches outside"),
    ],
)
def test_what_cannot_be_is_named(at: int, value: bytes, says: str) -> None:
    data = bytearray(sheet().encode())
    data[at : at + len(value)] = value
    with pytest.raises(SheetError, match=says):
        Sheet.decode(bytes(data))


def test_a_sheet_that_is_made_is_checked_as_one_that_came() -> None:
    with pytest.raises(SheetError, match="listed twice"):
        sheet_of([handle(), handle()], [])
    with pytest.raises(SheetError, match="64 bytes"):
        Handle(GPU, HANDLE[:63], 1, 1)
    with pytest.raises(SheetError, match="must have 1 to"):
        Handle(GPU, HANDLE, MOST_BYTES + 1, 1)
    with pytest.raises(SheetError, match="span 0 is in allocation -1"):
        sheet_of([handle()], [(-1, 0, 8)])
    with pytest.raises(SheetError, match="reaches outside"):
        sheet_of([handle()], [(0, -8, 8)])
