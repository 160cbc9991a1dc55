"""What is copied where, as a table of chunks that one kernel works off in any order.

Pure: addresses are numbers here. A *pair* is a run of bytes at a source and a target address. It
becomes at most three *pieces*: a head that brings both addresses to a multiple of 16 where they
can come to one together, a body, and a tail shorter than 16 bytes. Each piece is copied by loads
of one *width*, the largest of 16, 8, 4, 2 and 1 bytes that both addresses and the size allow. A
body is cut into chunks; each chunk, head and tail is a row.

With digests, every pair belongs to a block (`digest`), and no piece but a pair's last ends within
a word of 8 bytes. So a pair whose addresses are no multiples of 8 is copied by its narrower loads
throughout, while without digests its body still goes by 16 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import attrs
import numpy as np

from parallelkit_torch.cuda.digest import WORD_BYTES
from parallelkit_torch.cuda.errors import TableError

#: Columns of a row, all int64: addresses in bytes, size in bytes, the block of the digest, index
#: of the first word in the block, and the pair that the row is of.
SOURCE, TARGET, NBYTES, BLOCK, WORD, PAIR = range(6)
COLUMNS: Final = 6
#: Widths of loads in bytes, widest first: the order of the rows.
WIDTHS: Final = (16, 8, 4, 2, 1)
LEAST_CHUNK: Final = 1 << 16
LARGEST_CHUNK: Final = 1 << 20
#: Rows aimed at: several for each place that a GPU has for a group of threads.
WANTED_ROWS: Final = 1 << 14
#: What one launch of the kernel can count, whatever the tiles of a row.
MOST_ROWS: Final = 1 << 24
_END: Final = 1 << 62

Array = np.ndarray[Any, np.dtype[np.int64]]


class Run(NamedTuple):
    """Rows `first` to `last` (excluded), all of one width."""

    width: int
    first: int
    last: int


@attrs.frozen(eq=False)
class Table:
    """Rows, ordered by width, and the pairs that they were made of.

    Attributes:
        rows: shape (rows, `COLUMNS`), int64.
        runs: where each width is, widest first; widths without rows are left out.
        source, target, nbytes: of the pairs, as given.
        block, word: of the pairs: the digest's block, and index of the first word in it; None
            without digests.
        block_nbytes: bytes of each block, for `digest.salts_of`.
        chunk: bytes of the largest row.
    """

    rows: Array
    runs: tuple[Run, ...]
    source: Array
    target: Array
    nbytes: Array
    block: Array | None
    word: Array | None
    block_nbytes: Array
    chunk: int

    @property
    def total(self) -> int:
        """Bytes of all pairs."""
        return int(self.nbytes.sum())

    def parts(self, count: int) -> Iterator[tuple[Run, ...]]:
        """Cut the rows into at most `count` parts of about the same number of bytes."""
        if not len(self.rows):
            return
        ends = np.cumsum(self.rows[:, NBYTES])
        goals = ends[-1] * np.arange(1, count + 1) // count
        cuts = np.unique(np.searchsorted(ends, goals, side="left") + 1)
        first = 0
        for last in map(int, cuts):
            yield tuple(
                Run(run.width, max(run.first, first), min(run.last, last))
                for run in self.runs
                if run.first < last and run.last > first
            )
            first = last


def build_table(
    source: Any,
    target: Any,
    nbytes: Any,
    *,
    block: Any = None,
    position: Any = None,
    chunk: int = 0,
) -> Table:
    """Make the table of some pairs.

    Args:
        source, target: addresses in bytes, in one address space. None as a target: nothing is to
            be copied; the table is for digests of the source alone.
        nbytes: their sizes; pairs of no bytes are allowed.
        block: the digest's block that each pair is part of, from 0; None: no digests.
        position: byte in the block at which each pair begins, a multiple of 8; None: the pairs of
            a block follow one another, each at the next multiple of 8.
        chunk: bytes of a row at most, a power of two from `LEAST_CHUNK` to `LARGEST_CHUNK`; 0: by
            the number of bytes.

    Raises:
        TableError: lengths differ; an address or size is none; a target overlaps another target or
            a source; parts of a block overlap or begin within a word; the chunk is not allowed.
    """
    sources, sizes = _integers("source", source), _integers("nbytes", nbytes)
    targets = sources if target is None else _integers("target", target)
    _check_pairs(sources, targets, sizes)
    if target is not None:
        _check_overlap(sources, targets, sizes)
    blocks = words = None
    block_nbytes = np.zeros(0, np.int64)
    if block is not None:
        blocks = _integers("block", block)
        words, block_nbytes = _place(blocks, sizes, position)
    elif position is not None:
        raise TableError("positions of pairs in a digest's block were given, and no blocks")
    size = _chunk(chunk, int(sizes.sum()))
    rows, runs = _rows(sources, targets, sizes, blocks, words, size)
    return Table(rows, runs, sources, targets, sizes, blocks, words, block_nbytes, size)


# --- checks ------------------------------------------------------------------------------------


def _integers(name: str, values: Any) -> Array:
    found = np.asarray(values)
    if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
        raise TableError(
            f"{name} must be one whole number for each pair, not {found.dtype} of shape "
            f"{found.shape}"
        )
    if found.dtype.kind == "u" and len(found) and int(found.max()) >= _END:
        raise TableError(f"{name} has {int(found.max())}; numbers must be below 2^62")
    return found.astype(np.int64)


def _check_pairs(sources: Array, targets: Array, sizes: Array) -> None:
    if not len(sources) == len(targets) == len(sizes):
        raise TableError(
            f"{len(sources)} sources, {len(targets)} targets and {len(sizes)} sizes; each pair "
            "needs one of each"
        )
    for name, values, bad in (
        ("nbytes", sizes, (sizes < 0) | (sizes >= _END)),
        ("source", sources, (sizes > 0) & ((sources < 1) | (sources >= _END))),
        ("target", targets, (sizes > 0) & ((targets < 1) | (targets >= _END))),
    ):
        if bad.any():
            pair = int(np.argmax(bad))
            least = 0 if name == "nbytes" else 1
            raise TableError(
                f"{name} of pair {pair} is {values[pair]}; it must be from {least} to 2^62"
            )
    if sum(map(int, sizes.tolist())) >= _END:
        raise TableError("the sizes of all pairs together reach 2^62")


def _check_overlap(sources: Array, targets: Array, sizes: Array) -> None:
    held = np.flatnonzero(sizes)
    order = held[np.argsort(targets[held], kind="stable")]
    starts, ends = targets[order], targets[order] + sizes[order]
    clash = np.flatnonzero(ends[:-1] > starts[1:])
    if len(clash):
        one, other = order[clash[0]], order[clash[0] + 1]
        raise TableError(
            f"the targets of pairs {one} and {other} overlap: {sizes[one]} bytes at "
            f"{targets[one]:#x} and {sizes[other]} at {targets[other]:#x}; chunks are copied in no "
            "order, so each byte may be a target once"
        )
    # targets are disjoint now, so the last one that begins before a source's end reaches furthest
    last = np.searchsorted(starts, sources[held] + sizes[held], side="left") - 1
    found = np.flatnonzero((last >= 0) & (ends[last] > sources[held])) if len(held) else held
    if len(found):
        one, other = held[found[0]], order[last[found[0]]]
        raise TableError(
            f"the source of pair {one} ({sizes[one]} bytes at {sources[one]:#x}) overlaps the "
            f"target of pair {other} ({sizes[other]} bytes at {targets[other]:#x})"
        )


def _place(blocks: Array, sizes: Array, position: Any) -> tuple[Array, Array]:
    """Index of each pair's first word in its block, and bytes of each block."""
    if len(blocks) != len(sizes):
        raise TableError(f"{len(blocks)} blocks for {len(sizes)} pairs")
    if len(blocks) and not 0 <= int(blocks.min()) <= int(blocks.max()) < MOST_ROWS:
        raise TableError(
            f"blocks of digests must be from 0 to {MOST_ROWS}; they are {blocks.min()} to "
            f"{blocks.max()}"
        )
    count = int(blocks.max()) + 1 if len(blocks) else 0
    block_nbytes = np.zeros(count, np.int64)
    np.add.at(block_nbytes, blocks, sizes)
    lengths = -(-sizes // WORD_BYTES)
    if position is not None:
        return _given(blocks, lengths, _integers("position", position)), block_nbytes
    order = np.argsort(blocks, kind="stable")
    before = np.cumsum(lengths[order]) - lengths[order]
    first = np.searchsorted(blocks[order], np.arange(count))
    words = np.empty_like(lengths)
    words[order] = before - before[first[blocks[order]]] if len(order) else before
    return words, block_nbytes


def _given(blocks: Array, lengths: Array, positions: Array) -> Array:
    if len(positions) != len(blocks):
        raise TableError(f"{len(positions)} positions for {len(blocks)} pairs")
    bad = np.flatnonzero((positions < 0) | (positions % WORD_BYTES != 0))
    if len(bad):
        raise TableError(
            f"pair {bad[0]} begins at byte {positions[bad[0]]} of its block; digests are made of "
            f"words of {WORD_BYTES} bytes, so it must be a multiple of that"
        )
    words = positions // WORD_BYTES
    held = np.flatnonzero(lengths)
    order = held[np.lexsort((words[held], blocks[held]))]
    same = blocks[order][:-1] == blocks[order][1:]
    clash = np.flatnonzero(same & ((words + lengths)[order][:-1] > words[order][1:]))
    if len(clash):
        one, other = order[clash[0]], order[clash[0] + 1]
        raise TableError(f"pairs {one} and {other} share a word of block {blocks[one]}")
    return words


def _chunk(chunk: int, total: int) -> int:
    if not chunk:
        wanted = max(total // WANTED_ROWS, 1)
        return min(max(1 << (wanted.bit_length() - 1), LEAST_CHUNK), LARGEST_CHUNK)
    if not LEAST_CHUNK <= chunk <= LARGEST_CHUNK or chunk & (chunk - 1):
        raise TableError(
            f"chunks of {chunk} bytes; they must be a power of two from {LEAST_CHUNK} to "
            f"{LARGEST_CHUNK}"
        )
    return chunk


# --- rows --------------------------------------------------------------------------------------


def _lowest_bit(values: Array) -> Array:
    return values & -values


def _rows(
    sources: Array,
    targets: Array,
    sizes: Array,
    blocks: Array | None,
    words: Array | None,
    chunk: int,
) -> tuple[Array, tuple[Run, ...]]:
    pair, offset, length, width = _pieces(sources, targets, sizes, blocks is not None)
    counts = -(-length // chunk)
    if int(counts.sum()) > MOST_ROWS:
        raise TableError(f"{int(counts.sum())} rows; at most {MOST_ROWS} are allowed")
    which = np.repeat(np.arange(len(pair)), counts)
    within = (np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)) * chunk
    start, owner = offset[which] + within, pair[which]
    rows = np.zeros((len(which), COLUMNS), np.int64)
    rows[:, SOURCE] = sources[owner] + start
    rows[:, TARGET] = targets[owner] + start
    rows[:, NBYTES] = np.minimum(length[which] - within, chunk)
    rows[:, PAIR] = owner
    if blocks is not None and words is not None:
        rows[:, BLOCK] = blocks[owner]
        rows[:, WORD] = words[owner] + start // WORD_BYTES
    widths = width[which]
    order = np.argsort(-widths, kind="stable")
    edges = np.searchsorted(-widths[order], [-w for w in WIDTHS], side="left").tolist()
    runs = (Run(*run) for run in zip(WIDTHS, edges, [*edges[1:], len(rows)], strict=True))
    return rows[order], tuple(run for run in runs if run.first < run.last)


def _pieces(
    sources: Array, targets: Array, sizes: Array, digested: bool
) -> tuple[Array, Array, Array, Array]:
    """Heads, bodies and tails: of which pair, from which byte of it, how many, in which width."""
    if digested:
        together = ((sources ^ targets) % 16 == 0) & (sources % WORD_BYTES == 0)
        width = np.where(together, 16, _lowest_bit(sources | targets | WORD_BYTES))
        head = np.where(together, -sources % 16, 0)
        unit = np.maximum(width, WORD_BYTES)
    else:
        unit = width = _lowest_bit((sources ^ targets) | 16)
        head = -sources % width
    head = np.minimum(head, sizes)
    body = (sizes - head) // unit * unit
    tail = sizes - head - body
    pairs = np.arange(len(sizes))
    pair = np.concatenate([pairs, pairs, pairs])
    offset = np.concatenate([np.zeros_like(head), head, head + body])
    length = np.concatenate([head, body, tail])
    narrow = _lowest_bit((sources[pair] + offset) | (targets[pair] + offset) | length | 8)
    widths = np.where(np.repeat([False, True, False], len(pairs)), np.tile(width, 3), narrow)
    held = length > 0
    return pair[held], offset[held], length[held], widths[held]
