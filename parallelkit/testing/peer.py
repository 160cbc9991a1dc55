"""A publisher or subscriber in a process of its own, that can be made to fail at a given phase.

    python -m parallelkit.testing.peer publish|subscribe '<json settings>'

The ticket is read from (subscribe) or written to (publish) a line of standard input or output;
events are JSON lines on standard output. Fault tests drive it with `Peer`.

Lines to a publisher: a number (fill the model with it and update), `ticket`, `members`, `fault`
(bring the fault about now). Lines to a subscriber: a ticket, and with `rejoin` another one whenever
it has none. Signals to a subscriber: SIGUSR1 (bring the fault about), SIGUSR2 (say how it is),
SIGHUP (leave).
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
from types import FrameType
from typing import Any

import numpy as np

from parallelkit.errors import PartialCommitError, PeerLostError
from parallelkit.loader import register
from parallelkit.testing.arrays import Arrays
from parallelkit.testing.faults import Fault, FaultyArrays, Traps

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
        return self.event_of((kind,), timeout)

    def event_of(self, kinds: tuple[str, ...], timeout: float = 30.0) -> dict[str, Any]:
        """Wait for an event of one of several kinds; others are dropped."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                event = self._events.get(timeout=max(deadline - time.monotonic(), 0.01))
            except Empty:
                raise TimeoutError(f"no {' or '.join(kinds)} event in {timeout:g} s") from None
            if event["event"] in kinds:
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


class _Leave(Exception):
    """A subscriber was told to leave."""


class _Strike(Exception):
    """A fault comes now that cannot come within `step()`."""


def main(role: str, settings: dict[str, Any]) -> None:
    """Run one role to its end."""
    model = sample_model(settings.get("value", 0.0), settings.get("elements", 1 << 16))
    fault = Fault(emit, **settings.get("fault", {}))
    if "fault" in settings:
        model = FaultyArrays(model.arrays, fault)
        register(Traps(fault), "traps")

    def phase(name: str) -> None:
        emit("phase", phase=name)
        if role == "subscribe" and name == "begin":
            fault.count()
        fault.at(name)
        if name == settings.get("die_at"):
            time.sleep(0.3)  # let what was sent before leave, so that the phase is the one meant
            os.kill(os.getpid(), getattr(signal, settings.get("signal", "SIGKILL")))

    emit("started")
    if role == "publish":
        _publish(model, settings, phase, fault)
    else:
        _subscribe(model, settings, phase, fault)


def emit(event: str, **fields: Any) -> None:
    """Write one event line."""
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


def _publish(model: Arrays, settings: dict[str, Any], phase: Any, fault: Fault) -> None:
    with _published(model, settings, fault) as publisher:
        publisher._coordinator._phase_hook = phase
        fault.watch_publisher(publisher)
        for _ in range(settings.get("tickets", 1)):
            emit("ticket", ticket=publisher.new_ticket())
        publisher.wait(settings.get("tickets", 1))
        emit("ready")
        for line in map(str.strip, sys.stdin):
            if line == "ticket":
                emit("ticket", ticket=publisher.new_ticket())
            elif line == "members":
                members = {x.name: x.state for x in publisher.members}
                emit("members", members=members, version=publisher.version)
            elif line == "fault":
                fault.strike()
            else:
                _update(publisher, model, float(line))


def _published(model: Arrays, settings: dict[str, Any], fault: Fault) -> Any:
    """Publish; after a failure again when told to, where `rejoin` is set."""
    from parallelkit.weights import publish_weights

    while True:
        try:
            return publish_weights(model, **settings.get("publish", {}))
        except Exception as error:
            if not settings.get("rejoin"):
                raise
            emit("refused", error=type(error).__name__, message=str(error))
        fault.relent()
        sys.stdin.readline()


def _update(publisher: Any, model: Arrays, value: float) -> None:
    fill(model, value)
    try:
        emit("report", report=publisher.update().to_dict(), version=publisher.version)
    except Exception as error:
        report: Any = error.report if isinstance(error, PartialCommitError) else None
        emit(
            "error",
            error=type(error).__name__,
            cause=type(error.__cause__).__name__,
            message=str(error),
            version=publisher.version,
            quarantined=list(report.quarantined) if report else [],
        )


def _subscribe(model: Arrays, settings: dict[str, Any], phase: Any, fault: Fault) -> None:
    from parallelkit.weights import subscribe_weights

    for ticket in iter(sys.stdin.readline, ""):
        try:
            subscriber = subscribe_weights(
                model,
                ticket,
                member=settings.get("member", 0),
                timeout=settings.get("join_timeout", 60.0),
            )
        except Exception as error:
            if not settings.get("rejoin"):
                raise
            fault.relent()
            about = {"error": type(error).__name__, "message": str(error)}
            emit("refused", values=sorted(values(model)), **about)
            continue
        with subscriber:
            subscriber._phase = phase  # type: ignore[method-assign]
            fault.watch_subscriber(subscriber)
            if settings.get("serve"):
                subscriber.serve()
            emit("joined", name=subscriber.name)
            left = _follow(subscriber, model, settings, fault)
        if left:
            emit("left")
        if not settings.get("rejoin"):
            return


def _follow(subscriber: Any, model: Arrays, settings: dict[str, Any], fault: Fault) -> bool:
    """Step until the publisher is gone, or until told to leave; returns whether that was it."""

    def look(event: str, error: Exception | None = None) -> None:
        emit(
            event,
            version=subscriber.version,
            state=subscriber.state,
            values=sorted(values(model)),
            error=type(error).__name__ if error else None,
            message=str(error) if error else "",
            use=_use(subscriber) if settings.get("rejoin") else None,
        )

    def leave(number: int, frame: FrameType | None) -> None:
        raise _Leave

    def strike(number: int, frame: FrameType | None) -> None:
        if fault.act == "serve":
            raise _Strike
        fault.strike()

    signal.signal(signal.SIGUSR1, strike)
    signal.signal(signal.SIGUSR2, lambda number, frame: look("state"))
    signal.signal(signal.SIGHUP, leave)
    while True:
        try:
            subscriber.step(settings.get("timeout", 30.0))
        except _Leave:
            return True
        except _Strike:
            fault.strike()
        except Exception as error:
            look("step", error)
            if isinstance(error, PeerLostError):
                return False
        else:
            look("step")


def _use(subscriber: Any) -> str | None:
    """The name of the error that using the target raises, if any."""
    try:
        with subscriber.use():
            return None
    except Exception as error:
        return type(error).__name__


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
