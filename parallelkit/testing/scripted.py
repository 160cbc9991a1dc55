"""Both ends of the protocol without sockets: what the other end does is written down beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from parallelkit.errors import EpochError, PeerLostError
from parallelkit.testing.arrays import Arrays
from parallelkit.testing.handmade import welcome
from parallelkit.weights import messages as m
from parallelkit.weights.buckets import as_bytes
from parallelkit.weights.client import ControlClient
from parallelkit.weights.exports import export
from parallelkit.weights.manifest import Manifest
from parallelkit.weights.placement import Placement
from parallelkit.weights.plan import plan_transfer
from parallelkit.weights.readers import Readers
from parallelkit.weights.regions import Bytes, Span, view
from parallelkit.weights.subscriber import WeightSubscriber


class ScriptedClient(ControlClient):
    """A control channel at a subscriber that plays a script; then time passes and nothing comes.

    The script has messages, which are received in order, and functions, which are called when it
    is their turn: to change memory, or to raise `PeerLostError`.
    """

    def __init__(self, script: Iterable[m.ToSubscriber | Callable[[], None]]) -> None:
        self.peer = "publisher by the book"  # no socket is opened
        self.script = list(script)
        self.sent: list[Any] = []
        self.stopped = False

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def receive(self, deadline: float) -> m.ToSubscriber | None:
        while self.script:
            item = self.script.pop(0)
            if not callable(item):
                return item
            item()
        return None

    def close(self) -> None:
        """Nothing is open."""


class Memory:
    """A subscriber's transport within the process: rank 0's arena is a plain buffer.

    Attributes:
        memory: the arena, laid out as rank 0 exports a manifest that is not spread over ranks.
        now: the publisher's epoch.
    """

    name = "memory"

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._export = export(manifest, 0)
        self.memory = memoryview(bytearray(self._export.nbytes))
        self.now = 0

    def readers(self) -> Readers:
        """What a member that keeps everything reads this by."""
        plan = plan_transfer(self._manifest)
        return Readers(plan, {0: self}, {0: self.memory.nbytes})

    def write(self, tensors: Sequence[bytes]) -> None:
        """Write the bytes of every unique tensor."""
        for part in self._export.parts():
            self.memory[part.offset : part.offset + part.nbytes] = tensors[part.tensor]

    def epoch(self, *, deadline: float) -> int:
        """The publisher's epoch now."""
        return self.now

    def pull(
        self, spans: Sequence[Span], into: Sequence[Bytes], *, epoch: int, deadline: float
    ) -> None:
        """Copy spans, of one epoch."""
        for span, array in zip(spans, into, strict=True):
            found = view(as_bytes(self.memory), span)
            np.copyto(array.reshape(found.shape), found)
        if self.now != epoch:
            raise EpochError(f"the publisher is at epoch {self.now} instead of {epoch}")

    def close(self) -> None:
        """Nothing is open."""


class ScriptedSubscriber:
    """A real subscriber of a model, whose publisher is a script.

    Attributes:
        subscriber: to call; memory: the publisher's; client: with the rest of the script, and what
            was sent.
    """

    def __init__(self, model: Arrays, verify: str = "digest") -> None:
        manifest = model.manifest()
        self.memory = Memory(manifest)
        self.client = ScriptedClient([])
        welcomed = welcome(manifest, verify=verify)
        readers = self.memory.readers()
        self.subscriber = WeightSubscriber(
            self.client,
            welcomed,
            Placement(model, manifest, readers, verify, welcomed.run_id),
        )

    def publish(self, model: Arrays, epoch: int) -> Callable[[], None]:
        """A function for the script: write a model's values into the arena, in an epoch."""
        unique = self.subscriber.plan.manifest.unique
        data = [bytes(model.host_bytes(i)) for i in range(len(unique))]

        def write() -> None:
            self.memory.now = epoch
            self.memory.write(data)

        return write

    def lose(self) -> None:
        """A function for the script: the connection ends."""
        raise PeerLostError(f"the {self.client.peer} is gone", peers=[self.client.peer])


class ScriptedServer:
    """The publisher's control channel, as far as an update uses it: keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, Any]] = []

    def send(self, route: bytes, message: Any) -> None:
        self.sent.append((route, message))
