"""What this plugin tells parallelkit. No library is loaded to say so.

`hccl` never reaches by itself: `publish_weights` moves weights through an arena of host memory
that subscribers read one-sidedly, while HCCL's collectives need every rank to call, with device
memory. Use `HcclSender` and `HcclReceiver`.
"""

from __future__ import annotations

from parallelkit.errors import TransportError
from parallelkit.plugin import (
    PublisherTransport,
    Section,
    TransportCandidate,
    TransportRequest,
    TransportSpec,
    hookimpl,
)
from parallelkit_hccl.found import look

parallelkit_api = 1

NAME = "hccl"
#: Seconds for a gigabyte: what others report of HCCL between NPUs (5 GB/s); not measured here.
_COST = 0.2
_INSTEAD = (
    "publish_weights moves weights through host memory, HCCL reads the device's: use "
    "parallelkit_hccl.HcclSender and HcclReceiver"
)


@hookimpl
def parallelkit_transports(request: TransportRequest) -> list[TransportCandidate]:
    """List `hccl`, with what is missing here or how else it is used."""
    lacking = look().lacking
    return [
        TransportCandidate(
            name=NAME,
            reach=False,
            cost=_COST,
            reason=lacking or _INSTEAD,
            publish_options=(),
            subscribe_options=(),
        ),
    ]


@hookimpl
def parallelkit_open_transport(spec: TransportSpec) -> PublisherTransport | None:
    """Refuse `hccl` with the reason; others are not ours."""
    if spec.name != NAME:
        return None
    lacking = look().lacking
    here = f". And here {lacking}" if lacking else ""
    raise TransportError(f"transport 'hccl' cannot be chosen: {_INSTEAD}{here}")


@hookimpl
def parallelkit_diagnostics() -> list[Section]:
    """Say which libraries and NPUs were found. Their absence is no failure."""
    found = look()
    facts = {
        "libhccl": found.hccl or "not found",
        "libascendcl": found.acl or "not found",
        "NPUs": ", ".join(found.devices) or "none",
        "usable": found.lacking or "yes, by parallelkit_hccl; never run on an NPU by its authors",
    }
    return [Section(title="HCCL", facts=facts)]
