"""Contexts on real ranks; the jobs say what is compared with what."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parallelkit.spawn import RankResult

pytestmark = pytest.mark.ranks
Job = Callable[..., list[RankResult]]


def products(job: Job, ranks: int, *cases: dict[str, Any]) -> None:
    job("context_products.py", json.dumps(cases), ranks=ranks, timeout=300.0)


def test_one_axis_of_two(job: Job) -> None:
    products(
        job,
        2,
        {"data": 2, "reduce": "sum"},
        {"data": 2, "mode": "graph"},
        {"tensor": 2, "model": "tokens"},
        {"tensor": 2, "model": "tokens", "layouts": "columns"},
    )


def test_two_axes_of_two(job: Job) -> None:
    products(
        job,
        4,
        {"data": 2, "tensor": 2},
        {"data": 2, "tensor": 2, "reduce": "sum", "mode": "graph"},
    )


def test_mindspores_own_ways(job: Job) -> None:
    ways = ("cell:graph", "custom:eager", "custom:graph", "model:eager", "model:graph")
    job("context_native.py", "mean,sum", *ways, timeout=300.0)


def test_mindspores_own_ways_on_four_ranks(job: Job) -> None:
    job("context_native.py", "mean", "cell:eager", "step:eager", ranks=4, timeout=300.0)


def test_what_ranks_get_wrong_and_what_they_keep(job: Job, tmp_path: Path) -> None:
    job("context_mistakes.py", str(tmp_path / "checkpoints"), timeout=300.0)


@pytest.mark.slow
def test_more_products(job: Job) -> None:
    products(
        job,
        4,
        {"data": 4, "model": "images"},
        {"data": 2, "tensor": 2, "model": "tokens", "reduce": "sum"},
        {"tensor": 4, "model": "tokens", "mode": "graph"},
    )
    job(
        "context_native.py", "mean,sum", *(f"{way}:{mode}" for way in ("cell", "custom", "model")
        for mode in ("eager", "graph")), ranks=4, timeout=300.0,
    )  # fmt: skip
