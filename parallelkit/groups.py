"""Open the default process group, once, on whichever framework was chosen.

The launcher's variables are read and frozen before any framework is imported, since importing
one may write some of them. Nothing here writes `os.environ`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Mapping
from typing import Any, Final, NoReturn

import attrs

from parallelkit import hooks
from parallelkit.counted import LIFE, CountedGroup
from parallelkit.environ import launcher_identity
from parallelkit.errors import (
    AlreadyInitializedError,
    LaunchError,
    NotInitializedError,
    PlanError,
)
from parallelkit.launch import LaunchInfo
from parallelkit.loader import PluginManager, default_manager
from parallelkit.meeting.scheduler import serve
from parallelkit.plan import ParallelPlan
from parallelkit.protocols import ProcessGroup
from parallelkit.ranks import compare_plugins
from parallelkit.selection import Selection, require, select
from parallelkit.specs import GroupSpec, ProbeRequest, check_timeout, device_name

DEFAULT_TIMEOUT: Final = 60.0


_open: CountedGroup | None = None
_at_exit = False


def init_process_group(
    framework: str = "auto",
    backend: str = "auto",
    device: str = "auto",
    rank: int | None = None,
    world_size: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    *,
    plan: ParallelPlan | None = None,
    manager: PluginManager | None = None,
) -> ProcessGroup:
    """Open the default process group; what is not said is detected, and `explain()` says how.

    Collective: every rank of the job calls it. It blocks until all ranks have arrived, up to
    `timeout` seconds. The same call again returns the same group and counts; the last `close`
    closes. A group that the script made before, by the framework's own call, is adopted and left
    alive.

    Args:
        framework: `"torch"`, `"mindspore"`, a third party's name. Auto: what the launcher
            implies, then what is imported already, then the highest score.
        backend: `"gloo"`, `"nccl"`, ...; auto: the framework's for the device.
        device: `"cpu"`, `"cuda"`, `"cuda:1"`, ..., or the framework's own device object; auto:
            the best there is, by local rank.
        rank, world_size, master_addr, master_port: override the launcher. Without a port, rank 0
            takes a free one and publishes it by the launcher's rendezvous file.
        timeout: seconds, for the rendezvous and then for each collective.
        plan: what `parallel_context` will be asked for. With it, a plan of another world size, and
            a mode or an axis that the backend cannot run, are errors before the rendezvous.
        manager: plugins to use, the process's own by default.

    In the extra process in which msrun runs the script as its scheduler, this call does the
    scheduler's work until all workers have left, and then ends the process.

    Raises:
        AlreadyInitializedError: a group is open with another specification.
        LaunchError: the launcher's variables are partial or contradict each other.
        RendezvousTimeoutError, PortInUseError, DeviceError: as their names say.
        RankMismatchError: ranks have different plugins, versions, or chose differently.
        PlanError, UnsupportedFeatureError: the plan cannot be run here.

    Example:
        >>> with init_process_group(device="cpu") as group:  # doctest: +SKIP
        ...     total = group.all_reduce(x)
    """
    global _open
    check_timeout(timeout)
    device = device_name(device)
    with LIFE:
        held = _live()
        if held is not None:
            given = {
                "framework": framework,
                "backend": backend,
                "device": device,
                "rank": rank,
                "world_size": world_size,
                "master_addr": master_addr,
                "master_port": master_port,
                "timeout": timeout,
            }
            _same_or_raise(held, given)
            _check_plan(plan, held.world_size, held.selection)
            if plan is not None and plan != (held.plan or plan):
                raise AlreadyInitializedError(
                    f"a process group is open already, for the plan\n{held.plan}\nand this call "
                    f"is for\n{plan}\nClose the first, or give the plan to parallel_context"
                )
            held.plan = plan or held.plan
            return held.open_again()
        manager = manager or default_manager()
        launch = _read_environ(
            rank=rank, world_size=world_size, master_addr=master_addr, master_port=master_port
        )
        if launch.is_scheduler:
            _schedule(launch, framework, timeout)
        request = ProbeRequest(framework=framework, backend=backend, device=device, launch=launch)
        selection = select(request, manager=manager)
        _check_plan(plan, launch.world_size, selection)
        spec = _spec(selection, launch, timeout)
        inner = hooks.init_process_group(selection.winner, spec, manager=manager)
        group = CountedGroup(inner, spec, selection, manager)
        group.plan = plan
        try:
            compare_plugins(group, manager.plugins, selection)
        except BaseException:
            with contextlib.suppress(Exception):
                inner.close()
            raise
        _open = group
        _close_at_exit()
        return group


def current_group() -> ProcessGroup:
    """Return the open default group. Not collective.

    Raises:
        NotInitializedError: none is open; a rank is never guessed to be 0.
    """
    held = _live()
    if held is None:
        raise NotInitializedError(
            "no process group is open; call parallelkit.init_process_group() first"
        )
    return held


def read_launch() -> LaunchInfo:
    """Return what the launcher said: of the open group if there is one, else of `os.environ`."""
    held = _live()
    return held.spec.launch if held is not None else _read_environ()


def open_group() -> CountedGroup | None:
    """Return the open default group or None, for reports."""
    return _live()


def reset() -> None:
    """Close whatever is open, however often it was opened. For tests."""
    held = _live()
    if held is not None:
        held.close_for_all()


# --- inner parts -------------------------------------------------------------------------------


def _live() -> CountedGroup | None:
    held = _open
    return None if held is None or held.closed else held


def _read_environ(**given: Any) -> LaunchInfo:
    """Read the launcher's variables, with what tells this run and user from others."""
    return LaunchInfo.from_environ(
        os.environ, uid=os.geteuid(), run_identity=launcher_identity(), **given
    )


