"""The process that owns the weights: exports them, and digests them when told to.

Orders come as lines on stdin: `export`, `digest`, `end`. An answer on stdout is a line of JSON, and
as many bytes as it says in `nbytes`.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import torch
from lists import LISTS
from parallelkit_torch.cuda.copier import Copier
from parallelkit_torch.cuda.driver import Driver
from parallelkit_torch.cuda.ipc import Exports
from parallelkit_torch.cuda.table import build_table


def answer(data: bytes, **what: Any) -> None:
    line = json.dumps({**what, "nbytes": len(data)})
    sys.stdout.buffer.write(line.encode() + b"\n" + data)
    sys.stdout.buffer.flush()


def main(name: str, quick: bool) -> None:
    device = torch.device("cuda:0")
    shapes = list(LISTS[name]())[:: 50 if quick else 1]
    tensors = [torch.empty(shape, dtype=torch.bfloat16, device=device) for shape in shapes]
    for tensor in tensors:
        tensor.view(torch.int16).random_(-(1 << 15), 1 << 15)
    sizes = [tensor.nbytes for tensor in tensors]
    places = [tensor.data_ptr() for tensor in tensors]
    table = build_table(places, None, sizes, block=np.arange(len(sizes)))
    copier = Copier(table, device)
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with Exports(Driver.load()) as exports:
        for line in sys.stdin:
            if line.strip() == "export":
                start = time.perf_counter()
                sheet = exports.tensors(tensors)
                data = sheet.encode()
                took = time.perf_counter() - start
                answer(data, ms=took * 1e3, allocations=len(sheet.handles))
            elif line.strip() == "digest":
                begin.record()
                copier.digest_source()
                end.record()
                found = copier.digests().source
                assert found is not None
                answer(found.tobytes(), ms=begin.elapsed_time(end))
            else:
                break


if __name__ == "__main__":
    main(sys.argv[1], "--quick" in sys.argv)
