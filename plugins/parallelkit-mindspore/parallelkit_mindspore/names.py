"""Plain names: what other frameworks and checkpoints call the tensors of a Cell.

A name is the path of attributes, as `Cell.state_dict` has it, with three differences. Wrappers are
recognised by their type and taken off; no prefix is guessed from a string, so a part that really is
called `network` keeps its name. Optimisers, schedules and loss scales inside a Cell are left out.
And tensors of layers that MindSpore names in its own way have Torch's names:

| layer | its tensor | published as |
|---|---|---|
| BatchNorm, InstanceNorm | gamma, beta | weight, bias |
| | moving_mean, moving_variance | running_mean, running_var |
| LayerNorm, GroupNorm | gamma, beta | weight, bias |
| Embedding, EmbeddingLookup | embedding_table | weight |
| PReLU | w | weight |

`mint.nn` has these names already. Other layers are told about by `register_names`. Torch's norms
with running statistics also count batches, in `num_batches_tracked`; MindSpore's `nn` has no such
tensor, so one is kept beside the layer: it is published as zero, or as what was last received.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import mindspore as ms

from parallelkit.errors import ManifestError

_NN: Final = "mindspore.nn"
_WRAP: Final = "mindspore.nn.wrap.cell_wrapper"
_AMP: Final = "mindspore.train.amp"

#: Wrapper types by where they live, and the attribute that holds what they wrap.
_WRAPPERS: Final[Mapping[tuple[str, str], str]] = {
    (_WRAP, "WithLossCell"): "_backbone",
    (_WRAP, "WithGradCell"): "network",
    (_WRAP, "WithEvalCell"): "_network",
    (_WRAP, "ForwardValueAndGrad"): "network",
    (_WRAP, "TrainOneStepCell"): "network",
    (_WRAP, "GradAccumulationCell"): "network",
    (_WRAP, "PipelineCell"): "network",
    (_WRAP, "MicroBatchInterleaved"): "network",
    (_WRAP, "_VirtualDatasetCell"): "_backbone",
    (_WRAP, "VirtualDatasetCellTriple"): "_backbone",
    (_AMP, "WithLossCell"): "_backbone",
    (_AMP, "_OutputTo16"): "_backbone",
    (_AMP, "_OutputTo32"): "_backbone",
    ("mindspore.parallel.auto_parallel", "AutoParallel"): "network",
    ("mindspore.train.model", "Model"): "_network",
    # Not a wrapper by intent: a layer of another dimension inside a layer.
    (f"{_NN}.layer.normalization", "BatchNorm3d"): "bn2d",
}
#: Parts that hold no weights of the model, but the state of its training.
_STATE: Final = {
    (f"{_NN}.optim.optimizer", "Optimizer"),
    ("mindspore.experimental.optim.optimizer", "Optimizer"),
    (f"{_NN}.learning_rate_schedule", "LearningRateSchedule"),
    (f"{_NN}.wrap.loss_scale", "DynamicLossScaleUpdateCell"),
    (f"{_NN}.wrap.loss_scale", "FixedLossScaleUpdateCell"),
    (f"{_NN}.wrap.grad_reducer", "DistributedGradReducer"),
    (f"{_NN}.wrap.grad_reducer", "PipelineGradReducer"),
    (_WRAP, "ParameterUpdate"),
}
_AFFINE: Final = {"gamma": "weight", "beta": "bias"}
_RUNNING: Final = {**_AFFINE, "moving_mean": "running_mean", "moving_variance": "running_var"}
_TABLE: Final = {"embedding_table": "weight"}
_LAYERS: Final[Mapping[tuple[str, str], Mapping[str, str]]] = {
    (f"{_NN}.layer.normalization", "_BatchNorm"): _RUNNING,
    (f"{_NN}.layer.normalization", "_InstanceNorm"): _RUNNING,
    (f"{_NN}.layer.normalization", "LayerNorm"): _AFFINE,
    (f"{_NN}.layer.normalization", "GroupNorm"): _AFFINE,
    (f"{_NN}.layer.embedding", "Embedding"): _TABLE,
    (f"{_NN}.layer.embedding", "EmbeddingLookup"): _TABLE,
    (f"{_NN}.layer.activation", "PReLU"): {"w": "weight"},
}
_COUNT: Final = "num_batches_tracked"

_registered: dict[type, Mapping[str, str]] = {}
_counts: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


class Slot(NamedTuple):
    """A place in a Cell that holds a tensor, under its plain name.

    Attributes:
        name: such as `layers.0.weight`.
        path: where it is in the Cell, such as `layers.0.gamma`; for messages.
        holder: the dict of the Cell that owns it.
        key: its key in `holder`.
    """

    name: str
    path: str
    holder: dict[str, Any]
    key: str

    @property
    def tensor(self) -> Any:
        """The tensor as it is now; it may have been replaced since.

        Raises:
            ManifestError: it was removed.
        """
        tensor = self.holder.get(self.key)
        if tensor is None:
            raise ManifestError(f"tensor {self.name!r} is no longer there")
        return tensor


def register_names(cell_type: type, names: Mapping[str, str]) -> None:
    """Say what the tensors of a type of layer are called elsewhere.

    Holds for the type and what is derived from it, in this process, for models published or
    subscribed afterwards; the nearest type in the order of inheritance decides alone. Replaces
    what is built in for that type.

    Args:
        cell_type: a subclass of `mindspore.nn.Cell`.
        names: attribute of the layer, to the name it is published under. Attributes that are not
            listed keep their names.

    Raises:
        ManifestError: no Cell type; a name is empty, no string, or given to two attributes; or
            the type has other names already.

    Example:
        >>> class RMSNorm(ms.nn.Cell):
        ...     def __init__(self) -> None:
        ...         super().__init__()
        ...         self.gamma = ms.Parameter(ms.mint.ones(4))
        >>> register_names(RMSNorm, {"gamma": "weight"})
        >>> plain_names(ms.nn.SequentialCell(RMSNorm()))
        ['0.weight']
    """
    if not (isinstance(cell_type, type) and issubclass(cell_type, ms.nn.Cell)):
        raise ManifestError(
            f"register_names got {cell_type!r}; the first argument is a subclass of "
            "mindspore.nn.Cell"
        )
    for key, name in names.items():
        if not all(isinstance(text, str) and text.strip(".") for text in (key, name)):
            raise ManifestError(
                f"register_names got {key!r}: {name!r} for {cell_type.__qualname__}; both are "
                "names that are not empty"
            )
    shared = sorted(name for name in set(names.values()) if list(names.values()).count(name) > 1)
    if shared:
        keys = sorted(key for key, name in names.items() if name == shared[0])
        raise ManifestError(
            f"register_names gives {' and '.join(keys)} of {cell_type.__qualname__} the same name, "
            f"{shared[0]!r}; each needs one of its own"
        )
    known = _registered.get(cell_type)
    if known is not None and dict(known) != dict(names):
        raise ManifestError(
            f"{cell_type.__qualname__} is registered already with {dict(known)}; "
            f"it cannot be {dict(names)} too"
        )
    _registered[cell_type] = MappingProxyType(dict(names))


def unwrap(model: Any) -> Any:
    """Take off wrappers that train, evaluate or cast, in whatever order they are."""
    while True:
        attribute = _lookup(model, _WRAPPERS)
        inner = getattr(model, attribute, None) if attribute else None
        if not isinstance(inner, ms.nn.Cell):
            return model
        model = inner


def slots(model: Any) -> list[Slot]:
    """List every parameter and persistent buffer, in the order of the plain `state_dict`.

    A tensor under two names is listed twice: which names are one tensor is the caller's business.

    Args:
        model: a Cell, or a `mindspore.Model`, of which the network is taken.

    Raises:
        ManifestError: two tensors would have one name; both places are named.
    """
    found: list[tuple[Slot, bool]] = []
    _walk(unwrap(model), "", "", found, frozenset())
    owned = {id(slot.tensor) for slot, listed in found if not listed}
    kept = [slot for slot, listed in found if not listed or id(slot.tensor) not in owned]
    paths: dict[str, str] = {}
    for slot in kept:
        other = paths.setdefault(slot.name, slot.path)
        if other != slot.path:
            raise ManifestError(
                f"{other} and {slot.path} would both be published as {slot.name!r}; give one "
                "another name with parallelkit_mindspore.names.register_names"
            )
    return kept


def plain_names(model: Any) -> list[str]:
    """Names of the parameters and persistent buffers, as they are published.

    Example:
        >>> plain_names(ms.nn.LayerNorm((4,)))
        ['weight', 'bias']
    """
    return [slot.name for slot in slots(model)]


def _walk(
    cell: Any, prefix: str, path: str, found: list[tuple[Slot, bool]], above: frozenset[int]
) -> None:
    """Add each tensor of `cell` and its parts, and whether it is only listed in a tuple there.

    A step of the user's own may hold the optimiser's `ParameterTuple`, which makes every parameter
    of the network one of the step's too.
    """
    names, counts = _names_of(cell)
    parameters = cell._params
    listed = {
        id(item)
        for value in list(cell.__dict__.values())
        if isinstance(value, ms.ParameterTuple)
        for item in value
    }
    for key, tensor in list(parameters.items()):
        if tensor is not None:
            slot = Slot(prefix + names.get(key, key), path + key, parameters, key)
            found.append((slot, id(tensor) in listed and key == tensor.name))
    buffers = cell.__dict__.get("_buffers", {})
    transient = cell.__dict__.get("_lazy_non_persistent_buffers_set") or ()
    for key, tensor in list(buffers.items()):
        if tensor is not None and key not in transient:
            found.append((Slot(prefix + names.get(key, key), path + key, buffers, key), False))
    if counts:
        found.append((Slot(prefix + _COUNT, path + _COUNT, _count_of(cell), _COUNT), False))
    for key, child in list(cell._cells.items()):
        inner = None if child is None else unwrap(child)
        if inner is not None and id(inner) not in above and not _is_state(inner):
            _walk(inner, f"{prefix}{key}.", f"{path}{key}.", found, above | {id(cell)})


def _names_of(cell: Any) -> tuple[Mapping[str, str], bool]:
    """Names by attribute, and whether Torch's layer counts batches where this one does not."""
    for kind in type(cell).__mro__:
        if kind in _registered:
            return _registered[kind], False
        known = _LAYERS.get((kind.__module__, kind.__name__))
        if known is not None:
            return known, known is _RUNNING and _COUNT not in cell._params
    return {}, False


def _count_of(cell: Any) -> dict[str, Any]:
    held = _counts.get(cell)
    if held is None:
        held = _counts[cell] = {_COUNT: ms.Tensor(0, ms.int64)}
    return held


def _is_state(cell: Any) -> bool:
    return any((kind.__module__, kind.__name__) in _STATE for kind in type(cell).__mro__)


def _lookup(thing: Any, table: Mapping[tuple[str, str], str]) -> str | None:
    for kind in type(thing).__mro__:
        found = table.get((kind.__module__, kind.__name__))
        if found is not None:
            return found
    return None
