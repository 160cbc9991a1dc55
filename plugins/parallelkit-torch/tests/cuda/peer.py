"""Another process with a GPU, told what to do by lines of JSON. A script, no test.

{"do": "export", "sizes": [...]}   allocate bfloat16 tensors, random; a sheet, digests by numpy
{"do": "open", "sheet": hex}       map a sheet, copy it, digests by the kernel
{"do": "survey"}                   what it finds out about itself
{"do": "change", "tensor": i}      change one element of a tensor
"""

from __future__ import annotations

import json
import sys
from typing import Any

import attrs
import numpy as np
import torch
from parallelkit_torch.cuda.copier import Copier
from parallelkit_torch.cuda.digest import digest_of
from parallelkit_torch.cuda.driver import Driver
from parallelkit_torch.cuda.ipc import Exports, Imports
from parallelkit_torch.cuda.probe import survey
from parallelkit_torch.cuda.sheet import Sheet
from parallelkit_torch.cuda.table import build_table

from parallelkit.errors import ParallelKitError

DEVICE = torch.device("cuda:0")
KEPT: list[torch.Tensor] = []


def octets(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().cpu().view(torch.int16).numpy().tobytes()


def export(order: dict[str, Any], exports: Exports) -> Any:
    KEPT[:] = [torch.randn(n, device=DEVICE).to(torch.bfloat16) for n in order["sizes"]]
    torch.cuda.synchronize()
    sheet = exports.tensors(KEPT)
    return {
        "sheet": sheet.encode().hex(),
        "allocations": len(sheet.handles),
        "digests": [digest_of([octets(tensor)]) for tensor in KEPT],
    }


def open_(order: dict[str, Any], imports: Imports) -> Any:
    sheet = Sheet.decode(bytes.fromhex(order["sheet"]))
    sources = imports.open(sheet)
    target = torch.zeros(int(sheet.nbytes.sum()) + 16 * len(sources), dtype=torch.uint8).to(DEVICE)
    room = (sheet.nbytes + 15) // 16 * 16
    places = target.data_ptr() + np.cumsum(room) - room
    table = build_table(sources, places, sheet.nbytes, block=np.arange(len(sources)))
    copier = Copier(table, DEVICE)
    copier.copy_and_read_back()
    found = copier.digests().target
    assert found is not None
    imports.release(sheet)
    return {"digests": found.tolist()}


def main() -> None:
    driver = Driver.load()
    exports, imports = Exports(driver), Imports(driver, 0)
    for line in sys.stdin:
        order = json.loads(line)
        answer: Any = {}
        try:
            if order["do"] == "export":
                answer = export(order, exports)
            elif order["do"] == "open":
                answer = open_(order, imports)
            elif order["do"] == "change":
                KEPT[order["tensor"]].view(torch.int16)[-1] ^= 1
                torch.cuda.synchronize()
            else:
                answer = attrs.asdict(survey(DEVICE, [torch.zeros(8, device=DEVICE)]))
        except ParallelKitError as error:
            answer = {"error": type(error).__name__, "says": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
