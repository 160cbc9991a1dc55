"""A training step under parallelkit, Accelerate and Fabric, against raw torch, on two gloo ranks.

All train the same model on the same data from the same values, in the same processes, in turns:
raw, raw again, parallelkit, the peers, and a rank by itself. The second raw arm shows what "the
same" measures here; the goal is that parallelkit differs from raw no more than raw does from
itself. A ratio is the median over rounds, low and high its 95 % interval. parallelkit's final
weights must be raw's bit by bit, the peers' nearly.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
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
    time_calls,
    wait_idle,
)

if TYPE_CHECKING:
    from trainers import Trainer

RANKS = 2
COLUMNS = (
    *("strategy", "mode", "size", "arm", "ms a step", "low ms", "high ms"),
    *("ratio", "ratio low", "ratio high"),
)
#: Within noise: a hundredth, or the interval of raw against itself where that is wider.
NOISE = 0.01
#: How far weights may be from raw's after all steps, for arms that add up in another order.
CLOSE = 1e-3


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--strategy", choices=("ddp", "fsdp2", "both"), default="both")
    made.add_argument("--mode", choices=("eager", "graph", "both"), default="both")
    made.add_argument("--size", choices=("small", "large", "both"), default="both")
    made.add_argument("--rank-output", type=Path, help=argparse.SUPPRESS)
    args = made.parse_args()
    if args.rank_output is not None:
        rank_main(args)
        return
    wait_idle(args.wait_idle)
    run = Run("step", args)
    rows: list[Row] = []
    goals: list[Goal] = []
    missing: list[Row] = []
    limits: list[Row] = []
    for strategy, mode, size in cases(args):
        found = measure(strategy, mode, size, args.quick)
        rows += found["rows"]
        missing += found["missing"]
        limits += found["limits"]
        for lack in found["missing"]:
            print(f"{strategy}, {mode}, {size}: no {lack['arm']}: {lack['why']}")
        if found["rows"]:
            goals.append(goal(found["rows"], f"{strategy}, {mode}, {size}"))
    result = run.result(rows, goals, ranks=RANKS, missing=missing, limits=limits)
    finish(result, COLUMNS, args.output)


def cases(args: argparse.Namespace) -> list[tuple[str, str, str]]:
    """Every strategy, mode and size asked for; the quick form leaves out what takes long."""
    strategies = ("ddp", "fsdp2") if args.strategy == "both" else (args.strategy,)
    modes = ("eager", "graph") if args.mode == "both" else (args.mode,)
    sizes = ("small", "large") if args.size == "both" else (args.size,)
    if args.quick:  # compiling takes longer than all the rest
        modes, sizes = modes[:1], sizes[:1]
    return list(itertools.product(strategies, modes, sizes))


def goal(rows: list[Row], what: str) -> Goal:
    own = next(row for row in rows if row["arm"] == "raw again")
    noise = max(NOISE, own["ratio high"] - 1, 1 - own["ratio low"])
    ours = next(row for row in rows if row["arm"] == "parallelkit")
    return Goal(f"{what}: step over raw step", 1 + noise, ours["ratio"], False)


def measure(strategy: str, mode: str, size: str, quick: bool) -> dict[str, Any]:
    """Start two ranks of this file and return what rank 0 found."""
    from parallelkit import spawn_ranks

    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rank.json"
        argv = [sys.executable, __file__, "--strategy", strategy, "--mode", mode, "--size", size]
        argv += ["--rank-output", str(output)]
        env = {"OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port())}
        results = spawn_ranks(argv + ["--quick"] * quick, RANKS, timeout=1800, env=env, grace=30)
        for result in results:
            if result.returncode:
                raise SystemExit(f"rank {result.rank} failed:\n{result.stderr[-4000:]}")
        found: dict[str, Any] = json.loads(output.read_text())
        return found


def free_port() -> int:
    """A port that was free just now: the peers read one from the environment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_main(args: argparse.Namespace) -> None:
    """One rank: build all arms that can run, and train them in turns."""
    import torch
    from trainers import ARMS, Case, MissingArmError, build

    import parallelkit as pk

    torch.set_num_threads(1)
    case = Case(args.strategy, args.mode, args.size)
    blocks, steps = (6, 5) if args.quick else {"small": (60, 25), "large": (40, 8)}[args.size]
    with pk.init_process_group(framework="torch", device="cpu", timeout=600) as group:
        mode = pk.execution_mode(case.mode, fallback=True)
        if mode.effective != case.mode:
            lack = {"strategy": case.strategy, "mode": case.mode, "size": case.size}
            lacks = [lack | {"arm": "all", "why": mode.reason}]
            report(args, group.rank, {"rows": [], "missing": lacks, "limits": []})
            return
        trainers: dict[str, Trainer] = {}
        missing: list[Row] = []
        for arm in ARMS:
            try:
                trainers[arm] = build(arm, case)
            except MissingArmError as error:
                missing.append({**case._asdict(), "arm": arm, "why": str(error)})

        def timed(trainer: Trainer) -> float:
            group.barrier()
            start = time.perf_counter()
            trainer.train(steps)
            return (time.perf_counter() - start) / steps

        calls = {arm: partial(timed, trainer) for arm, trainer in trainers.items()}
        seconds = interleaved(calls, warmups=2, repeats=blocks)
        differences = compare(trainers)
        limits = [case._asdict() | limit(trainers["no exchange"], group, args.quick)]
    rows = [
        {**case._asdict(), **row(arm, seconds), "difference": differences.get(arm)}
        for arm in trainers
    ]
    for made in rows:
        made |= {"blocks": blocks, "steps a block": steps}
    report(args, group.rank, {"rows": rows, "missing": missing, "limits": limits})


