"""Run the kernel in Triton's interpreter, on the CPU, and compare with numpy. A script, no test."""

from __future__ import annotations

import numpy as np
import torch
from parallelkit_torch.cuda import kernel
from parallelkit_torch.cuda.digest import digest_of, finish, salts_of
from parallelkit_torch.cuda.table import SOURCE, TARGET, build_table

BYTES = 150_000
BLOCKS = [0, 1, 0, 2, 1]
#: The interpreter cannot run loops with bounds of its own where numpy is strict about arrays.
FEW = 2 if np.lib.NumpyVersion(np.__version__) < "2.0.0" else 0

#: Offsets of sources, of targets, and sizes: widths 16 with a head, 8, 4, 2 and 1, and tails.
CASES = [
    ([8, 1024, 2000, 4096, 90000], [24, 1024, 2000, 3080, 90000], [16, 7, 0, 70000, 20001]),
    ([4, 604, 1002, 4097, 8000], [12, 606, 1004, 4096, 8008], [500, 300, 3001, 3001, 40016]),
]


def check(digested: bool) -> None:
    rng = np.random.default_rng(digested)
    for sources, targets, sizes in CASES:
        source = torch.from_numpy(rng.integers(0, 256, BYTES, dtype=np.uint8))
        target = torch.full((BYTES,), 0xEE, dtype=torch.uint8)
        want = target.numpy().copy()
        for at, to, size in zip(sources, targets, sizes, strict=True):
            want[to : to + size] = source.numpy()[at : at + size]
        table = build_table(
            source.data_ptr() + np.array(sources),
            target.data_ptr() + np.array(targets),
            sizes,
            block=BLOCKS if digested else None,
        )
        rows, sums = torch.from_numpy(table.rows), torch.zeros((3, 3), dtype=torch.int64)
        kernel.launch(
            rows, sums[0], table.runs, chunk=table.chunk, column=SOURCE, copy=True, digest=digested
        )
        assert np.array_equal(target.numpy(), want)
        if not digested:
            assert not sums.any()
            continue
        kernel.launch(
            rows, sums[1], table.runs, chunk=table.chunk, column=SOURCE, copy=False, digest=True
        )
        kernel.launch(
            *(rows, sums[2], table.runs),
            chunk=table.chunk,
            column=TARGET,
            copy=False,
            digest=True,
            programs=FEW,
        )
        parts = [source.numpy()[a : a + n].tobytes() for a, n in zip(sources, sizes, strict=True)]
        expected = [
            digest_of([part for part, b in zip(parts, BLOCKS, strict=True) if b == block])
            for block in range(3)
        ]
        for found in sums.numpy().view(np.uint64):
            assert finish(found, salts_of(table.block_nbytes)).tolist() == expected


if __name__ == "__main__":
    check(False)
    check(True)
    print("equal")
