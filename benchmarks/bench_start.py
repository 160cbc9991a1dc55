"""Time from a process's start to its group, and to its first training step, on two gloo ranks.

Raw torch, Accelerate, Fabric and parallelkit, each as a script of its own that is started by the
same launcher, in turns. A figure is that of the slower rank, with the interpreter's own start. A
ratio is the median over rounds, low and high its 95 % interval.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from bench_step import free_port
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
ARMS = ("raw", "raw again", "parallelkit", "accelerate", "fabric")
POINTS = ("imported", "group open", "first step")
COLUMNS = (
    *("arm", "imported s", "group open s", "first step s", "low s", "high s"),
    *("ratio", "ratio low", "ratio high", "import of library ms", "aborts"),
)
#: How a rank ends whose gloo thread wanted Python's lock when Python had gone; see `start`.
ABORT = -signal.SIGABRT

#: A hundredth, or the interval of raw against itself where that is wider; as in bench_step.
NOISE = 0.01


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    made.add_argument("--began", type=float, help=argparse.SUPPRESS)
    args = made.parse_args()
    if args.arm is not None:
        rank_main(args.arm, args.began)
        return
    wait_idle(args.wait_idle)
    run = Run("start", args)
    missing = lacking()
    for arm, why in missing.items():
        print(f"no {arm}: {why}")
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS if arm not in missing}

    def timed(arm: str) -> float:
        found[arm].append(start(arm))
        return found[arm][-1]["first step"]

    calls: dict[str, Callable[[], float]] = {arm: lambda arm=arm: timed(arm) for arm in found}
    warmups, repeats = (0, 2) if args.quick else (2, 15)
    interleaved(calls, warmups=warmups, repeats=repeats)
    samples = {arm: points[warmups:] for arm, points in found.items()}
    rows = [row(arm, samples) for arm in samples]
    lacks = [{"arm": arm, "why": why} for arm, why in missing.items()]
    finish(run.result(rows, goals(rows), ranks=RANKS, missing=lacks), COLUMNS, args.output)


def lacking() -> dict[str, str]:
    """Arms whose library is not installed, and the command that installs it."""
    from importlib.util import find_spec

    needs = {"accelerate": "accelerate", "fabric": "lightning_fabric"}
    return {
        arm: f"{module} is not installed: pip install -r requirements/bench.txt"
        for arm, module in needs.items()
        if find_spec(module) is None
    }


def start(arm: str) -> dict[str, float]:
    """Start the ranks of one arm; returns seconds to each point, of the slower rank.

    A rank that has said its seconds and then aborts at its end counts as "aborts": torch's gloo
    threads do that to scripts now and then.
    """
    from parallelkit import spawn_ranks

    began = time.monotonic()  # the same clock in every process
    argv = [sys.executable, __file__, "--arm", arm, "--began", repr(began)]
    env = {"OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port())}
    env["PYTHONDONTWRITEBYTECODE"] = ""  # a checkout compiles once, as what pip installed has been
    results = spawn_ranks(argv, RANKS, timeout=300, env=env)
    for result in results:
        if result.returncode and not (result.returncode == ABORT and result.stdout):
            raise SystemExit(f"{arm}: rank {result.rank} failed:\n{result.stderr[-4000:]}")
    points = [json.loads(result.stdout.splitlines()[-1]) for result in results]
    aborts = sum(result.returncode == ABORT for result in results)
    return {name: max(point[name] for point in points) for name in points[0]} | {"aborts": aborts}


def row(arm: str, samples: dict[str, list[dict[str, float]]]) -> Row:
    """What one arm measured, and the ratio of its first step to raw's of the same round."""
    own = {name: [point[name] for point in samples[arm]] for name in samples[arm][0]}
    raw = [point["first step"] for point in samples["raw"]]
    first, ratio = Timing.of(own["first step"]), ratios(own["first step"], raw)
    low, high = median_interval([a / b for a, b in zip(own["first step"], raw, strict=True)])
    medians = {f"{name} s": Timing.of(own[name]).median for name in POINTS}
    return {
        "arm": arm,
        **medians,
        "low s": first.low,
        "high s": first.high,
        "ratio": ratio.median,
        "ratio low": low,
        "ratio high": high,
        "import of library ms": Timing.of(own["library"]).median * 1e3,
        "aborts": int(sum(own["aborts"])),
        "samples": first.samples,
    }


