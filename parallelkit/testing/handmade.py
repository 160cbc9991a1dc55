"""Messages made by hand, and a member that sends them over the real channel.

For tests of what a peer may do wrong. Everything here that depends on the fields of a message is in
this module.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Final

import zmq

from parallelkit import hooks
from parallelkit.errors import ParallelKitError
from parallelkit.protocols import SubscriberTransport
from parallelkit.weights import messages as m
from parallelkit.weights.blocks import Workers, as_bytes, hash_arena, wanted_blocks
from parallelkit.weights.client import ControlClient
from parallelkit.weights.identity import host_identity
from parallelkit.weights.manifest import Manifest, TensorSpec
from parallelkit.weights.plan import TransferPlan, plan_transfer
from parallelkit.weights.ticket import Ticket

#: What a member may send, by name, and what a publisher may.
TO_PUBLISHER: Final = (
    *("hello", "opened", "refused", "ready", "prepared", "committed", "staged", "failed", "leave"),
)
TO_SUBSCRIBER: Final = (
    *("welcome", "joined", "refused", "begin", "transfer", "commit", "abort", "close"),
)
#: Of these, the ones that belong to an update.
ANSWERS: Final = ("ready", "prepared", "committed", "staged", "failed")


def to_publisher(
    kind: str,
    *,
    session: bytes = bytes(16),
    version: int = 0,
    epoch: int = 0,
    token: bytes = bytes(32),
    member: int = 0,
    digests: bytes = b"",
    text: str = "made by hand",
) -> m.ToPublisher:
    """Make a message of a kind of `TO_PUBLISHER`; what it has no field for is left out."""
    update: dict[str, Any] = {"session": session, "version": version, "epoch": epoch}
    if kind == "hello":
        return m.hello(token, member, host_identity(), text[:256], "0")
    if kind == "opened":
        return m.Opened(session=session, plan_digest=(digests + bytes(16))[:16])
    if kind == "refused":
        return m.Refused(error="ProtocolError", message=text)
    if kind == "ready":
        return m.Ready(**update)
    if kind == "prepared":
        return m.Prepared(**update, digests=digests, seconds=0.0)
    if kind in ("committed", "staged"):
        return m.Committed(**update, readback=digests, pause=0.0, staged=kind == "staged")
    if kind == "failed":
        return m.Failed(**update, phase="transfer", error="RuntimeError", message=text)
    return m.Leave(session=session)


def to_subscriber(
    kind: str, *, version: int = 0, epoch: int = 0, timeout: float = 5.0
) -> m.ToSubscriber:
    """Make a message of a kind of `TO_SUBSCRIBER`."""
    update: dict[str, Any] = {"version": version, "epoch": epoch}
    if kind == "welcome":
        tiny = Manifest([TensorSpec(name="w", dtype="int8", shape=(1,))])
        return welcome(plan_transfer(tiny), verify="digest")
    if kind == "joined":
        return m.Joined(version=version)
    if kind == "refused":
        return m.Refused(error="ProtocolError", message="made by hand")
    if kind == "begin":
        return m.Begin(**update, timeout=timeout)
    if kind == "transfer":
        return m.Transfer(**update)
    if kind == "commit":
        return m.Commit(**update)
    if kind == "abort":
        return m.Abort(**update, reason="made by hand")
    return m.Close(reason="made by hand")


def welcome(plan: TransferPlan, *, verify: str, timeout: float = 5.0) -> m.Welcome:
    """Make the message by which a publisher of `plan` admits a member."""
    return m.Welcome(
        session=b"s" * 16,
        run_id=b"r" * 16,
        name="made by hand",
        version=0,
        **m.manifest_fields(plan.manifest),
        plan_digest=plan.digest,
        transport="memory",
        offer=b"",
        verify=verify,
        timeout=timeout,
    )


class HandMade:
    """A member that says what it is told to. A context manager that cuts its connection.

    It joins as a real one does (`hello`, `open`), and can give the right answers (`answer`), but
    nothing of it waits for anything, or checks anything.
    """

    def __init__(self, ticket: str, timeout: float = 10.0) -> None:
        self._ticket = Ticket.decode(ticket)
        self._timeout = timeout
        self._client = ControlClient(self._ticket, timeout)
        self._transport: SubscriberTransport | None = None
        self._welcome: m.Welcome | None = None
        self._plan: TransferPlan | None = None

    @property
    def session(self) -> bytes:
        """The key that the publisher gave it; zeros before."""
        return bytes(16) if self._welcome is None else self._welcome.session

    def send(self, message: m.ToPublisher | bytes) -> None:
        """Send a message, or bytes that are none; that nobody is there any more is ignored."""
        frame = message if isinstance(message, bytes) else m.encode(message)
        try:
            self._client._dealer.send(frame, zmq.DONTWAIT)
        except zmq.ZMQError:
            return

    def say(self, kind: str, **fields: Any) -> None:
        """Send a message of a kind of `TO_PUBLISHER`, by default with its own session."""
        self.send(to_publisher(kind, **{"session": self.session} | fields))

    def hear(self, seconds: float | None = None) -> m.ToSubscriber | None:
        """Return the next message; None when none came in time, or the publisher is gone."""
        wait = self._timeout if seconds is None else seconds
        try:
            return self._client.receive(time.monotonic() + wait)
        except ParallelKitError:
            return None

    def hello(self, member: int = 0) -> m.ToSubscriber | None:
        """Show the ticket; returns the answer."""
        self.say("hello", token=self._ticket.token, member=member)
        answer = self.hear()
        if isinstance(answer, m.Welcome):
            self._welcome = answer
            self._plan = plan_transfer(m.manifest_of(answer))
        return answer

    def open(self) -> m.ToSubscriber | None:
        """Connect to the publisher's memory, and join; returns the answer. After `hello`."""
        assert self._welcome is not None
        assert self._plan is not None
        self._transport = hooks.connect_transport(self._welcome.transport, self._welcome.offer)
        self.send(m.Opened(session=self.session, plan_digest=self._plan.digest))
        return self.hear()

    def answer(self, message: m.ToSubscriber) -> None:
        """Give the answer that a good member gives; it places nothing."""
        if isinstance(message, m.Begin):
            self.say("ready", version=message.version, epoch=message.epoch)
        elif isinstance(message, m.Transfer):
            digests = self._digests(message.version)
            update = {"version": message.version, "epoch": message.epoch}
            self.say("prepared", **update, digests=digests)
        elif isinstance(message, m.Commit):
            digests = self._digests(message.version) if self._read_back() else b""
            update = {"version": message.version, "epoch": message.epoch}
            self.say("committed", **update, digests=digests)

    def close(self) -> None:
        """Cut the connection, without a word."""
        self._client.close()
        if self._transport is not None:
            self._transport.close()

    def __enter__(self) -> HandMade:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _read_back(self) -> bool:
        return self._welcome is not None and self._welcome.verify == "readback"

    def _digests(self, version: int) -> bytes:
        assert self._welcome is not None
        assert self._plan is not None
        assert self._transport is not None
        assert self._transport.buffer is not None
        wanted = wanted_blocks(self._welcome.verify, self._plan, self._welcome.run_id, version)
        if not any(wanted):
            return b""
        workers = Workers()
        try:
            arena = as_bytes(self._transport.buffer)
            return hash_arena(arena, self._plan, workers, wanted).astype("<u8").tobytes()
        finally:
            workers.close()
