"""A torch model as the search of mode `"auto"` sees it: sizes of its units, and what divides them.

Units are the parts between which `parallelkit_torch.parallel.units` would cut; what a tensor axis
divides is what `parallelkit_torch.parallel.tensor` would divide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import attrs
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from parallelkit.errors import ExampleError, LayoutError, StageError
from parallelkit.shapes import ModelShape, Size, Unit
from parallelkit_torch.parallel.fit import check, kind, limits
from parallelkit_torch.parallel.measure import Reading, measure
from parallelkit_torch.parallel.shard import blocks as blocks_of
from parallelkit_torch.parallel.tensor import styles as styles_of
from parallelkit_torch.parallel.units import anatomy

_COLUMNS: Final = ("colwise", "colwise_gather")
# An all-reduce is two passes over the ranks, and there is one more in the backward pass; a gather
# is one, and its backward pass is counted with the layer before it.
_SHARES: Final = {"rowwise": 1.0, "colwise_gather": 0.25}


@attrs.frozen(kw_only=True)
class _Division:
    """What a tensor axis would do to a model.

    Attributes:
        divisors: numbers that its degree has to divide; none if it is not possible.
        parameters: names of the parameters that it divides.
        summed: modules that make their output whole, and the share of an all-reduce it costs.
        note: why it is not possible.
    """

    divisors: tuple[int, ...] = ()
    parameters: frozenset[str] = frozenset()
    summed: Mapping[str, float] = attrs.field(factory=dict)
    note: str = ""


def describe_model(
    model: nn.Module,
    example: Any = None,
    layouts: Mapping[str, Any] | None = None,
    *,
    builtin: bool = True,
    blocks: Sequence[str] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    device: torch.device | str = "cpu",
) -> ModelShape:
    """Look at a model's parameters, and at what a training step on `example` keeps. Not collective.

    Nothing is computed and the model is left as it is: the step runs on a copy whose tensors have
    sizes and no values. So the model may be on the meta device, and larger than memory.

    Args:
        model: any module.
        example: a batch as the model takes it: a tensor, a tuple of arguments, or a dict of them
            by name; dim 0 of its tensors is the items. None: activations count as nothing.
        layouts: patterns of module names to styles, as the context takes them.
        builtin: whether models named as Qwen2 and Llama are divided without layouts.
        blocks: patterns of the submodules that sharding gathers one at a time.
        loss: of the model's output; None: a cross-entropy over the last dim.
        device: the type of device that training will run on.

    Raises:
        ExampleError: the example does not run through the model.
        LayoutError: `layouts` or `blocks` match nothing.
    """
    units, note = _units(model, blocks)
    division = _division(model, layouts, builtin=builtin)
    readings = [Reading() for _ in units]
    items = 1
    if example is not None:
        items = _items(example)
        readings = measure(
            model,
            example,
            units,
            device=torch.device(device),
            loss=loss,
            divided=division.parameters,
            summed=division.summed,
        )
    gathered = set(blocks_of(model, blocks))
    owners = _owners(model, units)
    made = [
        _unit(
            names,
            [name for name, owner in owners.items() if owner[0] == number],
            dict(model.named_parameters()),
            _buffers(model, units, number),
            division.parameters,
            reading,
            items,
            block=any(_inside(name, gathered) for name in names),
        )
        for number, (names, reading) in enumerate(zip(units, readings, strict=True))
    ]
    tied = {tuple(dict.fromkeys(made[n].name for n in owner)) for owner in owners.values()}
    groups = [group for group in tied if len(group) > 1]
    if note:
        groups.append((made[0].name, made[-1].name))
    return ModelShape(
        units=made,
        divisors=division.divisors,
        tied=tuple(sorted(groups)),
        measured=example is not None,
        notes=[text for text in (note, division.note) if text],
    )


def _units(model: nn.Module, patterns: Sequence[str] | None) -> tuple[list[tuple[str, ...]], str]:
    """Return names of modules by unit, and why the model cannot be cut where it cannot.

    The first name is that of the module with which the unit begins.
    """
    try:
        return list(anatomy(model).units), ""
    except StageError as error:
        found = [(name,) for name in blocks_of(model, patterns)]
        # parameters outside of blocks; the model itself, whose call begins the forward pass
        return [("",), *found], f"no pipeline: {_short(error)}"


def _division(model: nn.Module, layouts: Mapping[str, Any] | None, *, builtin: bool) -> _Division:
    try:
        styles = styles_of(model, layouts, builtin=builtin)
        check(model, styles, 1)
    except LayoutError as error:
        if layouts:
            raise
        return _Division(note=f"no tensor axis: {_short(error)}")
    names = {
        f"{module}.{key}" if module else key
        for module, style in styles.items()
        for key in _divided_keys(model.get_submodule(module), kind(style))
    }
    # a parameter with several names is divided under all of them
    ids = {id(p) for n, p in model.named_parameters(remove_duplicate=False) if n in names}
    everywhere = model.named_parameters(remove_duplicate=False)
    return _Division(
        divisors=tuple(sorted(set(limits(model, styles).values()))),
        parameters=frozenset(name for name, p in everywhere if id(p) in ids),
        summed={
            module: _SHARES[kind(style)]
            for module, style in styles.items()
            if kind(style) in _SHARES
        },
    )


def _divided_keys(module: nn.Module, how: str) -> list[str]:
    keys = [key for key, _ in module.named_parameters(recurse=False)]
    if how in _COLUMNS and isinstance(module, nn.Linear):
        return keys
    divides = how in (*_COLUMNS, "rowwise") and isinstance(module, nn.Linear | nn.Embedding)
    return [key for key in keys if key == "weight"] if divides else []


def _owners(model: nn.Module, units: Sequence[Sequence[str]]) -> dict[str, list[int]]:
    """Return the units that use each parameter, by the parameter's first name; owner first."""
    names = {id(p): name for name, p in model.named_parameters()}
    owners: dict[str, list[int]] = {name: [] for name in names.values()}
    for number, modules in enumerate(units):
        for module in modules:
            if module:
                for parameter in model.get_submodule(module).parameters():
                    owners[names[id(parameter)]].append(number)
    return {name: sorted(set(found)) or [0] for name, found in owners.items()}


