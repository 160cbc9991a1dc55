"""`parallelkit run`: start ranks with the framework's own launcher."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import subprocess
import sys
from pathlib import Path

from parallelkit import hooks
from parallelkit.errors import LaunchError
from parallelkit.selection import select
from parallelkit.specs import LaunchSpec, ProbeRequest


def run(args: argparse.Namespace) -> int:
    """Start the launcher, wait, and return its exit code."""
    if args.ranks < 1:
        raise LaunchError(f"-n is {args.ranks}; it is a positive number of processes")
    if not Path(args.script).is_file():
        raise LaunchError(f"there is no script {args.script!r}")
    selection = select(ProbeRequest(framework=args.framework))
    spec = LaunchSpec(
        framework=selection.candidate.framework,
        ranks=args.ranks,
        script=args.script,
        args=tuple(args.args),
        python=sys.executable,
    )
    command = hooks.launch(selection.winner, spec)
    if args.dry_run:
        print(shlex.join(command))
        return 0
    return wait_for(command)


def wait_for(command: list[str]) -> int:
    """Run a command in the foreground; it gets Ctrl-C too, and is waited for."""
    try:
        process = subprocess.Popen(command)
    except OSError as error:
        raise LaunchError(f"cannot start {command[0]!r}: {error}") from error
    try:
        code = process.wait()
    except BaseException:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        if process.poll() is None:
            process.kill()
            process.wait()
        raise
    return 128 - code if code < 0 else code  # as a shell reports a signal
