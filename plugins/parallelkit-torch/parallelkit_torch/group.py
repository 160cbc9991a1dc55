"""Process groups over `torch.distributed`: the default group, opened or adopted, and subgroups."""

from __future__ import annotations

import atexit
import contextlib
import inspect
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar, final

import torch
import torch.distributed as dist

from parallelkit import arguments, plain
from parallelkit.errors import (
    AlreadyInitializedError,
    CollectiveError,
    GroupClosedError,
    GroupError,
    NotPlainError,
    UnsupportedFeatureError,
)
from parallelkit.protocols import Plain
from parallelkit.specs import GroupSpec
from parallelkit_torch import checks, devices
from parallelkit_torch.letting_go import await_gloo, await_gloo_at_exit
from parallelkit_torch.rendezvous import meet
from parallelkit_torch.wire import PrefixStore, Wire


def init_process_group(spec: GroupSpec) -> TorchProcessGroup:
    """Open torch's default group as `spec` says, or adopt the one the user opened before.

    Collective; blocks up to `spec.timeout` seconds. Nothing is written to `os.environ`.

    Raises:
        DeviceError, UnsupportedFeatureError: before anything is opened.
        PortInUseError, RendezvousTimeoutError: as their names say.
        AlreadyInitializedError: torch's default group is another one than `spec` asks for.
        GroupError: the ranks met but could not connect to each other.
    """
    device = devices.claim(spec)
    devices.check_backend(spec.backend, device)
    if dist.is_initialized():
        return _adopt(spec, device)
    meeting = meet(spec)
    hook = sys.excepthook
    try:
        dist.init_process_group(
            spec.backend,
            store=PrefixStore("torch", meeting.store),
            rank=spec.rank,
            world_size=spec.world_size,
            timeout=timedelta(seconds=spec.timeout),
            device_id=None if device.type == "cpu" else device,
        )
    except (RuntimeError, ValueError) as error:
        raise GroupError(
            f"rank {spec.rank} met the others at {meeting.where}, but {spec.backend} could not "
            f"connect them: {str(error).splitlines()[0]}. If the host name resolves to an address "
            "that peers cannot reach, set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME to the network "
            "interface to use"
        ) from error
    wire = Wire(dist.group.WORLD, device, spec.timeout, PrefixStore("handle", meeting.store))
    return TorchProcessGroup(wire, spec.backend, spec.local_rank, excepthook=hook)


def _adopt(spec: GroupSpec, device: torch.device) -> TorchProcessGroup:
    """Use the default group that the user opened; it stays theirs."""
    native: Any = dist.group.WORLD
    config = dist.BackendConfig(dist.Backend(dist.get_backend_config(native)))
    have = (native.rank(), native.size(), config.get_device_backend_map().get(device.type))
    want = (spec.rank, spec.world_size, spec.backend)
    if have != want:
        raise AlreadyInitializedError(
            "torch's default process group was opened before, with "
            f"rank {have[0]} of {have[1]} and {have[2]} on {device.type}; parallelkit is asked "
            f"for rank {want[0]} of {want[1]} and {want[2]}. Open it with the same values, or "
            "leave it to parallelkit"
        )
    store = PrefixStore("parallelkit-adopted", dist.distributed_c10d._get_default_store())
    wire = Wire(native, device, spec.timeout, store)
    if spec.backend == "gloo":
        await_gloo_at_exit()
    return TorchProcessGroup(wire, spec.backend, spec.local_rank, ours=False)


