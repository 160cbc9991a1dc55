"""What the core itself brings as a plugin: the `shm` and `tcp` transports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from parallelkit.errors import TransportError
from parallelkit.hookspecs import hookimpl

if TYPE_CHECKING:
    from parallelkit import protocols, specs

parallelkit_api = 1

#: Options of `publish_weights` that are for a transport, and for which.
_OPTIONS = {"named": "shm", "encrypt": "tcp"}


@hookimpl
def parallelkit_transports(request: specs.TransportRequest) -> list[specs.TransportCandidate]:
    from parallelkit.weights import shm, tcp

    return [shm.candidate(request), tcp.candidate(request)]


@hookimpl
def parallelkit_open_transport(spec: specs.TransportSpec) -> protocols.PublisherTransport | None:
    from parallelkit.weights import shm, tcp

    if spec.name not in (shm.NAME, tcp.NAME):
        return None
    _check_options(spec.options)
    common: dict[str, Any] = {"secret": spec.secret, "rank": spec.rank}
    if spec.name == shm.NAME:
        named = bool(spec.options.get("named", False))
        return shm.ShmPublisher(spec.nbytes, named=named, **common)
    encrypt = bool(spec.options.get("encrypt", True))
    common |= {"host": spec.host, "memory": spec.memory}
    return tcp.TcpPublisher(spec.nbytes, encrypt=encrypt, **common)


@hookimpl
def parallelkit_connect_transport(
    name: str, offer: bytes, key: bytes
) -> protocols.SubscriberTransport | None:
    from parallelkit.weights import shm, tcp

    if name == shm.NAME:
        return shm.ShmSubscriber(offer, key)
    return tcp.TcpSubscriber(offer, key) if name == tcp.NAME else None


def _check_options(options: Mapping[str, Any]) -> None:
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise TransportError(
            f"publish_weights has no argument {', '.join(unknown)}, and no transport such an "
            "option; its arguments are in help(parallelkit.publish_weights), options are: "
            + ", ".join(f"{name} ({of})" for name, of in _OPTIONS.items())
        )
    for name, value in options.items():
        if not isinstance(value, bool):
            raise TransportError(f"option {name} is {value!r}; it is True or False")
