"""What a layer does beyond its type: carried over to its part, or a reason not to divide it."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import mindspore as ms
from mindspore import mint, nn

from parallelkit.errors import LayoutError

_KINDS: Final = (nn.Dense, mint.nn.Linear, nn.Embedding, mint.nn.Embedding)
#: What a class, or one object, may define of its own in place of what its kind does.
_DEEDS: Final = ("construct", "__call__", "bprop")
#: What a cell keeps its hooks in.
_HOOKS: Final = tuple(
    f"_lazy_{what}"
    for what in ("forward_pre_hook", "forward_hook", "backward_pre_hook", "backward_hook")
)


def check_kept(found: Mapping[str, nn.Cell], chosen: Iterable[str]) -> None:
    """Raise if a part would not do what its layer does, or would not be reached; pure.

    Args:
        found: all cells of the model, by name.
        chosen: the names of those that are to be divided.

    Raises:
        LayoutError: with the cell's name.
    """
    held: dict[int, str] = {}
    for name in chosen:
        cell = found[name]
        odd = _own(cell)
        if odd:
            raise LayoutError(
                f"layouts divides cell {name!r}, a {type(cell).__qualname__} {odd}, and a part of "
                "it would lose that. Leave it whole, with 'replicate', put what is its own in a "
                "cell around it, or add hooks after parallelize"
            )
        held[id(cell)] = name
        held.update((id(p), name) for p in cell._params.values() if p is not None)
    for name, cell in found.items():
        for key, thing in _attributes(cell):
            for inner in _reached(thing):
                if id(inner) in held:
                    place = f"{name}.{key}".strip(".")
                    raise LayoutError(
                        f"layouts divides cell {held[id(inner)]!r}, and {place}, a "
                        f"{type(thing).__qualname__}, holds it or a parameter of it: what uses "
                        "that would go on with the whole layer, which is not trained. Hold it as "
                        "an attribute or in a CellList, or leave it whole, with 'replicate'"
                    )


def carry(plain: nn.Cell, part: nn.Cell) -> None:
    """Let `part` train or evaluate, and compute in the dtype, as `plain` does."""
    part.set_train(plain.training)
    dtype = float_of(plain)
    if dtype is not None:
        part.to_float(dtype)


def float_of(cell: nn.Cell) -> Any:
    """The dtype that `to_float` gave a cell, its own or one above; None without."""
    flags = {"fp16": ms.float16, "fp32": ms.float32, "bf16": ms.bfloat16}
    return next((dtype for flag, dtype in flags.items() if getattr(cell, flag, False)), None)


def _own(cell: Any) -> str:
    """What the cell does that its kind does not; empty for nothing."""
    kind = next(kind for kind in _KINDS if isinstance(cell, kind))
    for deed in _DEEDS:
        if deed in vars(cell) or getattr(type(cell), deed, None) is not getattr(kind, deed, None):
            return f"with a {deed} of its own"
    if any(getattr(cell, hook, None) for hook in _HOOKS):
        return "with hooks"
    if any(parameter is not None and parameter.hooks() for parameter in cell._params.values()):
        return "with hooks on its parameters"
    if cell._recompute_cell is not None:
        return "with recompute()"
    return ""


def _attributes(cell: nn.Cell) -> Iterator[tuple[str, Any]]:
    """What a cell holds beside its cells and parameters."""
    for key, thing in vars(cell).items():
        registered = key in ("_cells", "_params")
        listed = key == "cell_list" and isinstance(cell, nn.SequentialCell)  # MindSpore renews it
        if not registered and not listed:
            yield key, thing


def _reached(thing: Any) -> Iterator[Any]:
    """`thing` and what is in it, through containers, methods and partial functions."""
    waiting, seen = [thing], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, Mapping):
            waiting += one.values()
        elif isinstance(one, list | tuple | set | frozenset):
            waiting += one
        elif isinstance(one, types.MethodType):
            waiting.append(one.__self__)
        elif isinstance(one, functools.partial):
            waiting += [one.func, *one.args, *one.keywords.values()]
