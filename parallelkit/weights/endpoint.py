"""Where the control channel listens, and for how long anything may wait."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from typing import Final

from parallelkit.errors import TransportError, WeightTransferError

#: A week: longer waits are mistakes, and overflow the sockets' counters.
MAX_TIMEOUT_SECONDS: Final = 7 * 24 * 3600
#: What either end of a channel or transport opens at once, and some room for others.
_DESCRIPTORS: Final = 32


def check_timeout(seconds: float, *, zero: bool = False) -> None:
    """Raise `WeightTransferError` unless it is a number of seconds above 0, a week at most.

    With `zero`, 0 is allowed too: do not wait.
    """
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not number or not 0 <= seconds <= MAX_TIMEOUT_SECONDS or not (zero or seconds):
        least = "from 0" if zero else "above 0"
        raise WeightTransferError(
            f"timeout is {seconds!r:.80}; it is a number of seconds {least} and at most a week"
        )


def check_descriptors() -> None:
    """Raise `TransportError` unless this process may open what a channel takes.

    Asked beforehand, since ZeroMQ ends the process where it gets no descriptor.
    """
    with contextlib.ExitStack() as taken:
        try:
            for _ in range(_DESCRIPTORS):
                taken.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            raise TransportError(
                f"this process cannot open {_DESCRIPTORS} more files or connections ({error}): "
                "close some, or allow more by `ulimit -n`"
            ) from error


def parse_endpoint(endpoint: str | None) -> tuple[str, int]:
    """Split and check where to listen; see `ControlServer`.

    Returns:
        A numeric address, IPv6 in brackets, and a port, 0 for any.

    Raises:
        TransportError: not an address of one interface.
    """
    if not isinstance(endpoint, str | None):
        raise TransportError(f"endpoint is {endpoint!r}; it is a string such as '127.0.0.1:0'")
    text = "127.0.0.1" if endpoint is None else endpoint.removeprefix("tcp://")
    host, _, port_text = text.rpartition(":") if _has_port(text) else (text, "", "0")
    help_text = "give the address of one interface, as in '10.0.0.5:0' or 'tcp://127.0.0.1:5600'"
    try:
        port_text = "0" if port_text in ("*", "") else port_text
        port = int(port_text) if port_text.isascii() and port_text.isdigit() else -1
        if not 0 <= port < 65536:
            raise ValueError("port")
        if host in ("", "*"):
            raise ValueError("all interfaces")
        if not host.isprintable():  # what follows a NUL would be dropped
            raise ValueError("characters that cannot be printed")
        info = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
        infos = sorted(info, key=lambda i: i[0] != socket.AF_INET)
        address = ipaddress.ip_address(infos[0][4][0])
        plain = getattr(address, "ipv4_mapped", None) or address
        if plain.is_unspecified:
            raise ValueError("all interfaces")
        if plain.is_multicast or str(plain) == "255.255.255.255":
            raise ValueError("an address of many hosts")  # it can be bound, and never connected to
    except (ValueError, OSError) as error:
        raise TransportError(
            f"endpoint {endpoint!r:.200} cannot be used ({error}); {help_text}"
        ) from error
    return (f"[{address}]" if address.version == 6 else str(address)), port


def _has_port(text: str) -> bool:
    return text.rpartition("]")[2].count(":") == 1