@final
class TorchProcessGroup:
    """A `parallelkit.protocols.ProcessGroup` over one of torch's groups.

    On the CPU every collective first compares what the ranks are about to do (call, dtype,
    shape), at the price of one small exchange: gloo itself would end the process, or give wrong
    values, where they differ. On a GPU that comparison would stall the stream and is not made.

    Results carry no gradient. `native` is for what parallelkit does not wrap.

    Attributes:
        ours: False for a group that stays open at `close`: one that the user opened, and a
            subgroup of a subgroup, which ends with the default group.
    """

    framework: ClassVar[str] = "torch"

    def __init__(
        self,
        wire: Wire,
        backend: str,
        local_rank: int,
        *,
        ours: bool = True,
        world_ranks: Sequence[int] = (),
        excepthook: Any = None,
    ) -> None:
        """Wrap an open group; `init_process_group` and `subgroup` do.

        Args:
            wire: the group's messages.
            backend, local_rank: facts.
            ours: close it at `close`.
            world_ranks: rank in the default group of each of this group's ranks.
            excepthook: what `sys.excepthook` was before torch replaced it.
        """
        self._wire = wire
        self._backend = backend
        self._local_rank = local_rank
        self._world_ranks = list(world_ranks) or list(range(wire.world_size))
        self._excepthooks = (excepthook, sys.excepthook)
        self._children: list[TorchProcessGroup] = []
        self._divisions = 0
        self._closed = False
        self.ours = ours
        atexit.register(self.close)

    # --- facts

    @property
    def rank(self) -> int:
        return self._wire.rank

    @property
    def world_size(self) -> int:
        return self._wire.world_size

    @property
    def local_rank(self) -> int:
        return self._local_rank

    @property
    def device(self) -> str:
        return str(self._wire.device)

    @property
    def backend(self) -> str:
        return self._backend

    @property
    def timeout(self) -> float:
        return self._wire.timeout

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def native(self) -> Any:
        """The `torch.distributed.ProcessGroup`."""
        self._check_open("native")
        return self._wire.native

    @property
    def wire(self) -> Wire:
        """The group's messages, for what goes between two ranks of it; of this package only."""
        self._check_open("wire")
        return self._wire

    # --- collectives

    def barrier(self, *, timeout: float | None = None) -> None:
        """Wait until every rank is here; on a GPU, until its earlier work is done too."""
        seconds = arguments.seconds(timeout, self.timeout)
        self._check_open("barrier()")
        if self._on_cpu:
            self._wire.agree("barrier()", seconds)
        else:
            self._wire.barrier("barrier()", seconds)

    def all_reduce(self, x: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Combine `x` elementwise over ranks; `op` is sum, mean, max, min or product."""
        what = self._check_combined(f"all_reduce(op={op!r})", x, op)
        out = _fresh(x)
        if self._meet(what, x):
            self._wire.all_reduce(what, out, op)
        return out.div_(self.world_size) if op == "mean" else out

    def broadcast(self, x: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Give every rank the `x` of rank `src`; shapes and dtypes must agree."""
        what = self._check(f"broadcast(src={arguments.source(src, self.world_size)})", x)
        out = _fresh(x)
        if self._meet(what, x):
            self._wire.broadcast(what, out, src)
        return out

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Give every rank the list of all ranks' `x`, by rank; shapes must agree."""
        what = self._check("all_gather()", x)
        mine = _fresh(x)
        out = [torch.empty_like(mine) for _ in range(self.world_size)]
        if self._meet(what, x):
            self._wire.all_gather(what, out, mine)
        else:
            out[self.rank] = mine
        return out

    def reduce_scatter(self, x: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Combine `x` over ranks and keep this rank's slice of dim 0, which must divide evenly."""
        what = self._check_combined(f"reduce_scatter(op={op!r})", x, op)
        if x.dim() == 0 or x.shape[0] % self.world_size:
            raise CollectiveError(f"{what}: dim 0 must divide by the world size, {self.world_size}")
        each = x.shape[0] // self.world_size
        parts = [_fresh(x[r * each : (r + 1) * each]) for r in range(self.world_size)]
        out = parts[self.rank].clone()
        if self._meet(what, x):
            self._wire.reduce_scatter(what, out, parts, op)
        return out.div_(self.world_size) if op == "mean" else out

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
                data = plain.encode(obj)
            except NotPlainError as error:  # the others wait: tell them, then raise
                data, refused = str(error).encode(errors="replace"), error
        if self.world_size > 1:
            self._wire.agree(what, seconds)
            data, ok = self._wire.send_bytes(
                what, data, refused is None, src, seconds, plain.MAX_BYTES
            )
            if not ok and refused is None:
                raise CollectiveError(
                    f"{what} failed: rank {src} said: {data.decode(errors='replace')}"
                )
        if refused is not None:
            raise refused
        return plain.decode(data)

    def subgroup(self, ranks: Sequence[int]) -> TorchProcessGroup | None:
        """Make a group of some ranks. Collective over this group, members or not.

        Args:
            ranks: ranks of this group, each once; a rank's position is its rank in the new one.

        Returns:
            The new group on its members, else None. Closing this group closes it too.

        Raises:
            GroupError: a rank is given twice or does not exist, or the list is empty.
            UnsupportedFeatureError: an accelerator's group cannot be divided twice.
            CollectiveError: ranks gave different lists, or members could not connect.
        """
        members = arguments.members(ranks, self.world_size)
        return self._divided(f"subgroup({members})", [members])

    def partition(self, parts: Sequence[Sequence[int]]) -> TorchProcessGroup:
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

        It names the ranks that are gone or late, as far as known, and takes up to two seconds
        for it. The group is broken afterwards.

        Args:
            error: what the backend raised.
            what: was called, for the message.
            elapsed: seconds that it took.
        """
        return self._wire.failed(error, what, self.timeout, elapsed)

    # --- life

    def close(self) -> None:
        """Leave the group and its subgroups; a group the user opened stays alive. Not collective.

        Harmless when repeated. Rank 0's port is free again once nothing else refers to the
        group, such as a model that was wrapped with it.
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        for child in self._children:
            child.close()
        if "gloo" in self._backend:
            await_gloo()
        with contextlib.suppress(AssertionError, ValueError, RuntimeError):  # gone already
            if self.ours and dist.is_initialized():
                dist.destroy_process_group(self._wire.native)
        before, torchs = self._excepthooks
        if before is not None and sys.excepthook is torchs:
            sys.excepthook = before  # torch puts its own there and leaves it
        self._wire.release()

    def __enter__(self) -> TorchProcessGroup:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"rank {self.rank} of {self.world_size}"
        return f"<TorchProcessGroup {self._backend} on {self.device}, {state}>"

    # --- inner parts

    @property
    def _on_cpu(self) -> bool:
        return self._wire.device.type == "cpu"

    @property
    def _is_everyone(self) -> bool:
        return len(self._world_ranks) == dist.get_world_size()

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise GroupClosedError(f"{what} was called on a group that was closed")

    def _check(self, call: str, x: torch.Tensor) -> str:
        self._check_open(call)
        return checks.describe(call, x, self._wire.device)

    def _check_combined(self, call: str, x: torch.Tensor, op: str) -> str:
        what = self._check(call, x)
        checks.operation(call, x, op, self._backend)
        return what

    def _meet(self, what: str, x: torch.Tensor) -> bool:
        """Compare the call with the other ranks'; tell whether there is anything to send."""
        if self.world_size == 1:
            return False
        if self._on_cpu:
            self._wire.agree(what, self.timeout)
        return x.numel() > 0

    def _divided(self, what: str, parts: list[list[int]]) -> TorchProcessGroup | None:
        """Make a group of each part; return the one that this rank is in."""
        self._check_open(what)
        if not self._on_cpu and not self._is_everyone:
            raise UnsupportedFeatureError(
                f"a subgroup of a subgroup cannot be made with {self._backend}; make it from the "
                "default group"
            )
        self._wire.agree(what, self.timeout)
        mine, problem = None, ""
        try:
            for members in parts:
                self._divisions += 1  # on every rank alike: part of the names in the store
                mine = self._divide(members) or mine
        except (RuntimeError, ValueError) as error:
            problem = str(error).splitlines()[0][:120]
        # Also keeps rank 0's store alive until every member is connected.
        rows = self._wire.exchange(problem or "ok", what, self.timeout)
        failed = [f"rank {rank}: {row}" for rank, row in enumerate(rows) if row != "ok"]
        if failed:
            raise CollectiveError(f"{what} failed; " + "; ".join(failed))
        return mine

    def _divide(self, members: list[int]) -> TorchProcessGroup | None:
        """Make torch's group of `members`; None on the others."""
        if not self._is_everyone and self.rank not in members:
            return None
        world_ranks = [self._world_ranks[rank] for rank in members]
        options: dict[str, Any] = {}
        if world_ranks != sorted(world_ranks):
            if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
                raise ValueError(f"torch {torch.__version__} makes groups in rising order only")
            options["sort_ranks"] = False
        native = dist.new_group(
            world_ranks,
            timeout=timedelta(seconds=self.timeout),
            backend=self._backend,
            # Where members alone make a group, torch names it by its ranks, and once it was
            # destroyed would use the name, with the old addresses in the store, again.
            use_local_synchronization=not self._is_everyone,
            **options,
        )
        if native is None or native is dist.GroupMember.NON_GROUP_MEMBER:
            return None
        name = f"{self._divisions}:{','.join(map(str, world_ranks))}"
        store = self._wire.store
        wire = Wire(native, self._wire.device, self.timeout, store and PrefixStore(name, store))
        child = TorchProcessGroup(
            wire, self._backend, self._local_rank, ours=self._is_everyone, world_ranks=world_ranks
        )
        self._children.append(child)
        return child


def _fresh(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of the values, without history."""
    plain_view = x.detach().resolve_conj().resolve_neg()
    return plain_view.clone(memory_format=torch.contiguous_format)
