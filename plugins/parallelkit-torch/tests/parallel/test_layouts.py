"""Patterns of names to styles: pure, and every mistake by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parallelkit_torch.parallel import layouts
from parallelkit_torch.parallel.layouts import fits, modules, resolve
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

from parallelkit.errors import LayoutError


def net() -> nn.Module:
    cell = nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4), "norm": nn.LayerNorm(4)})
    other = nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})
    return nn.ModuleDict({"table": nn.Embedding(8, 4), "cells": nn.ModuleList([cell, other])})


def chosen(given: Mapping[str, Any]) -> dict[str, Any]:
    return resolve(given, modules(net()))


@pytest.mark.parametrize(
    ("pattern", "name", "fit"),
    [
        ("layers.*.mlp", "layers.0.mlp", True),
        ("layers.*.mlp", "layers.0.mlp.up", False),
        ("layers.*.mlp", "model.layers.0.mlp", False),
        ("*", "layers.0", False),
        ("**", "layers.0", True),
        ("**.mlp", "mlp", True),
        ("**.mlp", "layers.0.mlp", True),
        ("layers.**.up", "layers.up", True),
        ("layers.**.up", "layers.3.mlp.up", True),
        ("layers.[01].up", "layers.1.up", True),
        ("layers.[01].up", "layers.2.up", False),
        ("layers.1?.up", "layers.12.up", True),
        ("*.*_proj", "0.q_proj", True),
        ("Layers.0", "layers.0", False),
        ("", "", True),
        ("", "layers", False),
    ],
)
def test_fits(pattern: str, name: str, fit: bool) -> None:
    assert fits(pattern, name) is fit


@given(st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=5), st.data())
def test_a_name_fits_itself_and_its_wildcards(parts: list[str], data: st.DataObject) -> None:
    name = ".".join(parts)
    place = data.draw(st.integers(0, len(parts) - 1))
    assert fits(name, name)
    assert fits(".".join([*parts[:place], "*", *parts[place + 1 :]]), name)
    assert fits(".".join([*parts[:place], "**"]), name)
    assert not fits(f"{name}.*", name)
    assert fits(f"{name}.**", name)


def test_styles_by_pattern() -> None:
    assert chosen({"cells.*.up": "colwise", "cells.*.down": "rowwise", "**.norm": "sequence"}) == {
        "cells.0.up": "colwise",
        "cells.0.down": "rowwise",
        "cells.0.norm": "sequence",
        "cells.1.up": "colwise",
        "cells.1.down": "rowwise",
    }


@pytest.mark.parametrize("turned", [False, True])
def test_the_more_exact_pattern_wins_whatever_the_order(turned: bool) -> None:
    given = {"**.up": "colwise", "cells.1.up": "colwise_gather"}
    got = chosen(dict(reversed(given.items())) if turned else given)
    assert got == {"cells.0.up": "colwise", "cells.1.up": "colwise_gather"}


def test_equally_exact_patterns_must_agree() -> None:
    assert chosen({"cells.*.up": "colwise", "cells.?.up": "colwise"})["cells.0.up"] == "colwise"
    with pytest.raises(LayoutError, match=r"'cells\.0\.up' two styles.*'colwise'.*'rowwise'"):
        chosen({"cells.*.up": "colwise", "cells.?.up": "rowwise"})


def test_replicate_holds_below_unless_a_pattern_says_more() -> None:
    got = chosen({"cells.0": "replicate", "cells.0.up": "colwise"})
    assert got == {
        "cells.0": "replicate",
        "cells.0.up": "colwise",
        "cells.0.down": "replicate",
        "cells.0.norm": "replicate",
    }


def test_a_style_object_is_for_any_module() -> None:
    style = ColwiseParallel()
    assert chosen({"cells.0": style, "": style}) == {"cells.0": style, "": style}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cells.*.upp": "colwise"}, r"'cells\.\*\.upp', which fits no module.*'cells\.\*\.up'"),
        ({"cells.*.up.weight": "colwise"}, r"the nearest are 'cells\.\*\.up'"),
        ({"zzzzzzzz": "colwise"}, r"it has 'table', 'cells\.\*\.up', 'cells\.\*\.down'"),
        ({"up": "colwise"}, "fits no module"),
        ({"cells.*.up": "colwize"}, r"'colwize' \(did you mean 'colwise'\?\); a style is"),
        ({"cells.*.up": 3}, "the style 3; a style is"),
        ({3: "colwise"}, "a pattern is a string"),
        ({"cells.*": "colwise"}, r"module 'cells\.0' is a ModuleDict; 'colwise' is for nn\.Linear"),
        ({"**.norm": "rowwise"}, "is a LayerNorm; 'rowwise' is for"),
        ({"**.up": "sequence"}, "is a Linear; 'sequence' is for norms"),
    ],
)
def test_mistakes(given: dict[Any, Any], said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        chosen(given)


def test_modules_are_listed_once_by_plain_names() -> None:
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": shared, "b": nn.ModuleDict({"c": shared, "d": nn.Linear(2, 2)})})
    assert list(modules(model)) == ["", "a", "b", "b.d"]
    wrapped = torch.compile(model, backend="eager")
    assert modules(wrapped) == modules(model)
    model["b"] = torch.compile(model["b"], backend="eager")
    assert list(modules(model)) == ["", "a", "b", "b.d"]


def test_messages_stay_short_for_large_models() -> None:
    stack = nn.ModuleList(
        nn.ModuleDict({f"l{i}": nn.Linear(2, 2) for i in range(9)}) for _ in range(100)
    )
    said = layouts.dividable(modules(stack))
    assert said == "'*.l0', '*.l1', '*.l2', '*.l3', '*.l4', '*.l5' and 3 more"
    assert layouts.dividable({}) == "no nn.Linear or nn.Embedding"
