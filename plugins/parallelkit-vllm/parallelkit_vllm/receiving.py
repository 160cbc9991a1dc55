"""A worker that is sent tensors one by one, and puts them in place when it has all of them."""

from __future__ import annotations

import logging
from typing import Any, Final

import torch

from parallelkit.errors import NonFiniteError
from parallelkit.weights.manifest import Manifest, TensorSpec
from parallelkit_vllm import checkpoint, live
from parallelkit_vllm.collecting import Admitted, Collection
from parallelkit_vllm.errors import ReloadError
from parallelkit_vllm.sink import DTYPES, EngineSink

_log = logging.getLogger(__name__)

#: Names in a line of the log.
_NAMED: Final = 8


class Receiver:
    """Collects tensors for a worker's model; the engine keeps its weights until all are there.

    Then one layer-wise reload puts them in place. So it computes with one set of weights or with
    another, never with a mixture, and needs memory for a second set meanwhile.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any) -> None:
        """
        Args:
            model, vllm_config: the worker's.

        Raises:
            EngineCheckpointError: what the engine needs cannot be found out.
        """
        needed = checkpoint.needed(vllm_config.model_config, vllm_config.load_config)
        packed = getattr(model, "packed_modules_mapping", None) or {}
        self._model = model
        self._config = vllm_config
        self._tied = needed.tied
        self._sink = EngineSink(model, vllm_config)
        self._collection = Collection(needed, packed, _same)
        self._placed: set[bytes] = set()  # digests, where a head has to be compared with them
        self._start = live.look(model)
        #: How often all weights were replaced.
        self.updates = 0
        #: Why the model is of no version, or None.
        self.broken: str | None = None

    @property
    def missing(self) -> list[str]:
        """Names that the update which is under way lacks; empty where none is."""
        return self._collection.missing if len(self._collection) else []

    def admit(self, name: object, dtype: object, shape: object) -> Admitted:
        """Say whether a tensor may come; see `Collection.admit`. Nothing is touched."""
        return self._collection.admit(name, dtype, shape)

    def take(self, admitted: Admitted, tensor: torch.Tensor) -> None:
        """Take a tensor over; the last one that was missing puts all in place.

        Args:
            tensor: as `prepare` returned it; the caller does not use it any more.

        Raises:
            ManifestMismatchError: a head differs from the embedding that the engine ties it to.
            ReloadError: the engine's loader failed; its weights are of no version until another
                update is complete.
        """
        collection = self._collection
        if admitted.use == "head" and live.digest(tensor) in self._placed:
            return  # of the update that was completed by the tensor before
        if not len(collection) and admitted.use == "keep":
            _log.info(
                "an update of %d tensors begins; the weights stay as they are until all are there",
                len(collection.missing),
            )
        collection.take(admitted, tensor)
        if len(collection) and collection.whole:
            self._place()

    def forget(self) -> None:
        """Give up what was collected."""
        if len(self._collection):
            _log.warning("an update is given up, without %s", _listed(self._collection.missing))
        self._collection.clear()

    def changed(self) -> bool:
        """Whether the weights are others than at the start, and whole; see the extensions."""
        if self.broken:
            _log.warning("the weights are of no version: %s", self.broken)
            return False
        if self.missing:
            _log.warning("the weights are the old ones: still missing %s", _listed(self.missing))
            return False
        if not len(self._collection) and (heads := self._collection.heads):
            _log.warning("%s came, and is not the embedding that it is tied to", _listed(heads))
            return False
        now = live.look(self._model)
        if now.unseen:
            _log.warning("weights of these layers cannot be read: %s", _listed(list(now.unseen)))
        if now.zero:
            _log.info("all weights are zero")
        return now.digests != self._start.digests

    def _place(self) -> None:
        held = self._collection.drain()
        specs: list[TensorSpec] = [spec for spec, _ in held.values()]
        self._sink.learn(Manifest(specs))
        self._sink.begin()
        for index, (_, tensor) in enumerate(held.values()):
            self._sink.write(index, live.as_bytes(tensor))
        try:
            self._sink.finish()
        except ReloadError as error:
            self.broken = str(error)
            raise
        self.broken = None
        self.updates += 1
        if self._tied:
            self._placed = {live.digest(tensor) for _, tensor in held.values()}
        _log.info("update %d is in place: %d tensors", self.updates, len(held))
        if self.updates == 1 and self._config.cache_config.enable_prefix_caching:
            _log.warning(
                "prefixes that were cached are of the old weights: call reset_prefix_cache() on "
                "the engine before it generates"
            )


def prepare(admitted: Admitted, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as it is kept; the same one where nothing is to be cast.

    Raises:
        NonFiniteError: the cast would make values infinite.
    """
    if admitted.dtype == admitted.spec.dtype:
        return tensor
    made = tensor.to(DTYPES[admitted.dtype])
    beyond = torch.isfinite(tensor) & ~torch.isfinite(made)
    if bool(beyond.any()):
        name = admitted.spec.name
        raise NonFiniteError(
            f"{int(beyond.sum())} values of {name!r} ({admitted.spec.dtype}) are too large for "
            f"{admitted.dtype}, which the engine has; nothing was touched",
            tensors=[name],
        )
    return made


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and live.as_bytes(a) == live.as_bytes(b)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
