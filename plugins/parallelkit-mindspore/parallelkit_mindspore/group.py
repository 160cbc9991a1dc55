"""Process groups over MindSpore: the default group, opened or adopted, and subgroups."""

from __future__ import annotations

import atexit
import contextlib
import sys
import time
from collections.abc import Sequence
from typing import Any, ClassVar, final

import msgspec

from parallelkit import arguments, plain
from parallelkit.errors import (
    AlreadyInitializedError,
    CollectiveError,
    GroupClosedError,
    NotPlainError,
    ParallelKitError,
    UnsupportedFeatureError,
    WrongThreadError,
)
from parallelkit.meeting import Place, Seat, Star, enter, open_door
from parallelkit.meeting.boards import Known
from parallelkit.protocols import Plain
from parallelkit.specs import GroupSpec
from parallelkit_mindspore import checks, devices, life, native, runtime
from parallelkit_mindspore.collectives import (
    Collectives,
    DeviceCollectives,
    HostCollectives,
    copied,
    native_failure,
)
from parallelkit_mindspore.rendezvous import World, adopt_world, open_world

_LEAVE_SECONDS = 10.0  # for the others to leave before rank 0's store goes
_LINGER_SECONDS = 5.0  # for the others' processes to end before rank 0's
_LOST_SECONDS = 1.5  # until MindSpore has noticed that rank 0 is gone


def init_process_group(spec: GroupSpec) -> MindSporeProcessGroup:
    """Open MindSpore's default group as `spec` says, or adopt the one the user opened before.

    Collective; blocks up to `spec.timeout` seconds for the ranks to meet, then as long for
    MindSpore. The environment is left as it was. A world of one opens nothing of MindSpore's.

    Raises:
        DeviceError, UnsupportedFeatureError: before anything is opened.
        PortInUseError, RendezvousTimeoutError: as their names say.
        AlreadyInitializedError: MindSpore's default group is another one than `spec` asks for,
            or this process had one of ours before: MindSpore can have one a process.
        GroupError: the ranks met but could not connect to each other.
        WrongThreadError: another thread uses MindSpore.
    """
    kind, index = devices.parse(spec)
    devices.check_backend(spec.backend, kind)
    if spec.world_size > 1:
        life.check_unused()
    ms = runtime.mindspore("init_process_group")
    if native.is_initialized():
        _compare(spec, kind)
        index = index if kind == "cpu" else int(ms.get_context("device_id"))
        device = kind if kind == "cpu" else f"{kind}:{index}"
        return _default_group(adopt_world(spec), spec, kind, device)
    device = devices.claim(kind, index)
    hook = sys.excepthook
    return _default_group(open_world(spec), spec, kind, device, hook)


def _compare(spec: GroupSpec, kind: str) -> None:
    """Raise unless the group that the user opened is what `spec` asks for."""
    have = (native.rank(), native.world_size(), native.backend(), native.device_target())
    want = (spec.rank, spec.world_size, spec.backend, native.TARGETS[kind])
    if have != want:
        raise AlreadyInitializedError(
            "MindSpore's default process group was opened before, with "
            f"rank {have[0]} of {have[1]} and {have[2]} on {have[3]}; parallelkit is asked for "
            f"rank {want[0]} of {want[1]} and {want[2]} on {want[3]}. Open it with the same "
            "values, or leave it to parallelkit"
        )


def _default_group(
    world: World, spec: GroupSpec, kind: str, device: str, hook: Any = None
) -> MindSporeProcessGroup:
    name = native.world_group() if world.opened or world.adopted else ""
    return MindSporeProcessGroup(
        world.star,
        name,
        kind,
        device=device,
        backend=spec.backend,
        local_rank=spec.local_rank,
        world=world,
        excepthook=hook,
    )


