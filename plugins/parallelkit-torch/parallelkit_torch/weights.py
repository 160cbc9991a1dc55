"""Weights of an `nn.Module`: read by `ModuleSource`, placed by `ModuleSink`.

Both name tensors by `parallelkit_torch.names`, so wrapped and compiled models publish plain names.
Names that are one tensor (same storage, offset, shape, strides and dtype) are one alias group.
Tensors that overlap without being the same are separate tensors: each is sent whole, and where a
target has such tensors the last one placed wins.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import final

import torch
from torch import nn

from parallelkit.errors import ManifestError, StateError, UnsupportedFeatureError
from parallelkit.weights.manifest import Manifest, TensorSpec
from parallelkit_torch import tensors
from parallelkit_torch.names import Slot, slots


class _ModuleWeights:
    """What source and sink share: the manifest, and tensors as bytes."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._slots = slots(module)
        self._manifest, self._groups = _describe(self._slots)

    @property
    def device(self) -> str:
        """Where the tensors are: `"cpu"`, `"cuda:0"`; of the first one, if they differ."""
        return str(self._slots[0].tensor.device) if self._slots else "cpu"

    def host_bytes(self, index: int) -> memoryview:
        """Return tensor `index` (of the unique ones) as contiguous row-major bytes.

        The live memory where it is contiguous on the CPU; else a copy, and for a tensor on a
        GPU that is one blocking copy to the host.
        """
        return tensors.as_bytes(self._tensor(index))

    def _tensor(self, index: int) -> torch.Tensor:
        """The live tensor, checked to be what the manifest says."""
        spec = self._manifest.unique[index]
        tensor = self._groups[index][0].tensor
        dtype = tensors.dtype_name(tensor)
        if tuple(tensor.shape) != spec.shape or dtype != spec.dtype:
            raise ManifestError(
                f"tensor {spec.name!r} was {spec.describe()} and is now "
                f"{dtype}{list(tensor.shape)}; a model keeps its shapes and dtypes while it is "
                "published"
            )
        return tensor


@final
class ModuleSource(_ModuleWeights):
    """The weights of a module, for `pk.publish_weights`; a `protocols.WeightSource`.

    Example:
        >>> source = ModuleSource(nn.Linear(2, 3))
        >>> [t.describe() for t in source.manifest().tensors]
        ['float32[3, 2]', 'float32[3]']
    """

    def __init__(self, module: nn.Module) -> None:
        """Read names, dtypes and shapes of `module`; no data.

        Raises:
            ManifestError: a tensor has no bytes here (meta, sparse, sharded, uninitialised) or
                its dtype is not allowed; the tensor is named.
        """
        super().__init__(module)
        self._adopted = False

    def manifest(self) -> Manifest:
        return self._manifest

    def adopt(self, buffers: Sequence[memoryview]) -> None:
        """Move every unique tensor into the host buffer of the same index, values included.

        Every `Parameter` stays the object it was, so optimisers keep working, and tied names
        stay tied. Tensors become row-major contiguous. The buffers must outlive the model, or
        `release` must be called before they go.

        Args:
            buffers: writable, contiguous, each of exactly the tensor's bytes.

        Raises:
            UnsupportedFeatureError: a tensor is not on the CPU, overlaps another, or a buffer
                does not fit; nothing was moved.
        """
        unique = self._manifest.unique
        if len(buffers) != len(unique):
            raise UnsupportedFeatureError(
                f"adopt got {len(buffers)} buffers for {len(unique)} tensors"
            )
        _refuse_overlaps(unique, self._groups)
        homes = [
            _home(spec, self._tensor(index), buffer)
            for index, (spec, buffer) in enumerate(zip(unique, buffers, strict=True))
        ]
        self._move(homes)
        self._adopted = True

    def release(self) -> None:
        """Move adopted tensors back into memory of torch's own; harmless when repeated."""
        if self._adopted:
            self._move([self._tensor(i).detach().clone() for i in range(len(self._groups))])
            self._adopted = False

    def _move(self, homes: Sequence[torch.Tensor]) -> None:
        """Copy every tensor into its new home, then let all its names live there."""
        with torch.no_grad():
            for index, home in enumerate(homes):
                home.copy_(self._tensor(index))
        for group, home in zip(self._groups, homes, strict=True):
            for tensor in {id(slot.tensor): slot.tensor for slot in group}.values():
                tensor.data = home


