"""Weights of one process's GPU memory into another process's: how near to the copy limits?

The owner of the weights is a process of its own; the reader maps its memory, on the same GPU and,
if there are two, on another, and copies it into tensors of its own. Figures are wall seconds at
the reader, of payload; with digests they hold the owner's pass, both messages and the comparison.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))

import common  # noqa: E402
from lists import LISTS  # noqa: E402
from parallelkit_torch.cuda import kernel  # noqa: E402
from parallelkit_torch.cuda.copier import PARTS, Copier  # noqa: E402
from parallelkit_torch.cuda.driver import Driver  # noqa: E402
from parallelkit_torch.cuda.ipc import Imports  # noqa: E402
from parallelkit_torch.cuda.memory import bytes_at  # noqa: E402
from parallelkit_torch.cuda.sheet import Sheet  # noqa: E402
from parallelkit_torch.cuda.table import build_table  # noqa: E402

OURS = ("ours, off", "ours, digest", "ours, readback")
GOALS = {"same": (1950.0, 1350.0, 1000.0), "other": (372.0, 372.0, 372.0)}
COLUMNS = ("list", "gpu", "what", "ms", "low", "high", "gb_s", "of_limit")
POISON = 0x5A


class Owner:
    """The other process; asked by lines, and `send` before `answer` lets it work meanwhile."""

    def __init__(self, name: str, quick: bool) -> None:
        command = [sys.executable, str(FOLDER / "owner.py"), name, *["--quick"][: int(quick)]]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def send(self, order: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(order.encode() + b"\n")
        self.process.stdin.flush()

    def answer(self) -> tuple[Any, bytes]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("the owner of the weights ended")
        told = json.loads(line)
        return told, self.process.stdout.read(told["nbytes"])

    def end(self) -> None:
        self.process.communicate(b"end\n")


def limit(here: torch.device, there: torch.device, quick: bool) -> float:
    """GB/s of payload of one large copy by torch."""
    nbytes = 1 << (28 if quick else 32)
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=there)
    target = torch.empty(nbytes, dtype=torch.uint8, device=here)

    def call() -> None:
        target.copy_(source)
        torch.cuda.synchronize(there)
        torch.cuda.synchronize(here)

    seconds = common.time_calls(call, warmups=3, repeats=15)
    return nbytes / common.Timing.of(seconds).median / 1e9


class Reader:
    """Targets on one device for what an owner exported, and the ways to fill them.

    Where both are on one GPU, the owner's digest comes first, as in an update: what is published
    is known before anything moves. Over a link the two passes are on two GPUs and overlap.
    """

    def __init__(self, owner: Owner, device: torch.device, same: bool) -> None:
        self.owner, self.device, self.same = owner, device, same
        self.setup: dict[str, Any] = {}
        owner.send("export")
        told, data = owner.answer()
        self.setup |= {"export_ms": told["ms"], "allocations": told["allocations"]}
        sheet = Sheet.decode(data)
        self.sizes = sheet.nbytes
        self.targets = [
            torch.empty(n // 2, dtype=torch.int16, device=device) for n in self.sizes.tolist()
        ]
        self.imports = Imports(Driver.load(), device.index)
        places = self._timed("open_ms", lambda: self.imports.open(sheet))
        block = np.arange(len(self.sizes))
        into = [target.data_ptr() for target in self.targets]
        table = self._timed("table_ms", lambda: build_table(places, into, self.sizes, block=block))
        self._timed("compile_ms", lambda: kernel.compile_for(device))
        self.copier = self._timed("upload_ms", lambda: Copier(table, device))
        self.setup |= {"rows": len(table.rows), "chunk": table.chunk, "tensors": len(self.sizes)}
        self.sources = [
            bytes_at(place, n, device).view(torch.int16)
            for place, n in zip(places.tolist(), self.sizes.tolist(), strict=True)
        ]

    def _timed(self, name: str, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        made = call()
        torch.cuda.synchronize(self.device)
        self.setup[name] = (time.perf_counter() - start) * 1e3
        return made

    # --- ways -------------------------------------------------------------------------------

    def loop(self) -> None:
        for target, source in zip(self.targets, self.sources, strict=True):
            target.copy_(source, non_blocking=True)

    def foreach(self) -> None:
        torch._foreach_copy_(self.targets, self.sources)

    def off(self) -> None:
        self.copier.copy()

    def digest(self) -> None:
        self._verified(lambda: self.copier.copy(digest=True), readback=False)

    def readback(self) -> None:
        self._verified(self._read_back, readback=True)

    def _read_back(self) -> None:
        self.copier.copy_and_read_back(1 if self.same else PARTS)

    def at_once(self) -> None:
        """As `digest`, but on the same GPU without waiting for the owner's pass."""
        self._verified(lambda: self.copier.copy(digest=True), readback=False, wait=False)

    def _verified(
        self, copy: Callable[[], None], *, readback: bool, wait: bool | None = None
    ) -> None:
        self.owner.send("digest")
        if self.same if wait is None else wait:
            _, data = self.owner.answer()
            copy()
        else:
            copy()
            _, data = self.owner.answer()
        expected = np.frombuffer(data, np.uint64)
        found = self.copier.digests()
        if not np.array_equal(found.copied, expected):
            raise SystemExit("what was read is not what the owner has")
        if readback and not np.array_equal(found.target, expected):
            raise SystemExit("what was placed is not what the owner has")

    # --- checks -----------------------------------------------------------------------------

    def check(self, way: Callable[[], None]) -> None:
        """Poison the targets, fill them, and compare every tensor."""
        for target in self.targets:
            target.view(torch.uint8).fill_(POISON)
        way()
        torch.cuda.synchronize(self.device)
        for position, (a, b) in enumerate(zip(self.targets, self.sources, strict=True)):
            if not torch.equal(a, b):
                raise SystemExit(f"tensor {position} is not the source's after {way.__name__}")

    def check_finding(self) -> None:
        """Flip one bit of one target: its digest, and no other, must differ."""
        self.copier.copy(digest=True)
        which = len(self.targets) // 3
        self.targets[which].view(-1)[-1] ^= 64
        self.copier.digest_target()
        found = self.copier.digests()
        if np.flatnonzero(found.copied != found.target).tolist() != [which]:
            raise SystemExit("a flipped bit was not found where it is")

    def device_ms(self, repeats: int) -> dict[str, float]:
        """Milliseconds of single passes by the device's clock."""
        passes = {
            "copy": self.copier.copy,
            "copy and digest": lambda: self.copier.copy(digest=True),
            "digest of the target": self.copier.digest_target,
            "copy, digest and readback": self._read_back,
        }
        taken = {}
        for name, call in passes.items():
            times = []
            for _ in range(repeats + 2):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                call()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end))
            taken[name] = float(np.median(times[2:]))
        source, whole = [], []
        for _ in range(repeats):
            start = time.perf_counter()
            self.owner.send("digest")
            source.append(self.owner.answer()[0]["ms"])
            whole.append((time.perf_counter() - start) * 1e3)
        taken["digest of the source, owner"] = float(np.median(source))
        taken["the same, with both messages"] = float(np.median(whole))
        return taken

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        self.sources.clear()
        self.imports.close()
        self.targets.clear()
        del self.copier
        torch.cuda.empty_cache()


