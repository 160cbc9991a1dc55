"""The table of chunks, worked off here by numpy: every byte once, in any order, none besides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parallelkit_torch.cuda import table as tables
from parallelkit_torch.cuda.digest import digest_of, finish, salts_of, sum_of
from parallelkit_torch.cuda.errors import TableError
from parallelkit_torch.cuda.table import LARGEST_CHUNK, LEAST_CHUNK, Run, Table, build_table

#: Where the memory of these tests is said to begin: sources first, targets behind.
BASE = 1 << 20
ROOM = 1 << 19

SIZES = st.one_of(
    st.integers(0, 70), st.sampled_from([4096, LEAST_CHUNK, LEAST_CHUNK + 9, 150_001])
)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], list[int]]:
    """Sources, targets, sizes, blocks: any alignment; sources may be the same memory twice."""
    sizes = draw(st.lists(SIZES, min_size=1, max_size=6).filter(lambda s: sum(s) < ROOM - 1000))
    sources, targets, blocks, source, target = [], [], [], BASE, BASE + ROOM
    for size in sizes:
        source += draw(st.integers(0, 33))
        target += draw(st.integers(0, 33))
        sources.append(source)
        targets.append(target)
        blocks.append(draw(st.integers(0, 3)))
        source += draw(st.sampled_from([0, size]))
        target += size
    return sources, targets, sizes, blocks


def work_off(table: Table, memory: np.ndarray[Any, Any]) -> list[int]:
    """Execute a table as the kernel does, in a shuffled order; gives the blocks' sums."""
    sums = [0] * len(table.block_nbytes)
    for at in np.random.default_rng(1).permutation(len(table.rows)):
        source, target, nbytes, block, word, _ = table.rows[at].tolist()
        width = next(run.width for run in table.runs if run.first <= at < run.last)
        assert 0 < nbytes <= table.chunk
        assert source % width == target % width == nbytes % width == 0
        data = memory[source - BASE : source - BASE + nbytes]
        if sums:
            sums[block] = (sums[block] + sum_of(data.tobytes(), word)) % (1 << 64)
        memory[target - BASE : target - BASE + nbytes] = data
    return sums


@given(layouts(), st.booleans())
@settings(max_examples=120, deadline=None)
def test_a_table_copies_its_pairs_and_nothing_else(layout: Any, digested: bool) -> None:
    sources, targets, sizes, blocks = layout
    memory = np.random.default_rng(0).integers(0, 256, 2 * ROOM, dtype=np.uint8)
    expected = memory.copy()
    for source, target, size in zip(sources, targets, sizes, strict=True):
        expected[target - BASE :][:size] = memory[source - BASE :][:size]
    parts = [memory[s - BASE :][:n].tobytes() for s, n in zip(sources, sizes, strict=True)]
    table = build_table(sources, targets, sizes, block=blocks if digested else None)
    sums = work_off(table, memory)
    assert np.array_equal(memory, expected)
    assert table.total == sum(sizes)
    if digested:
        found = finish(np.array(sums, np.uint64), salts_of(table.block_nbytes)).tolist()
        for block in range(max(blocks) + 1):
            mine = [part for part, b in zip(parts, blocks, strict=True) if b == block]
            assert found[block] == digest_of(mine)


@given(layouts())
@settings(max_examples=60, deadline=None)
def test_parts_hold_every_row_once(layout: Any) -> None:
    sources, targets, sizes, blocks = layout
    table = build_table(sources, targets, sizes, block=blocks)
    for count in (1, 3, 1000):
        parts = list(table.parts(count))
        assert len(parts) <= count
        rows = [at for part in parts for run in part for at in range(run.first, run.last)]
        assert rows == list(range(len(table.rows)))
        assert all(run.width in tables.WIDTHS and run.first < run.last for p in parts for run in p)


def test_parts_have_about_the_same_bytes() -> None:
    table = build_table([1 << 30], [1 << 40], [64 * LEAST_CHUNK], block=[0], chunk=LEAST_CHUNK)
    sizes = [run.last - run.first for part in table.parts(16) for run in part]
    assert sizes == [4] * 16


