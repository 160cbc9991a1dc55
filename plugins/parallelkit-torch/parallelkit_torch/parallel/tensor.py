"""Tensor parallel: layers divided over the ranks of one axis, by a plan of names.

`styles` turns patterns into a style for each module, `check` finds what cannot be divided, both
pure; `apply` divides. What is not in the styles stays a plain tensor, whole on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from parallelkit.errors import LayoutError
from parallelkit_torch.parallel import builtin as builtin_plan
from parallelkit_torch.parallel.fit import check, kind, limits
from parallelkit_torch.parallel.layouts import Style, dividable, grouped, modules, resolve
from parallelkit_torch.parallel.local import own_outputs
from parallelkit_torch.parallel.sequence import Block, Sequence
from parallelkit_torch.parallel.whole import replicate_rest

__all__ = ["Style", "apply", "check", "limits", "styles"]


def styles(
    model: nn.Module,
    layouts: Mapping[str, Style] | None = None,
    *,
    builtin: bool = True,
    sequence: bool = False,
) -> dict[str, Style]:
    """Find a style for each module that is to be divided; pure.

    Args:
        model: any module; nothing of it is changed.
        layouts: pattern of plain module names to style, see `layouts.resolve` for the rules. They
            go before the built-in plan.
        builtin: whether modules named as those of Qwen2 and Llama get built-in styles.
        sequence: whether the built-in plan divides the activations between attention and MLP
            along the sequence too. Costs no more traffic, saves memory and all-reduces.

    Returns:
        Plain module name to style.

    Raises:
        LayoutError: a pattern fits nothing, a style is unknown or not for that module, or
            nothing is left to divide.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> styles(model, {"0": "colwise", "2": "rowwise"}, builtin=False)
        {'0': 'colwise', '2': 'rowwise'}
    """
    found = modules(model)
    chosen = resolve(layouts or {}, found)
    if sequence and not builtin:
        raise LayoutError(
            "sequence=True is a part of the built-in layouts, and only yours are asked for. Give "
            "norms 'sequence', and torch's RowwiseParallel(output_layouts=Shard(1)) and "
            "PrepareModuleInput to what is around them"
        )
    known = builtin_plan.plan(found, chosen, sequence=sequence) if builtin else {}
    result = {name: style for name in found if (style := chosen.get(name, known.get(name)))}
    if all(style == "replicate" for style in result.values()):
        raise LayoutError(
            f"the layouts divide nothing; the model has {dividable(found)}. Write such as "
            "layouts={'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}"
        )
    return result


def apply(model: nn.Module, mesh: DeviceMesh, styles: Mapping[str, Style]) -> list[str]:
    """Divide `model` in place over a mesh of one dim, as `styles` say. Call `check` before.

    Collective over the mesh, in the same order on every rank; blocks for a scatter or a broadcast
    of each parameter that the styles name, so these get the values of the mesh's first rank.
    Other parameters become replicated `DTensor`s, which their own modules see as plain tensors, and
    buffers stay as they are; both must be equal on all ranks already. Names stay, and parameters
    that were one stay one. Parameters are new objects: make the optimiser afterwards.

    Args:
        model: the whole model, or a pipeline stage of it under the same names; names in
            `styles` that it lacks are passed over.
        mesh: one dim, the tensor axis.
        styles: as `styles` returns them.

    Returns:
        One line for each kind of layer, for people.

    Raises:
        LayoutError: the mesh has more than one dim.
    """
    if mesh.ndim != 1:
        raise LayoutError(f"layers are divided over one axis, and the mesh has {mesh.ndim}")
    found = modules(model)
    places = _places(found)
    here = _with_ends({name: styles[name] for name in styles if name in found})
    for name, style in here.items():
        native = _native(found[name], style)
        if native is not None:
            parallelize_module(found[name], mesh, native)
            if isinstance(found[name], nn.Linear | nn.Embedding) or isinstance(style, Block):
                own_outputs(found[name])
    for place in places:
        place.settle(places)
    rest = replicate_rest(model, mesh)
    return [*_lines(found, here), *([f"{rest} other parameters: whole on each rank"] * bool(rest))]


@attrs.frozen(eq=False)
class _Place:
    """Where a parameter was before: its module, its key there, and the object."""

    module: nn.Module
    key: str
    before: nn.Parameter

    def settle(self, places: list[_Place]) -> None:
        """Make the new parameter what the old one was: shared, frozen, marked."""
        now = self.module._parameters[self.key]
        if now is None or now is self.before:
            return
        first = next(place for place in places if place.before is self.before)
        if first is not self:
            self.module.register_parameter(self.key, first.module._parameters[first.key])
            return
        vars(now).update(vars(self.before))
        _place_gradient(now)
        now.requires_grad_(self.before.requires_grad)


def _places(found: Mapping[str, nn.Module]) -> list[_Place]:
    return [
        _Place(module, key, parameter)
        for module in found.values()
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    ]


def _place_gradient(parameter: nn.Parameter) -> None:
    """Give a divided parameter a gradient that is divided as it is.

    Autograd leaves the gradient of a replicated `DTensor` as terms of a sum, one a rank, and that
    of an embedding's rows whole on every rank. Whoever reads it as a local tensor (clipping, a
    plain all-reduce) would have a part of it, or too much.
    """
    tensor: torch.Tensor = parameter.data
    if not isinstance(tensor, DTensor):
        return
    wanted = tensor.placements

    def placed(gradient: torch.Tensor) -> torch.Tensor:
        if isinstance(gradient, DTensor) and gradient.placements != wanted:
            return gradient.redistribute(placements=wanted)
        return gradient

    parameter.requires_grad_(True)  # a frozen one takes no hook, and may be thawed later
    parameter.register_hook(placed)  # type: ignore[no-untyped-call]


def _with_ends(here: dict[str, Style]) -> dict[str, Style]:
    """Tell the first and the last block that this rank holds, of each stack of blocks."""
    stacks: dict[str, list[str]] = {}
    for name, style in here.items():
        if isinstance(style, Block):
            stacks.setdefault(name.rpartition(".")[0], []).append(name)
    for stack in stacks.values():
        for name in stack:
            here[name] = Block(first=name == stack[0], last=name == stack[-1])
    return here


def _native(module: nn.Module, style: Style) -> ParallelStyle | None:
    """Torch's style for ours; objects pass as they are."""
    if not isinstance(style, str):
        return style
    if style == "colwise":
        return ColwiseParallel()
    if style == "colwise_gather":
        return ColwiseParallel(output_layouts=Replicate())
    if style == "rowwise":
        table = isinstance(module, nn.Embedding)
        return RowwiseParallel(input_layouts=Replicate()) if table else RowwiseParallel()
    return Sequence() if style == "sequence" else None


def _lines(found: Mapping[str, nn.Module], here: Mapping[str, Style]) -> list[str]:
    lines = []
    for shown, members in grouped(here).items():
        hows = dict.fromkeys(kind(here[member]) for member in members)
        count = f" ({len(members)})" if len(members) > 1 else ""
        lines.append(f"{shown or 'the model'}{count}: {', '.join(hows)}")
    drops = [n for n, m in found.items() if isinstance(m, nn.Dropout) and m.p > 0]
    if drops:
        lines.append(
            f"{len(drops)} dropout layers: ranks of the tensor axis must have one torch seed"
        )
    return [f"tensor: {line}" for line in lines]
