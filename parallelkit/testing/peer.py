"""A publisher or subscriber in a process of its own, that can be made to fail at a given phase.

    python -m parallelkit.testing.peer publish|subscribe '<json settings>'

The ticket is read from (subscribe) or written to (publish) a line of standard input or output;
events are JSON lines on standard output. Fault tests drive it with `Peer`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from parallelkit.testing.arrays import Arrays

PUBLISHER_PHASES = ("begin", "stage", "transfer", "verify", "committed")
SUBSCRIBER_PHASES = ("begin", "transfer", "prepared", "commit", "committed")


def sample_model(value: float = 0.0, elements: int = 1 << 16) -> Arrays:
    """A small model with a tie, a scalar, an empty tensor and several dtypes."""
    tied = np.full((3, 5), value, np.float32)
    return Arrays(
        {
            "body": np.full(elements, value, np.float32),
            "half": np.full(7, value, np.float16),
            "head": tied,
            "tail": tied,
            "scalar": np.full((), value, np.float64),
            "empty": np.zeros((0, 4), np.int8),
        }
    )


def fill(model: Arrays, value: float) -> None:
    """Give every element of every array the value."""
    for array in model.arrays.values():
        array[...] = value


def values(model: Arrays) -> set[float]:
    """The distinct values in a model; one when it is at one version."""
    return {float(v) for a in model.arrays.values() for v in np.unique(a)}


class Peer:
    """A running `parallelkit.testing.peer`, for tests. A context manager that kills it."""

    def __init__(self, role: str, *, prefix: Sequence[str] = (), **settings: Any) -> None:
        """Start it; `prefix` is a command that starts commands, such as somewhere else."""
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "parallelkit.testing.peer", role, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._events: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def send(self, line: str) -> None:
        """Write a line to the peer."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def event(self, kind: str, timeout: float = 30.0) -> dict[str, Any]:
        """Wait for an event of a kind; others are dropped."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                event = self._events.get(timeout=max(deadline - time.monotonic(), 0.01))
            except Empty:
                raise TimeoutError(f"no {kind!r} event within {timeout:g} s") from None
            if event["event"] == kind:
                return event

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()
        self._thread.join()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._events.put(json.loads(line))


def main(role: str, settings: dict[str, Any]) -> None:
    """Run one role to its end."""
    model = sample_model(settings.get("value", 0.0), settings.get("elements", 1 << 16))

    def phase(name: str) -> None:
        emit("phase", phase=name)
        if name == settings.get("die_at"):
            time.sleep(0.3)  # let what was sent before leave, so that the phase is the one meant
            os.kill(os.getpid(), getattr(signal, settings.get("signal", "SIGKILL")))

    if role == "publish":
        _publish(model, settings, phase)
    else:
        _subscribe(model, settings, phase)


def emit(event: str, **fields: Any) -> None:
    """Write one event line."""
    print(json.dumps({"event": event, **fields}), flush=True)


def _publish(model: Arrays, settings: dict[str, Any], phase: Any) -> None:
    from parallelkit.weights import publish_weights

    options = settings.get("publish", {})
    with publish_weights(model, **options) as publisher:
        publisher._coordinator._phase_hook = phase  # type: ignore[union-attr]
        for _ in range(settings.get("tickets", 1)):
            emit("ticket", ticket=publisher.new_ticket())
        publisher.wait(settings.get("tickets", 1))
        emit("ready")
        for line in sys.stdin:
            fill(model, float(line))
            try:
                emit("report", report=publisher.update().to_dict())
            except Exception as error:
                emit("error", error=type(error).__name__, message=str(error))


def _subscribe(model: Arrays, settings: dict[str, Any], phase: Any) -> None:
    from parallelkit.weights import subscribe_weights

    with subscribe_weights(model, sys.stdin.readline()) as subscriber:
        subscriber._phase = phase  # type: ignore[method-assign]
        if settings.get("serve"):
            subscriber.serve()
        emit("joined", name=subscriber.name)
        while True:
            try:
                subscriber.step(settings.get("timeout", 30.0))
                error = None
            except Exception as caught:
                error = caught
            emit(
                "step",
                version=subscriber.version,
                state=subscriber.state,
                values=sorted(values(model)),
                error=type(error).__name__ if error else None,
                message=str(error) if error else "",
            )
            if error is not None and type(error).__name__ == "PeerLostError":
                return


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
