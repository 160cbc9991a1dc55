"""What a guard does for a publisher inside the server: each call is whole, whoever asked for it.

A call runs in a task of its own. A publisher that goes away in the middle changes nothing: a
commit ends, or its deadline does, and the engine is resumed.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, Final, TypeVar

import parallelkit
from parallelkit.errors import ParallelKitError, StateError, VersionError
from parallelkit_vllm import wire
from parallelkit_vllm.clients.settings import join_seconds
from parallelkit_vllm.commit import RECOVERY_SECONDS, EngineCalls, check_ready, commit, halt
from parallelkit_vllm.door import TaskDoor

_STATUS_SECONDS: Final = 5.0

T = TypeVar("T")


class EngineService:
    """One engine, at most one publisher. Belongs to the server's event loop."""

    def __init__(self, engine: Any, door: TaskDoor, name: str = wire.ENGINE) -> None:
        """`name` stands for the engine in errors."""
        self._engine = engine
        self._name = name
        self._door = door
        self._lock = asyncio.Lock()
        self._doing = ""
        self._owner = ""
        self._version = 0
        self._last: wire.Committed | None = None
        self._begun = 0
        self._lease = 0.0
        self._opened = False  # an update, by vLLM's own routes
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def under_way(self) -> str:
        """What must not be disturbed just now; empty: nothing."""
        if self._doing:
            return self._doing
        if self._begun and time.monotonic() < self._lease:
            return f"an update to version {self._begun}"
        return ""

    def noted(self, path: str, status: int) -> None:
        """An admin route of vLLM's was answered: follow whether an update is open by those."""
        done = status == 200
        if path in ("/start_weight_update", "/start_draft_weight_update") and done:
            self._opened = True
        elif (path == "/finish_weight_update" and done) or (path == "/update_weights" and not done):
            self._opened = False

    async def init(self, body: wire.InitBody) -> dict[str, Any]:
        """Deliver a ticket; returns once every worker has joined.

        Raises:
            StateError: something else is under way.
            UpdateTimeoutError, PeerLostError, EngineCommitError: a worker did not join.
        """
        if body.owner != self._owner and self.under_way:
            raise StateError(f"an attach is refused: {self.under_way} is under way")
        return await self._alone("an attach", self._init(body))

    async def begin(self, body: wire.BeginBody) -> dict[str, Any]:
        """See that the engine can take an update; keep admin calls away until it is committed.

        Raises:
            StateError: asleep, paused, attached to another publisher, or something is under way.
            PeerLostError, UpdateTimeoutError: it is dead, or does not answer.
        """
        self._check_owner(body.owner)
        self._check_closed()
        return await self._alone(f"the begin of version {body.version}", self._begin(body))

    async def commit(self, body: wire.CommitBody) -> wire.Committed:
        """Put a staged version in place. The same one again gives the same answer.

        Raises:
            StateError: attached to another publisher, asleep, or something is under way; nothing
                was touched.
            VersionError: the engine is past that version.
            PeerLostError, UpdateTimeoutError, EngineCommitError: it failed; quarantined.
        """
        self._check_owner(body.owner)
        if body.version < self._version:
            raise VersionError(
                f"commit of version {body.version}: {self._name} is at version {self._version}"
            )
        if body.version == self._version and self._last is not None and not self._door.reason:
            return self._last
        self._check_closed()
        return await self._alone(f"the commit of version {body.version}", self._commit(body))

    async def abort(self, body: wire.AbortBody) -> dict[str, Any]:
        """The update that was begun is called off; nothing was touched."""
        self._check_owner(body.owner)
        if self._begun == body.version:
            self._begun = 0
        return {"version": self._version}

    async def quarantine(self, body: wire.QuarantineBody) -> dict[str, Any]:
        """Let nobody generate until a commit works; end what is being generated.

        Raises:
            PeerLostError, UpdateTimeoutError, EngineCommitError: what is in flight could not be
                ended; the door is shut all the same.
        """
        self._check_owner(body.owner)
        self._door.shut(body.reason)
        self._begun = 0
        if not self._lock.locked():  # else a commit has the engine, and its end sees to it
            await self._alone("a quarantine", self._halt())
        return {"state": "quarantined"}

    async def status(self) -> wire.Status:
        """Never raises for the engine's sake; waits a few seconds for it at most."""
        dead = bool(self._engine.errored)
        served = None
        if not dead and hasattr(self._engine, "get_weight_version"):
            calls = EngineCalls(self._engine, self._name)
            with contextlib.suppress(ParallelKitError):
                end = time.monotonic() + _STATUS_SECONDS
                call = self._engine.get_weight_version()
                served = str(await calls.run("get_weight_version", call, end))
        elif not dead:
            served = str(self._version)
        return wire.Status(
            guard=wire.GUARD_PROTOCOL,
            parallelkit=parallelkit.__version__,
            members=members_of(self._engine),
            state="dead" if dead else "quarantined" if self._door.reason else "serving",
            reason=str(self._engine.dead_error)[:8000] if dead else self._door.reason[:8000],
            version=self._version,
            weight_version=served,
            owner=self._owner,
            under_way=self.under_way,
            requests=self._door.inside_now,
        )

    async def _init(self, body: wire.InitBody) -> dict[str, Any]:
        deadline = time.monotonic() + body.timeout
        ours = bool(self._door.reason)
        await check_ready(self._engine, deadline=deadline, name=self._name, ours=ours)
        info = {"ticket": body.ticket, "timeout": join_seconds(body.timeout)}
        calls = EngineCalls(self._engine, self._name)
        call = self._engine.init_weight_transfer_engine(_init_request(info))
        await calls.run("init_weight_transfer_engine", call, deadline)
        self._owner, self._version, self._last, self._begun = body.owner, 0, None, 0
        return {"members": members_of(self._engine)}

    async def _begin(self, body: wire.BeginBody) -> dict[str, Any]:
        now = time.monotonic()
        ours = bool(self._door.reason)
        await check_ready(self._engine, deadline=now + body.lease / 2, name=self._name, ours=ours)
        self._begun, self._lease = body.version, now + body.lease
        return {"version": self._version}

    async def _commit(self, body: wire.CommitBody) -> wire.Committed:
        shuts = self._door.shuts
        try:
            done = await commit(
                self._engine,
                body.version,
                cache=body.cache,
                pause=body.pause,
                deadline=time.monotonic() + body.timeout,
                name=self._name,
                door=self._door,
            )
        finally:
            self._begun = 0
        self._version = body.version
        self._last = wire.Committed(
            pause_seconds=done.pause_seconds,
            cache="reset" if done.cache == "reset" else "kept",
            weight_version=done.weight_version,
            notes=list(done.notes),
        )
        if self._door.shuts == shuts:
            self._door.open()
        else:  # whoever asked has given it up meanwhile
            await self._halt()
        return self._last

    async def _halt(self) -> None:
        deadline = time.monotonic() + RECOVERY_SECONDS
        await halt(self._engine, deadline=deadline, name=self._name, door=self._door)

    async def _alone(self, what: str, work: Coroutine[Any, Any, T]) -> T:
        """Do `work` in a task of its own, with nothing else; at once or not at all."""
        if self._lock.locked():
            work.close()
            raise StateError(f"{what} is refused: {self._doing} is under way")

        async def locked() -> T:
            async with self._lock:
                self._doing = what
                try:
                    return await work
                finally:
                    self._doing = ""

        task = asyncio.ensure_future(locked())
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        task.add_done_callback(lambda _: work.close())  # cancelled before it began
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # heard, where nobody waits for it any more

    def _check_closed(self) -> None:
        if self._opened:
            raise StateError(
                f"an update is open in {self._name}, by its route /start_weight_update: "
                "/finish_weight_update ends it"
            )

    def _check_owner(self, owner: str) -> None:
        if owner != self._owner:
            whose = "another publisher" if self._owner else "no publisher"
            raise StateError(f"{self._name} is attached to {whose}: attach it first")


def members_of(engine: Any) -> int:
    """How many workers join: tensor x pipeline x data."""
    parallel = engine.vllm_config.parallel_config
    across = getattr(parallel, "world_size_across_dp", None)
    return int(across or parallel.world_size * getattr(parallel, "data_parallel_size", 1))


def _init_request(info: dict[str, Any]) -> Any:
    if "vllm" in sys.modules:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        return WeightTransferInitRequest(init_info=info)
    return SimpleNamespace(init_info=info)
