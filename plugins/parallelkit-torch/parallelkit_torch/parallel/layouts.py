"""Layouts: which patterns of module names a user writes, and which styles they stand for."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Final, TypeAlias

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from parallelkit.errors import LayoutError
from parallelkit.patterns import below, choose, fits, general, grouped
from parallelkit_torch import names

__all__ = [
    "STYLES",
    "Style",
    "below",
    "dividable",
    "fits",
    "general",
    "grouped",
    "modules",
    "resolve",
]

#: What a module gets: one of `STYLES` by name, or a style object of torch's.
Style: TypeAlias = str | ParallelStyle

#: Styles by name, and what each does with a module's parameters, input and output.
STYLES: Final[Mapping[str, str]] = {
    "colwise": "weight divided by outputs; whole input, output divided in its last dim",
    "colwise_gather": "as colwise, and the output is gathered",
    "rowwise": "weight divided by inputs (an embedding's by its rows); whole output",
    "sequence": "weights whole; input and output divided in dim 1, the sequence",
    "replicate": "left alone, with all modules below",
}
_SPLIT: Final = (nn.Linear, nn.Embedding)
_SHOWN: Final = 6


def modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every module of `model` by its plain name, the model itself under `""`, wrappers left out.

    A module that is in several places is listed once, under its first name.
    """
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def walk(module: nn.Module, name: str) -> None:
        module = names.unwrap(module)
        if id(module) in seen:
            return
        seen.add(id(module))
        found[name] = module
        for key, child in module.named_children():
            walk(child, f"{name}.{key}" if name else key)

    walk(model, "")
    return found


def resolve(layouts: Mapping[str, Style], found: Mapping[str, nn.Module]) -> dict[str, Style]:
    """Give each module the style of its pattern; pure.

    Of several patterns for one module, the one with the most characters outside wildcards wins.
    `"replicate"` holds for the modules below too, unless a pattern names them.

    Args:
        layouts: pattern to style.
        found: modules by plain name, as `modules` lists them.

    Raises:
        LayoutError: a style is unknown or not for that kind of module, a pattern matches nothing
            (the nearest names are listed), or two equally good patterns give different styles.
    """
    for pattern, style in layouts.items():
        _known(pattern, style)
    return choose(
        layouts,
        found,
        suits=lambda pattern, name, style: _suits(pattern, name, found[name], style),
        unmatched=lambda pattern: _unmatched(pattern, found),
    )


def dividable(found: Mapping[str, nn.Module]) -> str:
    """The general names of the layers that can be divided, for messages."""
    kinds = list(grouped(name for name, module in found.items() if isinstance(module, _SPLIT)))
    more = f" and {len(kinds) - _SHOWN} more" if len(kinds) > _SHOWN else ""
    return ", ".join(map(repr, kinds[:_SHOWN])) + more if kinds else "no nn.Linear or nn.Embedding"


def _known(pattern: object, style: object) -> None:
    if not isinstance(pattern, str):
        raise LayoutError(f"layouts has the pattern {pattern!r:.100}; a pattern is a string")
    if isinstance(style, ParallelStyle) or (isinstance(style, str) and style in STYLES):
        return
    near = difflib.get_close_matches(style, STYLES, n=1) if isinstance(style, str) else []
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise LayoutError(
        f"layouts gives {pattern!r} the style {style!r:.100}{hint}; a style is "
        f"{', '.join(map(repr, STYLES))} or a torch.distributed.tensor.parallel.ParallelStyle"
    )


def _suits(pattern: str, name: str, module: nn.Module, style: Style) -> None:
    if style in ("colwise", "colwise_gather", "rowwise") and not isinstance(module, _SPLIT):
        raise LayoutError(
            f"layouts gives {pattern!r} the style {style!r}, and module {name!r} is a "
            f"{type(module).__qualname__}; {style!r} is for nn.Linear and nn.Embedding. For others "
            "pass a torch.distributed.tensor.parallel.ParallelStyle"
        )
    if style == "sequence" and isinstance(module, _SPLIT):
        raise LayoutError(
            f"layouts gives {pattern!r} the style 'sequence', and module {name!r} is a "
            f"{type(module).__qualname__}; 'sequence' is for norms and the like"
        )


def _unmatched(pattern: str, found: Mapping[str, nn.Module]) -> str:
    kinds = [kind for kind in grouped(found) if kind]
    near = difflib.get_close_matches(general(pattern), kinds, n=3, cutoff=0.5)
    hint = f"the nearest are {', '.join(map(repr, near))}" if near else f"it has {dividable(found)}"
    return f"layouts has the pattern {pattern!r}, which fits no module of the model; {hint}"
