"""What the core itself brings as a plugin: the `shm` and `tcp` transports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from parallelkit.errors import TransportError
from parallelkit.hookspecs import hookimpl

if TYPE_CHECKING:
    from parallelkit import protocols, specs

parallelkit_api = 1


@hookimpl
def parallelkit_transports(request: specs.TransportRequest) -> list[specs.TransportCandidate]:
    from parallelkit.weights import shm, tcp

    return [shm.candidate(request), tcp.candidate(request)]


@hookimpl
def parallelkit_open_transport(spec: specs.TransportSpec) -> protocols.PublisherTransport | None:
    from parallelkit.weights import shm, tcp

    if spec.name not in (shm.NAME, tcp.NAME):
        return None
    named, encrypt = _flag(spec.options, "named", False), _flag(spec.options, "encrypt", True)
    common: dict[str, Any] = {"secret": spec.secret, "rank": spec.rank}
    if spec.name == shm.NAME:
        return shm.ShmPublisher(spec.nbytes, named=named, **common)
    common |= {"host": spec.host, "memory": spec.memory}
    return tcp.TcpPublisher(spec.nbytes, encrypt=encrypt, **common)


@hookimpl
def parallelkit_connect_transport(
    name: str, offer: bytes, key: bytes, options: Mapping[str, Any]
) -> protocols.SubscriberTransport | None:
    from parallelkit.weights import shm, tcp

    if name not in (shm.NAME, tcp.NAME):
        return None
    connections = tcp.check_connections(options.get("connections", tcp.CONNECTIONS))
    if name == shm.NAME:
        return shm.ShmSubscriber(offer, key)
    return tcp.TcpSubscriber(offer, key, connections=connections)


def _flag(options: Mapping[str, Any], name: str, default: bool) -> bool:
    value = options.get(name, default)
    if not isinstance(value, bool):
        raise TransportError(f"option {name} is {value!r:.80}; it is True or False")
    return value
