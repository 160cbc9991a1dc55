"""Both ends of the protocol without sockets: what the other end does is written down beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from parallelkit.errors import PeerLostError
from parallelkit.testing.arrays import Arrays
from parallelkit.testing.handmade import welcome
from parallelkit.weights import messages as m
from parallelkit.weights.client import ControlClient
from parallelkit.weights.placement import Placement
from parallelkit.weights.plan import plan_transfer
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
    """A transport within the process: the arena is a plain buffer."""

    name = "memory"

    def __init__(self, nbytes: int) -> None:
        self.buffer = memoryview(bytearray(nbytes))
        self.epoch = 0

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
        plan = plan_transfer(manifest)
        self.memory = Memory(plan.nbytes)
        self.client = ScriptedClient([])
        self.subscriber = WeightSubscriber(
            self.client,
            welcome(plan, verify=verify),
            plan,
            Placement(model, manifest, plan),
            self.memory,
        )

    def publish(self, model: Arrays, epoch: int) -> Callable[[], None]:
        """A function for the script: write a model's values into the arena, in an epoch."""
        data = [bytes(model.host_bytes(i)) for i in range(len(self.subscriber.plan.sizes))]

        def write() -> None:
            self.memory.epoch = epoch
            spans = zip(self.subscriber.plan.offsets, self.subscriber.plan.sizes, strict=True)
            for (offset, size), tensor in zip(spans, data, strict=True):
                self.memory.buffer[offset : offset + size] = tensor

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