@final
class MindSporeProcessGroup:
    """A `parallelkit.protocols.ProcessGroup` over one of MindSpore's groups.

    For PyNative code: collectives take and give `mindspore.Tensor`s outside of compiled
    functions, in either mode. Results carry no gradient. MindSpore cannot compile them: within
    `mindspore.jit` and `construct` in graph mode its parser raises `RuntimeError` ("Unsupported
    exception type"); there use `ops.AllReduce(group=group.native)` and its like.

    On the CPU every call is compared across ranks first, the data goes over parallelkit's own
    connections, and a rank that comes too late gets an error. What the user sends by MindSpore's
    own operators, and what a graph sends, is not protected: there a rank that is late by more than
    the time limit computes with wrong values, and is told nothing. On Ascend and GPU the backend
    moves the data; that was never run.

    Used by one thread, the one that owns MindSpore.

    Attributes:
        ours: False for a group that the user opened, which stays open at `close`.
    """

    framework: ClassVar[str] = "mindspore"

    def __init__(
        self,
        star: Star,
        name: str,
        kind: str,
        *,
        device: str,
        backend: str,
        local_rank: int,
        world: World | None = None,
        world_ranks: Sequence[int] = (),
        excepthook: Any = None,
    ) -> None:
        """Wrap an open group; `init_process_group` and `subgroup` do.

        Args:
            star: connections between the ranks.
            name: MindSpore's name of the group, empty where it has none.
            kind: device type; device, backend, local_rank: facts.
            world: the default group; None for a subgroup.
            world_ranks: rank in the default group of each of this group's ranks.
            excepthook: what `sys.excepthook` was before MindSpore replaced it.
        """
        self._star = star
        self._name = name
        self._kind = kind
        self._device = device
        self._backend = backend
        self._local_rank = local_rank
        self._world = world
        self._world_ranks = list(world_ranks) or list(range(star.world_size))
        self._data: Collectives = HostCollectives(star)
        if kind != "cpu" and star.world_size > 1:
            self._data = DeviceCollectives(star, name, self._world_ranks)
        self._excepthooks = (excepthook, sys.excepthook)
        self._children: list[MindSporeProcessGroup] = []
        self._divisions = 0
        self._closed = False
        self.ours = world is None or not world.adopted
        atexit.register(self._at_exit)

    # --- facts

    @property
    def rank(self) -> int:
        return self._star.rank

    @property
    def world_size(self) -> int:
        return self._star.world_size

    @property
    def local_rank(self) -> int:
        return self._local_rank

    @property
    def device(self) -> str:
        return self._device

    @property
    def backend(self) -> str:
        return self._backend

    @property
    def timeout(self) -> float:
        return self._star.timeout

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def native(self) -> str | None:
        """MindSpore's name of the group, for `ops.AllReduce(group=...)`; None in a world of one.

        MindSpore orders a group's ranks by their rank in the default group.
        """
        self._check_open("native")
        return self._name or None

    # --- collectives

    def barrier(self, *, timeout: float | None = None) -> None:
        """Wait until every rank is here and its earlier work is done."""
        seconds = arguments.seconds(timeout, self.timeout)
        self._check_open("barrier()")
        self._data.barrier("barrier()", seconds)

    def all_reduce(self, x: Any, op: str = "sum") -> Any:
        """Combine `x` elementwise over ranks; `op` is sum, mean, max, min or product."""
        what = self._check_combined(f"all_reduce(op={op!r})", x, op)
        return self._data.all_reduce(what, x, op) if self._is_shared else copied(x, self._kind)

    def broadcast(self, x: Any, src: int = 0) -> Any:
        """Give every rank the `x` of rank `src`; shapes and dtypes must agree."""
        what = self._check(f"broadcast(src={arguments.source(src, self.world_size)})", x)
        return self._data.broadcast(what, x, src) if self._is_shared else copied(x, self._kind)

    def all_gather(self, x: Any) -> list[Any]:
        """Give every rank the list of all ranks' `x`, by rank; shapes must agree."""
        what = self._check("all_gather()", x)
        return self._data.all_gather(what, x) if self._is_shared else [copied(x, self._kind)]

    def reduce_scatter(self, x: Any, op: str = "sum") -> Any:
        """Combine `x` over ranks and keep this rank's slice of dim 0, which must divide evenly."""
        what = self._check_combined(f"reduce_scatter(op={op!r})", x, op)
        if not x.shape or x.shape[0] % self.world_size:
            raise CollectiveError(f"{what}: dim 0 must divide by the world size, {self.world_size}")
        return self._data.reduce_scatter(what, x, op) if self._is_shared else copied(x, self._kind)

    def broadcast_object(self, obj: Plain, src: int = 0, *, timeout: float | None = None) -> Plain:
        """Give every rank the plain object of rank `src`; msgpack, at most 64 MiB.

        Raises:
            NotPlainError: on `src`; the others raise `CollectiveError` with the reason.
        """
        seconds = arguments.seconds(timeout, self.timeout)
        what = f"broadcast_object(src={arguments.source(src, self.world_size)})"
        self._check_open(what)
        data, refused = b"", None
        if self.rank == src:
            try:
                data = b"+" + plain.encode(obj)
            except NotPlainError as error:  # the others wait: tell them, then raise
                data, refused = b"-" + str(error).encode(errors="replace"), error
        data = self._star.send_bytes(what, data, src, plain.MAX_BYTES + 1, seconds)
        if refused is not None:
            raise refused
        if not data.startswith(b"+"):
            said = data[1:].decode(errors="replace")
            raise CollectiveError(f"{what} failed: rank {src} said: {said}")
        return plain.decode(data[1:])

    def subgroup(self, ranks: Sequence[int]) -> MindSporeProcessGroup | None:
        """Make a group of some ranks. Collective over this group, members or not.

        Args:
            ranks: ranks of this group, each once; a rank's position is its rank in the new one.

        Returns:
            The new group on its members, else None. Closing this group closes it too.

        Raises:
            GroupError: a rank is given twice or does not exist, or the list is empty.
            UnsupportedFeatureError: ranks out of rising order on an accelerator.
            CollectiveError: ranks gave different lists, or members could not connect.
        """
        members = arguments.members(ranks, self.world_size)
        return self._divided(f"subgroup({members})", [members])

    def partition(self, parts: Sequence[Sequence[int]]) -> MindSporeProcessGroup:
        """Divide this group into parts and return this rank's. Collective over this group.

        One exchange for all parts, where a `subgroup` for each would take one each.

        Args:
            parts: every rank of this group in exactly one of them, as `ParallelPlan.groups` gives.

        Raises:
            GroupError: a rank is in no part or in two.
            UnsupportedFeatureError, CollectiveError: as `subgroup`.
        """
        members = arguments.parts(parts, self.world_size)
        mine = self._divided(f"partition into {len(members)} from {members[0]}", members)
        assert mine is not None
        return mine

    def failed(self, error: Exception, what: str, elapsed: float) -> CollectiveError:
        """Turn an error of what went through `native` directly into ours, to be raised.

        The group is broken afterwards.

        Args:
            error: what MindSpore raised.
            what: was called, for the message.
            elapsed: seconds that it took.
        """
        return native_failure(self._star, error, what, elapsed)

    # --- life

    def close(self) -> None:
        """Leave the group and its subgroups; a group the user opened stays alive. Not collective.

        Harmless when repeated. Rank 0 waits up to ten seconds for the others to leave too, since
        MindSpore's store lives there.

        Raises:
            WrongThreadError: another thread uses MindSpore.
        """
        if self._closed:
            return
        runtime.own("close()")
        self._closed = True
        if self._world is None or not self._world.opened:
            atexit.unregister(self._at_exit)
        for child in self._children:
            child.close()
        with contextlib.suppress(RuntimeError):  # a broken group's last operations
            runtime.synchronize()
        if self._world is None:
            self._leave_subgroup()
        else:
            self._leave_world(self._world)

    def _leave_subgroup(self) -> None:
        self._star.leave()
        # MCCL cannot free a group, and says so on standard error.
        if self._name and self._kind != "cpu" and life.state() == "open":
            with contextlib.suppress(RuntimeError):
                native.destroy_group(self._name)

    def _leave_world(self, world: World) -> None:
        if self.rank == 0:  # its store must outlive the others' groups
            self._star.leave(min(self.timeout, _LEAVE_SECONDS), linger=world.opened)
        if world.opened:
            with contextlib.suppress(RuntimeError):
                native.destroy()
            life.closed()
        if world.store is not None:
            native.close_store(world.store)
        self._star.leave(linger=world.opened)  # for rank 0, the second time
        before, theirs = self._excepthooks
        if before is not None and sys.excepthook is theirs:
            sys.excepthook = before  # MindSpore puts its own there and leaves it
        world.leave()

    def _at_exit(self) -> None:
        with contextlib.suppress(WrongThreadError):  # the process ends, whichever thread it was
            self.close()
        # MindSpore's thread looks after a lost rank 0 for half a second; a process that ends in
        # that time ends by a segmentation fault. So rank 0 ends last, or is waited out.
        if self._world is not None and self._world.opened and self._star.linger(_LINGER_SECONDS):
            time.sleep(_LOST_SECONDS)

    def __enter__(self) -> MindSporeProcessGroup:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"rank {self.rank} of {self.world_size}"
        return f"<MindSporeProcessGroup {self._backend} on {self.device}, {state}>"

    # --- inner parts

    @property
    def _is_shared(self) -> bool:
        return self.world_size > 1

    def _check_open(self, what: str) -> None:
        runtime.own(what)
        if self._closed:
            raise GroupClosedError(f"{what} was called on a group that was closed")

    def _check(self, call: str, x: Any) -> str:
        self._check_open(call)
        return checks.describe(call, x, self._kind)

    def _check_combined(self, call: str, x: Any, op: str) -> str:
        what = self._check(call, x)
        checks.operation(call, x, op, self._kind)
        return what

    def _divided(self, what: str, parts: list[list[int]]) -> MindSporeProcessGroup | None:
        """Make a group of each part; return the one that this rank is in."""
        self._check_open(what)
        if self._kind != "cpu" and any(part != sorted(part) for part in parts):
            raise UnsupportedFeatureError(
                f"{what}: {self._backend} numbers a group's ranks in rising order; give them so"
            )
        first, self._divisions = self._divisions, self._divisions + len(parts)
        mine = next((at for at, part in enumerate(parts) if self.rank in part), None)
        members = [] if mine is None else parts[mine]
        door = open_door(self._star.host) if members[1:] and members[0] == self.rank else None
        try:
            words = b"" if door is None else msgspec.msgpack.encode(door.place)
            said = self._star.exchange(what, words)
        except BaseException:
            if door is not None:
                door.listener.close()
            raise
        child, problem = None, b""
        if mine is not None:
            name = f"{self._name or 'parallelkit'}.{first + mine}"
            seat = Seat(
                rank=members.index(self.rank),
                world_size=len(members),
                timeout=self.timeout,
                run=name,
            )
            try:
                child = self._divide(seat, members, said[members[0]], door)
            except (ParallelKitError, RuntimeError) as error:
                problem = (str(error).splitlines() or ["?"])[0][:300].encode()
        rows = self._star.exchange(f"{what}, made", problem, 2 * self.timeout)
        failed = [f"rank {r}: {row.decode(errors='replace')}" for r, row in enumerate(rows) if row]
        if failed:
            raise CollectiveError(f"{what} failed; " + "; ".join(failed[:8]))
        return child

    def _divide(
        self, seat: Seat, members: list[int], words: bytes, door: Any
    ) -> MindSporeProcessGroup:
        """Connect the members, then let MindSpore know the group."""
        star = Star(0, 1, self.timeout)
        if seat.world_size > 1:
            star = enter(seat, Known(msgspec.msgpack.decode(words, type=Place)), door)
        world_ranks = [self._world_ranks[rank] for rank in members]
        name = native.create_group(seat.run, sorted(world_ranks)) if self._name else ""
        child = MindSporeProcessGroup(
            star,
            name,
            self._kind,
            device=self._device,
            backend=self._backend,
            local_rank=self._local_rank,
            world_ranks=world_ranks,
        )
        self._children.append(child)
        return child
