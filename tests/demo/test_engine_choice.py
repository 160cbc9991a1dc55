"""Which engine the demo takes, and whose Python."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from parallelkit.demo.config import (
    PYTHON_VARIABLE,
    DemoSettingsError,
    Settings,
    choose_engine,
)
from parallelkit.specs import DemoSpec

THERE = str(Path(sys.executable).absolute())


def choose(
    engine: str = "auto", python: str = "", *, here: bool = False, variable: str = ""
) -> tuple[str, str]:
    def find(name: str) -> Any:
        return name if here else None

    spec = DemoSpec(engine=engine, engine_python=python)
    return choose_engine(spec, environ={PYTHON_VARIABLE: variable}, find=find)


@pytest.mark.parametrize(
    ("asked", "engine"),
    [
        ({}, "module"),
        ({"here": True}, "vllm"),
        ({"python": THERE}, "vllm"),
        ({"variable": THERE}, "module"),  # the variable says where, not whether
        ({"engine": "vllm", "here": True}, "vllm"),
        ({"engine": "vllm", "variable": THERE}, "vllm"),
        ({"engine": "vllm", "python": THERE, "variable": "/none"}, "vllm"),
        ({"engine": "module", "here": True, "python": THERE}, "module"),
    ],
)
def test_choices(asked: dict[str, Any], engine: str) -> None:
    assert choose(**asked) == (engine, sys.executable)


def test_a_given_python_wins_over_this_one(tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.symlink_to(sys.executable)
    assert choose(python=str(other), here=True) == ("vllm", str(other))


def test_half_of_what_is_needed_is_not_enough() -> None:
    def find(name: str) -> Any:
        return name if name == "vllm" else None

    assert choose_engine(DemoSpec(), environ={}, find=find)[0] == "module"


def test_mistakes() -> None:
    with pytest.raises(DemoSettingsError, match="engine is 'sglang'; it is auto, module or vllm"):
        choose("sglang")
    with pytest.raises(DemoSettingsError, match=f"--engine-python or {PYTHON_VARIABLE}"):
        choose("vllm")
    with pytest.raises(DemoSettingsError, match="'/no/python': no program is there"):
        choose(python="/no/python")
    with pytest.raises(DemoSettingsError, match="engine is 'auto'; it is module or vllm"):
        Settings(engine="auto")
