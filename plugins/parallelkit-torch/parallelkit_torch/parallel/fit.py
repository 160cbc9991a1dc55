"""Whether a model can be divided as its styles say: everything that is wrong, before any change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import attrs
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from parallelkit.errors import LayoutError
from parallelkit_torch.parallel.heads import head_size
from parallelkit_torch.parallel.layouts import Style, below, general, grouped, modules
from parallelkit_torch.parallel.sequence import Block, Entry

_HEAD_PROJECTIONS: Final = frozenset({"q_proj", "k_proj", "v_proj", "wq", "wk", "wv"})
_OUT_PROJECTIONS: Final = frozenset({"o_proj", "wo"})


@attrs.frozen
class Unit:
    """What of a module cannot be cut: `count` pieces, which the degree must divide."""

    name: str
    count: int
    what: str


def kind(style: Style) -> str:
    """The name of a style; torch's own column and row styles count as theirs."""
    if isinstance(style, str):
        return style
    if isinstance(style, ColwiseParallel):
        return "colwise"
    return "rowwise" if isinstance(style, RowwiseParallel) else repr(style)


def limits(model: nn.Module, styles: Mapping[str, Style]) -> dict[str, int]:
    """Numbers that the tensor degree must divide, by module name; pure.

    Attention heads for projections of attention, rows for an embedding, else features. A planner
    tries only degrees that divide all of them.
    """
    return {unit.name: unit.count for unit in _units(modules(model), styles)}


def check(model: nn.Module, styles: Mapping[str, Style], degree: int) -> None:
    """Find everything that is wrong with dividing `model` by `degree`; pure.

    Raises:
        LayoutError: with one line for each kind of mistake: sizes that the degree does not
            divide, a column-divided layer that feeds no row-divided one or the other way round,
            parameters inside a divided region whose gradients would differ, tied parameters that
            are divided differently, embedding options that need the whole table.
    """
    found = modules(model)
    problems = [
        *_divided_already(found),
        *_indivisible(found, styles, degree),
        *_unpaired(found, styles),
        *_uncovered(found, styles),
        *_untied(found, styles),
        *_whole_tables(found, styles),
    ]
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise LayoutError(f"the model cannot be divided with tensor={degree}:\n{lines}")


def _units(found: Mapping[str, nn.Module], styles: Mapping[str, Style]) -> Iterator[Unit]:
    for name, style in styles.items():
        module, how = found.get(name), kind(style)
        if isinstance(module, nn.Linear) and how in ("colwise", "colwise_gather"):
            yield _unit(found, name, module.out_features, "output features", _HEAD_PROJECTIONS)
        elif isinstance(module, nn.Linear) and how == "rowwise":
            yield _unit(found, name, module.in_features, "input features", _OUT_PROJECTIONS)
        elif isinstance(module, nn.Embedding) and how in ("colwise", "colwise_gather"):
            yield Unit(name, module.embedding_dim, "embedding features")
        elif isinstance(module, nn.Embedding) and how == "rowwise":
            yield Unit(name, module.num_embeddings, "rows of vocabulary")


