"""`publisher.attach(llm)`: vLLM's `LLM`, whose engine runs in processes of its own.

vLLM's calls wait without an end for an engine that died or hangs, and a timeout given to its
`collective_rpc` kills the engine. So each call runs in a thread here, with a deadline of ours, and
whether the engine is alive is looked at meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import InvalidStateError
from typing import Any, Final

from parallelkit.errors import EngineError, StateError, WeightTransferError
from parallelkit.plugin import EngineCommit
from parallelkit_vllm.clients.options import AttachOptions
from parallelkit_vllm.clients.settings import (
    check_backend,
    engine_name,
    join_seconds,
    version_number,
)
from parallelkit_vllm.commit import EngineCalls, check_ready, commit, halt
from parallelkit_vllm.handles import OfflineHandle
from parallelkit_vllm.service import members_of
from parallelkit_vllm.versions import check_version, takes

#: How often a call that waits looks whether the engine is alive, in seconds.
_LOOK_SECONDS: Final = 0.1
_HALT_SECONDS: Final = 4.0
_UPDATE: Final = "an update"

_IN_PROCESS: Final = (
    "this LLM runs its engine in this process, which vLLM changes for itself (default process "
    "group, threads), so a publisher does not live beside it. Start it with "
    "VLLM_ENABLE_V1_MULTIPROCESSING=1, vLLM's default; or publish from another process and follow "
    "from this one: pk.subscribe_weights(llm, ticket)"
)


class OfflineEngine:
    """An `EngineClient`. From `begin` to the end of an update it has the engine alone."""

    def __init__(self, llm: Any, options: Mapping[str, object]) -> None:
        """
        Raises:
            EngineError: the engine runs in this process, was started without our weight-transfer
                engine, has data-parallel replicas, or an option is wrong.
            EngineVersionError: vLLM is too old.
        """
        check_version()
        self._options = AttachOptions.of(options, what="attach(LLM)", also={})
        self.name = engine_name(self._options.name, "LLM")
        if hasattr(llm.llm_engine.engine_core, "engine_core"):
            raise EngineError(f"{self.name}: {_IN_PROCESS}")
        config = llm.llm_engine.vllm_config
        check_backend(config, self.name, "LLM")
        replicas = int(getattr(config.parallel_config, "data_parallel_size", 1))
        if replicas > 1:
            raise EngineError(
                f"{self.name} has {replicas} data-parallel replicas: attach a server or an AsyncLLM"
            )
        self.members = members_of(llm.llm_engine)
        self.handle = OfflineHandle(self.name, llm)
        self._engine = Coroutines(llm)

    def init(self, ticket: str, *, timeout: float) -> None:
        """See `EngineClient`."""
        deadline = time.monotonic() + timeout
        self.handle.take(_UPDATE, timeout)
        try:
            self._refuse_hanging()
            asyncio.run(self._init(ticket, deadline))
        finally:
            self.handle.give_up(_UPDATE)

    def begin(self, version: int, *, timeout: float) -> None:
        """See `EngineClient`; waits for what is being generated."""
        deadline = time.monotonic() + timeout
        self.handle.take(_UPDATE, timeout)
        try:
            self._refuse_hanging()
            ours = self.handle.state == "quarantined"
            asyncio.run(check_ready(self._engine, deadline=deadline, name=self.name, ours=ours))
        except BaseException:
            self.handle.give_up(_UPDATE)
            raise

    def commit(self, version: int, *, timeout: float) -> EngineCommit:
        """See `EngineClient`."""
        shuts = self.handle.shuts
        work = commit(
            self._engine,
            version,
            cache=self._options.cache,
            pause=self._options.pause,
            deadline=time.monotonic() + timeout,
            name=self.name,
            door=self.handle,
        )
        try:
            done = asyncio.run(work)
            self.handle.moved(version, shuts)
        finally:
            self.handle.give_up(_UPDATE)
        return done

    def abort(self, version: int, reason: str, *, timeout: float) -> None:
        """See `EngineClient`; nothing was touched."""
        self.handle.give_up(_UPDATE)

    def quarantine(self, reason: str) -> None:
        """See `EngineClient`."""
        self.handle.shut(reason)
        try:
            if not self._engine.hanging:
                end = time.monotonic() + _HALT_SECONDS
                asyncio.run(halt(self._engine, deadline=end, name=self.name))
        except WeightTransferError as error:
            self.handle.shut(f"{reason} (and what was in flight could not be ended: {error})")
        finally:
            self.handle.give_up(_UPDATE)

    def version(self, *, timeout: float) -> int:
        """See `EngineClient`."""
        if not hasattr(self._engine, "get_weight_version"):
            return self.handle.version
        calls = EngineCalls(self._engine, self.name)
        end = time.monotonic() + timeout
        self.handle.take("version()", timeout)
        try:
            work = self._served(calls, end)
            return version_number(asyncio.run(work))
        finally:
            self.handle.give_up("version()")

    def close(self) -> None:
        """See `EngineClient`."""

    async def _init(self, ticket: str, deadline: float) -> None:
        ours = self.handle.state == "quarantined"
        await check_ready(self._engine, deadline=deadline, name=self.name, ours=ours)
        seconds = join_seconds(deadline - time.monotonic())
        calls = EngineCalls(self._engine, self.name)
        call = self._engine.init_weight_transfer_engine(ticket, seconds)
        await calls.run("init_weight_transfer_engine", call, deadline)

    async def _served(self, calls: EngineCalls, deadline: float) -> str:
        call = self._engine.get_weight_version()
        return str(await calls.run("get_weight_version", call, deadline))

    def _refuse_hanging(self) -> None:
        if self._engine.hanging:
            raise StateError(
                f"{self.name}: {', '.join(self._engine.hanging)} of an earlier call has not "
                "returned yet: wait for it, or start the engine again"
            )


class Coroutines:
    """An `LLM`, as `parallelkit_vllm.commit` wants an engine: each call in a thread.

    One call at a time may be made, as vLLM's client of the engine's process is not thread safe.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._core = llm.llm_engine.engine_core
        self._running: dict[threading.Thread, str] = {}

    @property
    def errored(self) -> bool:
        """Whether the engine's process is gone."""
        return bool(self._core.resources.engine_dead)

    @property
    def dead_error(self) -> str:
        return "its process has ended"

    @property
    def hanging(self) -> list[str]:
        """Calls that nobody waits for any more, and that have not returned."""
        return sorted({what for thread, what in self._running.items() if thread.is_alive()})

    async def is_sleeping(self) -> bool:
        return bool(await self._call("is_sleeping", self._core.is_sleeping))

    async def init_weight_transfer_engine(self, ticket: str, seconds: float) -> None:
        request = {"init_info": {"ticket": ticket, "timeout": seconds}}
        await self._call(
            "init_weight_transfer_engine",
            lambda: self._llm.init_weight_transfer_engine(request),
        )

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        await self._utility("pause_scheduler", mode, clear_cache)

    async def resume_generation(self) -> None:
        await self._utility("resume_scheduler")

    async def start_weight_update(self) -> None:
        await self._call("start_weight_update", self._llm.start_weight_update)

    async def update_weights(self, request: Any) -> None:
        info = {"update_info": request.update_info}
        await self._call("update_weights", lambda: self._llm.update_weights(info))

    @property
    def finish_weight_update(self) -> Callable[..., Coroutine[Any, Any, None]]:
        """With `weight_version` where this vLLM has it."""
        finish = self._llm.finish_weight_update

        async def with_version(weight_version: str | None = None) -> None:
            await self._call("finish_weight_update", lambda: finish(weight_version))

        async def without() -> None:
            await self._call("finish_weight_update", finish)

        return with_version if takes(finish, "weight_version") else without

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        reset = self._core.reset_prefix_cache
        done = await self._call("reset_prefix_cache", lambda: reset(reset_running_requests))
        return done is not False

    @property
    def get_weight_version(self) -> Callable[[], Coroutine[Any, Any, str]]:
        """An `AttributeError` before vLLM 0.27, as of an `AsyncLLM`."""
        get = self._core.get_weight_version

        async def served() -> str:
            return str(await self._call("get_weight_version", get))

        return served

    async def _utility(self, name: str, *arguments: Any) -> Any:
        return await self._call(name, lambda: self._core.call_utility(name, *arguments))

    async def _call(self, what: str, function: Callable[[], Any]) -> Any:
        """Run a blocking call.

        Raises:
            RuntimeError: the engine died meanwhile; the call itself never returns then.
        """
        answer: list[Any] = []
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def run() -> None:
            try:
                answer.append((function(), None))
            except BaseException as error:
                answer.append((None, error))
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(ended.set)

        thread = threading.Thread(target=run, name=f"parallelkit {what}", daemon=True)
        self._running = {t: w for t, w in self._running.items() if t.is_alive()}
        self._running[thread] = what
        thread.start()
        while not answer:
            if self.errored:
                self._running.pop(thread, None)
                self._release()
                raise RuntimeError(self.dead_error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), _LOOK_SECONDS)
        self._running.pop(thread, None)
        value, error = answer[0]
        if error is not None:
            raise error
        return value

    def _release(self) -> None:
        """Let threads go that wait in vLLM for answers of an engine that is dead."""
        for future in list(getattr(self._core, "utility_results", {}).values()):
            with contextlib.suppress(InvalidStateError):
                future.set_exception(RuntimeError(self.dead_error))
