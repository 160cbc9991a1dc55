"""The other end of the weight suite: a process that makes a model and follows.

    python -m parallelkit.testing.conformance.follower --adapter package.module:name

It takes a JSON command a line on standard input, and answers each with one on standard output.
`Follower` drives it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import parallelkit as pk
from parallelkit.testing.conformance import reference
from parallelkit.testing.conformance.adapter import Adapter, load


def build(adapter: Adapter, kind: str, dtype: str, seed: int) -> Any:
    """Make one of the suite's models: `"mlp"`, `"tied"` or `"scale"`."""
    if kind == "mlp":
        return adapter.mlp(reference.mlp_weights(seed), dtype)
    if kind == "tied":
        return adapter.tied(reference.tied_weights(seed))
    return adapter.scale(float(seed))


def digests(adapter: Adapter, model: Any) -> dict[str, str]:
    """A hash of every parameter's dtype-free value; conversions to float32 are exact."""
    return {
        name: hashlib.sha256(values.tobytes()).hexdigest()
        for name, values in adapter.parameters(model).items()
    }


class Follower:
    """A running follower process. A context manager that ends it.

    Args:
        adapter: its reference, to be loaded in the folder `home`.
        seconds: for each answer.
    """

    def __init__(self, adapter: str, home: Path, *, seconds: float = 120.0) -> None:
        self._seconds = seconds
        module = "parallelkit.testing.conformance.follower"
        filters = [f"-W{text}" for text in sys.warnoptions]
        self._process = subprocess.Popen(
            [sys.executable, *filters, "-m", module, "--adapter", adapter],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=home,
        )
        self._read = b""

    def send(self, **command: Any) -> None:
        """Give it a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Wait for the answer to the oldest command without one; other lines are passed over.

        Raises:
            AssertionError: the process ended, or said nothing for long.
        """
        assert self._process.stdout is not None
        deadline = time.monotonic() + self._seconds
        while True:
            line, newline, rest = self._read.partition(b"\n")
            if newline:
                self._read = rest
                if line.startswith(b"{"):
                    found: dict[str, Any] = json.loads(line)
                    return found
                continue
            ready, _, _ = select.select([self._process.stdout], [], [], 0.5)
            data = os.read(self._process.stdout.fileno(), 1 << 16) if ready else b""
            self._read += data
            assert data or not ready, f"the follower ended with {self._process.wait()}"
            assert time.monotonic() < deadline, f"no answer within {self._seconds:g} s"

    def ask(self, **command: Any) -> dict[str, Any]:
        """`send`, then `answer`."""
        self.send(**command)
        return self.answer()

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *exc: object) -> None:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        try:
            code = process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        process.stdout.close()
        assert code == 0 or exc[0] is not None, f"the follower ended with {code}"


class _Side:
    """The process's own side: one model, one subscriber."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.model: Any = None
        self.subscriber: Any = None

    def do(self, command: Mapping[str, Any]) -> dict[str, Any]:
        what = command["do"]
        if what == "join":
            self.model = build(self.adapter, command["kind"], command["dtype"], command["seed"])
            self.subscriber = pk.subscribe_weights(self.model, command["ticket"], timeout=30.0)
        elif what == "step":
            self.subscriber.step(command["timeout"])
        elif what == "leave":
            self.subscriber.close()
        return {
            "version": self.subscriber.version,
            "state": self.subscriber.state,
            "digests": digests(self.adapter, self.model),
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--adapter", required=True)
    side = _Side(load(parser.parse_args().adapter))
    for line in sys.stdin:
        try:
            said = side.do(json.loads(line))
        except pk.ParallelKitError as error:
            said = {"error": type(error).__name__, "message": str(error)}
        sys.stdout.write("\n" + json.dumps(said) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
