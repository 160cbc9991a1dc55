"""How MindSpore's default group is opened: ranks meet on our own connections first.

So a rank that is missing is an error within the timeout, and named. MindSpore's part comes after
it, over a store of its own on rank 0, and needs no scheduler. Where a scheduler of MindSpore's is
all there is, MindSpore's own start is used, within the same time.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, final

import attrs
import msgspec

from parallelkit.environ import scoped_environ
from parallelkit.errors import GroupError, RendezvousTimeoutError, UnsupportedFeatureError
from parallelkit.meeting import (
    Board,
    Deadline,
    Place,
    Seat,
    Star,
    bind,
    enter,
    meet,
    open_door,
    own_address,
    resolve,
    run_identity,
)
from parallelkit.meeting.boards import Known
from parallelkit.meeting.clock import unreachable_error
from parallelkit.meeting.scheduler import Client, ForeignScheduler
from parallelkit.specs import GroupSpec
from parallelkit_mindspore import life, native, runtime

_PLACE_BYTES: Final = 256
#: What `import mindspore` itself writes where nothing was set.
_WRITTEN: Final = {"HCCL_CONNECT_TIMEOUT": "600"}
_TRIES: Final = 5  # ports that rank 0 tries for MindSpore's store
_SLOW: Final = 90.0  # seconds beyond the timeout that MindSpore's own start may need to give up


@attrs.frozen
class World:
    """An open default group.

    Attributes:
        star: the connections between its ranks.
        opened: parallelkit opened MindSpore's group, and closes it.
        adopted: the user opened it.
        leave: to be called at the very end.
    """

    star: Star
    opened: bool = False
    adopted: bool = False
    leave: Callable[[], None] = lambda: None
    store: Any = attrs.field(default=None, repr=False)


def environment(backend: str, timeout: float) -> dict[str, str | None]:
    """Variables by which a backend learns its time limit; one that the user set stays."""
    seconds = str(max(1, math.ceil(timeout)))
    wanted = {
        "mccl": {"MS_CPU_COMM_OP_TIMEOUT": seconds},
        "nccl": {},
        "hccl": {
            # HCCL takes 120 to 7200 seconds
            "HCCL_CONNECT_TIMEOUT": str(min(7200, max(120, math.ceil(timeout)))),
            "HCCL_EXEC_TIMEOUT": seconds,
        },
    }[backend]
    have = {name: os.environ.get(name) for name in wanted}
    theirs = {name: value for name, value in have.items() if value != _WRITTEN.get(name)}
    return {name: theirs.get(name) or value for name, value in wanted.items()}


def open_world(spec: GroupSpec) -> World:
    """Bring all ranks together and open MindSpore's default group. Collective.

    Blocks up to `spec.timeout` seconds for the ranks to meet, and as long again for MindSpore. A
    world of one opens nothing.

    Raises:
        PortInUseError, RendezvousTimeoutError: as their names say.
        GroupError: the ranks met, and MindSpore could not connect them.
    """
    if spec.world_size == 1:
        return World(Star(0, 1, spec.timeout))
    board: Board | None = None
    address, leave = None, _nothing
    if spec.launch.launcher == "msrun" and spec.launch.provenance.get("master_port") != "argument":
        try:
            client = _scheduler(spec)
        except ForeignScheduler:
            return _open_by_cluster(spec)
        board, address, leave = client, client.host, client.leave
    elif spec.launch.agent_store:
        board, address = Agent(spec), _address(spec)
    try:
        star = meet(spec, board=board, address=address)
        try:
            store = _open_by_store(spec, star)
            return World(star, opened=True, leave=leave, store=store)
        except BaseException:
            star.leave(1.0)
            raise
    except BaseException:
        leave()
        raise


def adopt_world(spec: GroupSpec) -> World:
    """Connect the ranks of a default group that is open already. Collective.

    Raises:
        RendezvousTimeoutError: a rank did not take part.
    """
    if spec.world_size == 1:
        return World(Star(0, 1, spec.timeout), adopted=True)
    return World(_connect_by_native(spec), adopted=True)


# --- with a store ------------------------------------------------------------------------------


def _open_by_store(spec: GroupSpec, star: Star) -> Any:
    """Open MindSpore's group over a store on rank 0; returns the store, which must stay."""
    life.opened()
    store, problem = None, ""
    try:
        with scoped_environ(**environment(spec.backend, spec.timeout)):
            store = _open_store(spec, star)
            try:
                native.init(spec.backend, store, spec.rank, spec.world_size, spec.timeout)
                native.name_default_group(spec.rank, spec.world_size)
            except (RuntimeError, ValueError) as error:
                problem = str(error).splitlines()[0][:300]
            _check_all(star, f"opening {spec.backend}", problem, spec.timeout + _SLOW)
            problem = _first_operation()
            _check_all(star, f"the first operation of {spec.backend}", problem, 2 * spec.timeout)
    except BaseException:
        life.closed()
        raise
    return store


