"""A publisher rank's end of a transport in a process of its own, to be stopped or killed.

    python -m parallelkit.testing.conformance.serving '<json settings>'

It opens the transport by the hooks, fills the arena with `pattern` and writes its offer and passes
on a line of standard output. It ends with its standard input.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any, Final

import numpy as np

from parallelkit import hooks
from parallelkit.protocols import PublisherTransport, SubscriberTransport
from parallelkit.specs import TransportSpec
from parallelkit.weights.manifest import Manifest, TensorSpec
from parallelkit.weights.passes import SECRET_BYTES, issue
from parallelkit.weights.regions import Bytes
from parallelkit.weights.segments import sweep_orphans

START_SECONDS: Final = 60.0


def pattern(nbytes: int, seed: int = 0) -> Bytes:
    """Bytes that tell where they are: no two pages alike."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def open_end(
    name: str, nbytes: int, *, secret: bytes, rank: int, options: Mapping[str, Any]
) -> PublisherTransport:
    """Open a publisher rank's end by the hooks."""
    spec = TransportSpec(
        name=name,
        manifest=Manifest((TensorSpec(name="arena", dtype="uint8", shape=(nbytes,)),)),
        nbytes=nbytes,
        run_id=b"conformance-run!",
        rank=rank,
        secret=secret,
        options=options,
    )
    end = hooks.open_transport(spec)
    assert end is not None, f"no plugin opens transport {name!r}"
    return end


def connect(name: str, offer: bytes, key: bytes) -> SubscriberTransport:
    """Open a member's end by the hooks."""
    end = hooks.connect_transport(name, offer, key)
    assert end is not None, f"no plugin connects transport {name!r}"
    return end


class Served:
    """A process that serves. A context manager that kills it."""

    def __init__(self, name: str, options: Mapping[str, Any], nbytes: int, passes: int = 1) -> None:
        settings = {"name": name, "options": dict(options), "nbytes": nbytes, "passes": passes}
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        late = threading.Timer(START_SECONDS, self.process.kill)
        late.start()
        try:
            assert self.process.stdout is not None
            line = self.process.stdout.readline()
        finally:
            late.cancel()
        assert line, f"no transport {name!r} within {START_SECONDS:g} s"
        facts = json.loads(line)
        self.offer = bytes.fromhex(facts["offer"])
        self.passes = [bytes.fromhex(text) for text in facts["passes"]]

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        sweep_orphans()  # what it left, as the next publisher's start would


def main(argv: Sequence[str]) -> None:
    """Serve until standard input ends."""
    settings = json.loads(argv[0])
    nbytes, secret = settings["nbytes"], os.urandom(SECRET_BYTES)
    with ExitStack() as stack:
        end = open_end(settings["name"], nbytes, secret=secret, rank=0, options=settings["options"])
        stack.enter_context(closing(end))
        np.frombuffer(end.buffer, np.uint8)[:] = pattern(nbytes)
        passes = [issue(secret, 0).hex() for _ in range(settings["passes"])]
        print(json.dumps({"offer": end.offer().hex(), "passes": passes}), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1:])
