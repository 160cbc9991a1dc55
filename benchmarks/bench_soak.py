"""Ten thousand updates of a small model: are memory, descriptors and threads flat?

Trainer and follower are two processes; a second follower is a thread of the trainer's process that
stages (`serve()`). Every element changes before each update. What each process holds is noted every
hundred updates, and a line is fitted to it, the first fifth left out: its slope is what an update
leaves behind. Every five hundredth update fails on purpose, and every thousandth time a member
joins, follows one update, and leaves.
"""

from __future__ import annotations

import gc
import os
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from common import Goal, Row, Run, Timing, finish, parser

from parallelkit import publish_weights, subscribe_weights
from parallelkit.testing.brittle import BrittleArrays
from parallelkit.testing.peer import Peer, fill, sample_model, values
from parallelkit.weights import WeightPublisher

EVERY: Final = 100
ELEMENTS: Final = 1 << 16
TIMEOUT: Final = 60.0
#: Goals: bytes that an update may leave in a process.
BYTES_AN_UPDATE: Final = 16.0
COLUMNS: Final = (
    *("process", "updates", "MB at first", "MB at last", "bytes an update", "error"),
    *("descriptors", "threads", "update ms", "low ms", "high ms"),
)


class Held:
    """What a process holds, noted now and then."""

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self._place = Path(f"/proc/{pid}")
        self.rss: list[int] = []
        self.descriptors: list[int] = []
        self.threads: list[int] = []

    def note(self) -> None:
        pages = int((self._place / "statm").read_text().split()[1])
        self.rss.append(pages * os.sysconf("SC_PAGE_SIZE"))
        self.descriptors.append(len(list((self._place / "fd").iterdir())))
        self.threads.append(len(list((self._place / "task").iterdir())))

    def row(self, updates: int, timing: Timing) -> Row:
        slope, error = line(self.rss[len(self.rss) // 5 :])
        return {
            "process": self.name,
            "updates": updates,
            "MB at first": self.rss[0] / 1e6,
            "MB at last": self.rss[-1] / 1e6,
            "bytes an update": slope / EVERY,
            "error": error / EVERY,
            "descriptors": spread(self.descriptors),
            "threads": spread(self.threads),
            "update ms": timing.median * 1e3,
            "low ms": timing.low * 1e3,
            "high ms": timing.high * 1e3,
            "rss": self.rss,
        }


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--updates", type=int, default=10_000)
    args = made.parse_args()
    updates = 500 if args.quick else args.updates
    run = Run("soak", args)
    source = BrittleArrays(sample_model(0.0, ELEMENTS).arrays)
    with (
        publish_weights(source, timeout=TIMEOUT) as publisher,
        Peer("subscribe", elements=ELEMENTS, timeout=TIMEOUT) as peer,
    ):
        peer.send(publisher.new_ticket())
        peer.event("joined")
        held = [Held("trainer", os.getpid()), Held("follower", peer.process.pid)]
        staged = sample_model(0.0, ELEMENTS)
        with subscribe_weights(staged, publisher.new_ticket(), timeout=TIMEOUT) as subscriber:
            subscriber.serve()
            seconds = np.full(updates, np.nan)  # all of it is resident from the beginning
            for number in range(1, updates + 1):
                fill(source, float(number % 1000))
                if number % (5 * EVERY) == 0:
                    fail(publisher, source)
                seconds[number - 1] = publisher.update().seconds
                check(subscriber.step(TIMEOUT), publisher.version)
                check(values(staged), {float(number % 1000)})
                step = peer.event("step", timeout=TIMEOUT)
                while step["error"]:  # of an update that failed on purpose
                    step = peer.event("step", timeout=TIMEOUT)
                check((step["version"], step["state"]), (publisher.version, "current"))
                check(set(step["values"]), {float(number % 1000)})
                if number % EVERY == 0:
                    gc.collect()  # visitors' models, until then
                    for process in held:
                        process.note()
                if number % (10 * EVERY) == 0:
                    visit(publisher, peer)
    timing = Timing.of(seconds.tolist())
    rows = [process.row(updates, timing) for process in held]
    finish(run.result(rows, goals(rows), threads=threading.active_count()), COLUMNS, args.output)


def fail(publisher: WeightPublisher, source: BrittleArrays) -> None:
    """An update that is called off, and leaves the version where it was."""
    source.fault = "read"
    try:
        publisher.update()
    except OSError:
        return
    raise SystemExit("an update that had to fail did not")


def visit(publisher: WeightPublisher, peer: Peer) -> None:
    """A member joins, follows one update, and leaves."""
    model = sample_model(0.0, ELEMENTS)
    ticket = publisher.new_ticket()
    with subscribe_weights(model, ticket, timeout=TIMEOUT) as subscriber:
        subscriber.serve()
        publisher.update()
        check(subscriber.step(TIMEOUT), publisher.version)
    peer.event("step", timeout=TIMEOUT)
    # An update that begins before it is known to have left would be called off.
    while any(x.present and x.name == subscriber.name for x in publisher.members):
        time.sleep(0.001)


def line(values: Sequence[int]) -> tuple[float, float]:
    """Slope of a line through values at 0, 1, 2, ..., and the slope's standard error."""
    if len(values) < 3:
        return 0.0, 0.0
    x = np.arange(len(values)) - (len(values) - 1) / 2
    y = np.array(values) - statistics.fmean(values)
    slope = float((x * y).sum() / (x * x).sum())
    rest = y - slope * x
    return slope, float(np.sqrt((rest * rest).sum() / (len(values) - 2) / (x * x).sum()))


def spread(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low}" if low == high else f"{low} to {high}"


def check(found: object, wanted: object) -> None:
    if found != wanted:
        raise SystemExit(f"{found!r} instead of {wanted!r}")


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Flat, by the slope; a bound for the bytes, since the allocator keeps some."""
    return [
        Goal(f"{row['process']}: bytes an update", BYTES_AN_UPDATE, row["bytes an update"], False)
        for row in rows
    ]


if __name__ == "__main__":
    main()
