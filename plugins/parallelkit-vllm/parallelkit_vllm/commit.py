"""Put a staged version in place in a running engine: pause, update, caches, version, resume.

Written once, over the coroutines of vLLM's `EngineClient`: the guard runs it inside the server,
the client of an `AsyncLLM` on the engine's loop. Generation never runs while an update is open
(the layers are empty then, and the engine dies of it), and it is resumed on every path.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
import weakref
from collections.abc import Awaitable, Coroutine
from types import SimpleNamespace
from typing import Any, Final, Protocol

from parallelkit.errors import (
    EngineCommitError,
    ParallelKitError,
    PeerLostError,
    StateError,
    UpdateTimeoutError,
)
from parallelkit.plugin import EngineCommit
from parallelkit_vllm.versions import takes

#: What ending a failed commit may take beyond its deadline, in seconds.
RECOVERY_SECONDS: Final = 5.0

#: What a worker leaves of the deadline, so that its own error arrives before ours, in seconds.
_WORKER_MARGIN: Final = 1.0

_ERROR_CHARACTERS: Final = 2000


class Door(Protocol):
    """What stands between users and the engine: a server's guard, or a handle."""

    def shut(self, reason: str) -> None:
        """Let nobody in from now on, and say why. At once; called on the engine's loop."""

    async def empty(self, seconds: float) -> None:
        """Wait for those inside to leave, so many seconds; then end them."""


#: Calls that did not return in time and may yet do something, by engine.
_hanging: weakref.WeakKeyDictionary[Any, dict[asyncio.Future[Any], str]] = (
    weakref.WeakKeyDictionary()
)


async def commit(
    engine: Any,
    version: int,
    *,
    cache: str,
    pause: str,
    deadline: float,
    name: str = "the engine",
    door: Door | None = None,
) -> EngineCommit:
    """Let every worker of `engine` put its staged `version` in place.

    Cancelled, it ends like one that failed. Who must not end it runs it in a task of its own.

    Args:
        engine: vLLM's `AsyncLLM`, or anything with the same coroutines. Called on its loop.
        version: staged by every worker.
        cache: `reset` or `keep`.
        pause: `keep`, `wait` or `abort`: what becomes of requests in flight.
        deadline: monotonic seconds; after a failure up to `RECOVERY_SECONDS` more are spent on
            ending what is in flight and on resuming.
        name: for errors.
        door: shut before anything else where a step fails, so that nobody gets tokens of weights
            that are of no version.

    Raises:
        StateError: the engine is asleep or paused, or an earlier commit hangs in it; nothing was
            touched.
        PeerLostError: the engine is dead.
        UpdateTimeoutError: a step did not end by the deadline. Requests in flight were ended.
        EngineCommitError: a step failed, by name. Requests in flight were ended.
    """
    await check_ready(engine, deadline=deadline, name=name)
    steps = EngineCalls(engine, name)
    notes: list[str] = []
    began = time.monotonic()
    try:
        freeze = engine.pause_generation(mode=pause, clear_cache=cache == "reset")
        await steps.run("pause", freeze, deadline)
        await steps.run("start_weight_update", engine.start_weight_update(), deadline)
        await steps.run("update_weights", _update(engine, version, deadline), deadline)
        await steps.run("finish_weight_update", _finish(engine, version), deadline)
        if cache == "reset":
            await steps.run("reset_prefix_cache", _reset(engine), deadline)
        served = await steps.run("get_weight_version", _served(engine, notes), deadline)
        if served not in ("", str(version)):
            raise EngineCommitError(
                f"{name} says that it serves version {served!r} after a commit of {version}",
                step="get_weight_version",
            )
        await steps.run("resume", engine.resume_generation(), deadline)
    except BaseException as error:
        await _recover(steps, error, door)
        if engine.errored and isinstance(error, EngineCommitError):  # its death is known only now
            raise PeerLostError(f"{name} died: {error}", peers=[name]) from error
        raise
    return EngineCommit(
        pause_seconds=time.monotonic() - began,
        cache="reset" if cache == "reset" else "kept",
        weight_version=served,
        notes=tuple(notes),
    )


async def check_ready(
    engine: Any, *, deadline: float, name: str = "the engine", ours: bool = False
) -> None:
    """See that a commit could begin now.

    Args:
        ours: a pause may be left of a commit that failed: resume first. Only where nobody can
            generate.

    Raises:
        StateError: it is asleep or paused, or an earlier commit hangs in it.
        PeerLostError: it is dead.
        UpdateTimeoutError: it did not answer by the deadline.
    """
    hanging = _hanging.get(engine)
    if hanging:
        raise StateError(
            f"{name}: {', '.join(sorted(set(hanging.values())))} of an earlier call has not "
            "returned yet: wait for it, or start the engine again"
        )
    _refuse_dead(engine, name)
    steps = EngineCalls(engine, name)
    if ours:
        await steps.run("resume", engine.resume_generation(), deadline)
    if await steps.run("is_sleeping", engine.is_sleeping(), deadline):
        raise StateError(
            f"{name} is asleep or paused, so it takes no update: wake it up (wake_up) or resume "
            "it (resume_generation) first"
        )


