"""What the core itself brings as a plugin: the `shm` and `tcp` transports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from parallelkit.errors import TransportError
from parallelkit.hookspecs import hookimpl

if TYPE_CHECKING:
    from parallelkit import protocols, specs

parallelkit_api = 1

#: Options of `publish_weights` that are for a transport, and for which; and of `subscribe_weights`.
_PUBLISHER = {"named": "shm", "encrypt": "tcp"}
_SUBSCRIBER = {"connections": "tcp"}


@hookimpl
def parallelkit_transports(request: specs.TransportRequest) -> list[specs.TransportCandidate]:
    from parallelkit.weights import shm, tcp

    return [shm.candidate(request), tcp.candidate(request)]


@hookimpl
def parallelkit_open_transport(spec: specs.TransportSpec) -> protocols.PublisherTransport | None:
    from parallelkit.weights import shm, tcp

    if spec.name not in (shm.NAME, tcp.NAME):
        return None
    _check_known("publish_weights", spec.options, _PUBLISHER)
    for name, value in spec.options.items():
        if not isinstance(value, bool):
            raise TransportError(f"option {name} is {value!r:.80}; it is True or False")
    common: dict[str, Any] = {"secret": spec.secret, "rank": spec.rank}
    if spec.name == shm.NAME:
        named = bool(spec.options.get("named", False))
        return shm.ShmPublisher(spec.nbytes, named=named, **common)
    encrypt = bool(spec.options.get("encrypt", True))
    common |= {"host": spec.host, "memory": spec.memory}
    return tcp.TcpPublisher(spec.nbytes, encrypt=encrypt, **common)


@hookimpl
def parallelkit_connect_transport(
    name: str, offer: bytes, key: bytes, options: Mapping[str, Any]
) -> protocols.SubscriberTransport | None:
    from parallelkit.weights import shm, tcp

    if name not in (shm.NAME, tcp.NAME):
        return None
    _check_known("subscribe_weights", options, _SUBSCRIBER)
    connections = tcp.check_connections(options.get("connections", tcp.CONNECTIONS))
    if name == shm.NAME:
        return shm.ShmSubscriber(offer, key)
    return tcp.TcpSubscriber(offer, key, connections=connections)


def _check_known(function: str, options: Mapping[str, Any], known: Mapping[str, str]) -> None:
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise TransportError(
            f"{function} has no argument {', '.join(unknown)}, and no transport such an option; "
            f"its arguments are in help(parallelkit.{function}), options are: "
            + ", ".join(f"{name} ({of})" for name, of in known.items())
        )