def _schedule(launch: LaunchInfo, framework: str, timeout: float) -> NoReturn:
    """Be msrun's scheduler, which runs the same script and is no rank, and end the process."""
    if framework not in ("auto", launch.framework):
        raise LaunchError(
            f"this process is the scheduler that {launch.launcher} started (MS_ROLE=MS_SCHED): it "
            f"has no rank, and {framework} has no use for it. Leave before init_process_group "
            "there, or start with torchrun or `parallelkit run`, which need no scheduler"
        )
    if launch.world_size == 1:  # one worker meets nobody
        raise SystemExit(0)
    raise SystemExit(serve(launch, timeout))


def _check_plan(plan: ParallelPlan | None, world_size: int, selection: Selection) -> None:
    """Raise if a plan cannot be run by these ranks on this backend."""
    if plan is None:
        return
    if not isinstance(plan, ParallelPlan):
        raise PlanError(f"plan is {plan!r:.100}; it is what pk.plan returned")
    plan.check_group(
        world_size,
        f"{world_size} were started; plan with pk.plan({world_size}, ...), or start "
        f"{plan.world_size}",
    )
    require(selection.candidate, selection.winner, set(plan.features()))


def _spec(selection: Selection, launch: LaunchInfo, timeout: float) -> GroupSpec:
    device = selection.device
    if ":" not in device and device != "cpu":
        device = f"{device}:{launch.local_rank}"
    return GroupSpec(
        framework=selection.candidate.framework,
        backend=selection.backend,
        device=device,
        rank=launch.rank,
        world_size=launch.world_size,
        local_rank=launch.local_rank,
        local_world_size=launch.local_world_size,
        master_addr=launch.master_addr,
        master_port=launch.master_port,
        timeout=timeout,
        launch=launch,
    )


def _same_or_raise(held: CountedGroup, given: Mapping[str, Any]) -> None:
    """Compare what this call says with what is open; what it leaves open agrees with anything.

    The group's own facts count where it has them: one that was adopted may differ from the spec.
    """
    have = {**attrs.asdict(held.spec, recurse=False), "rank": held.rank}
    have |= {"world_size": held.world_size, "backend": held.backend, "timeout": held.timeout}
    other = {
        name: value
        for name, value in given.items()
        if value not in (None, "auto") and not _agrees(name, value, have[name], held)
    }
    if other:
        opened = ", ".join(f"{name}={have[name]!r}" for name in given)
        asked = ", ".join(f"{name}={value!r}" for name, value in other.items())
        raise AlreadyInitializedError(
            f"a process group is open already, with {opened}; this call asks for {asked}. "
            "Close the first, or ask for the same"
        )


def _agrees(name: str, value: Any, have: Any, held: CountedGroup) -> bool:
    if name == "timeout":  # its default says nothing
        return bool(value in (have, DEFAULT_TIMEOUT))
    if name == "framework":
        return value in (have, held.selection.candidate.name, held.selection.winner.name)
    if name == "device" and ":" not in str(value):
        return bool(value == str(have).partition(":")[0])
    if name == "master_port" and value == 0:
        return True
    return bool(value == have)


def _close_at_exit() -> None:
    global _at_exit
    if not _at_exit:
        _at_exit = True
        atexit.register(reset)
