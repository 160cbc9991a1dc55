"""Parse the command line and hand over to one subcommand.

Exit codes: 0 good; 1 what was to be checked or run failed; 2 the request cannot be met (one
message, no traceback; `PARALLELKIT_TRACE=1` shows it); 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import cast

import attrs

from parallelkit import __version__
from parallelkit.errors import ParallelKitError

EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit code."""
    args = build_parser().parse_args(argv)
    run = cast(
        "Callable[[argparse.Namespace], int]",
        importlib.import_module(f"parallelkit.cli.{args.module}").run,
    )
    try:
        return run(args)
    except ParallelKitError as error:
        if _tracing():
            raise
        print(f"parallelkit {args.command}: {error}", file=sys.stderr)
        for note in getattr(error, "__notes__", ()):
            print(f"  {note}", file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `parallelkit plugins | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def build_parser() -> argparse.ArgumentParser:
    """Build the whole parser; no plugin is loaded for it."""
    parser = argparse.ArgumentParser(
        prog="parallelkit", description="Distributed training and live weight hand-over."
    )
    parser.add_argument("--version", action="version", version=f"parallelkit {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_plugins(commands)
    _add_doctor(commands)
    _add_plan(commands)
    _add_run(commands)
    _add_demo(commands)
    _add_bench(commands)
    return parser


_Commands = argparse._SubParsersAction  # the only name argparse has for it


def _add(
    commands: _Commands[argparse.ArgumentParser], name: str, text: str, *, module: str = ""
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(module=module or name)
    return parser


def _add_plugins(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _add(commands, "plugins", "List every plugin found, and why one is left out.")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_doctor(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _add(commands, "doctor", "Show what is installed, found and chosen; test two ranks.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--framework", default="auto", help="what to choose and test (%(default)s)")
    parser.add_argument("--no-self-test", action="store_true", help="do not start two ranks")
    parser.add_argument(
        "--timeout", type=float, default=120.0, help="seconds for the self-test (%(default)s)"
    )


def _add_plan(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _add(commands, "plan", "Print which rank has which place; touches no device.")
    ranks = parser.add_mutually_exclusive_group(required=True)
    ranks.add_argument("ranks", type=int, nargs="?", metavar="world_size", help="number of ranks")
    ranks.add_argument("--world-size", type=int, metavar="N", help="the same, by name")
    parser.add_argument("--mode", help="standalone, data, hybrid, semi_auto or auto")
    for axis in ("pipeline", "data", "data-shard", "context", "tensor", "expert"):
        default = None if axis == "data" else 1
        parser.add_argument(f"--{axis}", type=int, default=default, help=f"degree of {axis}")
    parser.add_argument("--offset", type=int, default=0, help="first rank, in a wider world")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--svg", metavar="PATH", help="write a picture, too; - prints only it")


def _add_run(commands: _Commands[argparse.ArgumentParser]) -> None:
    text = "Start a script on several ranks of this host with the framework's own launcher."
    parser = _add(commands, "run", text)
    parser.add_argument("-n", "--ranks", type=int, required=True, help="number of processes")
    parser.add_argument("--framework", default="auto", help="whose launcher (%(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="print the command line only")
    parser.add_argument("script", help="path of the script")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")


def _add_demo(commands: _Commands[argparse.ArgumentParser]) -> None:
    from parallelkit.specs import DemoSpec

    default = {f.name: f.default for f in attrs.fields(DemoSpec)}
    parser = _add(commands, "demo", "Train a small model while a second process follows it.")
    helps = {
        "framework": "whose demo",
        "seed": "seeds model, data order and sampling",
        "steps": "optimiser steps",
        "every": "steps between two updates of the follower",
        "ranks": "trainer processes",
        "output": "path of the HTML report",
        "engine": "what follows: module, vllm, or auto, which is vllm where it is installed",
        "engine_python": "a Python that has vLLM, where this one has none",
    }
    for name, text in helps.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(default[name]),
            default=default[name],
            help=f"{text} (%(default)s)",
        )


def _add_bench(commands: _Commands[argparse.ArgumentParser]) -> None:
    text = "Run benchmarks/bench_NAME.py of a source checkout; other arguments go to it."
    parser = _add(commands, "bench", text)
    parser.add_argument("name", nargs="?", help="which; `--list` shows them")
    parser.add_argument("--list", action="store_true", help="list the benchmarks")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the benchmark")


def _tracing() -> bool:
    value = os.environ.get("PARALLELKIT_TRACE", "").strip().lower()
    return value not in ("", "0", "false", "off", "no")


if __name__ == "__main__":
    sys.exit(main())
