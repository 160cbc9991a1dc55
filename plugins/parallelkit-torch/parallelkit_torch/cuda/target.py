"""A module on a GPU as a target: its GPU reads the publisher's memory and writes the module's."""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from parallelkit.errors import TransportError
from parallelkit.specs import Accelerator
from parallelkit_torch.cuda import backing
from parallelkit_torch.cuda.copier import PARTS, Copier, Digests
from parallelkit_torch.cuda.memory import bytes_at
from parallelkit_torch.cuda.probe import accelerator_of
from parallelkit_torch.cuda.table import Array, build_table


@attrs.frozen(eq=False)
class Room:
    """Memory of a device, which goes with this object."""

    octets: torch.Tensor

    @property
    def address(self) -> int:
        return self.octets.data_ptr()


class StreamCopier:
    """A `Copier` in a stream of its own, so that it waits for nothing else on the device."""

    def __init__(
        self,
        source: Array,
        target: Array | None,
        nbytes: Array,
        bucket: Array | None,
        device: torch.device,
    ) -> None:
        table = build_table(source, target, nbytes, block=bucket)
        self._stream: Any = None
        if device.type == "cuda":
            cuda: Any = torch.cuda  # its streams have no types
            self._stream = cuda.Stream(device)
        with self._on():
            self._copier = Copier(table, device)

    def copy(self, *, digest: bool) -> None:
        with self._on():
            self._copier.copy(digest=digest)

    def copy_and_read_back(self, *, linked: bool) -> None:
        with self._on():
            self._copier.copy_and_read_back(PARTS if linked else 1)

    def digest_source(self) -> None:
        with self._on():
            self._copier.digest_source()

    def digest_target(self) -> None:
        with self._on():
            self._copier.digest_target()

    def wait(self) -> Digests:
        try:
            with self._on():
                if self._stream is not None:
                    self._stream.synchronize()
                return self._copier.digests()
        except RuntimeError as error:  # torch's, of a device that failed
            raise TransportError(f"the GPU failed while it copied: {error}") from error

    def _on(self) -> Any:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


class DeviceTarget(ABC):
    """The half of a sink that a `protocols.DeviceSink` has and a `WeightSink` has not."""

    _looked: object = None
    _addresses: Sequence[int] = ()

    @abstractmethod
    def _parts(self) -> Sequence[Sequence[torch.Tensor]]:
        """For each unique tensor, all memory that is to have its values.

        As last looked at; another list when any of it has moved.
        """

    def accelerator(self) -> Accelerator | None:
        """The GPU that the module is on; None: it is on none."""
        return accelerator_of([tensor for group in self._parts() for tensor in group])

    def addresses(self) -> Sequence[int]:
        """Where each unique tensor's row-major bytes lie on the GPU; 0: not in one run there."""
        parts = self._parts()
        if parts is not self._looked:  # a sink gives another list when one moved
            place = self._place()
            self._addresses = [
                group[0].data_ptr() if len(group) == 1 and is_run(group[0], place) else 0
                for group in parts
            ]
            self._looked = parts
        return self._addresses

    def place(self, index: int, address: int) -> None:
        """Copy row-major bytes from the GPU's memory into a tensor that is no run there."""
        for tensor in self._parts()[index]:
            with torch.no_grad():
                tensor.detach().copy_(self._packed(tensor, address))

    def gather(self, index: int, address: int) -> None:
        """Copy such a tensor, row-major, into the GPU's memory."""
        tensor = self._parts()[index][0].detach()
        self._packed(tensor, address).copy_(tensor.resolve_conj().resolve_neg())
        self._settle()

    def allocate(self, nbytes: int) -> Room:
        """Allocate memory on the GPU.

        Raises:
            TransportError: there is not enough.
        """
        place = self._place()
        try:
            # not zeroed: torch's allocator gives out multiples of 512 bytes, on the CPU of 64
            octets = torch.empty(nbytes + 256, dtype=torch.uint8, device=place)
        except torch.OutOfMemoryError as error:
            raise TransportError(
                f"there is no room on {place} to stage {nbytes} bytes: {error}; publish with "
                "commit='in_place', which needs none, or transport='shm'"
            ) from error
        self._settle()  # what used this memory before, in whatever stream, is done
        start = -octets.data_ptr() % 256
        return Room(octets[start : start + nbytes])

    def copier(
        self, source: Array, target: Array | None, nbytes: Array, bucket: Array | None
    ) -> StreamCopier:
        """Prepare to copy pairs of memory, or to digest the sources."""
        return StreamCopier(source, target, nbytes, bucket, self._place())

    def _place(self) -> torch.device:
        for group in self._parts():
            for tensor in group:
                if backing.shares(tensor.device):
                    return tensor.device
        raise TransportError("the module is on no GPU any more; subscribe it again")

    def _packed(self, tensor: torch.Tensor, address: int) -> torch.Tensor:
        nbytes = math.prod(tensor.shape) * tensor.element_size()
        octets = bytes_at(address, nbytes, self._place())
        return octets.view(tensor.dtype).reshape(tensor.shape)

    def _settle(self) -> None:
        place = self._place()
        if place.type == "cuda":
            torch.cuda.synchronize(place)


def is_run(tensor: torch.Tensor, place: torch.device) -> bool:
    """Whether a tensor's row-major bytes are one run of memory of a device."""
    return (
        tensor.device == place
        and tensor.is_contiguous()
        and tensor.numel() > 0
        and not (tensor.is_conj() or tensor.is_neg())
    )
