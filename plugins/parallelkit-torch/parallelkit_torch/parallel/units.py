"""Where a model can be cut into pipeline stages, and which cut is the most even one. Pure."""

from __future__ import annotations

import itertools
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


def assign(
    model: nn.Module, count: int, stages: Sequence[Sequence[str]] | None = None
) -> list[list[str]]:
    """Divide a model's units over `count` stages, in order; pure, nothing is changed.

    Without `stages`, the largest number of parameter bytes in a stage is as small as can be, and
    among such cuts the sum of squares is; parameters of the embedding and the head count too.

    Args:
        model: with or without values, so a model on the meta device will do.
        count: number of stages, over all ranks of the pipeline.
        stages: names of modules for each stage, in forward order. A name may be that of a parent,
            such as `model.layers`, and modules without parameters may be left out.

    Returns:
        For each stage the names of its modules.

    Raises:
        StageError: the model cannot be cut, into so many stages or as `stages` says; or two
            stages would share a parameter.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise StageError(f"the number of stages is {count!r}; it is a positive integer")
    if stages is None:
        found = anatomy(model).units
        if len(found) < count:
            raise StageError(
                f"the model has {len(found)} parts to cut between ({_some(_firsts(found))}), "
                f"fewer than the {count} stages asked for"
            )
        sizes = [sum(_bytes(model, name) for name in unit) for unit in found]
        made = [
            [name for unit in found[start:stop] for name in unit]
            for start, stop in _even(sizes, count)
        ]
    else:
        made = _given(model, count, stages)
    _refuse_ties(model, made)
    return made


def anatomy(model: nn.Module) -> Anatomy:
    """Recognise a model; `units` says how.

    Raises:
        StageError: it is not recognised, or has parameters that belong to no unit.
    """
    if is_plain_sequential(model):
        found = Anatomy(tuple(_sequential_units(model)), "sequential")
    else:
        found = _decoder(model)
    _refuse_left_over(model, found.names)
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
        if _has_parameters(model.get_submodule(name)):
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


# --- what the user gave


def _given(model: nn.Module, count: int, stages: Sequence[Sequence[str]]) -> list[list[str]]:
    lists = [[stage] if isinstance(stage, str) else list(stage) for stage in stages]
    if len(lists) != count or not all(lists):
        raise StageError(
            f"stages has {len(lists)} lists, of {', '.join(str(len(s)) for s in lists)} names; "
            f"the plan needs {count} of at least one name each"
        )
    listed = [(name, number) for number, names in enumerate(lists) for name in names]
    known = {name for name, _ in model.named_modules() if name}
    unknown = [name for name, _ in listed if name not in known]
    if unknown:
        raise StageError(
            f"stages names {unknown[0]!r}, which is no module of the model; there are "
            f"{_some(sorted(known, key=lambda name: name.count('.')))}"
        )
    for (one, _), (two, _) in itertools.permutations(listed, 2):
        if two == one or two.startswith(f"{one}."):
            raise StageError(f"stages names {two!r} twice: {one!r} and {two!r} are both there")
    try:
        names = anatomy(model).names
    except StageError:  # not recognised: the user's word stands
        _refuse_left_over(model, [name for name, _ in listed])
        return lists
    return _ordered(model, names, listed, count)


def _ordered(
    model: nn.Module, names: list[str], listed: list[tuple[str, int]], count: int
) -> list[list[str]]:
    """The user's stages in terms of the model's own units, checked for order and gaps."""
    made: list[list[str]] = [[] for _ in range(count)]
    number = 0
    for name in names:
        owners = [(n, k) for n, k in listed if name == n or name.startswith(f"{n}.")]
        if not owners and any(n.startswith(f"{name}.") for n, _ in listed):
            raise StageError(
                f"stages cuts inside of {name!r}; it stays in one piece: name it whole"
            )
        if not owners and _has_parameters(model.get_submodule(name)):
            raise StageError(
                f"stages does not name {name!r}; every module with parameters has a stage"
            )
        mine = owners[0][1] if owners else number
        if mine < number:
            raise StageError(
                f"stages has {name!r} in stage {mine}, after modules of stage {number}; the order "
                f"of the model is {_some(names)}"
            )
        number = mine
        made[number].append(name)
    if not all(made):
        raise StageError(f"stage {made.index([])} of stages has nothing that can start a stage")
    return made


# --- refusing


def _refuse_left_over(model: nn.Module, names: Sequence[str]) -> None:
    inside = tuple(f"{name}." for name in names)
    every = model.named_parameters(remove_duplicate=False)
    rest = [name for name, _ in every if not name.startswith(inside)]
    if rest:
        raise StageError(
            f"parameter {rest[0]!r} belongs to no part that a stage could hold"
            f"{f' (nor do {len(rest) - 1} others)' if len(rest) > 1 else ''}; {_HINT}, with every "
            "module that has parameters"
        )


def _refuse_ties(model: nn.Module, stages: Sequence[Sequence[str]]) -> None:
    place = {f"{name}.": number for number, names in enumerate(stages) for name in names}
    first: dict[int, tuple[str, int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        number = next(place[start] for start in place if name.startswith(start))
        other, there = first.setdefault(id(parameter), (name, number))
        if there != number:
            raise StageError(
                f"{other!r} (stage {there}) and {name!r} (stage {number}) are one parameter; "
                "stages cannot share one. Build the model without tied weights (Hugging Face: "
                "tie_word_embeddings=False), put both into one stage with stages=, or use an "
                "axis that keeps them together: tensor or data_shard"
            )


# --- balancing


def _even(sizes: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Cut a row of sizes into `count` non-empty pieces, the largest as small as can be."""
    sums = [0, *itertools.accumulate(sizes)]
    largest = _best(sums, count, power=0, limit=sums[-1])[0]
    return _best(sums, count, power=2, limit=largest)[1]


def _best(
    sums: Sequence[int], count: int, *, power: int, limit: int
) -> tuple[int, list[tuple[int, int]]]:
    """Least cost of pieces of at most `limit`: their maximum (power 0) or sum of powers.

    O(count * n^2) for n units, which is a few milliseconds for a hundred layers.
    """
    n = len(sums) - 1
    best: list[tuple[int, list[int]] | None] = [(0, [])] + [None] * n
    for piece in range(1, count + 1):
        after: list[tuple[int, list[int]] | None] = [None] * (n + 1)
        for stop in range(piece, n - (count - piece) + 1):
            for start in range(stop - 1, piece - 2, -1):
                size, before = sums[stop] - sums[start], best[start]
                if size > limit:
                    break
                if before is None:
                    continue
                cost = before[0] + size**power if power else max(before[0], size)
                now = after[stop]
                if now is None or cost < now[0]:
                    after[stop] = (cost, [*before[1], stop])
        best = after
    end = best[n]
    assert end is not None  # count <= n, and the limit was reached by some cut
    return end[0], list(itertools.pairwise([0, *end[1]]))


def _bytes(model: nn.Module, name: str) -> int:
    return sum(p.numel() * p.element_size() for p in model.get_submodule(name).parameters())


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _firsts(found: Sequence[tuple[str, ...]]) -> list[str]:
    return [unit[0] for unit in found]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