def _buffers(model: nn.Module, units: Sequence[Sequence[str]], number: int) -> int:
    """Return bytes of the buffers of a unit; those of no unit are on every stage."""
    mine = [model.get_submodule(name) for name in units[number] if name]
    everyone = [model.get_submodule(name) for names in units for name in names if name]
    claimed = {id(buffer) for module in everyone for buffer in module.buffers()}
    found = {id(buffer): buffer.nbytes for module in mine for buffer in module.buffers()}
    if number == 0:
        found |= {id(b): b.nbytes for b in model.buffers() if id(b) not in claimed}
    return sum(found.values())


def _unit(
    names: Sequence[str],
    parameters: Iterable[str],
    known: Mapping[str, nn.Parameter],
    buffers: int,
    divided: frozenset[str],
    reading: Reading,
    items: int,
    *,
    block: bool,
) -> Unit:
    mine = [(name, known[name]) for name in parameters]

    def size(*, trainable: bool) -> Size:
        chosen = [(n, p.nbytes) for n, p in mine if p.requires_grad == trainable]
        return Size(sum(b for _, b in chosen), sum(b for n, b in chosen if n in divided))

    def each(nbytes: int) -> int:
        return -(-max(nbytes, 0) // items)

    def pair(whole: int, part: int) -> Size:
        return Size(each(whole), min(each(part), each(whole)))

    return Unit(
        name=names[0] or "the rest",
        trainable=size(trainable=True),
        frozen=size(trainable=False),
        buffers=buffers,
        activations=pair(reading.kept, reading.kept_divided),
        working=pair(reading.working, reading.working_divided),
        output=each(reading.output),
        reduced=each(reading.reduced),
        reductions=reading.reductions,
        flops=each(reading.flops),
        block=block,
    )


def _inside(name: str, gathered: set[str]) -> bool:
    """Say whether a module is in, or is, a block, or is made of blocks."""
    return any(
        name == one or name.startswith(f"{one}.") or (name and one.startswith(f"{name}."))
        for one in gathered
    )


def _short(error: Exception) -> str:
    """Return what a message says is wrong, without the advice that follows."""
    text = str(error).partition("; the model has ")[0].partition("; give stages")[0]
    lines = text.splitlines()  # a list of mistakes: the first one
    return " ".join(lines[1 if len(lines) > 1 else 0].strip(" -").split())[:300]


def _items(example: Any) -> int:
    sizes = {x.shape[0] for x in tree_leaves(example) if isinstance(x, torch.Tensor) and x.dim()}
    if len(sizes) != 1 or 0 in sizes:
        raise ExampleError(
            f"tensors of the example have dim 0 of sizes {sorted(sizes)}; they need one and the "
            "same number of items, at least 1"
        )
    return int(sizes.pop())
