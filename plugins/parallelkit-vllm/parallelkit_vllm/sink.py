"""An engine's model as a target of weights: a `LoaderSink`, `LocatedSink` and `FiniteSink`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, final

import torch

from parallelkit.errors import ManifestError, StateError
from parallelkit.weights.buckets import Workers, as_bytes
from parallelkit.weights.finite import non_finite
from parallelkit.weights.manifest import DTYPE_BYTES, Manifest
from parallelkit.weights.overlap import Span
from parallelkit_vllm import checkpoint, live, reload
from parallelkit_vllm.compare import Given, Needed, compare
from parallelkit_vllm.errors import ReloadError

DTYPES: Final = {name: getattr(torch, name) for name in DTYPE_BYTES}


def _nothing() -> None:
    return


@final
class EngineSink:
    """Places published tensors by one layer-wise reload of all of them.

    Only the checkpoint that the engine was made from is compared with what is published; the live
    model is touched in `finish` alone, in the thread that owns it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        vllm_config: Any,
        *,
        module: Any = None,
        ready: Callable[[], None] = _nothing,
        placed: Callable[[], None] = _nothing,
    ) -> None:
        """
        Args:
            model, vllm_config: the worker's.
            module: what `with subscriber.use()` gives; default the model.
            ready: raises if the engine cannot be updated now; called before an update, perhaps in
                another thread, and before anything is written.
            placed: called after the reload, such as to reset caches of old weights.
        """
        self._model = model
        self._config = vllm_config
        self._module = model if module is None else module
        self._ready = ready
        self._placed = placed
        self._published: Manifest | None = None
        self._needed: Needed | None = None
        self._given: list[Given] = []
        self._pending: dict[int, torch.Tensor] = {}
        self._open = False
        self._live: tuple[Span, ...] = ()
        #: Whether what is placed now is finite, where that was found out before.
        self._finite: bool | None = None
        #: Whether the weights that were placed last had values that are not finite.
        self._poisoned = False
        #: Times that key-value caches were cleared of such values.
        self.cleared = 0

    @property
    def device(self) -> str:
        """Where the engine computes."""
        return str(self._config.device_config.device)

    @property
    def module(self) -> Any:
        """The engine, or its model."""
        return self._module

    def learn(self, published: Manifest) -> None:
        """Compare with what the engine's checkpoint has; nothing of the engine is touched.

        Raises:
            ManifestMismatchError: names, shapes or dtypes differ; every difference is listed.
            EngineCheckpointError: what the engine needs cannot be found out.
        """
        needed = checkpoint.needed(self._config.model_config, self._config.load_config)
        packed = getattr(self._model, "packed_modules_mapping", None) or {}
        self._given = compare(published, needed, packed)
        self._published, self._needed = published, needed

    def needs(self) -> Manifest:
        """What `learn` was given: whether it is what the engine needs was settled there."""
        return self._manifest()

    def check(self) -> None:
        """Raise if the engine cannot be updated now."""
        self._ready()

    def begin(self) -> None:
        """Take tensors from here on; the engine generates nothing until `finish` has returned.

        Raises:
            ReloadError: an update by another way is open.
        """
        self._ready()
        self._pending.clear()
        self._finite = None
        if reload.opened(self._model):
            raise ReloadError(
                "another update of this engine is open: finish it first (finish_weight_update)"
            )
        found = _located(self._model)
        if found != self._live:
            self._live = found
        self._open = True

    def live_memory(self) -> Sequence[Span]:
        """Where the model's parameters lie; what layers keep packed elsewhere is not known."""
        return self._live

    def note_finite(self, finite: bool) -> None:
        """Whether all that is written now is finite; see `finish`."""
        self._check_open("note_finite")
        self._finite = finite

    def destination(self, index: int) -> memoryview | None:
        """None: every tensor goes through the engine's loader."""
        self._check_open("destination")
        return None

    def write(self, index: int, data: memoryview) -> None:
        """Take tensor `index`; its bytes are used by `finish` and not copied before."""
        self._check_open("write")
        spec = self._manifest().unique[index]
        if data.nbytes != spec.nbytes:
            raise ManifestError(
                f"tensor {spec.name!r} has {spec.nbytes} bytes, {data.nbytes} were given"
            )
        self._pending[index] = _tensor(data, DTYPES[spec.dtype], spec.shape)

    def readable(self, index: int) -> bool:
        """Never: layers are fused and packed; the bytes as staged were verified."""
        return False

    def host_bytes(self, index: int) -> memoryview:
        """Raises `StateError`: see `readable`."""
        raise StateError(
            f"tensor {self._manifest().unique[index].name!r} cannot be read back from an engine, "
            "whose layers are fused and packed"
        )

    def finish(self) -> None:
        """Reload every layer from the tensors that were written.

        Key-value caches are zeroed if the weights before had values that are not finite. Where
        nobody said so by `note_finite`, the tensors are looked at here, while the engine stands
        still.

        Raises:
            ReloadError: a tensor was not written, the loader raised, or a layer lacks values.
        """
        self._check_open("finish")
        self._open = False
        try:
            lacking = [g.name for g in self._given if g.index not in self._pending]
            if lacking:
                raise ReloadError(
                    f"{len(lacking)} tensors were not written, such as {lacking[0]!r}; nothing "
                    "was touched",
                    layers=lacking,
                )
            model_config = self._config.model_config
            reload.load(self._model, model_config, self._config, self._pairs(), whole=False)
            finite = self._look() if self._finite is None else self._finite
            was, self._poisoned = self._poisoned, not finite
        finally:
            self._pending.clear()
            found = _located(self._model)
            if found != self._live:  # either place was written then
                self._live = (*self._live, *found)
        if was:
            reload.clear_kv(self._config)
            self.cleared += 1
        self._placed()

    def explain(self) -> str:
        """Say which tensors the loader gets, and what was compared with what."""
        count, source = len(self._given), "" if self._needed is None else self._needed.source
        cut = sum(given.rows is not None for given in self._given)
        fused = f", {cut} of them cut from fused ones" if cut else ""
        return (
            f"{count} tensors by the engine's loader, layer by layer{fused}; names, shapes and "
            f"dtypes as in {source}; verified: staged bytes, since packed layers cannot be read "
            "back"
        )

    def _pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        for given in self._given:
            tensor = self._pending[given.index]
            if given.rows is not None:
                tensor = tensor.narrow(0, given.start, given.rows)
            yield given.name, tensor

    def _look(self) -> bool:
        """Whether every value that was written is finite."""
        specs, workers = self._manifest().unique, Workers(1)
        return not any(
            non_finite(as_bytes(live.as_bytes(tensor)), specs[index].dtype, workers)
            for index, tensor in self._pending.items()
        )

    def _manifest(self) -> Manifest:
        if self._published is None:
            raise StateError("EngineSink was asked for tensors before learn()")
        return self._published

    def _check_open(self, what: str) -> None:
        if not self._open:
            raise StateError(f"EngineSink.{what} was called outside begin and finish")


def _located(model: torch.nn.Module) -> tuple[Span, ...]:
    """Where the parameters lie that have elements in memory of their own."""
    return tuple(
        _span(name, tensor)
        for name, tensor in model.named_parameters()
        if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel()
    )


def _span(name: str, tensor: torch.Tensor) -> Span:
    space = "cpu" if tensor.is_cpu else str(tensor.device)
    where, item = tensor.data_ptr(), tensor.element_size()
    return Span.strided(name, where, item, tensor.shape, tensor.stride(), space)


def _tensor(data: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Bytes as a tensor, without a copy where that may be.

    A loader may be careless: what must not be written, or is not aligned, is copied.
    """
    flat = data.cast("B") if data.nbytes else data
    if not flat.nbytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    if flat.readonly:
        flat = memoryview(bytearray(flat))
    raw = torch.frombuffer(flat, dtype=torch.uint8)
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).reshape(shape)
