"""Start the demo's processes, read what they say, and leave none behind."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

import attrs

from parallelkit.demo.events import Event, read
from parallelkit.errors import ParallelKitError

_TAIL_LINES: Final = 12
_GRACE_SECONDS: Final = 3.0
_POLL_SECONDS: Final = 0.01


class DemoProcessError(ParallelKitError):
    """A process of the demo failed or went silent; the message has its last lines."""


@attrs.define(eq=False)
class _Child:
    name: str
    process: subprocess.Popen[bytes]
    errors: Path
    reader: threading.Thread | None = None
    ended: bool = False

    def describe(self) -> str:
        """Say how it ended, with the last lines of its standard error."""
        lines = self.errors.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        code = self.process.returncode
        if code is None:
            how = "closed its output, and still runs"
        else:
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return "\n".join([f"{self.name}: {how}", *(f"  | {line}" for line in lines)])


class Children:
    """The processes of one run. A context manager; at its end none of them is left.

    Each gets a process group of its own, which ends with it: what it started and left running is
    killed. Its standard error goes to a private file, and it has pipes for standard input and
    output. A process that sees the end of its input leaves by itself, so a
    parent that is killed leaves nothing behind either.
    """

    def __init__(self, silence: float) -> None:
        """Wait at most `silence` seconds for the next event."""
        self._silence = silence
        self._children: list[_Child] = []
        self._events: queue.SimpleQueue[tuple[_Child, Event | None]] = queue.SimpleQueue()
        self.folder = Path(tempfile.mkdtemp(prefix="parallelkit-demo-"))

    def start(self, name: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Start a process; `name` stands in errors."""
        errors = self.folder / f"{len(self._children)}.err"
        with errors.open("wb") as stderr:
            process = subprocess.Popen(
                list(argv),
                env=dict(env),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,  # Ctrl-C is for the parent, which ends the rest
            )
        child = _Child(name, process, errors)
        self._children.append(child)
        child.reader = threading.Thread(
            target=self._read, args=(child,), name=f"demo {name}", daemon=True
        )
        child.reader.start()

    def tell(self, name: str, line: str) -> None:
        """Write a line to the standard input of a process."""
        child = next(child for child in self._children if child.name == name)
        assert child.process.stdin is not None  # a pipe, as started
        with contextlib.suppress(BrokenPipeError):  # it is gone: `events` says so
            child.process.stdin.write(line.encode() + b"\n")
            child.process.stdin.flush()

    def events(self) -> Iterator[Event]:
        """Give every event of every process, until all ended well.

        Raises:
            DemoProcessError: one failed, or none said anything for too long.
        """
        while running := [child for child in self._children if not child.ended]:
            try:
                child, event = self._events.get(timeout=self._silence)
            except queue.Empty:
                names = ", ".join(child.name for child in running)
                raise DemoProcessError(
                    f"no word for {self._silence:g} s from: {names}\n{self._tails(running)}"
                ) from None
            if event is not None:
                yield event
                continue
            child.ended = True
            if self._wait(child, _GRACE_SECONDS) != 0:
                raise DemoProcessError(self._failures(child))

    def close(self) -> None:
        """End what still runs, by process group, and remove the private folder."""
        for child in self._children:
            self._end_group(child)
        for child in self._children:
            child.process.wait()
            if child.reader is not None:
                child.reader.join(_GRACE_SECONDS)
            for pipe in (child.process.stdin, child.process.stdout):
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self, child: _Child) -> None:
        assert child.process.stdout is not None  # a pipe, as started
        for line in child.process.stdout:
            event = read(line)
            if event is not None:
                self._events.put((child, event))
        self._events.put((child, None))

    def _wait(self, child: _Child, seconds: float) -> int | None:
        """Wait for its end, and see that its group ends too; None: it goes on."""
        if child.process.returncode is not None:
            return child.process.returncode
        deadline = time.monotonic() + seconds
        # not taken from the kernel yet, so that the group's number stays its own
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while os.waitid(os.P_PID, child.process.pid, how) is None:
            if time.monotonic() >= deadline:
                return None
            time.sleep(_POLL_SECONDS)
        self._end_group(child)
        return child.process.wait()

    def _end_group(self, child: _Child) -> None:
        if child.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.process.pid, signal.SIGKILL)

    def _failures(self, first: _Child) -> str:
        """Describe the first failure, and those that follow from it or are its cause."""
        deadline = time.monotonic() + _GRACE_SECONDS
        for child in self._children:
            self._wait(child, max(0.0, deadline - time.monotonic()))
        others = [c for c in self._children if c is not first and c.process.returncode]
        return "\n".join(child.describe() for child in (first, *others))

    def _tails(self, children: Sequence[_Child]) -> str:
        lines = [
            f"{child.name}: {line}"
            for child in children
            for line in child.errors.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        ]
        return "\n".join(lines)
