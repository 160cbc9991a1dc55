"""Pulling an arena over loopback by the tcp transport, against a raw socket and one memcpy.

Two processes: one serves, one pulls everything into warm memory. `curve` is encrypted (the
default), `digest` is `encrypt=False`: in the clear, with a keyed digest of every reply. `raw` is
one socket, `sendall` to `recv_into`, nothing checked. All in turns, round by round.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np
from common import Row, Run, Timing, finish, interleaved, parser, ratios, wait_idle

from parallelkit.weights.passes import issue
from parallelkit.weights.regions import Bytes, Span
from parallelkit.weights.tcp import TcpPublisher, TcpSubscriber

SIZES: Final = {"1MB": 10**6, "10MB": 10**7, "100MB": 10**8, "1GB": 10**9}
WAYS: Final = ("curve", "digest")
#: A pull of columns has runs of so many bytes, each followed by as many that are left out.
RUN_BYTES: Final = 4096
SECONDS: Final = 300.0
COLUMNS: Final = (
    *("size", "way", "connections", "ms", "low ms", "high ms", "GB/s", "CPU s/GB", "of raw"),
    "of memcpy",
)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--sizes", nargs="+", choices=SIZES, default=["1MB", "100MB", "1GB"])
    made.add_argument("--connections", nargs="+", type=int, default=[1, 2, 4])
    made.add_argument("--rounds", type=int, default=9)
    args = made.parse_args()
    if args.quick:
        args.sizes, args.rounds = ["1MB", "10MB"], 3
    wait_idle(args.wait_idle)
    run = Run("tcp", args)
    rows = [row for size in args.sizes for row in measure(size, args)]
    finish(run.result(rows, [], rounds=args.rounds), COLUMNS, args.output)


def measure(size: str, args: Any) -> list[Row]:
    """All ways for one size, in turns."""
    nbytes = SIZES[size]
    target, copy = np.zeros(nbytes, np.uint8), content(nbytes)
    with Server(nbytes) as server, contextlib.ExitStack() as stack:
        calls: dict[str, Callable[[], float]] = {
            "memcpy 0": server.timed("memcpy 0", lambda: np.copyto(target, copy)),
            "raw 1": server.timed("raw 1", lambda: server.read_raw(target)),
        }
        for way, connections in itertools.product(WAYS, args.connections):
            end = TcpSubscriber(*server.way_in(way), connections=connections, timeout=SECONDS)
            stack.enter_context(contextlib.closing(end))
            name = f"{way} {connections}"
            calls[name] = server.timed(name, puller(end, Span(0, nbytes), target))
            if (way, connections) == ("curve", 2):
                rows = nbytes // (2 * RUN_BYTES)
                columns = Span(0, RUN_BYTES, ((rows, 2 * RUN_BYTES),))
                name = f"{way}, columns {connections}"
                calls[name] = server.timed(name, puller(end, columns, target))
        for name, call in calls.items():
            target[:] = 0
            call()
            got = nbytes // (2 * RUN_BYTES) * RUN_BYTES if "columns" in name else nbytes
            assert np.array_equal(target[:got], copy[:got]), f"{name}: other bytes"
        seconds = interleaved(calls, warmups=1, repeats=args.rounds)
    return [
        row(size, name, samples, seconds["raw 1"], seconds["memcpy 0"], server.cpu[name])
        for name, samples in seconds.items()
    ]


def row(
    size: str,
    name: str,
    samples: list[float],
    raw: list[float],
    copy: list[float],
    cpu: list[float],
) -> Row:
    """Figures of one way; CPU seconds are of both processes, so load does not matter to them."""
    way, _, connections = name.rpartition(" ")
    took = Timing.of(samples)
    nbytes = SIZES[size] // (2 if "columns" in way else 1)
    share = nbytes / SIZES[size]
    return {
        "size": size,
        "nbytes": nbytes,
        "way": way,
        "connections": int(connections),
        "ms": took.median * 1e3,
        "low ms": took.low * 1e3,
        "high ms": took.high * 1e3,
        "GB/s": nbytes / took.median / 1e9,
        "CPU s/GB": statistics.median(cpu) * 1e9 / nbytes,
        "of raw": ratios(raw, samples).median * share,
        "of memcpy": ratios(copy, samples).median * share,
    }


def puller(end: TcpSubscriber, span: Span, target: Bytes) -> Callable[[], None]:
    """A pull of one span."""
    into = target[: span.nbytes]

    def pull() -> None:
        end.pull([span], [into], epoch=0, deadline=time.monotonic() + SECONDS)

    return pull


class Server:
    """The serving process, as the pulling one sees it. A context manager that ends it."""

    def __init__(self, nbytes: int) -> None:
        context = get_context("spawn")
        self._pipe, other = context.Pipe()
        self._secret = os.urandom(32)
        self._process = context.Process(target=serve, args=(other, nbytes, self._secret))
        self._process.start()
        other.close()
        self._offers, port = self._pipe.recv()
        self._raw = socket.create_connection(("127.0.0.1", port))
        self.cpu: dict[str, list[float]] = {}

    def timed(self, name: str, call: Callable[[], None]) -> Callable[[], float]:
        """A call that returns its wall seconds, and notes those of the CPU, here and there."""
        noted = self.cpu.setdefault(name, [])

        def measured() -> float:
            before, start = self._cpu_seconds(), time.perf_counter()
            call()
            took = time.perf_counter() - start
            noted.append(self._cpu_seconds() - before)
            return took

        return measured

    def _cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        there = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return time.process_time() + there

    def way_in(self, way: str) -> tuple[bytes, bytes]:
        """An offer, and a pass for it."""
        return self._offers[way], issue(self._secret, WAYS.index(way))

    def read_raw(self, target: Bytes) -> None:
        """Read the whole arena from the raw socket."""
        self._raw.sendall(b"x")
        view, got = target.data, 0
        while got < len(view):
            got += self._raw.recv_into(view[got:])

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self._raw.close()
        self._pipe.close()
        self._process.join(30)
        self._process.kill()
        self._process.join()


def content(nbytes: int) -> Bytes:
    """What the arena holds: every run alike, so that columns of it are its beginning."""
    run = np.random.default_rng(0).integers(0, 256, RUN_BYTES, np.uint8)
    return np.resize(run, nbytes)


def serve(pipe: Connection, nbytes: int, secret: bytes) -> None:
    """Serve one arena in both ways and by a raw socket, until the other process ends."""
    arena = content(nbytes)
    with contextlib.ExitStack() as stack:
        offers = {}
        for rank, way in enumerate(WAYS):
            end = TcpPublisher(
                nbytes, secret=secret, rank=rank, memory=arena.data, encrypt=way == "curve"
            )
            stack.enter_context(contextlib.closing(end))
            offers[way] = end.offer()
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        thread = threading.Thread(target=serve_raw, args=(listener, arena))
        thread.start()
        pipe.send((offers, listener.getsockname()[1]))
        with contextlib.suppress(EOFError):
            pipe.recv()
        thread.join(30)


def serve_raw(listener: socket.socket, arena: Bytes) -> None:
    """Send the arena for each byte received, on one connection."""
    peer, _ = listener.accept()
    with peer:
        while peer.recv(1):
            peer.sendall(arena.data)


if __name__ == "__main__":
    main()
