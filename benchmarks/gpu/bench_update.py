"""Whole updates between two processes with GPUs: begin to commit, pause, set-up and memory.

This process publishes a module of a list's tensors, another follows, on the same GPU and, if there
are two, on another. Figures are wall time of `publisher.update()`, whose verification is on its
way. Beside them, in the same run, what torch offers: tensors shared one by one by its own
reductions, and copied in a loop, without protocol or verification.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

import common  # noqa: E402
from follower import DEVICE, checksum, memory, module_of, settle  # noqa: E402

import parallelkit as pk  # noqa: E402

COLUMNS = (
    *("list", "gpu", "what", "ms", "low", "high", "gb_s", "pause_ms", "first_ms"),
    *("publish_ms", "subscribe_ms", "equal"),
)
#: What is measured: the row's name, `commit` and `verify`.
WAYS = (
    ("in place, off", "in_place", "off"),
    ("in place, digest", "in_place", "digest"),
    ("in place, readback", "in_place", "readback"),
    ("staged, off", "staged", "off"),
    ("staged, digest", "staged", "digest"),
)
GOALS = {
    ("same", "in place, off"): 1950.0,
    ("same", "in place, digest"): 1350.0,
    ("same", "in place, readback"): 1000.0,
    ("other", "in place, off"): 372.0,
    ("other", "in place, digest"): 372.0,
    ("other", "in place, readback"): 372.0,
    ("other", "staged, digest"): 300.0,
}
#: Room that staging has to leave on the device.
SPARE_BYTES = 6 << 30


class Peer:
    """The other process."""

    def __init__(self, name: str, quick: bool, gpu: int) -> None:
        command = [sys.executable, str(FOLDER / "follower.py"), name, *["--quick"][: int(quick)]]
        place = {"PARALLELKIT_TEST_DEVICE": f"cuda:{gpu}"} if DEVICE.type == "cuda" else {}
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **place},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.hear()

    def tell(self, do: str, **order: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **order}) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the follower ended, with {self.process.wait(30)}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"the follower: {answer['error']}")
        return answer

    def ask(self, do: str, **order: Any) -> Any:
        self.tell(do, **order)
        return self.hear()

    def end(self) -> None:
        try:
            self.process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()


class Bench:
    """One list, with a follower on one GPU."""

    def __init__(self, name: str, where: str, peer: Peer, module: torch.nn.Module) -> None:
        self.name, self.where, self.peer, self.module = name, where, peer, module
        self.nbytes = sum(p.numel() * p.element_size() for p in module.parameters())
        self.rows: list[common.Row] = []
        self.facts: dict[str, Any] = {}

    def ours(self, what: str, commit: str, verify: str, repeats: int) -> None:
        """Measure updates of one kind."""
        self.peer.ask("clear")
        start = time.perf_counter()
        with pk.publish_weights(self.module, commit=commit, verify=verify) as publisher:
            published = time.perf_counter() - start
            joined = self.peer.ask("subscribe", ticket=publisher.ticket)
            self.peer.tell("step", count=repeats + 2)
            first = self._update(publisher)
            self._update(publisher)
            reports = [self._update(publisher) for _ in range(repeats)]
            self.peer.hear()
            equal = self._equal()
            self.peer.ask("leave")
        took = common.Timing.of([seconds for seconds, _ in reports])
        phases = {
            phase: common.Timing.of([r.phases.get(phase, 0.0) for _, r in reports]).median * 1e3
            for phase in reports[0][1].phases
        }
        pause = common.Timing.of([r.members[0].pause_seconds for _, r in reports]).median
        fetch = common.Timing.of([r.members[0].prepare_seconds for _, r in reports]).median
        self.rows.append(
            {
                "list": self.name,
                "gpu": self.where,
                "what": what,
                "ms": took.median * 1e3,
                "low": took.low * 1e3,
                "high": took.high * 1e3,
                "gb_s": self.nbytes / took.median / 1e9,
                "pause_ms": pause * 1e3,
                "first_ms": first[0] * 1e3,
                "publish_ms": published * 1e3,
                "subscribe_ms": joined["seconds"] * 1e3,
                "equal": equal,
            }
        )
        self.facts[what] = {
            "phases_ms": phases,
            "prepare_ms": fetch * 1e3,
            "first_phases_ms": {k: v * 1e3 for k, v in first[1].phases.items()},
            "transport": joined["transport"],
            "in_place": joined["in_place"],
            "verified": reports[-1][1].verified,
        }
        print(f"{self.name}, {self.where}, {what}: {self.rows[-1]}", flush=True)
        print(f"  {self.facts[what]}", flush=True)

    def growth(self, count: int) -> None:
        """Memory after 2 and after `count` updates."""
        with pk.publish_weights(self.module, commit="in_place") as publisher:
            self.peer.ask("subscribe", ticket=publisher.ticket)
            found = {}
            for updates in (2, count - 2):
                self.peer.tell("step", count=updates)
                for _ in range(updates):
                    self._update(publisher)
                self.peer.hear()
                found[str(publisher.version)] = {
                    "publisher": memory(),
                    "follower": self.peer.ask("memory"),
                }
            self.peer.ask("leave")
        self.facts["memory"] = found
        print(f"{self.name}, {self.where}: memory {found}", flush=True)

    def torch_one_by_one(self, repeats: int) -> None:
        """What torch itself offers."""
        self.peer.ask("clear")
        start = time.perf_counter()
        handles = [_shared(parameter.detach()) for parameter in self.module.parameters()]
        made = time.perf_counter() - start
        opened = self.peer.ask("open", handles=handles)["seconds"]
        seconds = common.time_calls(lambda: self.peer.ask("one_by_one"), warmups=2, repeats=repeats)
        equal = self._equal()
        self.peer.ask("drop")
        took = common.Timing.of(seconds)
        self.rows.append(
            {
                "list": self.name,
                "gpu": self.where,
                "what": "torch, one by one over IPC tensors",
                "ms": took.median * 1e3,
                "low": took.low * 1e3,
                "high": took.high * 1e3,
                "gb_s": self.nbytes / took.median / 1e9,
                "publish_ms": made * 1e3,
                "subscribe_ms": opened * 1e3,
                "equal": equal,
            }
        )
        print(f"{self.name}, {self.where}: {self.rows[-1]}", flush=True)

    def room(self) -> bool:
        """Whether the follower's device has room to stage."""
        if DEVICE.type != "cuda":
            return True
        device = 0 if self.where == "same" else 1
        return torch.cuda.mem_get_info(device)[0] > self.nbytes + SPARE_BYTES

    def _update(self, publisher: Any) -> tuple[float, Any]:
        with torch.no_grad():  # so that no two versions are alike
            next(self.module.parameters()).view(torch.int16).view(-1)[0] += 1
        settle()
        start = time.perf_counter()
        report = publisher.update()
        return time.perf_counter() - start, report

    def _equal(self) -> bool:
        return bool(self.peer.ask("checksum")["checksum"] == checksum(self.module))


