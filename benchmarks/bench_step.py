"""A training step under parallelkit, against the same raw torch DDP script, on two gloo ranks.

Both train the same model on the same data from the same values, in the same processes, in turns:
raw, raw again, parallelkit, and back. The second raw arm shows what "the same" measures here; the
goal is that parallelkit differs from raw no more than raw does from itself. A ratio is the median
over rounds, low and high its 95 % interval. Final weights must be equal bit by bit.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

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

RANKS = 2
BATCH = 16
FEATURES = 512
CLASSES = 64
ARMS = ("raw", "raw again", "parallelkit")
COLUMNS = ("mode", "arm", "ms a step", "low ms", "high ms", "ratio", "ratio low", "ratio high")
#: Within noise: a hundredth, or the interval of raw against itself where that is wider.
NOISE = 0.01


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--mode", choices=("eager", "graph", "both"), default="both")
    made.add_argument("--rank-output", type=Path, help=argparse.SUPPRESS)
    args = made.parse_args()
    if args.rank_output is not None:
        rank_main(args)
        return
    wait_idle(args.wait_idle)
    run = Run("step", args)
    rows: list[Row] = []
    goals: list[Goal] = []
    for mode in ("eager", "graph") if args.mode == "both" else (args.mode,):
        if args.quick and mode == "graph":
            continue  # compiling takes longer than all the rest
        found = measure(mode, args.quick)
        if "skipped" in found:
            print(f"{mode}: skipped, {found['skipped']}")
            continue
        rows += found["rows"]
        own = next(row for row in found["rows"] if row["arm"] == "raw again")
        noise = max(NOISE, own["ratio high"] - 1, 1 - own["ratio low"])
        goals.append(
            Goal(f"{mode}: step over raw step", 1 + noise, found["rows"][2]["ratio"], False)
        )
    result = run.result(rows, goals, ranks=RANKS, batch=BATCH, features=FEATURES)
    finish(result, COLUMNS, args.output)


def measure(mode: str, quick: bool) -> dict[str, Any]:
    """Start two ranks of this file and return what rank 0 found."""
    from parallelkit import spawn_ranks

    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rank.json"
        argv = [sys.executable, __file__, "--mode", mode, "--rank-output", str(output)]
        env = {"OMP_NUM_THREADS": "1"}
        results = spawn_ranks(argv + ["--quick"] * quick, RANKS, timeout=900, env=env)
        for result in results:
            if result.returncode:
                raise SystemExit(f"rank {result.rank} failed:\n{result.stderr[-4000:]}")
        found: dict[str, Any] = json.loads(output.read_text())
        return found


def rank_main(args: argparse.Namespace) -> None:
    """One rank: build three trainers, train them in turns."""
    import torch

    import parallelkit as pk

    torch.set_num_threads(1)
    blocks, steps = (6, 10) if args.quick else (60, 25)
    with pk.init_process_group(framework="torch", device="cpu", timeout=600) as group:
        mode = pk.execution_mode(args.mode, fallback=True)
        if mode.effective != args.mode:
            report(args, group.rank, {"skipped": mode.reason})
            return
        trainers = {arm: Trainer(arm, group, args.mode) for arm in ARMS}

        def timed(trainer: Trainer) -> float:
            group.barrier()
            start = time.perf_counter()
            trainer.train(steps)
            return (time.perf_counter() - start) / steps

        calls = {arm: partial(timed, trainer) for arm, trainer in trainers.items()}
        seconds = interleaved(calls, warmups=2, repeats=blocks)
        weights = {arm: trainer.weights() for arm, trainer in trainers.items()}
        for arm in ARMS:
            assert torch.equal(weights[arm], weights["raw"]), f"{arm} trained to other weights"
    rows = []
    for arm in ARMS:
        own, ratio = Timing.of(seconds[arm]), ratios(seconds[arm], seconds["raw"])
        pairs = [a / b for a, b in zip(seconds[arm], seconds["raw"], strict=True)]
        low, high = median_interval(pairs)
        rows.append(
            {
                "mode": args.mode,
                "arm": arm,
                "ms a step": own.median * 1e3,
                "low ms": own.low * 1e3,
                "high ms": own.high * 1e3,
                "ratio": ratio.median,
                "ratio low": low,
                "ratio high": high,
                "ratio quartiles": [ratio.low, ratio.high],
                "blocks": blocks,
                "steps a block": steps,
            }
        )
    report(args, group.rank, {"rows": rows})


class Trainer:
    """One arm: a model, a loader that never ends, and a step."""

    def __init__(self, arm: str, group: Any, mode: str) -> None:
        import torch
        from torch import nn
        from torch.utils.data import TensorDataset

        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(FEATURES, FEATURES),
            nn.ReLU(),
            nn.Linear(FEATURES, FEATURES),
            nn.ReLU(),
            nn.Linear(FEATURES, CLASSES),
        )
        count = BATCH * RANKS * 8
        data = TensorDataset(torch.randn(count, FEATURES), torch.randint(CLASSES, (count,)))
        build = with_parallelkit if arm == "parallelkit" else with_torch
        self._model, compile_, loader = build(model, data, group, mode)
        optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9)
        loss_of = nn.CrossEntropyLoss()
        forward = compile_(self._model)

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            optimizer.zero_grad()
            loss_of(forward(x), y).backward()
            optimizer.step()

        self._step: Callable[..., None] = step
        self._batches = endless(loader)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self._step(*next(self._batches))

    def weights(self) -> Any:
        import torch

        return torch.cat([p.detach().flatten() for p in self._model.parameters()])


def with_torch(model: Any, data: Any, group: Any, mode: str) -> tuple[Any, Any, Any]:
    """What a script without parallelkit does."""
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, shuffle=False))
    compile_ = torch.compile if mode == "graph" else (lambda target: target)
    return DistributedDataParallel(model), compile_, loader


def with_parallelkit(model: Any, data: Any, group: Any, mode: str) -> tuple[Any, Any, Any]:
    """The same by parallelkit."""
    import parallelkit as pk

    context = pk.parallel_context(data=-1, group=group)
    loader = context.shard(data, batch_size=BATCH)
    return context.parallelize(model), pk.execution_mode(mode).compile, loader


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def report(args: argparse.Namespace, rank: int, found: dict[str, Any]) -> None:
    if rank == 0:
        args.rank_output.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
