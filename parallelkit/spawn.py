"""Start a few ranks of one command on this host, with a deadline, leaving no process behind.

For self-tests, tests and `parallelkit run`; a job of more than one host is for torchrun, msrun
or SLURM.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final, Protocol

import attrs

from parallelkit.errors import LaunchError

#: Variables of an outer launcher, which would contradict ours.
FOREIGN: Final = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PARALLELKIT_RENDEZVOUS_FILE",
)
FOREIGN_PREFIXES: Final = ("TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "MV2_", "MS_")

_POLL_SECONDS: Final = 0.01


@attrs.frozen(kw_only=True)
class RankResult:
    """How one rank ended.

    Attributes:
        returncode: exit status; negative: the signal that ended it.
        stdout, stderr: what it wrote.
        timed_out: it was running at the deadline and was killed.
    """

    rank: int
    returncode: int
    stdout: str
    stderr: str
    timed_out: bool = False


class Process(Protocol):
    """A child of this process that leads a process group, as `subprocess.Popen` makes it."""

    @property
    def pid(self) -> int:
        """Its id."""

    @property
    def returncode(self) -> int | None:
        """Exit status, or minus the signal that ended it; None before `wait`."""

    def wait(self) -> int:
        """Wait for its end and reap it; returns the exit status."""


@attrs.define(eq=False)
class Child:
    """One rank that was started."""

    rank: int
    process: Process
    ended: bool = False
    timed_out: bool = False


def spawn_ranks(
    argv: Sequence[str],
    n: int,
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    grace: float = 5.0,
    capture: bool = True,
) -> list[RankResult]:
    """Run `argv` as `n` ranks on this host and wait for all of them.

    Each rank gets `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR` and
    `PARALLELKIT_RENDEZVOUS_FILE` in a private folder; there is no `MASTER_PORT`: rank 0 binds a
    free port and publishes it in that file. Variables of an outer launcher are not passed on.
    Each rank leads a process group of its own, which is killed with it.

    Args:
        argv: command and arguments, no shell.
        n: how many ranks.
        timeout: seconds from the start after which ranks that still run are killed.
        env: variables on top of this process's own.
        grace: seconds that the others may go on when one rank failed.
        capture: keep what the ranks write; False lets it through to our own output.

    Returns:
        One result for each rank, by rank. A rank that failed is a result, not an exception.

    Raises:
        LaunchError: `n` or `timeout` is not positive, or the command cannot be started.
    """
    if n < 1 or not timeout > 0:
        raise LaunchError(f"n={n!r}, timeout={timeout!r}: both must be positive")
    folder = Path(tempfile.mkdtemp(prefix="parallelkit-"))
    children: list[Child] = []
    try:
        for rank in range(n):
            child = _start(argv, rank, n, folder, env or {}, capture)
            children.append(child)  # at once: a later start may fail
        return watch_ranks(children, folder, timeout=timeout, grace=grace)
    finally:
        for child in children:
            _end(child)
        shutil.rmtree(folder, ignore_errors=True)


def watch_ranks(
    children: Sequence[Child], folder: Path, *, timeout: float, grace: float
) -> list[RankResult]:
    """Wait for ranks that write into files of `output_path`, as `spawn_ranks` does; all end."""
    _wait(children, time.monotonic() + timeout, grace)
    return [_result(child, folder) for child in children]


def rank_environ(rank: int, n: int, folder: Path) -> dict[str, str]:
    """Return this process's environment with the variables of one rank."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in FOREIGN and not name.startswith(FOREIGN_PREFIXES)
    }
    return kept | {
        "RANK": str(rank),
        "WORLD_SIZE": str(n),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(n),
        "MASTER_ADDR": "127.0.0.1",
        "PARALLELKIT_RENDEZVOUS_FILE": str(folder / "rendezvous"),
    }


def _start(
    argv: Sequence[str], rank: int, n: int, folder: Path, env: Mapping[str, str], capture: bool
) -> Child:
    with contextlib.ExitStack() as files:
        out, err = (_output(files, folder, rank, s) if capture else None for s in ("out", "err"))
        try:
            process = subprocess.Popen(
                list(argv),
                env=rank_environ(rank, n, folder) | dict(env),
                stdin=subprocess.DEVNULL,
                stdout=out,  # a file, not a pipe: a rank that writes much never blocks
                stderr=err,
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(f"cannot start {argv[0]!r}: {error}") from error
    return Child(rank, process)


def _output(files: contextlib.ExitStack, folder: Path, rank: int, stream: str) -> IO[bytes]:
    return files.enter_context(output_path(folder, rank, stream).open("wb"))


def output_path(folder: Path, rank: int, stream: str) -> Path:
    """Where a rank writes its `"out"` or `"err"`."""
    return folder / f"{rank}.{stream}"


def _wait(children: Sequence[Child], deadline: float, grace: float) -> None:
    """Return when all ended; end the rest at the deadline, or `grace` after a failure."""
    limit = deadline
    failed = False
    while running := [c for c in children if not _has_ended(c)]:
        if not failed and any(c.ended and c.process.returncode for c in children):
            failed = True
            limit = min(deadline, time.monotonic() + grace)
        now = time.monotonic()
        if now >= limit:
            for child in running:
                child.timed_out = now >= deadline
                _end(child)
            return
        time.sleep(min(_POLL_SECONDS, limit - now))


def _has_ended(child: Child) -> bool:
    """Look without reaping first: while it is a zombie its process group cannot be another's."""
    if not child.ended:
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        if os.waitid(os.P_PID, child.process.pid, flags) is not None:
            _end(child)
    return child.ended


def _end(child: Child) -> None:
    """Kill whatever is left of the rank's process group, then reap the rank."""
    if child.ended:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.process.pid, signal.SIGKILL)
    child.process.wait()
    child.ended = True


def _result(child: Child, folder: Path) -> RankResult:
    def read(stream: str) -> str:
        path = output_path(folder, child.rank, stream)
        return path.read_text(errors="replace") if path.exists() else ""

    return RankResult(
        rank=child.rank,
        returncode=child.process.wait(),  # at once: it has ended
        stdout=read("out"),
        stderr=read("err"),
        timed_out=child.timed_out,
    )
