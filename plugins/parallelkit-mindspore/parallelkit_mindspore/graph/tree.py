"""Tensors inside tuples, lists and dicts: with their paths, and replaced one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Give everything that is no tuple, list or dict, with its path: `["loss"]`, `[0]["y"]`.

    Example:
        >>> list(leaves({"a": [1, 2]}))
        [('["a"][0]', 1), ('["a"][1]', 2)]
    """
    if isinstance(tree, dict):
        for key, item in tree.items():
            name = f'["{key}"]' if isinstance(key, str) else f"[{key!r}]"
            yield from leaves(item, path + name)
    elif isinstance(tree, list | tuple):
        for number, item in enumerate(tree):
            yield from leaves(item, f"{path}[{number}]")
    else:
        yield path, tree


def replaced(tree: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of the containers, with `change(leaf)` for each leaf."""
    if isinstance(tree, dict):
        return {key: replaced(item, change) for key, item in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):  # a named tuple
        return type(tree)(*(replaced(item, change) for item in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(replaced(item, change) for item in tree)
    return change(tree)
