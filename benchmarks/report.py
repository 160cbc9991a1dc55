"""Rewrite the tables of README.md from results/*.json.

Each table stands between `<!-- table NAME -->` and `<!-- end NAME -->`. With `--check` nothing is
written, and the exit code says whether a table is out of date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import Row, show

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"
RESULTS = HERE / "results"

Result = dict[str, Any]


def main() -> int:
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--check", action="store_true")
    args = made.parse_args()
    old = README.read_text()
    new = rewrite(old, load())
    if args.check:
        return int(new != old)
    README.write_text(new)
    return 0


def load() -> dict[str, Result]:
    """All results, by the name of their file."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def rewrite(text: str, results: dict[str, Result]) -> str:
    """Replace what stands between each pair of markers that has a result."""

    def fill(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in results:
            return match.group(0)
        body = "\n\n".join([header(results[name]), *TABLES[name](results[name])])
        return f"<!-- table {name} -->\n{body}\n<!-- end {name} -->"

    return re.sub(r"<!-- table (\w+) -->\n.*?<!-- end \1 -->", fill, text, flags=re.DOTALL)


def header(result: Result) -> str:
    """When, where, how, and how loaded."""
    facts = result["machine"]
    load = " and ".join(f"{facts[at][0]:.1f}" for at in ("load_before", "load_after"))
    packages = ", ".join(f"{k} {v}" for k, v in facts["packages"].items() if k != "parallelkit")
    return (
        f"`{result['command']}`, {result['started'][:10]}, {facts['cpu']}, {facts['cores']} cores "
        f"(load {load} before and after), Linux {facts['kernel']}, Python {facts['python']}, "
        f"{packages}."
    )


def markdown(columns: Sequence[str], rows: Sequence[Row]) -> str:
    """A table of the chosen columns."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(show(row.get(c)) for c in columns) + " |" for row in rows]
    return "\n".join(lines)


def goal_table(result: Result) -> str:
    rows = [
        {
            "goal": goal["name"],
            "target": ("≥ " if goal["at_least"] else "≤ ") + show(goal["target"]),
            "measured": goal["measured"],
            "met": goal["met"],
        }
        for goal in result["goals"]
    ]
    return markdown(("goal", "target", "measured", "met"), rows)


def import_tables(result: Result) -> list[str]:
    columns = ("module", "wall ms", "low ms", "high ms", "booked ms", "of torch", "samples")
    return [markdown(columns, result["rows"]), goal_table(result)]


def hooks_tables(result: Result) -> list[str]:
    columns = ("way", "plugins", "µs", "low µs", "high µs", "of method")
    training = result["parameters"]["training"]
    counts = f"Hook calls while setting up: {training['setup']}; in the steps: {training['steps']}."
    return [markdown(columns, result["rows"]), counts, goal_table(result)]


def step_tables(result: Result) -> list[str]:
    columns = (
        *("strategy", "mode", "size", "arm", "ms a step", "low ms", "high ms"),
        *("ratio", "ratio low", "ratio high"),
    )
    limits = (
        *("strategy", "mode", "size", "gradient bytes", "all-reduce ms", "all-gather ms"),
        *("reduce-scatter ms", "all-reduce GB/s"),
    )
    parts = [markdown(columns, result["rows"]), goal_table(result)]
    if found := result["parameters"].get("limits"):
        parts += ["What the exchange alone takes, in the same runs:", markdown(limits, found)]
    return parts + missing_lines(result)


def start_tables(result: Result) -> list[str]:
    columns = (
        *("arm", "imported s", "group open s", "first step s", "low s", "high s"),
        *("ratio", "ratio low", "ratio high", "import of library ms", "aborts"),
    )
    return [markdown(columns, result["rows"]), goal_table(result), *missing_lines(result)]


def missing_lines(result: Result) -> list[str]:
    """What was not measured, each reason once."""
    places: dict[str, list[str]] = {}
    for lack in result["parameters"].get("missing", []):
        case = ", ".join(lack[key] for key in ("strategy", "mode", "size") if key in lack)
        places.setdefault(f"{lack['arm']}: {lack['why']}", []).append(case)
    lines = [f"- {why}" + f" ({'; '.join(at)})" * any(at) for why, at in places.items()]
    return ["Not measured:\n\n" + "\n".join(lines)] if lines else []


def shm_tables(result: Result) -> list[str]:
    case = ("size", "kind", "tensors", "verify", "aliased", "update ms")
    updates = (*case, "low ms", "high ms", "GB/s", "of memcpy", "times pickle")
    rows = result["rows"]
    phases = sorted({name for row in rows for name in row["phases ms"]}, key=_phase)
    peers = [name for name in result["parameters"]["peers"][0] if name != "cores busy before"]
    fits = ("verify", "aliased", "fixed ms", "overhead µs", "bandwidth GB/s", "worst error")
    return [
        markdown(updates, rows),
        goal_table(result),
        "The peers and limits of the same run:",
        markdown(peers, result["parameters"]["peers"]),
        "Seconds = fixed + tensors × overhead + bytes / bandwidth, fitted to each variant's rows:",
        markdown(fits, result["parameters"]["fits"]),
        "Phases, medians; (prepare) and (pause) are the follower's, by its own clock, "
        "inside verify or digest and inside commit:",
        markdown((*case, *(f"{name} ms" for name in phases)), [row | _named(row) for row in rows]),
    ]


def mindspore_step_tables(result: Result) -> list[str]:
    columns = (
        *("mode", "size", "arm", "ms a step", "low ms", "high ms"),
        *("ratio", "ratio low", "ratio high", "of eager"),
    )
    return [markdown(columns, result["rows"]), goal_table(result)]


def mindspore_weights_tables(result: Result) -> list[str]:
    columns = (
        *("size", "kind", "tensors", "verify", "update ms", "low ms", "high ms", "GB/s"),
        *("memcpy ms", "of memcpy", "times broadcast", "phases"),
    )
    peer = result["parameters"]["broadcast"]
    names = [name for name in peer if name != "cores busy before"]
    return [
        markdown(columns, result["rows"]),
        "MindSpore's own broadcast, in the same run:",
        markdown(names, [peer]),
    ]


def transfer_plan_tables(result: Result) -> list[str]:
    columns = ("case", "tensors", "ranks", "plans", "pieces", "buckets", "s", "low s", "high s")
    return [markdown(columns, result["rows"]), goal_table(result)]


def tcp_tables(result: Result) -> list[str]:
    columns = ("size", "way", "connections", "ms", "low ms", "high ms", "GB/s")
    return [markdown((*columns, "CPU s/GB", "of raw", "of memcpy"), result["rows"])]


def placement_tables(result: Result) -> list[str]:
    columns = (
        *("kind", "tensors", "MB", "arm", "ms", "low ms", "high ms", "GB/s"),
        "times loader",
    )
    return [markdown(columns, result["rows"]), goal_table(result)]


def vllm_tables(result: Result) -> list[str]:
    columns = (
        *("size", "tensors", "arm", "update ms", "low ms", "high ms", "GB/s", "of memcpy"),
        *("pause ms", "pause low ms", "pause high ms", "times slower", "times longer pause"),
    )
    rows = result["rows"]
    parts = [
        markdown(columns, rows),
        goal_table(result),
        "Phases, medians in milliseconds:",
        markdown(("size", "arm", "phases"), rows),
    ]
    if peers := result["parameters"]["peers"]:
        names = ("size", "nbytes", "memcpy ms", "memcpy GB/s", "engine up s")
        parts += ["In the same run:", markdown(names, peers)]
    return parts + missing_lines(result)


def soak_tables(result: Result) -> list[str]:
    columns = (
        *("process", "updates", "MB at first", "MB at last", "bytes an update", "error"),
        *("descriptors", "threads", "update ms", "low ms", "high ms"),
    )
    return [markdown(columns, result["rows"]), goal_table(result)]


def _named(row: Row) -> Row:
    """A row's phases under names that are no column's: there is a phase `verify`, too."""
    return {f"{name} ms": value for name, value in row["phases ms"].items()}


def _phase(name: str) -> int:
    order = ("begin", "stage", "ready", "digest", "verify", "commit", "(prepare)", "(pause)")
    return order.index(name) if name in order else len(order)


TABLES: dict[str, Callable[[Result], list[str]]] = {
    "import": import_tables,
    "hooks": hooks_tables,
    "step": step_tables,
    "start": start_tables,
    "shm": shm_tables,
    "mindspore_step": mindspore_step_tables,
    "mindspore_weights": mindspore_weights_tables,
    "transfer_plan": transfer_plan_tables,
    "tcp": tcp_tables,
    "placement": placement_tables,
    "soak": soak_tables,
    "vllm": vllm_tables,
}


if __name__ == "__main__":
    sys.exit(main())
