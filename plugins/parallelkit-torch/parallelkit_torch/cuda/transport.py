"""The `cuda_ipc` transport: a member's GPU reads the publisher's weights where they lie.

Each rank exports the allocations that its parts are in, once, and again where parts have moved. Its
epoch is in a small segment of shared memory, which members map as they do that of `shm`; so they
are on the same host, run as the same user, and need a pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Final

import msgspec
import numpy as np
import torch

from parallelkit.errors import ProtocolError, StateError
from parallelkit.plugin import TransportCandidate, TransportRequest
from parallelkit.protocols import DeviceSink
from parallelkit.specs import DeviceSpec
from parallelkit.weights.shm import ShmPublisher, ShmSubscriber
from parallelkit_torch.cuda import backing
from parallelkit_torch.cuda.ipc import Exports, Imports, extent
from parallelkit_torch.cuda.probe import reach, survey_of
from parallelkit_torch.cuda.sheet import Array, Sheet
from parallelkit_torch.cuda.target import DeviceTarget, StreamCopier, is_run

NAME: Final = "cuda_ipc"
#: Measured on two H200 of one host, see benchmarks/gpu.
SECONDS_PER_GB: Final = 0.0005
SECONDS_PER_GB_LINKED: Final = 0.0027

_EPOCH_BYTES: Final = 256


class _Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the epoch is, as `shm` offers it; what is exported; and the tensor of each span."""

    epoch: bytes
    sheet: bytes
    tensors: int
    parts: bytes


def candidate(request: TransportRequest) -> TransportCandidate:
    """Tell whether a member's GPU can read the publisher's."""

    def answer(reason: str, reach: bool = False, same: bool = True) -> TransportCandidate:
        return TransportCandidate(
            name=NAME,
            reach=reach,
            cost=SECONDS_PER_GB if same else SECONDS_PER_GB_LINKED,
            reason=reason,
            lane="device",
            in_place=reach and same,
            publish_options=(),
            subscribe_options=(),
        )

    owner, reader = request.publisher, request.subscriber
    if owner.accelerator is None:
        return answer(f"weights on {request.device} are not in memory that GPUs share")
    if reader is None:
        reasons = owner.accelerator.obstacles
        return answer("; ".join(reasons) or "GPUs of this host read the weights", not reasons)
    if reader.accelerator is None:
        return answer("the member's target is on no GPU, or is filled by a loader")
    if owner.net_namespace != reader.net_namespace:
        return answer("the two ends are in different network namespaces")
    judged = reach(survey_of(reader), survey_of(owner))
    if judged.reasons:
        return answer("; ".join(judged.reasons))
    where = "the same GPU" if judged.same_device else "GPUs of one host, over their link"
    return answer("; ".join([where, *judged.remarks]), True, judged.same_device)


class CudaIpcPublisher:
    """The end of one publisher rank."""

    name = NAME

    def __init__(self, spec: DeviceSpec) -> None:
        """Export the parts of this rank.

        Raises:
            TransportError: their memory cannot be exported.
        """
        self._source = spec.source
        self._tensors = list(spec.parts)
        self._exports = Exports(backing.driver())
        self._copies: dict[int, torch.Tensor] = {}
        self._ranges: list[tuple[int, int]] = []
        self._offer = b""
        self._seen: object = None
        self._device = torch.device("cpu")
        self._addresses = self._sizes = np.zeros(0, np.int64)
        self._epoch = ShmPublisher(_EPOCH_BYTES, secret=spec.secret, rank=spec.rank)
        try:
            self.refresh()
            compile_kernel(self._device)
        except BaseException:
            self.close()
            raise

    @property
    def epoch(self) -> int:
        return self._epoch.epoch

    def bump(self) -> int:
        return self._epoch.bump()

    def offer(self) -> bytes:
        return self._offer

    def refresh(self) -> bool:
        """Export anew what has moved, and copy what is no run of the GPU's memory into one."""
        live = self._source.live()
        if live is self._seen and not self._copies:  # a source gives another list when one moved
            return False
        parts: list[torch.Tensor] = []
        for index in self._tensors:
            part = live[index]
            if part is None:
                raise StateError(f"unique tensor {index} is to be exported, and is not here")
            parts.append(part.detach())
        self._device = next((p.device for p in parts if backing.shares(p.device)), self._device)
        held = [self._held(i, p) for i, p in zip(self._tensors, parts, strict=True)]
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        ranges = [extent(tensor) for tensor in held]
        self._seen = live
        if self._offer and ranges == self._ranges:
            return False
        sheet = self._exports.replace(ranges, kept=held)
        self._ranges = ranges
        self._addresses = np.zeros(len(live), np.int64)
        self._sizes = np.zeros(len(live), np.int64)
        if ranges:
            self._addresses[self._tensors], self._sizes[self._tensors] = np.array(ranges).T
        self._offer = msgspec.msgpack.encode(
            _Offer(
                epoch=self._epoch.offer(),
                sheet=sheet.encode(),
                tensors=len(live),
                parts=np.array(self._tensors, "<u4").tobytes(),
            )
        )
        return True

    def reader(self, tensor: Array, offset: Array, nbytes: Array, bucket: Array) -> StreamCopier:
        at = self._addresses[tensor] + offset
        return StreamCopier(at, None, nbytes, bucket, self._device)

    def non_finite(self) -> Mapping[int, int]:
        live, counts = self._source.live(), dict[int, torch.Tensor]()
        for index in self._tensors:
            part = live[index]
            count = None if part is None else non_finite(part.detach())
            if count is not None:
                counts[index] = count.to(self._device)
        if not counts:
            return {}
        found = torch.stack(list(counts.values())).tolist()  # the device is waited for once
        return {index: count for index, count in zip(counts, found, strict=True) if count}

    def close(self) -> None:
        """Let the exported memory go; harmless when repeated."""
        self._exports.close()
        self._copies.clear()
        self._epoch.close()

    def _held(self, index: int, part: torch.Tensor) -> torch.Tensor:
        """What is exported of a part: itself, or a row-major copy on the GPU."""
        if is_run(part, self._device) or not part.numel():
            self._copies.pop(index, None)
            return part
        copy = self._copies.get(index)
        if copy is None or copy.shape != part.shape or copy.dtype != part.dtype:
            copy = torch.empty(part.shape, dtype=part.dtype, device=self._device)
            self._copies[index] = copy
        copy.copy_(part.resolve_conj().resolve_neg())
        return copy


