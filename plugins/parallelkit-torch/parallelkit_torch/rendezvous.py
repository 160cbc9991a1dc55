"""How ranks find each other: a store of our own, everybody's arrival, one deadline.

Rank 0 binds the port itself and hands the listening socket to a `TCPStore`; the others connect to
it. Under torchrun the agent's store is joined as a client instead. A world of one needs no socket.
Nothing is read from or written to `os.environ`.
"""

from __future__ import annotations

import errno
import secrets
import socket
import struct
import time
from datetime import timedelta
from typing import NoReturn

import attrs
import torch.distributed as dist

from parallelkit import portfile
from parallelkit.errors import GroupError
from parallelkit.meeting.address import listen, resolve
from parallelkit.meeting.clock import Deadline, unreachable_error
from parallelkit.specs import GroupSpec
from parallelkit_torch.arrival import await_everyone, await_word
from parallelkit_torch.letting_go import run_aside
from parallelkit_torch.wire import HashStore, PrefixStore, Store, TCPStore

# What torch's own client begins with: "validate" and a magic number, "ping" and a nonce.
_HELLO = struct.Struct("=BIBI")
_VALIDATE, _MAGIC, _PING = 0, 0x3C85F7CE, 13
_NONCE = "parallelkit/nonce"
_opened = 0  # groups this process opened; part of the keys, since a store may outlive a group


@attrs.frozen
class Meeting:
    """A store that every rank has reached.

    Attributes:
        store: shared keys of this group only.
        where: `host:port`, for messages.
    """

    store: Store
    where: str


def meet(spec: GroupSpec) -> Meeting:
    """Bring all ranks together. Collective; blocks up to `spec.timeout` seconds.

    Raises:
        PortInUseError: rank 0 cannot bind its port; at once.
        RendezvousTimeoutError: `missing` names the ranks that did not arrive, as far as known.
        GroupError: another job answers at the address, or the host name is unknown on rank 0.
    """
    global _opened
    run = f"{spec.launch.job_id or '-'}/{spec.launch.restart_count or 0}/{_opened}"
    if spec.world_size == 1:
        meeting = Meeting(PrefixStore("parallelkit", HashStore()), "this process")
    elif spec.rank == 0 and not spec.launch.agent_store:
        meeting = _host(spec, run)
    else:
        meeting = _join(spec, run)
    _opened += 1
    return meeting


# --- rank 0 ------------------------------------------------------------------------------------


def _host(spec: GroupSpec, run: str) -> Meeting:
    # A little before the others' deadline, so that they hear from here who is missing.
    deadline = Deadline(spec.timeout - min(1.0, spec.timeout / 10))
    listener, host = listen(spec)
    port = listener.getsockname()[1]
    server = TCPStore(
        host,
        port,
        None,
        True,
        timedelta(seconds=spec.timeout),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    store = PrefixStore(f"parallelkit/{run}", server)
    path = None if spec.master_port else spec.launch.rendezvous_file
    said = None
    if path:
        said = portfile.announce(path, run, host, port)
        server.set(_NONCE, said.nonce)
    try:
        await_everyone(spec, store, deadline, f"{host}:{port}")
    finally:
        if path and said:
            portfile.withdraw(path, said)
    return Meeting(store, f"{host}:{port}")


# --- the other ranks ---------------------------------------------------------------------------


def _join(spec: GroupSpec, run: str) -> Meeting:
    """Connect and announce; start over when the store goes away, since it may be an old one."""
    deadline = Deadline(spec.timeout)
    token = secrets.token_hex(8)
    problem = "it was not tried"
    while True:
        try:
            server, where = _connect(spec, run, deadline, problem)
            store = PrefixStore(f"parallelkit/{run}", server)
            if spec.rank == 0:  # under torchrun, whose agent holds the store
                await_everyone(spec, store, deadline, where)
            else:
                await_word(spec, store, deadline, where, token)
            server.set_timeout(timedelta(seconds=spec.timeout))
            return Meeting(store, where)
        except dist.DistError as error:
            problem = str(error).splitlines()[0]
            if not deadline.pause():
                _raise_unreachable(spec, "the store", problem)


def _connect(spec: GroupSpec, run: str, deadline: Deadline, problem: str) -> tuple[TCPStore, str]:
    while True:
        target = _target(spec, run)
        if target is not None:
            host, port, nonce = target
            try:
                server = _client(resolve(host), port, deadline)
                if nonce is None or (server.check([_NONCE]) and server.get(_NONCE) == nonce):
                    return server, f"{host}:{port}"
                problem = "another job's store answers there"
            except OSError as error:
                problem = error.strerror or str(error)
        if not deadline.pause():
            where = f"{target[0]}:{target[1]}" if target else spec.launch.rendezvous_file
            _raise_unreachable(spec, str(where), problem if target else "no file of this run")


def _client(address: str, port: int, deadline: Deadline) -> TCPStore:
    """Connect to a store, in bounded time.

    torch's client is slow to give up and loud about it where nobody listens, and waits for ever
    where somebody listens who is no store; so a plain socket greets first. A store that answers
    that and then no more, since its host was stopped in between, is left to a thread.

    Raises:
        OSError: nobody listens, or nobody who answers as a store.
    """
    seconds = max(1.0, deadline.left / 3)  # leaves time for another try, at another address
    _greet(address, port, min(2.0, deadline.left + 0.1), min(seconds, deadline.left + 0.1))
    found: list[TCPStore | RuntimeError] = []

    def connect() -> None:
        try:
            limit = timedelta(seconds=seconds)
            found.append(TCPStore(address, port, None, False, limit, wait_for_workers=False))
        except RuntimeError as error:
            found.append(error)

    run_aside(connect, "parallelkit-store", seconds)
    if not found:
        raise TimeoutError(errno.ETIMEDOUT, "what listens there does not answer as a store")
    if isinstance(found[0], RuntimeError):
        raise found[0]
    return found[0]


def _greet(address: str, port: int, connect: float, answer: float) -> None:
    """Raise `OSError` unless a store listens there: it alone gives a nonce back."""
    nonce = secrets.randbits(32)
    end = time.monotonic() + answer
    said = b""
    with socket.create_connection((address, port), connect) as probe:
        try:
            probe.settimeout(answer)
            probe.sendall(_HELLO.pack(_VALIDATE, _MAGIC, _PING, nonce))
            while len(said) < 4 and (left := end - time.monotonic()) > 0:
                probe.settimeout(left)
                data = probe.recv(4 - len(said))
                if not data:
                    break
                said += data
        except OSError:
            pass
    if said != struct.pack("=I", nonce):
        raise TimeoutError(errno.ETIMEDOUT, "what listens there does not answer as a store")


def _target(spec: GroupSpec, run: str) -> tuple[str, int, bytes | None] | None:
    """Where the store is, and the nonce it must hold; None while the file says nothing."""
    if spec.master_port:
        return spec.master_addr or "127.0.0.1", spec.master_port, None
    path = spec.launch.rendezvous_file
    if not path:
        raise GroupError(
            f"rank {spec.rank} knows no port of rank 0: set master_port (MASTER_PORT), or "
            "PARALLELKIT_RENDEZVOUS_FILE to a path that every rank can reach"
        )
    said = portfile.read(path)
    if said is None or said.run != run:
        return None
    return said.host, said.port, said.nonce.encode()


def _raise_unreachable(spec: GroupSpec, where: str, problem: str) -> NoReturn:
    what = "torchrun's agent" if spec.launch.agent_store else "rank 0"
    raise unreachable_error(spec, where, problem, what)