def row(arm: str, seconds: dict[str, list[float]]) -> Row:
    """What one arm measured, and its ratio to raw of the same round."""
    own, ratio = Timing.of(seconds[arm]), ratios(seconds[arm], seconds["raw"])
    low, high = median_interval([a / b for a, b in zip(seconds[arm], seconds["raw"], strict=True)])
    return {
        "arm": arm,
        "ms a step": own.median * 1e3,
        "low ms": own.low * 1e3,
        "high ms": own.high * 1e3,
        "ratio": ratio.median,
        "ratio low": low,
        "ratio high": high,
        "ratio quartiles": [ratio.low, ratio.high],
    }


def compare(trainers: dict[str, Trainer]) -> dict[str, float]:
    """Largest difference of each arm's weights to raw's; ours must be 0. Collective."""
    weights = {arm: trainer.weights() for arm, trainer in trainers.items()}
    found = {
        arm: float((value - weights["raw"]).abs().max())
        for arm, value in weights.items()
        if arm != "no exchange"
    }
    for arm, difference in found.items():
        allowed = CLOSE if arm in ("accelerate", "fabric") else 0.0
        assert difference <= allowed, f"{arm} trained to other weights: {difference}"
    return found


def limit(trainer: Trainer, group: Any, quick: bool) -> Row:
    """What a step must move at least, and how long moving just that takes. Collective.

    DDP adds up the gradients on all ranks. FSDP2 gathers the parameters before forward, again
    before backward, and gives each rank its part of the gradients' sum.
    """
    import torch
    import torch.distributed as dist

    count = sum(p.numel() for p in trainer.model.parameters())
    count += -count % RANKS
    whole, part = torch.zeros(count), torch.zeros(count // RANKS)

    def timed(call: Any) -> float:
        def both() -> None:
            group.barrier()
            call()

        return Timing.of(time_calls(both, warmups=3, repeats=10 if quick else 50)).median

    empty = timed(lambda: None)
    reduced = timed(lambda: dist.all_reduce(whole)) - empty
    gathered = timed(lambda: dist.all_gather_into_tensor(whole, part)) - empty
    scattered = timed(lambda: dist.reduce_scatter_tensor(part, whole)) - empty
    return {
        "gradient bytes": 4 * count,
        "all-reduce ms": reduced * 1e3,
        "all-gather ms": gathered * 1e3,
        "reduce-scatter ms": scattered * 1e3,
        "all-reduce GB/s": 4 * count / reduced / 1e9 if reduced > 0 else None,
    }


def report(args: argparse.Namespace, rank: int, found: dict[str, Any]) -> None:
    if rank == 0:
        args.rank_output.write_text(json.dumps(found))


if __name__ == "__main__":
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # or Accelerate's arm is another one
    main()