async def halt(
    engine: Any,
    *,
    deadline: float,
    name: str = "the engine",
    door: Door | None = None,
) -> None:
    """End every request in flight, the door being shut; the engine is running afterwards.

    Raises:
        PeerLostError, UpdateTimeoutError, EngineCommitError: as `commit`; the door stays shut.
    """
    _refuse_dead(engine, name)
    steps = EngineCalls(engine, name)
    try:
        await steps.run("abort", engine.pause_generation(mode="abort"), deadline)
        if door is not None:
            await door.empty(max((deadline - time.monotonic()) / 2, 0.1))
    finally:
        await steps.run("resume", engine.resume_generation(), deadline)


async def _recover(steps: EngineCalls, error: BaseException, door: Door | None) -> None:
    """A commit failed: shut the door, end what is in flight, resume. Raises nothing."""
    if door is not None:
        door.shut(f"{type(error).__name__}: {error}")
    deadline = time.monotonic() + RECOVERY_SECONDS
    if "start_weight_update" in steps.begun:
        # Where one worker failed the others have the update open still. This closes it there; the
        # one that failed closed its own, and only says so.
        with contextlib.suppress(Exception):
            await steps.run("finish", steps.engine.finish_weight_update(), deadline)
    try:
        await halt(steps.engine, deadline=deadline, name=steps.name, door=door)
    except Exception as worse:
        error.add_note(f"and ending what was in flight: {worse}")


def _update(engine: Any, version: int, deadline: float) -> Coroutine[Any, Any, Any]:
    seconds = max(deadline - time.monotonic() - _WORKER_MARGIN, 0.1)
    info = {"version": version, "timeout": seconds}
    if "vllm" in sys.modules:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest as Request

        return engine.update_weights(Request(update_info=info))  # type: ignore[no-any-return]
    return engine.update_weights(SimpleNamespace(update_info=info))  # type: ignore[no-any-return]


def _finish(engine: Any, version: int) -> Coroutine[Any, Any, Any]:
    if takes(engine.finish_weight_update, "weight_version"):  # from vLLM 0.27
        return engine.finish_weight_update(weight_version=str(version))  # type: ignore[no-any-return]
    return engine.finish_weight_update()  # type: ignore[no-any-return]


async def _reset(engine: Any) -> None:
    """Forget every cached prefix; the pause did so already, where its mode lets it."""
    reset = engine.reset_prefix_cache
    whole = takes(reset, "reset_running_requests")
    done = await (reset(reset_running_requests=True) if whole else reset())
    if done is False:
        raise RuntimeError("the prefix cache was not reset")


async def _served(engine: Any, notes: list[str]) -> str:
    if not hasattr(engine, "get_weight_version"):
        notes.append("this vLLM keeps no weight version (it came with 0.27)")
        return ""
    return str(await engine.get_weight_version())


def _refuse_dead(engine: Any, name: str) -> None:
    if engine.errored:
        raise PeerLostError(f"{name} is dead: {engine.dead_error}", peers=[name])


class EngineCalls:
    """Calls of one engine, each with the deadline; one that is late is left, not cancelled."""

    def __init__(self, engine: Any, name: str) -> None:
        self.engine = engine
        self.name = name
        self.begun: list[str] = []

    async def run(self, step: str, call: Awaitable[Any], deadline: float) -> Any:
        self.begun.append(step)
        task = asyncio.ensure_future(call)
        began = time.monotonic()
        try:
            await asyncio.wait({task}, timeout=max(deadline - began, 0.0))
        finally:
            if not task.done():
                self._leave(step, task)
        if not task.done():
            raise UpdateTimeoutError(
                f"{self.name}: {step} did not end within {time.monotonic() - began:.1f} s",
                missing=[self.name],
            )
        try:
            return task.result()
        except ParallelKitError:
            raise
        except Exception as error:
            if self.engine.errored:
                raise PeerLostError(
                    f"{self.name} died during {step}: {_text(error)}", peers=[self.name]
                ) from error
            raise EngineCommitError(
                f"{self.name}: {step} failed: {_text(error)}", step=step
            ) from error

    def _leave(self, step: str, task: asyncio.Future[Any]) -> None:
        hanging = _hanging.setdefault(self.engine, {})
        hanging[task] = step

        def ended(late: asyncio.Future[Any]) -> None:
            hanging.pop(late, None)
            if not late.cancelled():
                late.exception()  # heard, so that the loop does not report it

        task.add_done_callback(ended)


def _text(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:_ERROR_CHARACTERS]