@final
class ModuleSink(_ModuleWeights):
    """A module that weights are placed into; a `protocols.WeightSink`.

    Contiguous CPU tensors are written in place by the caller, through `destination`; all others
    by `write`, with one staging copy. Addresses of parameters never change.
    """

    def __init__(self, module: nn.Module) -> None:
        """Read names, dtypes and shapes of `module`; raises as `ModuleSource` does."""
        super().__init__(module)
        self._open = False

    @property
    def module(self) -> nn.Module:
        """The module as it was given, wrappers included."""
        return self._module

    def needs(self) -> Manifest:
        """Exactly what the module holds.

        Raises:
            ManifestError: several elements of a tensor share one place in memory (an expanded
                tensor), so it cannot be written; the tensor is named.
        """
        for index, spec in enumerate(self._manifest.unique):
            if tensors.self_overlapping(self._tensor(index)):
                raise ManifestError(
                    f"tensor {spec.name!r} of the target has shape {list(spec.shape)} and strides "
                    f"{list(self._tensor(index).stride())}: its elements share memory, so it "
                    "cannot be written; make it contiguous first"
                )
        return self._manifest

    def begin(self) -> None:
        self._open = True

    def destination(self, index: int) -> memoryview | None:
        """Return the live bytes of tensor `index`, or None for a strided or GPU tensor."""
        self._check_open("destination")
        tensor = self._tensor(index)
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            return None
        return tensors.as_bytes(tensor)

    def write(self, index: int, data: memoryview) -> None:
        self._check_open("write")
        tensor = self._tensor(index)
        staged = torch.empty(tensor.shape, dtype=tensor.dtype)
        into = tensors.as_bytes(staged)
        if data.nbytes != into.nbytes:
            raise ManifestError(
                f"tensor {self._manifest.unique[index].name!r} has {into.nbytes} bytes, "
                f"{data.nbytes} were given"
            )
        into[:] = data.cast("B")
        with torch.no_grad():
            tensor.detach().copy_(staged)

    def finish(self) -> None:
        """Tell autograd that every tensor changed: a graph recorded before is void."""
        self._check_open("finish")
        self._open = False
        changed = [self._tensor(index) for index in range(len(self._groups))]
        torch.autograd.graph.increment_version([t for t in changed if not t.is_inference()])

    def _check_open(self, what: str) -> None:
        if not self._open:
            raise StateError(f"ModuleSink.{what} was called outside begin and finish")


def _describe(all_slots: Sequence[Slot]) -> tuple[Manifest, list[list[Slot]]]:
    """Make the manifest, and for each unique tensor the slots that hold it."""
    specs: list[TensorSpec] = []
    groups: list[list[Slot]] = []
    known: dict[object, int] = {}
    for slot in all_slots:
        tensor = slot.tensor
        tensors.refuse_unreadable(slot.name, tensor)
        index = known.setdefault(tensors.identity(tensor), len(groups))
        alias_of = None
        if index == len(groups):
            groups.append([])
        else:
            alias_of = groups[index][0].name
        groups[index].append(slot)
        specs.append(
            TensorSpec(
                name=slot.name,
                dtype=tensors.dtype_name(tensor),
                shape=tuple(tensor.shape),
                alias_of=alias_of,
            )
        )
    return Manifest(specs), groups


def _refuse_overlaps(unique: Sequence[TensorSpec], groups: Sequence[Sequence[Slot]]) -> None:
    """Raise if tensors that are not the same share memory: moving them would part them."""
    spans: dict[tuple[torch.device, int], list[tuple[int, int, str]]] = {}
    for spec, group in zip(unique, groups, strict=True):
        tensor = group[0].tensor
        if tensor.numel() == 0:
            continue
        start = int(tensor.storage_offset()) * tensor.element_size()
        steps = zip(tensor.stride(), tensor.shape, strict=True)
        last = sum(int(stride) * (size - 1) for stride, size in steps)
        end = start + (last + 1) * tensor.element_size()
        storage = (tensor.device, tensor.untyped_storage().data_ptr())
        spans.setdefault(storage, []).append((start, end, spec.name))
    for ranges in spans.values():
        ranges.sort()
        for (_, end, first), (start, _, second) in itertools.pairwise(ranges):
            if start < end:
                raise UnsupportedFeatureError(
                    f"tensors {first!r} and {second!r} share memory without being the same; "
                    "moving them into foreign memory would part them"
                )


def _home(spec: TensorSpec, tensor: torch.Tensor, buffer: memoryview) -> torch.Tensor:
    """View `buffer` as the tensor's new, contiguous home."""
    if tensor.device.type != "cpu":
        raise UnsupportedFeatureError(
            f"tensor {spec.name!r} is on {tensor.device}; only tensors on the CPU can live in "
            "host memory"
        )
    if buffer.nbytes != spec.nbytes or buffer.readonly or not buffer.c_contiguous:
        raise UnsupportedFeatureError(
            f"tensor {spec.name!r} needs a writable, contiguous buffer of {spec.nbytes} bytes; "
            f"got one of {buffer.nbytes} (read-only: {buffer.readonly})"
        )
    if spec.nbytes == 0:
        return torch.empty(spec.shape, dtype=tensor.dtype)
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer.cast("B")))
    if address % tensor.element_size():
        raise UnsupportedFeatureError(
            f"the buffer for tensor {spec.name!r} is at an address that is not a multiple of its "
            f"element size, {tensor.element_size()} bytes"
        )
    return torch.frombuffer(buffer, dtype=tensor.dtype).reshape(spec.shape)
