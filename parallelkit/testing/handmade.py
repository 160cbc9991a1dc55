"""Messages made by hand, and a member that sends them over the real channel.

For tests of what a peer may do wrong. Everything here that depends on the fields of a message is in
this module.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Final

import zmq

from parallelkit.errors import ParallelKitError
from parallelkit.testing.arrays import Arrays
from parallelkit.weights import messages as m
from parallelkit.weights.buckets import Workers
from parallelkit.weights.client import ControlClient
from parallelkit.weights.exports import export
from parallelkit.weights.identity import host_identity
from parallelkit.weights.joining import connect
from parallelkit.weights.manifest import Manifest, TensorSpec
from parallelkit.weights.placement import Placement
from parallelkit.weights.placing import Fetch
from parallelkit.weights.plan import plan_transfer
from parallelkit.weights.readers import Readers
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
        digest = (digests + bytes(16))[:16]
        return m.Opened(session=session, plan_digest=digest, kept=None, partial=False)
    if kind == "refused":
        return m.Refused(error="ProtocolError", message=text)
    if kind == "ready":
        return m.Ready(**update)
    if kind == "prepared":
        return m.Prepared(**update, digests=digests, seconds=0.0)
    if kind in ("committed", "staged"):
        done: dict[str, Any] = {"readback": digests, "staged": kind == "staged"}
        return m.Committed(**update, **done, pause=0.0, repeated=0, live=0, received=1)
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
        return welcome(tiny, verify="digest")
    if kind == "joined":
        return m.Joined(version=version)
    if kind == "refused":
        return m.Refused(error="ProtocolError", message="made by hand")
    if kind == "begin":
        return m.Begin(**update, slot=0, timeout=timeout)
    if kind == "transfer":
        return m.Transfer(**update, offers=[])
    if kind == "commit":
        return m.Commit(**update, digests=b"")
    if kind == "abort":
        return m.Abort(**update, reason="made by hand")
    return m.Close(reason="made by hand")


def welcome(manifest: Manifest, *, verify: str, timeout: float = 5.0) -> m.Welcome:
    """Make the message by which a publisher of one rank admits a member."""
    nbytes = export(manifest, 0).nbytes
    return m.Welcome(
        session=b"s" * 16,
        run_id=b"r" * 16,
        name="made by hand",
        version=0,
        **m.manifest_fields(manifest),
        manifest_digest=manifest.digest(),
        sources=[m.Source(rank=0, nbytes=nbytes, transport="memory", offer=b"", key=b"")],
        lane="host",
        slots=1,
        verify=verify,
        commit="staged",
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
        self._readers: Readers | None = None
        self._welcome: m.Welcome | None = None
        self._slot = 0

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
        return answer

    def open(self) -> m.ToSubscriber | None:
        """Connect to the publisher's memory, and join; returns the answer. After `hello`."""
        assert self._welcome is not None
        plan = plan_transfer(m.manifest_of(self._welcome))
        self._readers = connect(self._welcome, plan)
        self.send(m.Opened(session=self.session, plan_digest=plan.digest, kept=None, partial=False))
        return self.hear()

    def answer(self, message: m.ToSubscriber) -> None:
        """Give the answer that a good member gives; it places nothing."""
        if isinstance(message, m.Begin):
            self._slot = message.slot
            self.say("ready", version=message.version, epoch=message.epoch)
        elif isinstance(message, m.Transfer):
            digests = self._digests(message)
            update = {"version": message.version, "epoch": message.epoch}
            self.say("prepared", **update, digests=digests)
        elif isinstance(message, m.Commit):
            digests = self._digests(message) if self._read_back() else b""
            update = {"version": message.version, "epoch": message.epoch}
            self.say("committed", **update, digests=digests)

    def close(self) -> None:
        """Cut the connection, without a word."""
        self._client.close()
        if self._readers is not None:
            self._readers.close()

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

    def _digests(self, message: m.Transfer | m.Commit) -> bytes:
        assert self._welcome is not None
        assert self._readers is not None
        fetch = Fetch(message.version, message.epoch, self._slot, time.monotonic() + self._timeout)
        workers = Workers()
        how = (self._welcome.verify, self._welcome.run_id)
        nowhere = Placement(Arrays({}), self._readers.plan.manifest, self._readers, *how)
        try:
            return nowhere.fetch(fetch, workers, staged=False)
        finally:
            workers.close()
