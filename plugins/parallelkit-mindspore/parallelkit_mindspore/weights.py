"""Weights of a Cell: read by `CellSource`, placed by `CellSink`.

Both name tensors by `parallelkit_mindspore.names`. Names that are one tensor (same memory, shape,
strides and dtype) are one alias group. Frozen parameters and persistent buffers are included.

Bytes are read and written where they are, by pointer. A parameter's memory moves when something
calls `set_data` on it, so the pointer is looked at for every update, and a view is kept only as
long as it is the same. We never call `set_data`: what `jit` compiled before, and that is every
optimiser of `mindspore.nn` in PyNative mode, goes on with the old memory, so that training stands
still without an error (MindSpore 2.10, CPU).

All but `CellSink.check` belongs to the thread that owns MindSpore; from others they raise
`WrongThreadError`. On Ascend and GPU tensors are copied through the host; that was never run.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final, final

import mindspore as ms

from parallelkit.errors import ManifestError, StateError, UnsupportedFeatureError
from parallelkit.weights.inventory import KEEP, Found, changed, describe, match
from parallelkit.weights.manifest import Manifest
from parallelkit.weights.overlap import Span, overlap, self_overlapping
from parallelkit.weights.subscriber import SERVE_THREAD
from parallelkit_mindspore import memory, runtime, tensors
from parallelkit_mindspore.names import Slot, slots, unwrap

_NO_ALIASING: Final = (
    "aliased=True is not possible with MindSpore: parameters move into other memory by set_data "
    "alone, and what jit compiled before, such as the optimisers of mindspore.nn in PyNative "
    "mode, goes on with the old memory and trains nothing any more. Publish without aliased"
)


class _CellWeights:
    """What source and sink share: the manifest, and tensors as bytes.

    With `parts`, a divided parameter is described by the shape of this rank's part.
    """

    def __init__(self, model: Any, *, parts: bool = False) -> None:
        runtime.own(type(self).__name__)
        runtime.synchronize()
        self._model = model
        self._parts = parts
        self._slots = slots(model)
        self._manifest, places = describe([_found(slot, parts) for slot in self._slots])
        self._groups = [[self._slots[place] for place in group] for group in places]
        self._unique = self._manifest.unique
        self._views: dict[int, tuple[int, memoryview]] = {}

    @property
    def device(self) -> str:
        """Where the tensors are: `"cpu"`, `"ascend:0"`; of the first one, if they differ."""
        return memory.device(self._groups[0][0].tensor) if self._groups else "cpu"

    def cuts(self) -> list[memory.Cut | None]:
        """How each unique tensor is divided over the tensor axis, as it is now."""
        return [memory.cut_of(group[0].tensor) for group in self._groups]

    def host_bytes(self, index: int) -> memoryview:
        """Return tensor `index` (of the unique ones) as contiguous row-major bytes.

        The live memory where it is contiguous on the host, else a copy. `begin` has waited for
        whatever was still being computed.
        """
        tensor = self._tensor(index)
        view = self._live_view(index, tensor)
        return memory.copy_out(tensor) if view is None else view

    def _live_view(self, index: int, tensor: Any) -> memoryview | None:
        """The tensor's own bytes; None where they are not row-major bytes of the host.

        A pointer that is equal, with the same shape and dtype, is the same bytes.
        """
        if not (memory.on_host(tensor) and tensor.is_contiguous()):
            return None
        where = tensor.data_ptr()
        kept = self._views.get(index)
        if kept is not None and kept[0] == where:
            return kept[1]
        view = tensors.live_bytes(tensor)
        if view is not None:
            self._views[index] = (where, view)
        return view

    def _tensor(self, index: int) -> Any:
        """The live tensor, checked to be what the manifest says."""
        spec = self._unique[index]
        tensor = self._groups[index][0].tensor
        problem = memory.unreadable(tensor, parts=self._parts) or changed(
            spec, tensors.dtype_name(tensor), tensor.shape
        )
        if problem:
            raise ManifestError(f"tensor {spec.name!r} {problem}; {KEEP}")
        return tensor

    def _rewalk(self) -> None:
        """Follow what was replaced in the model; raise if it is not what the manifest says."""
        held = slots(self._model)
        places = match(self._manifest, [_found(slot, self._parts) for slot in held])
        self._slots = held
        self._groups = [[held[place] for place in group] for group in places]

    def _own(self, what: str) -> None:
        runtime.own(f"{type(self).__name__}.{what}")


@final
class CellSource(_CellWeights):
    """The weights of a Cell, for `pk.publish_weights`; a `protocols.WeightSource`.

    Example:
        >>> source = CellSource(ms.nn.Dense(2, 3))
        >>> [t.describe() for t in source.manifest().tensors]
        ['float32[3, 2]', 'float32[3]']
    """

    def __init__(self, model: Any, *, parts: bool = False) -> None:
        """Read names, dtypes and shapes; no data.

        Args:
            model: a Cell, bare or in MindSpore's wrappers for training, or a `mindspore.Model`.
            parts: take a divided parameter for a tensor of the shape of this rank's part.

        Raises:
            ManifestError: a tensor has no bytes here (uninitialised, sliced over ranks, meta), its
                dtype is not allowed, or two would have one name; it is named.
            WrongThreadError: another thread owns MindSpore.
        """
        super().__init__(model, parts=parts)

    def manifest(self) -> Manifest:
        return self._manifest

    def begin(self) -> None:
        """Look at the model again, and wait until all that was asked for is computed.

        Raises:
            ManifestError: it has other names, dtypes, shapes or ties than `manifest()`.
            WrongThreadError: another thread owns MindSpore.
        """
        self._own("begin")
        runtime.synchronize()
        self._rewalk()

    def adopt(self, buffers: Sequence[memoryview]) -> None:
        """Refuse: MindSpore's parameters cannot live in foreign memory; nothing is moved.

        Raises:
            UnsupportedFeatureError: always, with the reason.
        """
        raise UnsupportedFeatureError(_NO_ALIASING)


@final
class CellSink(_CellWeights):
    """A Cell that weights are placed into; a `protocols.LocatedSink`.

    Contiguous tensors of the host are written in place by the caller, through `destination`; all
    others by `write`. Addresses of parameters never change, so what was compiled in Graph mode or
    by `jit` computes with the new values from its next call on.
    """

    def __init__(self, model: Any, *, parts: bool = False) -> None:
        """Read names, dtypes and shapes of `model`; raises as `CellSource` does."""
        super().__init__(model, parts=parts)
        self._open = False
        self._writable: list[object] = []
        self._live: Sequence[Span] = ()  # where the tensors lie of which `_writable` tells
        self._seen = [slot.tensor for slot in self._slots]

    @property
    def module(self) -> Any:
        """The model as it was given, wrappers included.

        Raises:
            WrongThreadError: another thread owns MindSpore.
        """
        self._own("module")
        return self._model

    def needs(self) -> Manifest:
        """Exactly what the model holds; raises as `check` does."""
        self.check()
        return self._manifest

    def check(self) -> None:
        """Look at the model again: it is about to be written.

        In the thread of `subscriber.serve()`, which must not touch MindSpore, only whether every
        name is still there; the rest follows when the owner's thread puts the version in place.

        Raises:
            ManifestError: it has other names, dtypes, shapes or ties than `needs()`; or it cannot
                be written: elements of a tensor share one place in memory, two tensors overlap,
                or the memory is mapped for reading only. The tensors are named. A read-only
                NumPy array that `Tensor.from_numpy` shares looks like any other memory.
            WrongThreadError: called in neither of these threads.
        """
        if threading.current_thread().name == SERVE_THREAD:
            for slot in self._slots:
                if slot.holder.get(slot.key) is None:
                    raise ManifestError(f"tensor {slot.name!r} is no longer there; {KEEP}")
            return
        self._own("check")
        self._rewalk()
        before, self._seen = self._seen, [slot.tensor for slot in self._slots]
        if any(a is not b for a, b in zip(before, self._seen, strict=True)):
            _forget_graphs(self._model)
        live = [group[0].tensor for group in self._groups]
        identities: list[object] = [memory.identity(tensor) for tensor in live]
        if identities != self._writable:  # same memory, same layout: same answer
            self._live = self._writable_spans(live)
            self._writable = identities

    def begin(self) -> None:
        """Wait for what still reads the old values, and let tensors be written.

        Raises:
            ManifestError, WrongThreadError: as `check`, of which nothing is left out here.
        """
        self._own("begin")
        runtime.synchronize()
        self.check()
        self._open = True

    def live_memory(self) -> Sequence[Span]:
        """Where the tensors lie, as `begin` saw them."""
        return self._live

    def destination(self, index: int) -> memoryview | None:
        """Return the live bytes of tensor `index`; None if they are no row-major bytes here."""
        self._check_open("destination")
        return self._live_view(index, self._tensor(index))

    def write(self, index: int, data: memoryview) -> None:
        self._check_open("write")
        spec, given = self._unique[index], data.cast("B")
        if given.nbytes != spec.nbytes:
            raise ManifestError(
                f"tensor {spec.name!r} has {spec.nbytes} bytes, {given.nbytes} were given"
            )
        memory.copy_in(self._tensor(index), given)

    def finish(self) -> None:
        """All is written; where MindSpore copied, wait until it has."""
        self._check_open("finish")
        self._open = False
        runtime.synchronize()

    def _writable_spans(self, live: Sequence[Any]) -> Sequence[Span]:
        """Where tensors lie; raises if writing one element would change another, or end all."""
        spans: list[Span] = []
        for spec, tensor in zip(self._unique, live, strict=True):
            if self_overlapping(spec.shape, tensor.stride()):
                raise ManifestError(
                    f"tensor {spec.name!r} of the target has shape {list(spec.shape)} and strides "
                    f"{list(tensor.stride())}: its elements share memory, so it cannot be "
                    "written; make it contiguous first"
                )
            if spec.nbytes:
                spans.append(memory.span(spec.name, tensor))
        pair = overlap(spans)
        if pair:
            raise ManifestError(
                f"tensors {pair[0]!r} and {pair[1]!r} of the target share memory without being "
                "the same: writing one would change the other; give each memory of its own"
            )
        protected = memory.first_protected(spans)
        if protected:
            raise ManifestError(
                f"tensor {protected!r} of the target lies in memory that is mapped for reading "
                "only; give it memory of its own, by Tensor(array) instead of Tensor.from_numpy"
            )
        return spans

    def _check_open(self, what: str) -> None:
        self._own(what)
        if not self._open:
            raise StateError(f"CellSink.{what} was called outside begin and finish")


def _forget_graphs(model: Any) -> None:
    """Let Cells be compiled again at their next call: a graph goes on with a replaced parameter."""
    root = model if isinstance(model, ms.nn.Cell) else unwrap(model)
    for _, cell in root.cells_and_names():
        cache = getattr(cell, "compile_cache", None)
        if cache:
            cache.clear()


def _found(slot: Slot, parts: bool) -> Found:
    """What the inventory wants to know of a tensor."""
    tensor = slot.tensor
    problem = memory.unreadable(tensor, parts=parts)
    if problem:
        return Found(slot.name, problem=problem)
    return Found(
        slot.name, tensors.dtype_name(tensor), tuple(tensor.shape), memory.identity(tensor)
    )
