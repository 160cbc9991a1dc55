"""The follower's side, once it has joined: `WeightSubscriber`."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, Final

from parallelkit.errors import (
    EpochError,
    PeerLostError,
    ProtocolError,
    QuarantinedError,
    StateError,
    UpdateAbortedError,
    UpdateTimeoutError,
    WrongThreadError,
)
from parallelkit.weights import messages as m
from parallelkit.weights.buckets import Workers
from parallelkit.weights.client import ControlClient
from parallelkit.weights.endpoint import check_timeout
from parallelkit.weights.placement import Placement
from parallelkit.weights.rounds import Round, Superseded, Talk
from parallelkit.weights.turns import Turns
from parallelkit.weights.writers import Writer

#: Name of the thread that `serve` starts: it touches no framework, nor may a sink called in it.
SERVE_THREAD: Final = "parallelkit-subscriber"
_SERVE_POLL_SECONDS = 0.5


class WeightSubscriber:
    """A target that follows. A context manager; closes at its end.

    One thread calls `step` and `use`. `state` is `waiting` (no version yet), `current`,
    `quarantined` or `closed`; `version` is that of the live weights, 0 for none.
    """

    def __init__(
        self,
        client: ControlClient,
        welcome: m.Welcome,
        placement: Placement,
    ) -> None:
        self.name = welcome.name
        self.plan = placement.plan
        self._client = client
        self._talk = Talk(client, welcome.session)
        self._verify = welcome.verify
        self._in_place = welcome.commit == "in_place"
        self._timeout = welcome.timeout
        self._placement = placement
        self._workers = Workers()
        self._version = 0
        self._doubt = ""  # the outcome of an update is unknown, or its bytes never came
        self._torn = ""  # live memory was written in part
        self._turns = Turns()
        self._writer = Writer(self.name, self._turns)
        placement.claims = self._writer.claims
        self._closed = False
        self._pid = os.getpid()
        self._stepping = False
        self._flipping = False
        # A step that ends and a close from elsewhere may both come to release.
        self._releasing = threading.RLock()
        self._released = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        # Guards what the thread staged; never held while live memory is used.
        self._staged = threading.Condition()
        self._finalizer = weakref.finalize(
            self, _free, self._talk, client, placement, self._workers, self._pid
        )

    @property
    def version(self) -> int:
        """Version of the live weights; 0 before the first update."""
        return self._version

    @property
    def state(self) -> str:
        """`waiting`, `current`, `quarantined` or `closed`."""
        if self._closed:
            return "closed"
        if self._trouble:
            return "quarantined"
        return "current" if self._version else "waiting"

    @property
    def staged(self) -> int:
        """The newest version that `serve` has brought here, in place or not; 0 before the first."""
        return self._placement.staged_version

    @property
    def connected(self) -> bool:
        """Whether updates can still come: not closed, and `serve` has not lost the publisher."""
        return not self._closed and not isinstance(self._error, PeerLostError)

    @property
    def _trouble(self) -> str:
        """Why nobody can vouch for the live weights."""
        return self._doubt or self._torn or self._writer.displaced

    def step(self, timeout: float | None = None) -> int:
        """Take part in one update and put it in place; returns the live version.

        Blocks until the publisher begins an update and it is decided. While `serve` runs, it
        waits for the next version that was staged and puts that in place instead.

        Args:
            timeout: seconds to wait for an update to begin (default: the publisher's timeout). With
                0 it takes part if one has begun, else returns the version as it is.

        Raises:
            UpdateTimeoutError: no update began in time, or the publisher went silent within one.
            UpdateAbortedError: the publisher called it off; the old version is still live.
            PeerLostError: the publisher is gone. If the decision was already due, this subscriber
                cannot know it and is quarantined.
            QuarantinedError: placing failed after the decision.
            StateError: after close, inside `with use()`, or while another thread is in `step`.
            WeightTransferError: `timeout` is no number of seconds, or more than a week.
        """
        self._check("step")
        if self._turns.in_use:
            raise StateError("step() inside `with subscriber.use()`: leave the block first")
        seconds = self._timeout if timeout is None else timeout
        check_timeout(seconds, zero=True)
        deadline = time.monotonic() + seconds
        if self._thread is not None:
            return self._step_staged(deadline, seconds)
        self._refuse_while_stepping("step")
        self._stepping = True
        try:
            return self._step(deadline, seconds)
        finally:
            self._stepping = False
            if self._closed:
                self._release()

    def _step(self, deadline: float, seconds: float) -> int:
        begin = self._talk.await_begin(deadline)
        if begin is None:
            if seconds == 0:
                return self._version
            raise UpdateTimeoutError(
                f"the {self._client.peer} began no update within {seconds:g} s; "
                f"version {self._version} is live",
                missing=[self._client.peer],
            )
        with self._turns:
            self._take_part(begin, staged=False)
        return self._version

    def serve(self) -> None:
        """Take part in every update from a thread, into memory of our own.

        The live weights change only in `step()` or on entering `use()`, in the caller's thread, so
        this thread touches no framework. Costs twice the bytes of the model in memory. Errors of
        the thread are raised by the next `step`; the loss of the publisher by each.

        Raises:
            StateError: after close, or while another thread is in `step`.
        """
        self._check("serve")
        if self._thread is None:
            self._refuse_while_stepping("serve")
            self._placement.allocate_staging()
            self._thread = threading.Thread(target=self._serve, name=SERVE_THREAD, daemon=True)
            self._thread.start()
            atexit.register(self.close)  # the thread must not outlive the interpreter

    @contextlib.contextmanager
    def use(self) -> Iterator[Any]:
        """Give the target for use, at one version from beginning to end.

        On entering, a version that `serve` staged goes live.

        Raises:
            QuarantinedError: the weights are of no version; wait for the next update.
            StateError: no version has arrived yet, or after close; or the block is left in another
                thread than the one that entered it.
            WrongThreadError: the target's framework belongs to another thread; what was staged
                stays so.
        """
        self._check("use")  # in a forked child before anything is waited for
        with self._turns.use(self._ready):
            self._refuse_if_quarantined()  # another writer may have come before this was in use
            yield self._placement.module

    def explain(self) -> str:
        """Say how published tensors reach the target; with a loader, which need it and why."""
        return self._placement.explain()

    def close(self) -> None:
        """Leave. The target keeps its weights. Harmless when repeated.

        From a signal handler or another thread during `step()`, that call ends first. A subscriber
        that is dropped, or open at exit, closes by itself.
        """
        if self._closed:
            return
        self._closed = self._client.stopped = True
        atexit.unregister(self.close)
        if self._pid == os.getpid() and not self._stepping:  # else the step ends, and releases
            self._release()

    def _release(self) -> None:
        with self._releasing:
            if self._released:
                return
            self._released = True
        if self._thread is not None:
            self._thread.join(self._timeout + 10.0)
            with self._staged:
                self._error = None  # its traceback holds this object
                self._staged.notify_all()  # a step that waits for the thread, elsewhere
        self._writer.leaves()
        self._finalizer()

    def __enter__(self) -> WeightSubscriber:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _phase(self, name: str) -> None:
        """Does nothing; fault tests replace it."""

    def _take_part(self, update: Round, *, staged: bool) -> None:
        """From `Begin` to the end of one update, or of the one that comes instead of it."""
        while True:
            try:
                return self._one_round(update, staged=staged)
            except Superseded as newer:
                update = newer.round

    def _one_round(self, update: Round, *, staged: bool) -> None:
        phase = "begin"
        try:
            here = max(self._version, self._placement.staged_version)
            if update.version <= here:
                raise ProtocolError(
                    f"the publisher began version {update.version}, and version {here} is here "
                    "already"
                )
            self._phase("begin")
            self._placement.check()
            self._talk.say(m.Ready, update)
            self._talk.await_next(update, m.Transfer, "transfer", self._version)
            phase = "transfer"
            started = time.monotonic()
            digests = self._fetch(update, staged=staged)
            self._phase("transfer")
            seconds = time.monotonic() - started
        except (UpdateAbortedError, Superseded):
            raise
        except BaseException as error:
            self._talk.failed(update, phase, error)
            raise
        # From here on the publisher may decide: whatever ends this early, the outcome is in doubt.
        decided = False
        try:
            self._talk.say(m.Prepared, update, digests=digests, seconds=seconds)
            self._phase("prepared")
            commit = self._talk.await_next(update, m.Commit, "decision", self._version)
            decided = True
            self._phase("commit")
            ack = self._place(update, commit.digests, staged=staged)
        except (UpdateAbortedError, Superseded):
            raise
        except BaseException as error:
            self._quarantine(update, error, decided=decided)
            raise
        self._phase("committed")
        with contextlib.suppress(PeerLostError):  # it is in place whether or not anyone hears
            self._client.send(ack)

    def _fetch(self, update: Round, *, staged: bool) -> bytes:
        """Fetch and hash the bytes; in place, see that they are there still."""
        digests = b""
        try:
            if not self._in_place:
                digests = self._placement.fetch(update.fetch(), self._workers, staged=staged)
            self._check_epoch(update)
        except EpochError as late:  # the publisher advances it first, and then says why
            self._talk.hear_why(update, self._version)
            self._talk.failed(update, "transfer", late)
            raise UpdateAbortedError(f"{late}; version {self._version} stays") from late
        return digests

    def _quarantine(self, update: Round, error: BaseException, *, decided: bool) -> None:
        """Serve nothing until the next commit, and say so; raises for errors of placing."""
        text = f"{type(error).__name__}: {error}"
        self._doubt = (
            f"placing version {update.version} failed: {text}"
            if decided
            else f"prepared for version {update.version}, and then: {text}; the publisher went "
            "away, or this process stopped waiting, before the decision was known"
        )
        self._talk.failed(update, "commit" if decided else "decision", error)
        if decided and isinstance(error, Exception):
            raise QuarantinedError(self._doubt) from error
        error.add_note(f"this subscriber is quarantined: {self._doubt}")

    def _place(self, update: Round, expected: bytes, *, staged: bool) -> m.Committed:
        """Put the bytes in place (or keep them), in place after fetching them now.

        Returns:
            The acknowledgement to send.
        """
        pause, readback = 0.0, b""
        self._placement.repeated = 0
        self._check_epoch(update)
        if staged:
            if self._in_place:
                self._placement.fetch_verified(update.fetch(), expected, self._workers)
                self._check_epoch(update)
            with self._staged:
                self._placement.keep_staged(update.version)
                self._doubt = ""
                self._staged.notify_all()
        else:
            started = time.monotonic()
            self._torn = f"version {update.version} is half in place"
            with self._writer.writing(self._placement):
                if self._in_place:
                    self._placement.place_fetched(update.fetch(), expected, self._workers)
                else:
                    self._placement.place(self._workers)
            self._check_epoch(update)
            pause = time.monotonic() - started
            if self._verify == "readback":
                readback = self._placement.readback(update.version, self._workers)
            self._version = update.version
            self._doubt = self._torn = ""
        live, received = self._placement.verified
        answer: m.Committed = self._talk.answer(
            m.Committed,
            update,
            readback=readback,
            pause=pause,
            staged=staged,
            repeated=self._placement.repeated,
            live=live,
            received=received,
        )
        return answer

    def _ready(self) -> None:
        """A use begins: put what was staged in place, unless it is within another."""
        self._check("use")
        if not self._turns.in_use:
            self._flip()
        self._refuse_if_quarantined()
        if self._version == 0:
            raise StateError("no version has arrived yet: call step() first")

    def _flip(self) -> None:
        """Put a version that the thread staged in place."""
        with self._turns, self._staged:
            self._refuse_while_flipping()
            version = self._placement.staged_version
            if version <= self._version:
                return
            before, self._torn = self._torn, f"version {version} is half in place"
            self._flipping = True
            try:
                with self._writer.writing(self._placement):
                    self._placement.place_staged(self._workers)
                if self._verify == "readback":
                    self._placement.readback(version, self._workers)
            except WrongThreadError:  # the sink refused before a byte was written
                self._torn = before
                raise
            except BaseException as error:
                self._torn = f"placing version {version} failed: {type(error).__name__}: {error}"
                if isinstance(error, Exception):
                    raise QuarantinedError(self._torn) from error
                error.add_note(f"this subscriber is quarantined: {self._torn}")
                raise
            finally:
                self._flipping = False
            self._version = version
            self._torn = ""

    def _refuse_while_flipping(self) -> None:
        """Locks are this thread's own: nothing else keeps a second version from beginning."""
        if self._flipping:
            raise StateError(
                "step() or use() was called from within, by a loader or a signal handler, while a "
                "version is put in place"
            )

    def _step_staged(self, deadline: float, seconds: float) -> int:
        with self._staged:
            self._refuse_while_flipping()
            while self._placement.staged_version <= self._version:
                if self._error is not None:
                    error = self._error
                    if not isinstance(error, PeerLostError):  # that one is for good
                        self._error = None
                    raise error
                if self._closed:
                    raise StateError("close() while this call was waiting")
                if seconds == 0:
                    return self._version
                left = deadline - time.monotonic()
                if left <= 0:
                    raise UpdateTimeoutError(
                        f"no new version was staged within {seconds:g} s; version "
                        f"{self._version} is live",
                        missing=[self._client.peer],
                    )
                self._staged.wait(left)
        self._flip()
        return self._version

    def _serve(self) -> None:
        while not self._closed:
            try:
                begin = self._talk.await_begin(time.monotonic() + _SERVE_POLL_SECONDS)
                if begin is not None:
                    self._take_part(begin, staged=True)
            except PeerLostError as error:  # of control, or of a way to bytes: nothing can come
                self._keep_error(error)
                self._talk.leave()
                return
            except BaseException as error:
                self._keep_error(error)

    def _keep_error(self, error: BaseException) -> None:
        with self._staged:
            self._error = error
            self._staged.notify_all()

    def _check_epoch(self, update: Round) -> None:
        deadline = time.monotonic() + update.timeout
        self._placement.readers.check_epoch(update.epoch, update.version, deadline)

    def _refuse_while_stepping(self, what: str) -> None:
        """One thread at a time hears the publisher, or each would miss what the other heard."""
        if self._stepping:
            raise StateError(
                f"{what}() while step() waits in another thread: one thread follows the "
                "publisher; wait for that call, or let serve() run from the beginning"
            )

    def _refuse_if_quarantined(self) -> None:
        if self._trouble:
            raise QuarantinedError(
                f"{self.name} is quarantined and serves nothing: {self._trouble}. The next update "
                "that commits brings it back"
            )

    def _check(self, what: str) -> None:
        if self._closed:
            raise StateError(f"{what}() after close(): subscribe again with a new ticket")
        if self._pid != os.getpid():
            raise StateError(f"{what}() in a forked child: a subscriber belongs to one process")


def _free(
    talk: Talk, client: ControlClient, placement: Placement, workers: Workers, pid: int
) -> None:
    if pid == os.getpid():
        talk.leave()
        client.close()
        placement.release()
        placement.readers.close()
        workers.close()
