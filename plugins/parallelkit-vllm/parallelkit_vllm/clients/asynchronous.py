"""`publisher.attach(engine)`: vLLM's `AsyncLLM`, which belongs to an event loop of this process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import secrets
from collections.abc import Coroutine, Mapping
from typing import Any, Final, TypeVar

from parallelkit.errors import (
    EngineError,
    PeerLostError,
    StateError,
    UpdateTimeoutError,
    WeightTransferError,
)
from parallelkit.plugin import EngineCommit
from parallelkit_vllm import wire
from parallelkit_vllm.clients.options import AttachOptions
from parallelkit_vllm.clients.settings import (
    check_backend,
    engine_name,
    join_seconds,
    version_served,
)
from parallelkit_vllm.commit import RECOVERY_SECONDS
from parallelkit_vllm.door import TaskDoor
from parallelkit_vllm.handles import AsyncHandle
from parallelkit_vllm.service import EngineService, members_of
from parallelkit_vllm.versions import check_version

_QUARANTINE_SECONDS: Final = 4.0
#: How much longer than a coroutine's own deadline its loop may take to run it, in seconds.
_LOOP_SECONDS: Final = 1.0

T = TypeVar("T")


class AsyncEngine:
    """An `EngineClient`, whose calls are coroutines on the engine's loop.

    Each does its whole work there, whoever waits for it: the same that a server's guard does.
    """

    def __init__(self, engine: Any, options: Mapping[str, object]) -> None:
        """
        Args:
            options: those of every client; `loop`, the event loop of the engine, needed before
                the engine has had its first request.

        Raises:
            EngineError: the loop is not known, the engine was started without our weight-transfer
                engine, or an option is wrong.
            EngineVersionError: vLLM is too old.
        """
        check_version()
        chosen = AttachOptions.of(options, what="attach(AsyncLLM)", also={"loop": None})
        self._options = chosen
        self.name = engine_name(chosen.name, "AsyncLLM")
        check_backend(engine.vllm_config, self.name, "AsyncLLM")
        self._loop = _loop_of(engine, chosen.extra["loop"], self.name)
        self._owner = secrets.token_hex(16)
        self._door = TaskDoor()
        self._service = EngineService(engine, self._door, self.name)
        self.members = members_of(engine)
        self.handle = AsyncHandle(self.name, engine, self._door)

    def check_thread(self) -> None:
        """See `ThreadBoundClient`."""
        try:
            here: Any = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is self._loop:
            raise StateError(
                f"{self.name} lives on the event loop of this thread, which would stand still "
                "while this call waits for it: write `await asyncio.to_thread(publisher.update)`, "
                "and the same for publisher.attach"
            )

    def init(self, ticket: str, *, timeout: float) -> None:
        """See `EngineClient`."""
        body = wire.InitBody(owner=self._owner, ticket=ticket, timeout=join_seconds(timeout))
        self._run("attach", self._service.init(body), timeout)

    def begin(self, version: int, *, timeout: float) -> None:
        """See `EngineClient`."""
        body = wire.BeginBody(owner=self._owner, version=version, lease=2 * timeout)
        self._run("begin", self._service.begin(body), timeout)

    def commit(self, version: int, *, timeout: float) -> EngineCommit:
        """See `EngineClient`."""
        body = wire.CommitBody(
            owner=self._owner,
            version=version,
            timeout=timeout,
            cache=self._options.cache,  # type: ignore[arg-type]
            pause=self._options.pause,  # type: ignore[arg-type]
        )
        done = self._run("commit", self._service.commit(body), timeout + RECOVERY_SECONDS)
        self.handle.moved(version)
        return done.as_commit()

    def abort(self, version: int, reason: str, *, timeout: float) -> None:
        """See `EngineClient`."""
        body = wire.AbortBody(owner=self._owner, version=version, reason=reason[:2000])
        self._run("abort", self._service.abort(body), timeout)

    def quarantine(self, reason: str) -> None:
        """See `EngineClient`."""
        self._door.shut(reason)  # at once, even if the loop is busy
        body = wire.QuarantineBody(owner=self._owner, reason=reason[:2000])
        try:
            self._run("quarantine", self._service.quarantine(body), _QUARANTINE_SECONDS)
        except WeightTransferError as error:
            self._door.shut(f"{reason} (and what was in flight could not be ended: {error})")

    def version(self, *, timeout: float) -> int:
        """See `EngineClient`."""
        return version_served(self._run("status", self._service.status(), timeout), self.name)

    def close(self) -> None:
        """See `EngineClient`."""

    def _run(self, what: str, work: Coroutine[Any, Any, T], seconds: float) -> T:
        """Run a coroutine on the engine's loop and wait for it here.

        Raises:
            PeerLostError: the loop has ended.
            UpdateTimeoutError: it does not run, or something in it blocks.
        """
        if self._loop.is_closed():
            work.close()
            raise PeerLostError(f"{self.name}: its event loop has ended", peers=[self.name])
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError as error:  # closed in between
            work.close()
            raise PeerLostError(f"{self.name}: {error}", peers=[self.name]) from error
        try:
            return future.result(seconds + _LOOP_SECONDS)
        except concurrent.futures.CancelledError as error:
            raise PeerLostError(f"{self.name}: its loop has ended", peers=[self.name]) from error
        except TimeoutError:
            if not future.cancel():
                return future.result()  # it came just now
            raise UpdateTimeoutError(
                f"{self.name}: {what} did not end within {seconds:.3g} s: its event loop does not "
                "run, or something in it blocks",
                missing=[self.name],
            ) from None


def _loop_of(engine: Any, given: Any, name: str) -> asyncio.AbstractEventLoop:
    if given is None:
        handler = getattr(engine, "output_handler", None)
        given = handler.get_loop() if handler is not None else None
    if given is None:
        raise EngineError(
            f"{name} has had no request yet, so its event loop is not known: give it, as in "
            "publisher.attach(engine, loop=asyncio.get_running_loop()), called in another thread"
        )
    if not isinstance(given, asyncio.AbstractEventLoop):
        raise EngineError(f"attach(loop={given!r:.80}): it is an asyncio event loop")
    return given
