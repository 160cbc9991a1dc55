"""Where a model can be cut into pipeline stages. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import attrs
from torch import nn

from parallelkit.errors import StageError

# Names of the parts of a decoder: Llama and Qwen2, torchtitan, GPT-2.
_EMBEDDINGS: Final = ("embed_tokens", "tok_embeddings", "wte")
_POSITIONS: Final = ("wpe",)
_LAYERS: Final = ("layers", "h")
_NORMS: Final = ("norm", "ln_f")
_HEADS: Final = ("lm_head", "output")
_LISTS: Final = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_DROPOUTS: Final = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_HINT: Final = "give stages=[[names of modules], ...], one list a stage"


@attrs.frozen
class Anatomy:
    """The parts of a model between which it can be cut.

    Attributes:
        units: in forward order, names of modules that stay together. The first name is what a
            stage can start with; the others are parts without which it does not work.
        kind: `"sequential"`, `"decoder"`, or `"given"` where the user named the stages.
        added: modules whose output is added to the embedding's; outside of the first stage
            they give 0.
    """

    units: tuple[tuple[str, ...], ...]
    kind: str
    added: frozenset[str] = frozenset()

    @property
    def names(self) -> list[str]:
        """Every name, in forward order."""
        return [name for unit in self.units for name in unit]


def units(model: nn.Module) -> list[str]:
    """Names of the modules that can start a stage, in forward order.

    Of an `nn.Sequential`: its children that have parameters, those of nested ones included. Of a
    decoder named as those of Llama, Qwen2, torchtitan or GPT-2 are: the embedding, each layer,
    the final norm, the head.

    Raises:
        StageError: the model is neither, or has parameters that belong to none of these.
    """
    return [unit[0] for unit in anatomy(model).units]


def anatomy(model: nn.Module) -> Anatomy:
    """Recognise a model; `units` says how.

    Raises:
        StageError: it is not recognised, or has parameters that belong to no unit.
    """
    if is_plain_sequential(model):
        found = Anatomy(tuple(_sequential_units(model)), "sequential")
    else:
        found = _decoder(model)
    refuse_left_over(model, found.names)
    return found


def is_plain_sequential(module: nn.Module) -> bool:
    """Whether `module` does nothing but call its children one after the other."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


# --- recognising


def _sequential_units(model: nn.Module) -> list[tuple[str, ...]]:
    """Children with parameters, each with the parameterless ones after it."""
    found: list[list[str]] = []
    leading: list[str] = []
    for name in _flat(model, ""):
        if has_parameters(model.get_submodule(name)):
            found.append([*leading, name])
            leading = []
        elif found:
            found[-1].append(name)
        else:
            leading.append(name)
    if not found:
        raise StageError(
            "the model is an nn.Sequential without parameters: there is nothing to cut"
        )
    return [tuple(unit) for unit in found]


def _flat(module: nn.Module, prefix: str) -> Iterator[str]:
    for name, child in _children(module):
        if is_plain_sequential(child) and child._modules:
            yield from _flat(child, f"{prefix}{name}.")
        else:
            yield prefix + name


def _decoder(model: nn.Module) -> Anatomy:
    backbones = [
        name
        for name, module in model.named_modules()
        if _child(module, _EMBEDDINGS) and _list_of_layers(module) and name.count(".") < 2
    ]
    if len(backbones) != 1:
        what = f"{len(backbones)} decoders ({', '.join(backbones)})" if backbones else "no decoder"
        raise StageError(
            f"{type(model).__qualname__} cannot be cut by itself: it is no nn.Sequential, and "
            f"{what} with an embedding ({', '.join(_EMBEDDINGS)}) and layers "
            f"({', '.join(_LAYERS)}) was found in it; {_HINT}"
        )
    prefix = f"{backbones[0]}." if backbones[0] else ""
    backbone = model.get_submodule(backbones[0])
    layers = _list_of_layers(backbone)
    positions = [prefix + name for name in _POSITIONS if _child(backbone, (name,))]
    first = [prefix + _child(backbone, _EMBEDDINGS), *positions]
    last = [prefix + name for name in (_child(backbone, _NORMS),) if name]
    # A dropout beside the layers belongs to the embedding, or it would be applied in each stage.
    first += [
        prefix + name for name, child in backbone.named_children() if isinstance(child, _DROPOUTS)
    ]
    middle = [
        (f"{prefix}{layers}.{key}",) for key, _ in backbone.get_submodule(layers).named_children()
    ]
    head = _child(model, _HEADS)
    found = [tuple(first), *middle, *((name,) for name in last), *((head,) for _ in head[:1])]
    return Anatomy(tuple(found), "decoder", frozenset(positions))


def _child(module: nn.Module, names: Sequence[str]) -> str:
    return next((name for name in names if isinstance(getattr(module, name, None), nn.Module)), "")


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Children by name; unlike `named_children`, one that is there twice is listed twice."""
    return [(name, child) for name, child in module._modules.items() if child is not None]


def _list_of_layers(module: nn.Module) -> str:
    name = _child(module, _LAYERS)
    layers = getattr(module, name) if name else None
    return name if isinstance(layers, _LISTS) and len(layers) else ""


def refuse_left_over(model: nn.Module, names: Sequence[str]) -> None:
    """Raise `StageError` unless every parameter is in one of the named modules."""
    inside = tuple(f"{name}." for name in names)
    every = model.named_parameters(remove_duplicate=False)
    rest = [name for name, _ in every if not name.startswith(inside)]
    if rest:
        raise StageError(
            f"parameter {rest[0]!r} belongs to no part that a stage could hold"
            f"{f' (nor do {len(rest) - 1} others)' if len(rest) > 1 else ''}; {_HINT}, with every "
            "module that has parameters"
        )


def has_parameters(module: nn.Module) -> bool:
    """Whether there is one in it, at any depth."""
    return next(module.parameters(), None) is not None


def some(names: Sequence[str]) -> str:
    """The first few, for a message."""
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
