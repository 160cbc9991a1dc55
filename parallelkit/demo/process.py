"""Between a process of the demo and the one that started it: standard input."""

from __future__ import annotations

import os
import queue
import sys
import threading

from parallelkit.errors import ParallelKitError


class DemoInputError(ParallelKitError):
    """The process that started this one did not say what it has to, in time."""


class Parent:
    """The parent's lines. When it dies, however that is, so does this process, at once.

    The parent holds the other end of standard input, which ends with it.
    """

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="demo-parent", daemon=True).start()

    def line(self, seconds: float, what: str) -> str:
        """Wait for the next line; `what` it is stands in the error.

        Raises:
            DemoInputError: none came in time.
        """
        try:
            return self._lines.get(timeout=seconds)
        except queue.Empty:
            raise DemoInputError(f"no {what} within {seconds:g} s") from None

    def arrived(self) -> str | None:
        """The next line, if it is there already."""
        return None if self._lines.empty() else self._lines.get()

    def end(self) -> None:
        """The parent is gone. Others replace this, to take children along."""
        os._exit(1)

    def _read(self) -> None:
        rest = b""
        while data := os.read(sys.stdin.fileno(), 4096):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._lines.put(line.decode())
        self.end()