def _unit(
    found: Mapping[str, nn.Module], name: str, features: int, what: str, heads: frozenset[str]
) -> Unit:
    parent, _, key = name.rpartition(".")
    size = head_size(found[parent], found[""]) if key in heads and parent in found else None
    if size and features % size == 0:
        return Unit(name, features // size, f"heads of {size}")
    return Unit(name, features, what)


def _divided_already(found: Mapping[str, nn.Module]) -> Iterator[str]:
    for name, module in found.items():
        if any(isinstance(p, DTensor) for p in module.parameters(recurse=False)):
            yield f"module {name!r} is divided already; parallelize a model once"
            return


def _indivisible(
    found: Mapping[str, nn.Module], styles: Mapping[str, Style], degree: int
) -> Iterator[str]:
    wrong = {unit.name: unit for unit in _units(found, styles) if unit.count % degree}
    for shown, members in grouped(wrong).items():
        for unit in {(wrong[m].count, wrong[m].what): wrong[m] for m in members}.values():
            shape = list(next(found[unit.name].parameters()).shape)
            yield (
                f"{shown!r} has {unit.count} {unit.what} (weight {shape}), which {degree} does "
                f"not divide{_times(members)}"
            )


def _unpaired(found: Mapping[str, nn.Module], styles: Mapping[str, Style]) -> Iterator[str]:
    """Only styles by name are judged: who passes a style object knows what surrounds it."""
    columns = {
        n: w for n, s in styles.items() if kind(s) == "colwise" and (w := _width(found.get(n)))
    }
    rows = {
        n: m.in_features
        for n, s in styles.items()
        if kind(s) == "rowwise" and isinstance(m := found.get(n), nn.Linear)
    }
    named = [n for n, style in styles.items() if isinstance(style, str)]
    loose = [
        n for n in named if n in columns and not _divides(columns[n], _nearest(n, rows, found, 1))
    ]
    unfed = [n for n in named if n in rows and rows[n] not in _nearest(n, columns, found, -1)]
    for shown, members in grouped(loose).items():
        yield (
            f"{shown!r} is 'colwise' ({columns[members[0]]} outputs, divided) and no 'rowwise' "
            "layer near it takes them: make the layer that follows 'rowwise', or this one "
            f"'colwise_gather'{_times(members)}"
        )
    for shown, members in grouped(unfed).items():
        yield (
            f"{shown!r} is 'rowwise' ({rows[members[0]]} inputs, divided) and no 'colwise' layer "
            "near it makes that many: the layer before it must be 'colwise', and several "
            "projections in one weight cannot be. Where this judges wrongly, pass a style "
            f"object of torch.distributed.tensor.parallel{_times(members)}"
        )


def _width(module: nn.Module | None) -> int | None:
    if isinstance(module, nn.Linear):
        return module.out_features
    return module.embedding_dim if isinstance(module, nn.Embedding) else None


def _divides(width: int, others: list[int]) -> bool:
    """Grouped queries: keys and values are narrower than what the row-divided layer takes."""
    return any(other % width == 0 for other in others)


def _nearest(
    name: str, others: Mapping[str, int], found: Mapping[str, nn.Module], side: int
) -> list[int]:
    """Widths of `others` under the nearest ancestor of `name` that has any.

    Where that is an `nn.Sequential`, those after `name` (`side` 1) or before it (-1) count.
    """
    place = {each: number for number, each in enumerate(found)}
    own = place[name]
    while name:
        name = name.rpartition(".")[0]
        near = [other for other in others if not name or below(other, name)]
        if isinstance(found[name], nn.Sequential):
            near = [other for other in near if (place[other] - own) * side > 0]
        if near:
            return [others[other] for other in near]
    return []


def _uncovered(found: Mapping[str, nn.Module], styles: Mapping[str, Style]) -> Iterator[str]:
    """Parameters used on divided activations: each rank would compute another gradient."""
    ends: dict[str, dict[str, list[str]]] = {}
    for name, style in styles.items():
        ends.setdefault(name.rpartition(".")[0], {}).setdefault(kind(style), []).append(name)
    regions = {n: k for n, k in ends.items() if n in found and {"colwise", "rowwise"} <= {*k}}
    bare = [
        name
        for region, kinds in regions.items()
        for name in _inside(list(found), region, kinds)
        if (name not in styles or isinstance(styles[name], Block | Entry))
        and any(True for _ in found[name].parameters(recurse=False))
    ]
    for shown, members in grouped(bare).items():
        yield (
            f"{shown!r} has parameters of its own between divided layers, and its gradients would "
            "differ between ranks: give it a layout ('replicate' if it works on whole "
            f"tensors){_times(members)}"
        )


def _inside(order: list[str], region: str, kinds: Mapping[str, list[str]]) -> list[str]:
    """Modules that may work on divided activations.

    All of a region; of a whole model, which has more in it than one region, those that were
    registered between a divided layer and the next that undoes it.
    """
    if region:
        return [name for name in order if name == region or below(name, region)]
    inside, within = [], False
    for name in order:
        if within and name not in kinds["rowwise"]:
            inside.append(name)
        within = (within or name in kinds["colwise"]) and name not in kinds["rowwise"]
    return inside


def _untied(found: Mapping[str, nn.Module], styles: Mapping[str, Style]) -> Iterator[str]:
    users: dict[int, list[tuple[str, str]]] = {}
    for name, module in found.items():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            users.setdefault(id(parameter), []).append((name, key))
    for places in users.values():
        ways = {_way(found[name], styles.get(name), key) for name, key in places}
        if len(ways) > 1:
            said = " and ".join(
                f"{name!r} ({kind(styles[name]) if name in styles else 'not in the layouts'})"
                for name, _ in places
            )
            yield (
                f"{said} share one parameter, and it would be divided in different ways: give "
                "all of them layouts that agree, 'rowwise' for an embedding and "
                "'colwise_gather' for the head"
            )


def _way(module: nn.Module, style: Style | None, key: str) -> str:
    """Along which dim of it a module's parameter is divided."""
    how = kind(style) if style is not None else "replicate"
    if how in ("colwise", "colwise_gather"):
        return "1" if isinstance(module, nn.Embedding) else "0"
    if how == "rowwise":
        if isinstance(module, nn.Embedding):
            return "0"
        return "1" if key == "weight" else "whole"
    return how


def _whole_tables(found: Mapping[str, nn.Module], styles: Mapping[str, Style]) -> Iterator[str]:
    for name, style in styles.items():
        module = found.get(name)
        if not isinstance(module, nn.Embedding) or kind(style) == "replicate":
            continue
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, option):
                yield (
                    f"{general(name)!r} has {option}={getattr(module, option)!r}, which needs the "
                    "whole table on each rank: give it 'replicate', or leave the option out"
                )


def _times(members: list[str]) -> str:
    return f" ({len(members)} times)" if len(members) > 1 else ""
