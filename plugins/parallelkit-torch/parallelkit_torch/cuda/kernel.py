"""One kernel that copies what a table says, digests it in the same pass, or both.

Importing this module needs Triton. The kernel is compiled once for each width of loads; a program
of it works off one row of the table. With digests it adds, per program, one sum to the block's.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Final

import torch
import triton
import triton.language as tl

from parallelkit_torch.cuda import digest, table

#: Words of 8 bytes that a program takes at once, and its threads in groups of 32.
_WORDS: Final = 2048
_WARPS: Final = 8

_COLUMNS: tl.constexpr = tl.constexpr(table.COLUMNS)
_SOURCE: tl.constexpr = tl.constexpr(table.SOURCE)
_TARGET: tl.constexpr = tl.constexpr(table.TARGET)
_NBYTES: tl.constexpr = tl.constexpr(table.NBYTES)
_BLOCK: tl.constexpr = tl.constexpr(table.BLOCK)
_WORD: tl.constexpr = tl.constexpr(table.WORD)
_STEP: tl.constexpr = tl.constexpr(digest.STEP)
_FIRST: tl.constexpr = tl.constexpr(digest.FIRST)
_SECOND: tl.constexpr = tl.constexpr(digest.SECOND)


@triton.jit
def _mixed(values):  # type: ignore[no-untyped-def]
    values = values * _FIRST
    values = values ^ (values >> 32)
    values = values * _SECOND
    return values ^ (values >> 32)


@triton.jit  # type: ignore[untyped-decorator]
def _pointer(address, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    if WIDTH >= 8:
        # the hint is what lets Triton load WIDTH bytes at once
        return tl.multiple_of(address.to(tl.pointer_type(tl.uint64)), WIDTH)
    elif WIDTH == 4:  # noqa: RET505 - only the branch taken is compiled, and there is one type
        return address.to(tl.pointer_type(tl.uint32))
    elif WIDTH == 2:
        return address.to(tl.pointer_type(tl.uint16))
    else:
        return address.to(tl.pointer_type(tl.uint8))


@triton.jit  # type: ignore[untyped-decorator]
def _pass(  # type: ignore[no-untyped-def]
    rows,
    sums,
    COLUMN: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    COPY: tl.constexpr,  # noqa: N803
    DIGEST: tl.constexpr,  # noqa: N803
    WORDS: tl.constexpr,  # noqa: N803
):
    row = rows + tl.program_id(0).to(tl.int64) * _COLUMNS
    source = _pointer(tl.load(row + COLUMN), WIDTH)
    target = _pointer(tl.load(row + _TARGET), WIDTH)
    nbytes = tl.load(row + _NBYTES).to(tl.int32)
    lanes = tl.arange(0, WORDS)
    total = tl.zeros([WORDS], tl.uint64)
    keys = lanes.to(tl.uint64) * _STEP
    word = tl.load(row + _WORD).to(tl.uint64) + 1
    if WIDTH >= 8:
        count = nbytes // 8
        whole = count // WORDS * WORDS
        for start in range(0, whole, WORDS):
            at = start + lanes
            values = tl.load(source + at, eviction_policy="evict_first")
            if COPY:
                tl.store(target + at, values, eviction_policy="evict_first")
            if DIGEST:
                total += _mixed(values + (keys + (word + start) * _STEP))
        if whole < count:
            at = whole + lanes
            inside = at < count
            values = tl.load(source + at, mask=inside, other=0)
            if COPY:
                tl.store(target + at, values, mask=inside)
            if DIGEST:
                values = _mixed(values + (keys + (word + whole) * _STEP))
                total += tl.where(inside, values, tl.zeros_like(values))
    else:
        parts: tl.constexpr = 8 // WIDTH
        items = nbytes // WIDTH
        for start in range(0, items, WORDS * parts):
            at = start + lanes * parts
            values = tl.zeros([WORDS], tl.uint64)
            for part in tl.static_range(parts):
                inside = at + part < items
                item = tl.load(source + at + part, mask=inside, other=0)
                if COPY:
                    tl.store(target + at + part, item, mask=inside)
                values = values | (item.to(tl.uint64) << (8 * WIDTH * part))
            if DIGEST:
                values = _mixed(values + (keys + (word + start // parts) * _STEP))
                total += tl.where(at < items, values, tl.zeros_like(values))
    if DIGEST:
        slot = sums + tl.load(row + _BLOCK)
        tl.atomic_add(slot, tl.sum(total, 0).to(tl.int64, bitcast=True), sem="relaxed")


def launch(
    rows: torch.Tensor,
    sums: torch.Tensor,
    runs: tuple[table.Run, ...],
    *,
    column: int,
    copy: bool,
    digest: bool,
) -> None:
    """Start the kernel for some rows, on the current stream of the tensors' device.

    Args:
        rows: of a table, on the device, int64.
        sums: one int64 for each block, added to; with `digest` only.
        runs: which rows.
        column: `table.SOURCE` or `table.TARGET`: what is read. What is written is the target.
        copy, digest: what is done with what was read.
    """
    with torch.cuda.device(rows.device) if rows.is_cuda else nullcontext():  # interpreted
        for run in runs:
            # programs have half as many words to hold where each takes several loads
            _pass[(run.last - run.first,)](
                rows[run.first : run.last],
                sums,
                COLUMN=column,
                WIDTH=run.width,
                COPY=copy,
                DIGEST=digest,
                WORDS=_WORDS if run.width >= 8 else _WORDS // 4,
                num_warps=_WARPS,
            )


def compile_for(device: Any) -> None:
    """Compile every form of the kernel for 16-byte loads that an update needs; moves nothing."""
    rows = torch.zeros((1, table.COLUMNS), dtype=torch.int64, device=device)
    sums = torch.zeros(1, dtype=torch.int64, device=device)
    runs = (table.Run(16, 0, 1),)
    for column, copy, digested in (
        (table.SOURCE, True, False),
        (table.SOURCE, True, True),
        (table.SOURCE, False, True),
        (table.TARGET, False, True),
    ):
        launch(rows, sums, runs, column=column, copy=copy, digest=digested)
