"""Peak memory of updates with a Cell of 200 MB at one end: the segment, and no second copy."""

from __future__ import annotations

import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn

import parallelkit as pk
from parallelkit.testing.arrays import Arrays

TENSORS, ROWS, COLUMNS = 10, 2500, 2000
MB = 1 << 20
MODEL_MB = TENSORS * ROWS * COLUMNS * 4 / MB
#: What else may come and go: digests, messages, threads' stacks.
SLACK_MB = 60.0


def cell() -> nn.Cell:
    made = nn.Cell()
    for i in range(TENSORS):
        value = ms.Tensor(np.full((ROWS, COLUMNS), i, np.float32))
        made.insert_param_to_cell(f"w{i}", ms.Parameter(value, name=f"w{i}"))
    return made


def arrays() -> Arrays:
    return Arrays({f"w{i}": np.full((ROWS, COLUMNS), -1, np.float32) for i in range(TENSORS)})


def status(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise KeyError(field)


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def updates(source: Any, target: Any, *, cell_follows: bool) -> float:
    """Return by how much the peak of two updates is above what was held before, in MB."""
    reset_peak()
    before = status("VmRSS")
    with pk.publish_weights(source, timeout=100.0) as publisher:
        with pk.subscribe_weights(target, publisher.ticket) as follower:
            for _ in range(2):
                ours, theirs = publisher.update, follower.step
                if cell_follows:
                    ours, theirs = theirs, ours
                thread = threading.Thread(target=theirs)
                thread.start()
                ours()
                thread.join()
    return status("VmHWM") - before


def main() -> None:
    # At its end MindSpore looks for a thread of its own by a deprecated name.
    warnings.filterwarnings("ignore", "getName", DeprecationWarning)
    net, plain = cell(), arrays()
    for source, target, cell_follows in ((net, plain, False), (plain, net, True)):
        grown = updates(source, target, cell_follows=cell_follows)
        side = "follower" if cell_follows else "publisher"
        print(f"{side}: {grown:.0f} MB above before, for {MODEL_MB:.0f} MB", flush=True)
        # Both ends are in this process, and each maps the one segment.
        assert grown < 2 * MODEL_MB + SLACK_MB, grown
        held = net.w3.asnumpy() if cell_follows else plain.arrays["w3"]
        assert (held == (103 if cell_follows else 3)).all()
        for array in plain.arrays.values():
            array += 100


if __name__ == "__main__":
    sys.exit(main())
