"""One kernel that copies what a table says, digests it in the same pass, or both.

Importing this module needs Triton. The kernel is compiled once for each width of loads; a program
of it works off one tile of a row, or several in turn. With digests it adds, per tile, one sum to
the block's.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Final

import torch
import triton
import triton.language as tl

from parallelkit_torch.cuda import digest, table

#: Bytes that a program works off. The programs that run at one time follow one another in memory;
#: the nearer together they are, the better DRAM serves reads and writes in turn: on an H200 32 KiB
#: copies at 2,042 GB/s, 64 KiB at 2,011 and 256 KiB at 1,991, while 16 KiB digests more slowly.
TILE: Final = 1 << 15
#: Words of 8 bytes that a program loads at once, and its threads in groups of 32: two loads of 16
#: bytes a thread. Four and more (1,024 words) cost 3%, as do hints to evict what was read first.
_WORDS: Final = 512
_WARPS: Final = 4

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
def _tile(  # type: ignore[no-untyped-def]
    rows,
    sums,
    place,
    tiles,
    COLUMN: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    COPY: tl.constexpr,  # noqa: N803
    DIGEST: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
    WORDS: tl.constexpr,  # noqa: N803
):
    row = rows + place // tiles * _COLUMNS
    begin = place % tiles * TILE
    nbytes = tl.minimum(tl.load(row + _NBYTES) - begin, TILE).to(tl.int32)
    source = _pointer(tl.load(row + COLUMN) + begin, WIDTH)
    target = _pointer(tl.load(row + _TARGET) + begin, WIDTH)
    word = (tl.load(row + _WORD) + begin // 8 + 1).to(tl.uint64)
    lanes = tl.arange(0, WORDS)
    keys = lanes.to(tl.uint64) * _STEP
    total = tl.zeros([WORDS], tl.uint64)
    if WIDTH >= 8 and nbytes == TILE:
        for start in range(0, TILE // 8, WORDS):
            at = start + lanes
            values = tl.load(source + at)
            if COPY:
                tl.store(target + at, values)
            if DIGEST:
                total += _mixed(values + (keys + (word + start) * _STEP))
    elif nbytes > 0:
        # words of 8 bytes, each by as many loads as it takes; of the last, zeros may be missing
        width: tl.constexpr = min(WIDTH, 8)
        parts: tl.constexpr = 8 // width
        items = nbytes // width
        for start in range(0, TILE // 8, WORDS):
            at = (start + lanes) * parts
            values = tl.zeros([WORDS], tl.uint64)
            for part in tl.static_range(parts):
                inside = at + part < items
                item = tl.load(source + at + part, mask=inside, other=0)
                if COPY:
                    tl.store(target + at + part, item, mask=inside)
                values = values | (item.to(tl.uint64) << (8 * width * part))
            if DIGEST:
                values = _mixed(values + (keys + (word + start) * _STEP))
                total += tl.where(at < items, values, tl.zeros_like(values))
    if DIGEST:
        slot = sums + tl.load(row + _BLOCK)
        sum_ = tl.sum(total, 0).to(tl.int64, bitcast=True)
        tl.atomic_add(slot, sum_, mask=nbytes > 0, sem="relaxed")


@triton.jit(do_not_specialize=["tiles", "count"])  # type: ignore[untyped-decorator]
def _pass(  # type: ignore[no-untyped-def]
    rows,
    sums,
    tiles,
    count,
    FEW: tl.constexpr,  # noqa: N803
    COLUMN: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    COPY: tl.constexpr,  # noqa: N803
    DIGEST: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
    WORDS: tl.constexpr,  # noqa: N803
):
    first = tl.program_id(0)
    if FEW:
        for place in range(first, count, tl.num_programs(0)):
            _tile(rows, sums, place, tiles, COLUMN, WIDTH, COPY, DIGEST, TILE, WORDS)
    else:
        _tile(rows, sums, first, tiles, COLUMN, WIDTH, COPY, DIGEST, TILE, WORDS)


def launch(
    rows: torch.Tensor,
    sums: torch.Tensor,
    runs: tuple[table.Run, ...],
    *,
    chunk: int,
    column: int,
    copy: bool,
    digest: bool,
    programs: int = 0,
) -> None:
    """Start the kernel for some rows, on the current stream of the tensors' device.

    Args:
        rows: of a table, on the device, int64.
        sums: one int64 for each block, added to; with `digest` only.
        runs: which rows.
        chunk: bytes of the largest row.
        column: `table.SOURCE` or `table.TARGET`: what is read. What is written is the target.
        copy, digest: what is done with what was read.
        programs: how many may run at one time, to leave room for others; 0: all that can.
    """
    tiles = chunk // TILE
    with torch.cuda.device(rows.device) if rows.is_cuda else nullcontext():  # interpreted
        for run in runs:
            count = (run.last - run.first) * tiles
            few = 0 < programs < count
            _pass[(programs if few else count,)](
                rows[run.first : run.last],
                sums,
                tiles,
                count,
                FEW=few,
                COLUMN=column,
                WIDTH=run.width,
                COPY=copy,
                DIGEST=digest,
                TILE=TILE,
                WORDS=_WORDS,
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
        launch(rows, sums, runs, chunk=TILE, column=column, copy=copy, digest=digested)
