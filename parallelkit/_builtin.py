"""What the core itself brings as a plugin: the `shm` transport."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallelkit.errors import TransportError
from parallelkit.hookspecs import hookimpl

if TYPE_CHECKING:
    from parallelkit import protocols, specs

parallelkit_api = 1


@hookimpl
def parallelkit_transports(request: specs.TransportRequest) -> list[specs.TransportCandidate]:
    from parallelkit.weights import shm

    return [shm.candidate(request)]


@hookimpl
def parallelkit_open_transport(spec: specs.TransportSpec) -> protocols.PublisherTransport | None:
    from parallelkit.weights import shm

    if spec.name != shm.NAME:
        return None
    unknown = sorted(set(spec.options) - {"named"})
    if unknown:
        raise TransportError(
            f"publish_weights has no argument {', '.join(unknown)}, and transport 'shm' no such "
            "option; its arguments are in help(parallelkit.publish_weights), the option is: named"
        )
    return shm.ShmPublisher(spec.nbytes, named=bool(spec.options.get("named", False)))


@hookimpl
def parallelkit_connect_transport(name: str, offer: bytes) -> protocols.SubscriberTransport | None:
    from parallelkit.weights import shm

    return shm.ShmSubscriber(offer) if name == shm.NAME else None