class CudaIpcSubscriber:
    """A member's end: the parts of one publisher rank, mapped for the target's GPU to read."""

    name = NAME

    def __init__(self, offer: bytes, key: bytes, sink: DeviceSink) -> None:
        """Map what a rank exports.

        Args:
            offer: what the rank's `offer` gave; key: a pass for it.
            sink: whose GPU is to read.

        Raises:
            ProtocolError: the offer is malformed.
            TransportError: the memory cannot be mapped.
        """
        if not isinstance(sink, DeviceTarget):
            raise ProtocolError(f"a {type(sink).__qualname__} is not on one of torch's GPUs")
        driver, device = backing.driver(), backing.index_of(sink._place())
        self._gpu = driver.uuid(device)
        self._imports = Imports(driver, device)
        self._sheet: Sheet | None = None
        facts = _decoded(offer)
        self._epoch = ShmSubscriber(facts.epoch, key)
        try:
            self._map(facts)
            compile_kernel(sink._place())
        except BaseException:
            self.close()
            raise

    @property
    def linked(self) -> bool:
        return self._sheet is not None and any(h.gpu != self._gpu for h in self._sheet.handles)

    def follow(self, offer: bytes) -> None:
        """Map what has moved; what stayed where it was stays mapped."""
        self._map(_decoded(offer))

    def parts(self) -> tuple[Array, Array]:
        return self._addresses, self._sizes

    def epoch(self, *, deadline: float) -> int:
        return self._epoch.epoch(deadline=deadline)

    def close(self) -> None:
        """Unmap everything; harmless when repeated. Nothing may be reading it any more."""
        self._imports.close()
        self._epoch.close()

    def _map(self, facts: _Offer) -> None:
        sheet = Sheet.decode(facts.sheet)
        tensors = np.frombuffer(facts.parts, "<u4").astype(np.int64)
        if len(tensors) != len(sheet.nbytes) or (tensors >= facts.tensors).any():
            raise ProtocolError(
                f"the cuda_ipc offer has {len(sheet.nbytes)} spans for {len(tensors)} of "
                f"{facts.tensors} tensors"
            )
        before, found = self._sheet, self._imports.open(sheet)
        self._sheet = sheet
        if before is not None:
            self._imports.release(before)
        self._addresses = np.zeros(facts.tensors, np.int64)
        self._sizes = np.zeros(facts.tensors, np.int64)
        self._addresses[tensors], self._sizes[tensors] = found, sheet.nbytes


def compile_kernel(device: torch.device) -> None:
    """Compile what an update needs, so that the first one does not wait for it."""
    if device.type == "cuda" and find_spec("triton") is not None:
        from parallelkit_torch.cuda import kernel

        kernel.compile_for(device)
        torch.cuda.synchronize(device)


def non_finite(tensor: torch.Tensor) -> torch.Tensor | None:
    """How many values are NaN or infinite, where that can be; of a complex number, each part."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point() or not tensor.numel():
        return None
    if tensor.element_size() == 1:  # float8 has few operations
        tensor = tensor.to(torch.float32)
    return (~torch.isfinite(tensor)).sum()


def _decoded(offer: bytes) -> _Offer:
    try:
        facts = msgspec.msgpack.decode(offer, type=_Offer)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"the cuda_ipc offer is malformed: {error}") from error
    if len(facts.parts) % 4 or not 0 <= facts.tensors <= 1 << 24:
        raise ProtocolError(
            f"the cuda_ipc offer is malformed: {facts.tensors} tensors, {len(facts.parts)} bytes"
        )
    return facts