def test_what_is_aligned_alike_goes_by_sixteen_bytes() -> None:
    def widths(source: int, target: int, size: int, block: list[int] | None) -> list[int]:
        table = build_table([source], [target], [size], block=block)
        return [run.width for run in table.runs]

    assert widths(4096, 65536, 1000 * 16, [0]) == [16]
    assert widths(4096 + 8, 65536 + 8, 1000, [0]) == [16, 8]
    assert widths(4096 + 8, 65536, 1000, [0]) == [8]
    assert widths(4096 + 6, 65536 + 6, 1000, None) == [16, 2]
    assert widths(4096 + 6, 65536 + 6, 1000, [0]) == [2]  # words of the digest begin at the pair
    assert widths(4096 + 3, 65536, 1000, None) == [1]


def test_chunks_follow_the_bytes() -> None:
    assert build_table([1 << 30], [1 << 40], [1 << 20]).chunk == LEAST_CHUNK
    assert build_table([1 << 30], [1 << 40], [1 << 36]).chunk == LARGEST_CHUNK
    assert build_table([1 << 30], [1 << 40], [1 << 20], chunk=1 << 18).chunk == 1 << 18


def test_positions_make_the_digest_of_the_whole_block() -> None:
    data = np.random.default_rng(2).integers(0, 256, 4000, dtype=np.uint8).tobytes()
    whole = digest_of([data])
    for cuts in ([0, 4000], [0, 8, 1600, 4000], [0, 2000, 3992, 4000]):
        starts, ends = np.array(cuts[:-1]), np.array(cuts[1:])
        order = np.arange(len(starts))[::-1]  # in which order they are listed does not matter
        table = build_table(
            BASE + starts[order],
            None,
            (ends - starts)[order],
            block=np.zeros(len(starts), np.int64),
            position=starts[order],
        )
        sums = [sum_of(data[r[0] - BASE :][: r[2]], r[4]) for r in table.rows.tolist()]
        total = np.array([sum(sums) % (1 << 64)], np.uint64)
        assert finish(total, salts_of(table.block_nbytes)).tolist() == [whole]


def test_nothing_to_do_makes_an_empty_table() -> None:
    for nothing in ([], [0]):
        table = build_table(nothing, nothing, nothing, block=nothing)
        assert table.runs == ()
        assert list(table.parts(4)) == []
        assert table.rows.shape == (0, tables.COLUMNS)


def test_blocks_without_pairs_have_no_bytes() -> None:
    table = build_table([4096], [8192], [10], block=[2])
    assert table.block_nbytes.tolist() == [0, 0, 10]
    assert table.runs == (Run(2, 0, 1),)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (([100], [200], [1.5]), "whole number"),
        (([100, 1], [200], [1]), "2 sources, 1 targets and 1 sizes"),
        (([100], [200], [-1]), "nbytes of pair 0 is -1"),
        (([0], [200], [1]), "source of pair 0 is 0"),
        (([100], [1 << 62], [1]), "target of pair 0"),
        ((np.array([1 << 63], np.uint64), [200], [1]), "below 2\\^62"),
        (([1, 1], [200, 300], [1 << 61, 1 << 61]), "reach 2\\^62"),
        (([100, 1000], [200, 203], [4, 4]), "targets of pairs 0 and 1 overlap"),
        (([100, 1000], [203, 200], [4, 4]), "targets of pairs 1 and 0 overlap"),
        (([100], [103], [4]), "source of pair 0 .* overlaps the target of pair 0"),
        (([100, 500], [900, 90], [4, 11]), "source of pair 0 .* target of pair 1"),
    ],
)
def test_pairs_that_no_table_is_made_of(arguments: Any, says: str) -> None:
    with pytest.raises(TableError, match=says):
        build_table(*arguments)


@pytest.mark.parametrize(
    ("settings_", "says"),
    [
        ({"block": [0]}, "1 blocks for 2 pairs"),
        ({"block": [-1, 0]}, "from 0"),
        ({"position": [0, 8]}, "no blocks"),
        ({"block": [0, 0], "position": [0]}, "1 positions"),
        ({"block": [0, 0], "position": [0, 12]}, "pair 1 begins at byte 12"),
        ({"block": [0, 0], "position": [0, 8]}, "share a word of block 0"),
        ({"chunk": 1 << 12}, "power of two"),
        ({"chunk": 3 << 16}, "power of two"),
    ],
)
def test_settings_that_no_table_is_made_of(settings_: dict[str, Any], says: str) -> None:
    with pytest.raises(TableError, match=says):
        build_table([1000, 2000], [3000, 4000], [9, 9], **settings_)


def test_neighbours_do_not_overlap() -> None:
    build_table([100, 104], [108, 104 + 8], [4, 4])
    build_table([100], [104], [4])
    build_table([104], [100], [4])
