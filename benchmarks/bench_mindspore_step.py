"""A training step of MindSpore under parallelkit against raw MindSpore, on two CPU ranks.

Raw MindSpore does it in two ways: `nn.TrainOneStepCell` ("cell"), and a step by hand of
`value_and_grad`, `nn.DistributedGradReducer` and the optimiser ("step"). Under parallelkit the
first is the same class over a model that `context.parallelize` gave; in place of the second stand
`context.train_step` and `context.apply_gradients`. All train the same model on the same data from
the same values, in the same processes, in turns, in PyNative and in Graph mode. The second raw
arms show what "the same" measures here; the goal is that parallelkit differs from raw no more than
raw does from itself. A ratio is the median over rounds, low and high its 95 % interval. After ten
steps all must have raw's weights.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import (
    Goal,
    Row,
    Run,
    Timing,
    finish,
    interleaved,
    median_interval,
    parser,
    ratios,
    wait_idle,
)

if TYPE_CHECKING:
    from trainers_mindspore import Trainer

RANKS = 2
COLUMNS = (
    *("mode", "size", "arm", "ms a step", "low ms", "high ms"),
    *("ratio", "ratio low", "ratio high", "of eager"),
)
#: Within noise: a hundredth, or the interval of raw against itself where that is wider.
NOISE = 0.01
#: How far weights may be from raw's after the first steps: gradients are added in flat buffers.
CLOSE = 1e-5
CHECKED_STEPS = 10


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--size", choices=("small", "large", "both"), default="both")
    made.add_argument("--rank-output", type=Path, help=argparse.SUPPRESS)
    args = made.parse_args()
    if args.rank_output is not None:
        rank_main(args)
        return
    wait_idle(args.wait_idle)
    run = Run("mindspore_step", args)
    rows: list[Row] = []
    sizes = ("small", "large") if args.size == "both" else (args.size,)
    for size in sizes[:1] if args.quick else sizes:
        rows += measure(size, args.quick)
    goals = [goal(rows, row) for row in rows if row["arm"].startswith("parallelkit")]
    finish(run.result(rows, goals, ranks=RANKS), COLUMNS, args.output)


def goal(rows: list[Row], ours: Row) -> Goal:
    """That ours is within what raw measures against itself."""
    case = (ours["mode"], ours["size"])
    again = next(
        row
        for row in rows
        if (row["mode"], row["size"]) == case and row["arm"] == f"{ours['against']} again"
    )
    noise = max(NOISE, again["ratio high"] - 1, 1 - again["ratio low"])
    return Goal(f"{', '.join(case)}: {ours['arm']} over raw", 1 + noise, ours["ratio"], False)


def measure(size: str, quick: bool) -> list[Row]:
    """Start two ranks of this file and return what rank 0 found."""
    from parallelkit import spawn_ranks

    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rank.json"
        argv = [sys.executable, __file__, "--size", size, "--rank-output", str(output)]
        env = {"OMP_NUM_THREADS": "1", "GLOG_v": "3"}
        results = spawn_ranks(argv + ["--quick"] * quick, RANKS, timeout=1800, env=env, grace=30)
        for result in results:
            if result.returncode:
                raise SystemExit(f"rank {result.rank} failed:\n{result.stderr[-4000:]}")
        found: list[Row] = json.loads(output.read_text())
        return found


def rank_main(args: argparse.Namespace) -> None:
    """One rank: build all arms in both modes, and train them in turns."""
    import mindspore as ms
    from trainers_mindspore import ARMS, SIZES, build

    import parallelkit as pk

    modes = {"eager": ms.PYNATIVE_MODE, "graph": ms.GRAPH_MODE}
    blocks, steps = (4, 1) if args.quick else (30, {"small": 8, "large": 4}[args.size])
    with pk.init_process_group(framework="mindspore", device="cpu", timeout=600) as group:
        context = pk.parallel_context(data=-1, reduce="mean")
        trainers: dict[str, Trainer] = {}
        for mode, number in modes.items():
            ms.set_context(mode=number)
            for arm in ARMS:
                made = build(arm, SIZES[args.size], group.rank, context)
                trainers[f"{mode}: {arm}"] = made

        for name, trainer in trainers.items():  # before rounding has had time to grow
            ms.set_context(mode=modes[name.partition(":")[0]])
            trainer.train(CHECKED_STEPS)
        compare(trainers)

        def timed(mode: int, trainer: Trainer) -> float:
            ms.set_context(mode=mode)
            group.barrier()
            start = time.perf_counter()
            trainer.train(steps)
            return (time.perf_counter() - start) / steps

        calls = {
            name: partial(timed, modes[name.partition(":")[0]], trainer)
            for name, trainer in trainers.items()
        }
        seconds = interleaved(calls, warmups=2, repeats=blocks)
    if group.rank:
        return
    rows = [
        row(mode, args.size, arm, against, seconds) | {"blocks": blocks, "steps a block": steps}
        for mode in modes
        for arm, against in ARMS.items()
    ]
    args.rank_output.write_text(json.dumps(rows))


def row(mode: str, size: str, arm: str, against: str, seconds: dict[str, list[float]]) -> Row:
    """What one arm measured, its ratio to raw and to itself in PyNative, of the same rounds."""
    own, raw = seconds[f"{mode}: {arm}"], seconds[f"{mode}: {against}"]
    timing, ratio = Timing.of(own), ratios(own, raw)
    low, high = median_interval([a / b for a, b in zip(own, raw, strict=True)])
    return {
        "mode": mode,
        "size": size,
        "arm": arm,
        "against": against,
        "ms a step": timing.median * 1e3,
        "low ms": timing.low * 1e3,
        "high ms": timing.high * 1e3,
        "ratio": ratio.median,
        "ratio low": low,
        "ratio high": high,
        "of eager": ratios(own, seconds[f"eager: {arm}"]).median,
    }


def compare(trainers: dict[str, Trainer]) -> dict[str, float]:
    """Largest difference of each arm's weights to the first's."""
    weights = {arm: trainer.weights() for arm, trainer in trainers.items()}
    first: Any = next(iter(weights.values()))
    found = {arm: float(abs(value - first).max()) for arm, value in weights.items()}
    for arm, difference in found.items():
        assert difference <= CLOSE, f"{arm} trained to other weights: {difference}"
    return found


if __name__ == "__main__":
    main()
