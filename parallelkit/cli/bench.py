"""`parallelkit bench`: run a benchmark of a source checkout."""

from __future__ import annotations

import argparse
import ast
import difflib
import sys
from pathlib import Path

from parallelkit.cli.run import wait_for
from parallelkit.errors import ParallelKitError

PREFIX = "bench_"


def run(args: argparse.Namespace) -> int:
    """List the benchmarks, or run one as a process of its own and return its exit code."""
    folder = find_folder()
    scripts = {p.stem.removeprefix(PREFIX): p for p in sorted(folder.glob(f"{PREFIX}*.py"))}
    if args.list or args.name is None:
        for name, path in scripts.items():
            print(f"{name:20} {_first_line(path)}".rstrip())
        return 0
    if args.name not in scripts:
        close = difflib.get_close_matches(args.name, scripts, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(scripts)}"
        raise ParallelKitError(f"no benchmark {args.name!r} in {folder}; {hint}")
    return wait_for([sys.executable, str(scripts[args.name]), *args.args])


def find_folder() -> Path:
    """Return `benchmarks/` of the current folder, else of the checkout this package is in."""
    places = (Path.cwd(), Path(__file__).resolve().parents[2])
    for place in places:
        if any((place / "benchmarks").glob(f"{PREFIX}*.py")):
            return place / "benchmarks"
    raise ParallelKitError(
        "benchmarks are part of the source checkout, not of the installed package; "
        f"run this in the checkout's folder (looked in {' and '.join(map(str, places))})"
    )


def _first_line(path: Path) -> str:
    """Return the first line of a script's docstring without running it."""
    doc = ast.get_docstring(ast.parse(path.read_text()))
    return doc.splitlines()[0] if doc else ""