def _open_store(spec: GroupSpec, star: Star) -> Any:
    store, port, problem = None, 0, ""
    if spec.rank == 0:
        for _ in range(_TRIES):
            with bind(star.host) as free:  # MindSpore takes no port 0 and no socket
                port = free.getsockname()[1]
            try:
                store = native.open_store(star.host, port, spec.world_size, True, spec.timeout)
                break
            except RuntimeError as error:
                problem = str(error).splitlines()[0][:300]
    said = Place(star.host, port if store is not None else 0, problem)
    data = star.send_bytes("MindSpore's store", msgspec.msgpack.encode(said), 0, 1024)
    place = msgspec.msgpack.decode(data, type=Place)
    if not place.port:
        raise GroupError(f"MindSpore's store could not be opened on rank 0: {place.nonce}")
    if store is None:
        try:
            where = (place.host, place.port)
            store = native.open_store(*where, spec.world_size, False, spec.timeout)
        except RuntimeError as error:
            problem = str(error).splitlines()[0][:300]
    else:
        problem = ""
    _check_all(star, f"MindSpore's store at {place.host}:{place.port}", problem, 2 * spec.timeout)
    return store


def _first_operation() -> str:
    """Connect the ranks by a first operation, which also fixes MCCL's time limit."""
    ms = runtime.mindspore()
    try:
        native.all_reduce(ms.Tensor([1.0], ms.float32), "sum", native.world_group())
        runtime.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0][:300]
    return ""


def _check_all(star: Star, what: str, problem: str, timeout: float) -> None:
    """Let every rank hear of every rank's problem."""
    rows = star.exchange(what, problem.encode(errors="replace"), timeout)
    failed = [f"rank {r}: {row.decode(errors='replace')}" for r, row in enumerate(rows) if row]
    if failed:
        raise GroupError(
            f"the ranks met at {star.where}, but {what} failed; {'; '.join(failed[:8])}. If the "
            "host name resolves to an address that peers cannot reach, set master_addr "
            "(MASTER_ADDR) to one that they can"
        )


# --- with a scheduler of MindSpore's -----------------------------------------------------------


def _open_by_cluster(spec: GroupSpec) -> World:
    """Start as MindSpore's scheduler wants it; it is not ours, so nobody can be named."""
    limits = environment(spec.backend, spec.timeout)
    limits["MS_TOPO_TIMEOUT"] = str(max(1, math.ceil(spec.timeout)))
    life.opened()
    began = time.monotonic()
    try:
        with scoped_environ(**limits):
            native.init_cluster(spec.backend)
            have = (native.rank(), native.world_size())
            if have != (spec.rank, spec.world_size):
                raise GroupError(
                    f"MindSpore's scheduler made this process rank {have[0]} of {have[1]}, and "
                    f"the environment says rank {spec.rank} of {spec.world_size}; set MS_NODE_ID "
                    "and MS_WORKER_NUM to what they are"
                )
            native.name_default_group(spec.rank, spec.world_size)
            return World(_connect_by_native(spec), opened=True)
    except RuntimeError as error:
        life.closed()
        raise RendezvousTimeoutError(
            f"rank {spec.rank}: MindSpore's own cluster at {spec.master_addr}:{spec.master_port} "
            f"did not come about within {time.monotonic() - began:.0f} s: "
            f"{str(error).splitlines()[0]} Check that the scheduler and every worker run, or "
            "start with `parallelkit run`, whose errors name who is missing"
        ) from error
    except BaseException:
        life.closed()
        raise


