"""The memory that one rank of a publisher hands its parts out of, and the transports that serve it.

The first transport makes the memory, further ones serve from the same, so that each member comes
by the way that reaches it and the bytes are written once. All have the same epoch. With two slots
the arena is double: one slot keeps the last committed version while the other is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs
import numpy as np

from parallelkit import hooks
from parallelkit.errors import TransportError
from parallelkit.protocols import NetworkTransport, PublisherTransport
from parallelkit.specs import TransportSpec
from parallelkit.weights.buckets import as_bytes
from parallelkit.weights.regions import Bytes

#: An arena has at least so many bytes, since memory of none cannot be mapped.
LEAST_BYTES: Final = 256


class Arena:
    """One rank's memory with one transport or more; closed by who made it."""

    def __init__(self, names: Sequence[str], spec: TransportSpec, slots: int = 1) -> None:
        """Open the transports.

        Args:
            names: of the transports, the one that makes the memory first.
            spec: what they have in common; its `nbytes` are those of one slot.
            slots: how often the memory holds the export.

        Raises:
            TransportError: nobody opens one of them, or memory or address are not to be had.
        """
        self.slots = slots
        self.slot_bytes = max(spec.nbytes, LEAST_BYTES)
        self._transports: list[PublisherTransport] = []
        memory: memoryview | None = None
        try:
            for name in names:
                spec = attrs.evolve(spec, name=name, nbytes=slots * self.slot_bytes, memory=memory)
                transport = hooks.open_transport(spec)
                if transport is None:
                    raise TransportError(f"transport {name!r} is listed, but no plugin opens it")
                self._transports.append(transport)
                memory = self._transports[0].buffer
            self.bytes: Bytes = as_bytes(self._transports[0].buffer)
        except BaseException:
            self.close()
            raise

    def slot(self, number: int) -> Bytes:
        """The writable bytes of one slot."""
        start = number * self.slot_bytes
        return self.bytes[start : start + self.slot_bytes]

    @property
    def epoch(self) -> int:
        """The epoch of all transports."""
        return self._transports[0].epoch

    def bump(self) -> int:
        """Advance the epoch: whatever was read before is void. Returns the new epoch."""
        epochs = [transport.bump() for transport in self._transports]
        return epochs[0]

    def offers(self) -> dict[str, bytes]:
        """By transport, how to reach this memory."""
        return {transport.name: transport.offer() for transport in self._transports}

    def encrypted(self) -> dict[str, bool]:
        """By transport, whether bytes are encrypted on their way, of those that use a network."""
        networks = [t for t in self._transports if isinstance(t, NetworkTransport)]
        return {transport.name: transport.encrypted for transport in networks}

    def close(self) -> None:
        """Close the transports, the one that made the memory last; harmless when repeated."""
        self.bytes = np.empty(0, np.uint8)
        transports, self._transports = self._transports[::-1], []
        for transport in transports:
            transport.close()
