"""A weight update from MindSpore to Torch over shared memory, against memcpy and a broadcast.

The trainer is a process with a MindSpore Cell, the follower one with a Torch module. An update is
`publisher.update()`, start to return, with every element changed before it; memcpy is one
`np.copyto` of as many bytes between warm buffers, timed in the same rounds. The broadcast is
MindSpore's own, between two ranks on the CPU, of fewer bytes, since it is slow: compare GB/s.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import xxhash
from bench_shm import TIMEOUT, memcpy, time_updates
from common import Row, Run, Timing, finish, parser, ratios, show, wait_idle
from follower import Follower
from model_layouts import KINDS, Layout, make_layout

from parallelkit.spawn import spawn_ranks

SIZES: Final = {"4MB": 4 * 10**6, "100MB": 10**8, "1GiB": 2**30}
VERIFY: Final = ("off", "digest")
COLUMNS: Final = (
    *("size", "kind", "tensors", "verify", "update ms", "low ms", "high ms", "GB/s", "memcpy ms"),
    *("of memcpy", "times broadcast", "phases"),
)
BROADCAST: Final = "--as-rank"


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--sizes", nargs="+", choices=SIZES, default=["100MB", "1GiB"])
    made.add_argument("--kinds", nargs="+", choices=KINDS, default=["few", "mix"])
    made.add_argument("--updates", type=int, default=9, help="timed updates of each variant")
    made.add_argument(
        "--broadcast-mb", type=int, default=100, help="bytes of MindSpore's broadcast"
    )
    args = made.parse_args()
    if args.quick:
        args.sizes, args.kinds, args.updates, args.broadcast_mb = ["4MB"], ["mix"], 3, 4
    run = Run("mindspore_weights", args)
    busy = wait_idle(args.wait_idle) if args.wait_idle else None
    broadcast = time_broadcast(args.broadcast_mb * 10**6, repeats=3)
    speed = args.broadcast_mb * 1e6 / broadcast.median
    print(f"MindSpore's broadcast: {show(speed / 1e9)} GB/s", flush=True)
    rows = [
        row
        for size, kind in itertools.product(args.sizes, args.kinds)
        for row in measure(size, make_layout(kind, SIZES[size]), args, speed)
    ]
    result = run.result(
        rows,
        [],
        updates=args.updates,
        broadcast={
            "MB": args.broadcast_mb,
            "ms": broadcast.median * 1e3,
            "low ms": broadcast.low * 1e3,
            "high ms": broadcast.high * 1e3,
            "GB/s": speed / 1e9,
            "cores busy before": busy,
        },
    )
    finish(result, COLUMNS, args.output)


class Cell:
    """A model of MindSpore parameters in nested Cells; see `model_layouts.Model`."""

    def __init__(self, layout: Layout) -> None:
        import mindspore as ms
        from mindspore import nn

        self.target = nn.Cell()
        for name, shape in layout.shapes.items():
            holder = self.target
            *path, key = name.split(".")
            for part in path:
                if part not in holder._cells:
                    holder.insert_child_to_cell(part, nn.Cell())
                holder = holder._cells[part]
            values = ms.mint.empty(shape, dtype=getattr(ms, layout.dtype))
            holder.insert_param_to_cell(key, ms.Parameter(values, name=name))
        for bits in self._bits():
            bits[:] = 1

    def train(self) -> None:
        """Change every element, by its bits: adding bfloat16 takes MindSpore 10 s a 100 MB."""
        for bits in self._bits():
            np.add(bits, 1, out=bits)

    def _bits(self) -> Iterator[np.ndarray[Any, Any]]:
        """The live elements of each parameter as integers."""
        from parallelkit_mindspore import runtime, tensors

        runtime.synchronize()
        for parameter in self.target.get_parameters():
            live = tensors.live_bytes(parameter)
            assert live is not None
            yield np.frombuffer(live, f"u{parameter.itemsize}")

    def digest(self) -> str:
        h = xxhash.xxh3_64()
        for parameter in self.target.get_parameters():
            h.update(parameter.asnumpy().reshape(-1).view(np.uint8).data)
        return str(h.hexdigest())


def measure(size: str, layout: Layout, args: Any, broadcast: float) -> list[Row]:
    """Every way to verify for one model; `broadcast` is in bytes a second."""
    model = Cell(layout)
    copy = memcpy(layout.nbytes)
    reading, writing = os.pipe()  # for models sent as pickles; not used here
    rows: list[Row] = []
    with open(writing, "wb"):
        try:
            follower = Follower("torch", layout.kind, SIZES[size], reading)
        finally:
            os.close(reading)
        with follower:
            for verify in VERIFY:
                updates, copies, reports = time_updates(
                    model, follower, copy, verify, False, 1 if args.quick else 2, args.updates
                )
                update, share = Timing.of(updates), ratios(copies, updates)
                phases = {
                    name: statistics.median(report.phases[name] for report in reports) * 1e3
                    for name in reports[0].phases
                }
                rows.append(
                    {
                        "size": size,
                        "kind": layout.kind,
                        "tensors": len(layout.shapes),
                        "nbytes": layout.nbytes,
                        "verify": verify,
                        "update ms": update.median * 1e3,
                        "low ms": update.low * 1e3,
                        "high ms": update.high * 1e3,
                        "GB/s": layout.nbytes / update.median / 1e9,
                        "memcpy ms": statistics.median(copies) * 1e3,
                        "of memcpy": share.median,
                        "of memcpy low": share.low,
                        "of memcpy high": share.high,
                        "times broadcast": layout.nbytes / update.median / broadcast,
                        "phases ms": phases,
                        "phases": " ".join(f"{name} {show(ms)}" for name, ms in phases.items()),
                    }
                )
    return rows


def time_broadcast(nbytes: int, repeats: int) -> Timing:
    """Seconds of MindSpore's broadcast on the rank that receives, from a barrier on."""
    argv = [sys.executable, __file__, BROADCAST, str(nbytes), str(repeats)]
    results = spawn_ranks(argv, 2, timeout=TIMEOUT, env={"GLOG_v": "3"})
    for result in results:
        if result.returncode:
            how = "took too long" if result.timed_out else f"ended with {result.returncode}"
            raise RuntimeError(f"rank {result.rank} of the broadcast {how}:\n{result.stderr}")
    return Timing.of(json.loads(results[1].stdout.splitlines()[-1]))


def broadcast_as_rank(nbytes: int, repeats: int) -> None:
    """One rank's part of `time_broadcast`; prints its seconds as JSON."""
    import mindspore as ms
    from mindspore.mint import distributed
    from parallelkit_mindspore import runtime

    import parallelkit as pk

    with pk.init_process_group(framework="mindspore", device="cpu", timeout=TIMEOUT) as group:
        x = ms.Tensor(np.full(nbytes // 4, group.rank, np.float32))
        seconds = []
        for turn in range(repeats + 1):
            group.barrier()
            start = time.perf_counter()
            distributed.broadcast(x, 0)
            runtime.synchronize()
            if turn:  # the first is a warm-up
                seconds.append(time.perf_counter() - start)
        assert not x.asnumpy().any(), "these are not rank 0's values"
        group.barrier()  # nobody leaves while another still sends
    print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == [BROADCAST]:
        broadcast_as_rank(*map(int, sys.argv[2:]))
    else:
        main()
