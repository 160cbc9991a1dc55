"""Names of modules and the patterns that users write for them; functions of text."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TypeVar

from parallelkit.errors import LayoutError

S = TypeVar("S")


def fits(pattern: str, name: str) -> bool:
    """Whether a plain module name fits a pattern, part by part between the dots.

    In a part `*`, `?` and `[...]` are as in file names; a part `**` is any number of parts.

    Example:
        >>> fits("layers.*.mlp", "layers.0.mlp"), fits("*.mlp", "layers.0.mlp")
        (True, False)
        >>> fits("**.mlp", "layers.0.mlp")
        True
    """

    def rest(parts: list[str], words: list[str]) -> bool:
        if not parts:
            return not words
        if parts[0] == "**":
            return any(rest(parts[1:], words[i:]) for i in range(len(words) + 1))
        return bool(words) and fnmatchcase(words[0], parts[0]) and rest(parts[1:], words[1:])

    return rest(pattern.split("."), name.split("."))


def choose(
    layouts: Mapping[str, S],
    names: Collection[str],
    *,
    suits: Callable[[str, str, S], None],
    unmatched: Callable[[str], str],
) -> dict[str, S]:
    """Give each module the style of its pattern.

    Of several patterns for one module, the one with the most characters outside wildcards wins.
    `"replicate"` holds for the modules below too, unless a pattern names them.

    Args:
        layouts: pattern to style.
        names: of all modules.
        suits: is given pattern, name and style, and raises if that module cannot have it.
        unmatched: makes the message for a pattern that fits nothing.

    Raises:
        LayoutError: a pattern fits nothing, or two equally good ones give different styles.
    """
    best: dict[str, tuple[int, str, S]] = {}
    for pattern, style in layouts.items():
        hits = [name for name in names if fits(pattern, name)]
        if not hits:
            raise LayoutError(unmatched(pattern))
        weight = len(re.sub(r"\[[^]]*\]|[*?]", "", pattern))
        for name in hits:
            suits(pattern, name, style)
            other = best.get(name)
            if other is not None and other[0] == weight and other[2] != style:
                raise LayoutError(
                    f"layouts gives module {name!r} two styles: {other[1]!r} says {other[2]!r} and "
                    f"{pattern!r} says {style!r}. Make one pattern more exact than the other"
                )
            if other is None or weight > other[0]:
                best[name] = (weight, pattern, style)
    chosen = {name: style for name, (_, _, style) in best.items()}
    whole = {name: style for name, style in chosen.items() if style == "replicate"}
    for name in names:
        for top, style in whole.items():
            if below(name, top):
                chosen.setdefault(name, style)
    return chosen


def below(name: str, top: str) -> bool:
    """Whether module `name` is inside module `top`."""
    return bool(name) and (not top or name.startswith(f"{top}."))


def general(name: str) -> str:
    """A name with its numbers as wildcards: what layers have in common."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def grouped(names_: Iterable[str]) -> dict[str, list[str]]:
    """Names by their general form, in order of first appearance."""
    groups: dict[str, list[str]] = {}
    for name in names_:
        groups.setdefault(general(name), []).append(name)
    return groups
