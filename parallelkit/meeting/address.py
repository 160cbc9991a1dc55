"""Where rank 0 listens: its address, its port, and what to say if it cannot have them."""

from __future__ import annotations

import errno
import socket
from typing import Final, NoReturn

from parallelkit.errors import GroupError, PortInUseError
from parallelkit.specs import GroupSpec

_BACKLOG: Final = 4096


def resolve(host: str) -> str:
    """Return the first IPv4 address of `host`.

    Raises:
        OSError: it has none.
    """
    found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    return str(found[0][4][0])


def own_address(towards: str) -> str:
    """Return the IPv4 address of this host on the way to another; nothing is sent.

    Raises:
        OSError: there is no way, or the name is unknown.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((resolve(towards), 9))
        return str(probe.getsockname()[0])


def listen(spec: GroupSpec) -> tuple[socket.socket, str]:
    """Bind rank 0's port; returns the socket and the address that others are to use.

    Bound to the named address only; to every interface where that is a loopback address, which
    other hosts could not use.

    Raises:
        PortInUseError: the port is taken; at once.
        GroupError: there is neither a port nor a file, the host name is unknown, or it is none
            of this host's.
    """
    local = spec.local_world_size == spec.world_size
    named = spec.master_addr or ("127.0.0.1" if local else socket.gethostname())
    if not spec.master_port and not spec.launch.rendezvous_file:
        raise GroupError(
            f"a world of {spec.world_size} ranks needs a port that all of them know; set "
            "master_port (MASTER_PORT), or PARALLELKIT_RENDEZVOUS_FILE to a path that every rank "
            "can reach, and rank 0 takes a free port"
        )
    try:
        host = resolve(named)
    except OSError as error:
        raise GroupError(
            f"the host name {named!r} (master_addr, MASTER_ADDR) has no IPv4 address: {error}"
        ) from error
    bind_to = "0.0.0.0" if host.startswith("127.") and not local else host
    port = spec.master_port or 0
    try:
        return bind(bind_to, port), host
    except OSError as error:
        raise_bind_error(error, named, host, port)


def bind(host: str, port: int = 0) -> socket.socket:
    """Listen on one address; port 0 takes a free one.

    Raises:
        OSError: the address cannot be had.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def raise_bind_error(
    error: OSError, host: str, address: str, port: int, who: str = "rank 0"
) -> NoReturn:
    """Say why `who` cannot listen, and which setting to change."""
    if error.errno == errno.EADDRNOTAVAIL:
        named = host if host == address else f"{host} ({address})"
        raise GroupError(
            f"{who} cannot listen on {named}: it is no address of this host. Set master_addr "
            f"(MASTER_ADDR) to an address of the host that runs {who}, on every rank"
        ) from error
    if error.errno == errno.EADDRINUSE:
        raise PortInUseError(
            f"{who} cannot listen on {host}:{port}: another process uses port {port}, perhaps "
            "another job. Set master_port (MASTER_PORT) to a free port, or start with torchrun "
            "or `parallelkit run`, which choose one"
        ) from error
    raise GroupError(f"{who} cannot listen on {host}:{port}: {error.strerror}") from error