def goals(rows: list[Row]) -> list[Goal]:
    """Not slower than the faster of the peers that are there, but for raw's own noise."""
    ratio = {row["arm"]: row["ratio"] for row in rows}
    again = next(row for row in rows if row["arm"] == "raw again")
    noise = max(NOISE, again["ratio high"] - 1, 1 - again["ratio low"])
    peers = [ratio[arm] for arm in ("accelerate", "fabric") if arm in ratio]
    if not peers:
        return []
    name = "first step over that of the faster peer"
    return [Goal(name, 1 + noise, ratio["parallelkit"] / min(peers), False)]


# --- in the ranks


def rank_main(arm: str, began: float) -> None:
    """One rank of one arm: import, open the group, take a step, say when."""
    import torch

    torch.set_num_threads(1)
    before = time.monotonic()
    OPENERS[arm](began, before)


def finish_rank(began: float, points: dict[str, float], library: float) -> None:
    seconds = {name: at - began for name, at in points.items()}
    print(json.dumps(seconds | {"library": library}), flush=True)


def take_step(model: Any, backward: Any = None) -> None:
    """One step of a small model, which is not what is measured."""
    import torch

    loss = model(torch.ones(4, 32)).square().mean()
    (backward or torch.autograd.backward)(loss)
    torch.optim.SGD(model.parameters(), lr=0.01).step()


def net() -> Any:
    from torch import nn

    return nn.Linear(32, 8)


def open_raw(began: float, before: float) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    imported = time.monotonic()
    dist.init_process_group("gloo")
    opened = time.monotonic()
    take_step(DistributedDataParallel(net()))
    done = time.monotonic()
    points = dict(zip(POINTS, (imported, opened, done), strict=True))
    finish_rank(began, points, imported - before)
    dist.destroy_process_group()


def open_parallelkit(began: float, before: float) -> None:
    import parallelkit as pk

    imported = time.monotonic()
    with pk.init_process_group(framework="torch", device="cpu"):
        opened = time.monotonic()
        take_step(pk.parallel_context(data=-1).parallelize(net()))
        done = time.monotonic()
        points = dict(zip(POINTS, (imported, opened, done), strict=True))
        finish_rank(began, points, imported - before)


def open_accelerate(began: float, before: float) -> None:
    from accelerate import Accelerator

    imported = time.monotonic()
    accelerator = Accelerator(cpu=True)
    opened = time.monotonic()
    take_step(accelerator.prepare(net()), accelerator.backward)
    done = time.monotonic()
    points = dict(zip(POINTS, (imported, opened, done), strict=True))
    finish_rank(began, points, imported - before)
    accelerator.end_training()


def open_fabric(began: float, before: float) -> None:
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import TorchElasticEnvironment
    from lightning_fabric.strategies import DDPStrategy

    imported = time.monotonic()
    fabric = Fabric(
        accelerator="cpu",
        devices=RANKS,
        strategy=DDPStrategy(),
        plugins=[TorchElasticEnvironment()],
    )
    fabric.launch()
    opened = time.monotonic()
    take_step(fabric.setup_module(net()), fabric.backward)
    done = time.monotonic()
    points = dict(zip(POINTS, (imported, opened, done), strict=True))
    finish_rank(began, points, imported - before)


OPENERS: dict[str, Callable[[float, float], None]] = {
    "raw": open_raw,
    "raw again": open_raw,
    "parallelkit": open_parallelkit,
    "accelerate": open_accelerate,
    "fabric": open_fabric,
}


if __name__ == "__main__":
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    main()