def measure(
    name: str, owner: Owner, device: torch.device, best: float, repeats: int
) -> tuple[list[common.Row], dict[str, Any], list[common.Goal]]:
    """All ways of one list, in turns."""
    where = "same" if device.index == 0 else "other"
    torch.cuda.set_device(device)
    reader = Reader(owner, device, where == "same")
    ways = dict(
        zip(
            ("torch, one by one", "torch, foreach", *OURS, "digest, passes at once"),
            (
                *(reader.loop, reader.foreach, reader.off, reader.digest, reader.readback),
                reader.at_once,
            ),
            strict=True,
        )
    )
    for way in ways.values():
        reader.check(way)
    reader.check_finding()

    def timed(way: Callable[[], None]) -> Callable[[], float]:
        def call() -> float:
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            way()
            torch.cuda.synchronize(device)
            return time.perf_counter() - start

        return call

    calls = {what: timed(way) for what, way in ways.items()}
    samples = common.interleaved(calls, warmups=2, repeats=repeats)
    total, rows, speeds = int(reader.sizes.sum()), [], {}
    for what, seconds in samples.items():
        took = common.Timing.of(seconds)
        speeds[what] = total / took.median / 1e9
        rows.append(
            {
                "list": name,
                "gpu": where,
                "what": what,
                "ms": took.median * 1e3,
                "low": took.low * 1e3,
                "high": took.high * 1e3,
                "gb_s": speeds[what],
                "of_limit": speeds[what] / best,
            }
        )
    facts = {"bytes": total, **reader.setup, "device_ms": reader.device_ms(repeats)}
    goals = [
        common.Goal(f"{name}, {where} GPU, {what}, GB/s", target, speeds[what])
        for what, target in zip(OURS, GOALS[where], strict=True)
    ]
    reader.close()
    return rows, facts, goals


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--lists", nargs="+", choices=LISTS, default=list(LISTS))
    parser.add_argument("--repeats", type=int, default=15, help="samples of each way")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs an NVIDIA GPU")
    run = common.Run("gpu_copy", args)
    devices = [torch.device("cuda", i) for i in range(min(torch.cuda.device_count(), 2))]
    limits = [limit(device, devices[0], args.quick) for device in devices]
    rows: list[common.Row] = [
        {"list": "-", "gpu": where, "what": "limit: one copy by torch", "gb_s": best}
        for where, best in zip(("same", "other"), limits, strict=False)
    ]
    torch.cuda.empty_cache()
    goals, facts = [], {}
    for name in args.lists:
        owner = Owner(name, args.quick)
        for device, best in zip(devices, limits, strict=True):
            found, facts[f"{name}, {device}"], more = measure(
                name, owner, device, best, args.repeats
            )
            rows += found
            goals += more
        owner.end()
    gpu = {
        "gpus": [torch.cuda.get_device_name(device) for device in devices],
        "cuda": torch.version.cuda,
        "triton": __import__("triton").__version__,
    }
    result = run.result(rows, goals, **gpu, facts=facts)
    result["command"] = result["command"].replace("benchmarks/", "benchmarks/gpu/", 1)
    common.finish(result, COLUMNS, args.output)
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
