"""A group of processes outside any world, for tensors that a trainer gives an engine's workers.

Rank 0 listens on the one address that everybody was told, and stays connected to every other rank.
Over these connections, `parallelkit.meeting`, each call is compared before a byte of it moves, so
that a rank that does something else, or nothing, is an error with its number. The bytes themselves
go by gloo, whose sockets are bound to the same interface. Nothing is read from or written to the
environment, and `torch.distributed` has no default group afterwards if it had none before.

Nobody is asked for a secret: whoever reaches the port before the last rank may take its place.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
import weakref
from datetime import timedelta
from typing import Any, Final, final

import torch

from parallelkit.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    GroupClosedError,
    GroupError,
    PortInUseError,
    UnsupportedFeatureError,
)
from parallelkit.meeting import Door, Place, Seat, Star, bind, enter, resolve
from parallelkit.meeting.boards import Known
from parallelkit.weights.manifest import DTYPE_BYTES

TIMEOUT: Final = 60.0

_c10d: Any = torch._C._distributed_c10d  # torch's stubs leave most of it out

_RUN: Final = "parallelkit-vllm/stateless/1"
#: Seconds to learn from the others who is gone, after gloo failed.
_ASK_SECONDS: Final = 1.0
#: A thread of gloo may hold a tensor for a moment longer; it must not be the last at exit.
_LET_GO_SECONDS: Final = 0.01


def stateless_init_process_group(
    master_address: str,
    master_port: int,
    rank: int,
    world_size: int,
    device: torch.device | str | int,
    *,
    timeout: float = TIMEOUT,
) -> StatelessGroup:
    """Make a group of a trainer, rank 0, and the workers of an engine. Collective; blocks.

    Args:
        master_address: of the trainer, as all ranks reach it; rank 0 listens on this interface
            alone.
        master_port: a free port there.
        rank, world_size: of this group; they have nothing to do with any other.
        device: where the tensors are. On the CPU the group is a gloo group; other devices are
            refused.
        timeout: seconds for everybody's arrival, and for each call.

    Raises:
        GroupError: an argument is impossible, or the address is none of rank 0's host.
        UnsupportedFeatureError: the device is no CPU.
        PortInUseError: the port is taken; at once.
        RendezvousTimeoutError: `missing` names the ranks that did not come.

    Example:
        >>> import torch
        >>> group = stateless_init_process_group("127.0.0.1", 51216, 0, 1, torch.device("cpu"))
        >>> group.broadcast(torch.ones(4), src=0)
        >>> group.close()
    """
    where = _device(device)
    _check_place(master_address, master_port, rank, world_size, timeout)
    star = _meet(master_address, master_port, rank, world_size, timeout)
    try:
        gloo = None if world_size == 1 else _connect(star, timeout)
    except BaseException:
        star.leave()
        raise
    return StatelessGroup(star, gloo, where)


@final
class StatelessGroup:
    """Ranks that broadcast to each other; made by `stateless_init_process_group`.

    Every call is collective: all ranks make it, in the same order. One thread at a time.
    """

    def __init__(self, star: Star, gloo: Any, device: torch.device) -> None:
        self.rank = star.rank
        self.world_size = star.world_size
        self.timeout = star.timeout
        self.device = device
        self._star = star
        self._gloo = gloo
        self._lock = threading.Lock()
        self._end = weakref.finalize(self, _let_go, star, gloo)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._end.alive

    @property
    def broken(self) -> str | None:
        """The error after which no call is possible, or None."""
        return self._star.broken

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        """Give every rank's `tensor` the values that it has on rank `src`, in place. Collective.

        Returns when the values are there. Dtypes and shapes are compared first: if they differ,
        or a rank refuses, that is an error on all ranks, nothing was sent, and the group goes on.

        Args:
            tensor: on the CPU, of any strides; a parameter is not recorded by autograd.
            src: the rank that gives.
            stream: of a GPU; None here.

        Raises:
            GroupError: an argument is impossible; nothing was said to the others.
            CollectiveError: the ranks make different calls (the group goes on), or `gone` ranks
                ended or closed the group (it is broken).
            CollectiveTimeoutError: `missing` ranks did not take part within the timeout.
            GroupClosedError: `close` was called.
        """
        what = self._describe(tensor, src, stream)
        with self._lock:
            self._check_open(what)
            self._star.agree(what)
            held = tensor.detach()
            if self._gloo is None or not held.numel():
                return
            flat = held.contiguous()
            self._run(what, flat.reshape(-1).view(torch.uint8), src)
            if flat is not held and self.rank != src:
                held.copy_(flat)

    def refuse(self, why: str) -> None:
        """Instead of `broadcast`: let it fail on all ranks, with these words. The group goes on."""
        what = f"refuses: {why}"
        with self._lock:
            self._check_open(what)
            with contextlib.suppress(CollectiveError):
                self._star.agree(what)

    def close(self) -> None:
        """Leave the group; the others learn it at their next call. Harmless when repeated."""
        self._end()
        self._gloo = None  # its sockets and threads end with its last reference

    def __enter__(self) -> StatelessGroup:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self, what: str, flat: torch.Tensor, src: int) -> None:
        options = _c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        options.timeout = timedelta(seconds=self.timeout)
        try:
            self._gloo.broadcast([flat], options).wait()
        except RuntimeError as error:
            said = str(error).splitlines()[0][:300]
            failed = _who(self._star, f"rank {self.rank}: {what} failed: {said}")
            self._star.broken = str(failed)
            raise failed from error

    def _describe(self, tensor: torch.Tensor, src: int, stream: Any) -> str:
        if not isinstance(tensor, torch.Tensor):
            raise GroupError(f"broadcast takes a torch.Tensor, not a {type(tensor).__qualname__}")
        if stream is not None and not isinstance(stream, torch.cpu.Stream):
            raise GroupError(
                f"stream is a {type(stream).__qualname__}; a group on the CPU has no streams: "
                "leave it out"
            )
        if type(src) is not int or not 0 <= src < self.world_size:
            raise GroupError(f"src is {src!r:.80}; it is a rank from 0 to {self.world_size - 1}")
        name = str(tensor.dtype).removeprefix("torch.")
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            raise GroupError(
                f"the tensor is a {tensor.layout} one on {tensor.device}; this group moves dense "
                "tensors on the CPU: give tensor.cpu()"
            )
        if name not in DTYPE_BYTES:
            raise GroupError(f"the tensor is of {name}; allowed are {', '.join(DTYPE_BYTES)}")
        return f"broadcast of {name}{list(tensor.shape)} from rank {src}"

    def _check_open(self, what: str) -> None:
        if self.closed:
            raise GroupClosedError(f"{what}: rank {self.rank} has closed this group")


def _let_go(star: Star, gloo: Any) -> None:
    with contextlib.suppress(OSError):
        star.leave()
    if gloo is not None:
        time.sleep(_LET_GO_SECONDS)
        with contextlib.suppress(RuntimeError):
            gloo.shutdown()


# --- how it is made ----------------------------------------------------------------------------


def _device(given: torch.device | str | int) -> torch.device:
    try:
        device = torch.device(f"cuda:{given}" if isinstance(given, int) else given)
    except (RuntimeError, TypeError) as error:
        raise GroupError(f"device is {given!r:.80}; it is torch.device('cpu')") from error
    if device.type != "cpu":
        raise UnsupportedFeatureError(
            f"a stateless group on {device} is not supported yet, only torch.device('cpu'). For "
            "engines on GPUs use pk.publish_weights(model) and publisher.attach(engine)"
        )
    return device


def _check_place(address: str, port: int, rank: int, world_size: int, timeout: float) -> None:
    if not isinstance(address, str) or not address:
        raise GroupError(f"master_address is {address!r:.80}; it is a host name or an address")
    if type(port) is not int or not 0 < port < 65536:
        raise GroupError(f"master_port is {port!r:.80}; it is a number from 1 to 65535")
    if type(world_size) is not int or world_size < 1:
        raise GroupError(f"world_size is {world_size!r:.80}; it is a number from 1")
    if type(rank) is not int or not 0 <= rank < world_size:
        raise GroupError(
            f"rank is {rank!r:.80}; it is a number from 0 to world_size - 1 = {world_size - 1}"
        )
    number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not number or not 0 < timeout < float("inf"):
        raise GroupError(f"timeout is {timeout!r:.80}; it is a number of seconds above 0")


def _meet(named: str, port: int, rank: int, world_size: int, timeout: float) -> Star:
    if world_size == 1:
        return Star(0, 1, timeout)
    try:
        address = resolve(named)
    except OSError as error:
        raise GroupError(f"master_address {named!r:.80} has no IPv4 address: {error}") from error
    if address == "0.0.0.0":
        raise GroupError(
            "master_address is 0.0.0.0, which means every interface; name the one by which the "
            "engine's workers reach the trainer, such as 127.0.0.1 on one host"
        )
    place = Place(address, port)
    seat = Seat(rank=rank, world_size=world_size, timeout=timeout, run=_RUN)
    door = Door(_listen(named, address, port), place) if rank == 0 else None
    return enter(seat, Known(place), door)


def _listen(named: str, address: str, port: int) -> socket.socket:
    try:
        return bind(address, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(
                f"rank 0 cannot listen on {named}:{port}: another process uses port {port}. "
                "Choose a free port, and give it to every rank as master_port"
            ) from error
        if error.errno == errno.EADDRNOTAVAIL:
            raise GroupError(
                f"rank 0 cannot listen on {named}: it is no address of this host. master_address "
                "is the trainer's, which is rank 0"
            ) from error
        raise GroupError(f"rank 0 cannot listen on {named}:{port}: {error.strerror}") from error


def _connect(star: Star, timeout: float) -> Any:
    """Connect all ranks by gloo, on the interface by which each reaches rank 0.

    The store that gloo needs for that is rank 0's, on the same interface, and is gone afterwards.
    """
    limit = timedelta(seconds=timeout)
    server = port = None
    if star.rank == 0:
        listener = bind(star.host)
        port = listener.getsockname()[1]
        server = _c10d.TCPStore(
            star.host,
            port,
            None,
            True,
            limit,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    words = star.exchange("gloo: a store", b"" if port is None else port.to_bytes(2, "big"))
    port = int.from_bytes(words[0], "big")
    host: str = star.where.rpartition(":")[0]
    kind = _c10d.ProcessGroupGloo
    options = kind._Options()
    options._devices = [kind.create_device(hostname=star.host, lazy_init=False)]
    options._timeout = limit
    try:
        # gloo keeps what it is given; so this is a client on rank 0, too, and the server can go
        store = _c10d.TCPStore(host, port, None, False, limit, wait_for_workers=False)
        gloo = kind(_c10d.PrefixStore("gloo", store), star.rank, star.world_size, options)
    except RuntimeError as error:
        said = str(error).splitlines()[0][:300]
        raise _who(star, f"rank {star.rank}: gloo could not connect the ranks: {said}") from error
    star.agree("gloo: connected")
    del server
    return gloo


def _who(star: Star, text: str) -> CollectiveError:
    """After gloo failed, whose end says little: ask the others who is not there any more."""
    try:
        star.agree(f"rank {star.rank} asks who is gone", _ASK_SECONDS)
    except CollectiveTimeoutError as error:
        return CollectiveTimeoutError(f"{text}. {error}", missing=error.missing)
    except CollectiveError as error:
        return CollectiveError(f"{text}. {error}", gone=error.gone)
    return CollectiveError(text)
