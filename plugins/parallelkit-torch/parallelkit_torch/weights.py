"""Weights of an `nn.Module`: read by `ModuleSource`, placed by `ModuleSink`.

Both name tensors by `parallelkit_torch.names`, so wrapped and compiled models publish plain names.
Names that are one tensor (same memory, shape, strides and dtype) are one alias group. Tensors that
overlap without being the same are separate tensors: a source sends each whole, a target that has
such tensors is refused.

A model is looked at again for each update. What was replaced by the like is followed; other names,
shapes, dtypes or ties than those of the manifest are errors.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import final

import torch
from torch import nn

from parallelkit.errors import ManifestError, StateError, UnsupportedFeatureError
from parallelkit.specs import Accelerator
from parallelkit.weights.inventory import KEEP, Found, changed, describe, match
from parallelkit.weights.manifest import Manifest, TensorSpec
from parallelkit.weights.overlap import Span
from parallelkit.weights.subscriber import SERVE_THREAD
from parallelkit_torch import tensors
from parallelkit_torch.cuda.probe import accelerator_of
from parallelkit_torch.cuda.target import DeviceTarget
from parallelkit_torch.names import Slot, refuse_frozen, refuse_hidden_state, slots
from parallelkit_torch.standing import Standing


class _ModuleWeights:
    """What source and sink share: the manifest, and tensors as bytes."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        held = slots(module)
        self._manifest, places = describe([_found(slot) for slot in held])
        self._groups = [[held[place] for place in group] for group in places]
        self._live = [group[0].tensor for group in self._groups]
        self._unique = self._manifest.unique
        self._views = tensors.LiveViews()
        self._standing: Standing | None = None  # as the groups are
        self._objects: list[torch.Tensor] = []
        self._devices: frozenset[torch.device] = frozenset()

    @property
    def device(self) -> str:
        """Where the tensors are: `"cpu"`, `"cuda:0"`; of the first one, if they differ."""
        return str(self._groups[0][0].tensor.device) if self._groups else "cpu"

    def host_bytes(self, index: int) -> memoryview:
        """Return tensor `index` (of the unique ones) as contiguous row-major bytes.

        The live memory where it is contiguous on the CPU; else a copy, and for a tensor on a
        GPU that is one blocking copy to the host.
        """
        tensor = self._tensor(index)
        view = self._views.of(index, tensor)
        return tensors.as_bytes(tensor) if view is None else view

    def _tensor(self, index: int) -> torch.Tensor:
        """The live tensor, checked to be what the manifest says."""
        spec = self._unique[index]
        tensor = self._groups[index][0].tensor
        problem = tensors.unreadable(tensor) or changed(
            spec, tensors.dtype_name(tensor), tensor.shape
        )
        if problem:
            raise ManifestError(f"tensor {spec.name!r} {problem}; {KEEP}")
        return tensor

    def _rewalk(self) -> None:
        """Follow what was replaced in the module; raise if it is not what the manifest says."""
        if not self._stands():
            standing = Standing(self._module)  # before it is walked: what changes then, shows
            self._keep(self._walked(), standing)

    def _stands(self) -> bool:
        """Whether the module is as it was when the groups were found."""
        return self._standing is not None and self._standing.holds()

    def _keep(self, groups: list[list[Slot]], standing: Standing) -> None:
        """These are the tensors, from now on."""
        objects = {id(s.tensor): s.tensor for group in groups for s in group}
        self._groups, self._standing = groups, standing
        self._live = [group[0].tensor for group in groups]
        self._objects = list(objects.values())
        self._devices = frozenset(tensor.device for tensor in self._objects)

    def _walked(self) -> list[list[Slot]]:
        """The places of each unique tensor now; raises if they are not what the manifest says."""
        held = slots(self._module)
        places = match(self._manifest, [_found(slot) for slot in held])
        return [[held[place] for place in group] for group in places]


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
        self._adopted: list[torch.Tensor] = []
        self._homes: set[int] = set()

    def manifest(self) -> Manifest:
        return self._manifest

    def begin(self) -> None:
        """Look at the module again: an update begins.

        Raises:
            ManifestError: it has other names, dtypes, shapes or ties than `manifest()`, or keeps
                state by now that is no tensor of its own.
        """
        refuse_hidden_state(self._module)
        self._rewalk()
        tensors.settle_devices(self._devices)

    def live(self) -> Sequence[torch.Tensor]:
        """Every unique tensor, as `begin` found it; the same list while nothing has moved."""
        return self._live

    def accelerator(self) -> Accelerator | None:
        """The GPU that the module is on, and whether others can read it there; None: it is not."""
        return accelerator_of(self.live(), exported=True)

    def adopt(self, buffers: Sequence[memoryview]) -> None:
        """Move every unique tensor into the host buffer of the same index, values included.

        Every `Parameter` stays the object it was, so optimisers keep working, and tied names
        stay tied. Tensors become row-major contiguous. The buffers must outlive the model, or
        `release` must be called before they go.

        Args:
            buffers: writable, contiguous, each of exactly the tensor's bytes.

        Raises:
            ManifestError: the module changed since it was described.
            UnsupportedFeatureError: a tensor is not on the CPU, overlaps another, or a buffer
                does not fit; nothing was moved.
        """
        self._rewalk()
        unique = self._unique
        if len(buffers) != len(unique):
            raise UnsupportedFeatureError(
                f"adopt got {len(buffers)} buffers for {len(unique)} tensors"
            )
        named = [(spec.name, self._tensor(index)) for index, spec in enumerate(unique)]
        pair = tensors.overlap(named)
        if pair:
            raise UnsupportedFeatureError(
                f"tensors {pair[0]!r} and {pair[1]!r} share memory without being the same; "
                "moving them into foreign memory would part them"
            )
        homes = [
            _home(spec, self._tensor(index), buffer)
            for index, (spec, buffer) in enumerate(zip(unique, buffers, strict=True))
        ]
        with torch.no_grad():
            for index, home in enumerate(homes):
                home.copy_(self._tensor(index))
        for group, home in zip(self._groups, homes, strict=True):
            for tensor in {id(slot.tensor): slot.tensor for slot in group}.values():
                tensor.data = home
        self._views.clear()
        self._adopted = list(self._objects)
        self._homes = {home.untyped_storage().data_ptr() for home in homes if home.numel()}

    def release(self) -> None:
        """Move adopted tensors back into memory of torch's own; harmless when repeated.

        Also those that the module has lost since, which an optimiser may still hold, and those
        that it has gained over the same memory.
        """
        everything = [*self._adopted, *(slot.tensor for slot in slots(self._module))]
        homes: dict[object, torch.Tensor] = {}
        for tensor in {id(t): t for t in everything}.values():
            if tensors.unreadable(tensor) or not self._is_home(tensor):
                continue
            was = tensors.identity(tensor)
            if was not in homes:
                homes[was] = tensor.detach().clone()
            tensor.data = homes[was]
        self._adopted, self._homes = [], set()
        self._views.clear()

    def _is_home(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() in self._homes


@final
class ModuleSink(_ModuleWeights, DeviceTarget):
    """A module that weights are placed into; a `protocols.LocatedSink`.

    Contiguous CPU tensors are written in place by the caller, through `destination`; all others
    by `write`, with one staging copy; on a GPU that reads the publisher's memory, by that
    (`DeviceTarget`). Addresses of parameters never change.
    """

    def __init__(self, module: nn.Module) -> None:
        """Read names, dtypes and shapes of `module`; raises as `ModuleSource` does."""
        super().__init__(module)
        self._open = False
        self._writable: list[object] = []
        self._spans: Sequence[Span] = ()  # where the tensors lie of which `_writable` tells
        self._seen: list[torch.Tensor] = []
        self._alone: list[list[torch.Tensor]] = []

    @property
    def module(self) -> nn.Module:
        """The module as it was given, wrappers included."""
        return self._module

    def needs(self) -> Manifest:
        """Exactly what the module holds; raises as `check` does."""
        self.check()
        return self._manifest

    def check(self) -> None:
        """Look at the module again: it is about to be written.

        The thread of `subscriber.serve()` only looks. What is written goes by what the user's
        thread saw when it began.

        Raises:
            ManifestError: it has other names, dtypes, shapes or ties than `needs()`; or it cannot
                be written, since several elements of a tensor share one place in memory (an
                expanded tensor), or two tensors overlap. The tensors are named. Or compiled code
                has weights as constants.
        """
        refuse_frozen(self._module)
        if self._stands():
            return
        standing = Standing(self._module)
        groups = self._walked()
        live = [group[0].tensor for group in groups]
        identities = [tensors.identity(tensor) for tensor in live]
        where = self._spans
        if identities != self._writable:  # same memory, same layout: same answer
            named = list(zip((spec.name for spec in self._unique), live, strict=True))
            tensors.refuse_overlaps(named)
            where = tensors.located(named)
        if threading.current_thread().name != SERVE_THREAD:
            self._writable = identities
            self._spans = where
            self._keep(groups, standing)

    def begin(self) -> None:
        """Wait for what still reads the old values, and let tensors be written.

        Raises as `check` does.
        """
        self.check()
        tensors.settle_devices(self._devices)
        self._open = True

    def live_memory(self) -> Sequence[Span]:
        """Where the tensors lie, as `begin` saw them."""
        return self._spans

    def destination(self, index: int) -> memoryview | None:
        """Return the live bytes of tensor `index`; None if they are no row-major bytes here."""
        self._check_open("destination")
        return self._views.of(index, self._tensor(index))

    def write(self, index: int, data: memoryview) -> None:
        self._check_open("write")
        tensors.fill(self._unique[index].name, self._tensor(index), data)

    def finish(self) -> None:
        """Tell torch that every tensor changed: see `tensors.mark_written`."""
        self._check_open("finish")
        self._open = False
        tensors.mark_written(self._objects)
        tensors.settle_devices(self._devices)

    def _parts(self) -> Sequence[Sequence[torch.Tensor]]:
        if self._seen is not self._live:
            self._seen, self._alone = self._live, [[tensor] for tensor in self._live]
        return self._alone

    def _check_open(self, what: str) -> None:
        if not self._open:
            raise StateError(f"ModuleSink.{what} was called outside begin and finish")


def _found(slot: Slot) -> Found:
    """What the inventory wants to know of a tensor."""
    tensor = slot.tensor
    problem = tensors.unreadable(tensor)
    if problem:
        return Found(slot.name, problem=problem)
    return Found(
        slot.name, tensors.dtype_name(tensor), tuple(tensor.shape), tensors.identity(tensor)
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
        return torch.empty(spec.shape, dtype=tensor.dtype, device="cpu")
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer.cast("B")))
    if address % tensor.element_size():
        raise UnsupportedFeatureError(
            f"the buffer for tensor {spec.name!r} is at an address that is not a multiple of its "
            f"element size, {tensor.element_size()} bytes"
        )
    return torch.frombuffer(buffer, dtype=tensor.dtype).reshape(spec.shape)