def _shared(tensor: torch.Tensor) -> list[Any]:
    """A tensor as torch's reductions share it, as JSON can carry it."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, args = reduce_tensor(tensor)
    (_, size, stride, offset, _, _, _, handle, nbytes, at, _, counter, counter_at, event, sync) = (
        args
    )
    return [
        *(list(size), list(stride), offset, handle.hex(), nbytes, at),
        *(counter.hex(), counter_at, event.hex(), sync),
    ]


def measure(name: str, gpu: int, args: Any, until: float) -> Bench:
    """Everything of one list and one GPU, as far as the time goes."""
    module = module_of(name, args.quick, random=True)
    peer = Peer(name, args.quick, gpu)
    bench = Bench(name, "same" if gpu == 0 else "other", peer, module)
    repeats = 3 if args.quick else args.repeats
    jobs: list[tuple[str, Any]] = []
    for what, commit, verify in WAYS:
        jobs.append((what, lambda w=what, c=commit, v=verify: bench.ours(w, c, v, repeats)))
    if name == "dense":
        jobs.append(("memory", lambda: bench.growth(10 if args.quick else 50)))
    if DEVICE.type == "cuda":
        jobs.append(("torch, one by one", lambda: bench.torch_one_by_one(repeats)))
    for what, job in jobs:
        if time.monotonic() > until:
            bench.facts[what] = "left out: no time"
        elif what.startswith("staged") and not bench.room():
            bench.facts[what] = "left out: no room to stage on the device"
        else:
            try:
                job()
            except Exception:
                bench.facts[what] = traceback.format_exc()
                print(bench.facts[what], flush=True)
                peer.end()
                peer = bench.peer = Peer(name, args.quick, gpu)
        if isinstance(bench.facts.get(what), str):
            print(f"{name}, {what}: {bench.facts[what]}", flush=True)
    peer.end()
    return bench


def main() -> None:
    from lists import LISTS

    parser = common.parser(__doc__)
    parser.add_argument("--lists", nargs="+", choices=LISTS, default=list(LISTS))
    parser.add_argument("--repeats", type=int, default=15, help="updates of each kind")
    parser.add_argument("--seconds", type=float, default=220.0, help="begin nothing after that")
    args = parser.parse_args()
    if not torch.cuda.is_available() and DEVICE.type == "cuda":
        raise SystemExit("this benchmark needs an NVIDIA GPU")
    run = common.Run("gpu_update", args)
    until = time.monotonic() + args.seconds
    rows: list[common.Row] = []
    facts: dict[str, Any] = {}
    for name in args.lists:
        for gpu in range(min(torch.cuda.device_count(), 2) or 1):
            bench = measure(name, gpu, args, until)
            rows += bench.rows
            facts[f"{name}, {bench.where}"] = bench.facts
            del bench
            if DEVICE.type == "cuda":
                torch.cuda.empty_cache()
    goals = [
        common.Goal(f"{r['list']}, {r['gpu']} GPU, {r['what']}, GB/s", goal, r["gb_s"])
        for r in rows
        if (goal := GOALS.get((r["gpu"], r["what"]))) is not None
    ]
    result = run.result(rows, goals, facts=facts, **_gpu())
    result["command"] = result["command"].replace("benchmarks/", "benchmarks/gpu/", 1)
    common.finish(result, COLUMNS, args.output)


def _gpu() -> dict[str, Any]:
    if DEVICE.type != "cuda":
        return {"gpus": []}
    return {
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
        "triton": __import__("triton").__version__,
    }


if __name__ == "__main__":
    main()