def _connect_by_native(spec: GroupSpec) -> Star:
    """Tell where rank 0 listens by a broadcast of MindSpore's, then meet there."""
    seat = Seat(
        rank=spec.rank,
        world_size=spec.world_size,
        timeout=spec.timeout,
        run=run_identity(spec),
    )
    door = open_door(_address(spec)) if spec.rank == 0 else None
    data = msgspec.msgpack.encode(door.place) if door is not None else b""
    ms = runtime.mindspore()
    numbers = list(data.ljust(_PLACE_BYTES, b"\xc0"))  # msgpack's null, cut off again below
    try:
        with scoped_environ(**environment(spec.backend, spec.timeout)):
            sent = native.broadcast(ms.Tensor(numbers, ms.int32), 0, native.world_group())
            said = bytes(sent.asnumpy().astype("uint8").tolist()).rstrip(b"\xc0")
            place = msgspec.msgpack.decode(said, type=Place)
    except (RuntimeError, ValueError, msgspec.DecodeError) as error:
        if door is not None:
            door.listener.close()
        raise RendezvousTimeoutError(
            f"rank {spec.rank}: the group that is open already could not be used: "
            f"{str(error).splitlines()[0]} Call init_process_group on every rank"
        ) from error
    return enter(seat, Known(place), door)


# --- boards ------------------------------------------------------------------------------------


def _scheduler(spec: GroupSpec) -> Client:
    run = run_identity(spec)
    seat = Seat(rank=spec.rank, world_size=spec.world_size, timeout=spec.timeout, run=run)
    host, port = spec.master_addr or "127.0.0.1", spec.master_port or 0
    return Client(seat, host, port, Deadline(spec.timeout))


@final
class Agent:
    """torchrun's agent, whose store tells the others where rank 0 listens."""

    def __init__(self, spec: GroupSpec) -> None:
        """Join the store.

        Raises:
            UnsupportedFeatureError: torch is not installed here.
            RendezvousTimeoutError: the agent does not answer.
        """
        self._where = f"{spec.master_addr}:{spec.master_port}"
        self._key = f"parallelkit/{run_identity(spec)}/mindspore"
        try:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]
        except ImportError as error:
            raise UnsupportedFeatureError(
                "under torchrun the ranks find each other by its agent's store, for which torch "
                "must be installed beside MindSpore; else start with `parallelkit run` or msrun"
            ) from error
        try:
            host = resolve(spec.master_addr or "127.0.0.1")
            limit = timedelta(seconds=spec.timeout)
            self._store: Any = TCPStore(
                host, spec.master_port or 0, None, False, limit, wait_for_workers=False
            )
        except (OSError, RuntimeError) as error:
            problem = str(error).splitlines()[0]
            raise unreachable_error(spec, self._where, problem, "torchrun's agent") from error

    def publish(self, place: Place) -> None:
        self._store.set(self._key, msgspec.json.encode(place).decode())

    def find(self) -> Place | None:
        if not self._store.check([self._key]):
            return None
        try:
            return msgspec.json.decode(self._store.get(self._key), type=Place)
        except msgspec.DecodeError:
            return None  # not rank 0's word

    def withdraw(self) -> None: ...

    def describe(self) -> str:
        return f"a place that torchrun's agent at {self._where} would tell"


def _address(spec: GroupSpec) -> str:
    """Where rank 0 listens for those who are told: loopback on one host."""
    if spec.local_world_size == spec.world_size:
        return "127.0.0.1"
    try:
        return own_address(spec.master_addr or socket.gethostname())
    except OSError as error:
        raise GroupError(
            f"rank 0 finds no way to {spec.master_addr!r} (master_addr, MASTER_ADDR): {error}"
        ) from error


def _nothing() -> None: ...
