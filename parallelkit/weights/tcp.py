"""The `tcp` transport: members pull the spans that they keep from any host.

One thread of each publisher rank serves its arena over ZeroMQ, encrypted with CURVE keys unless
`encrypt=False` was asked for. It listens on one interface, at a free port. A subscriber opens a few
connections to each rank that it needs bytes of, with a pass that rank 0 gave it.
"""

from __future__ import annotations

import ipaddress
from typing import Final

from parallelkit.specs import TransportCandidate, TransportRequest
from parallelkit.weights.tcp_client import CONNECTIONS, TcpSubscriber, check_connections
from parallelkit.weights.tcp_server import NAME, TcpPublisher

__all__ = [
    "CONNECTIONS",
    "NAME",
    "SECONDS_PER_GB",
    "TcpPublisher",
    "TcpSubscriber",
    "candidate",
    "check_connections",
]

SECONDS_PER_GB: Final = 2.0


def candidate(request: TransportRequest) -> TransportCandidate:
    """Tell whether two ends can be connected by tcp."""
    a, b = request.publisher, request.subscriber
    reach, reason = True, f"listens on {request.host}: reaches every host that the ticket does"
    try:
        loopback = ipaddress.ip_address(request.host.strip("[]")).is_loopback
    except ValueError:
        loopback = False
    if loopback:
        reason = "listens on loopback: reaches every process of this host"
        if b is not None and a.boot_id != b.boot_id:
            reach, reason = False, "listens on loopback, and the two ends are on different hosts"
        elif b is not None and a.net_namespace != b.net_namespace:
            reach = False
            reason = "listens on loopback, and the two ends are in different network namespaces"
        if not reach:
            reason += "; pass publish_weights(endpoint='address:0') with an address of a network"
    if request.device != "cpu":
        reason += f"; weights on {request.device} are staged through host memory"
    return TransportCandidate(
        name=NAME,
        reach=reach,
        cost=SECONDS_PER_GB,
        reason=reason,
        publish_options=("encrypt",),
        subscribe_options=("connections",),
    )
