"""Every product of axes on real ranks, against one process with the whole batch; see the job."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from parallelkit.spawn import RankResult

pytestmark = pytest.mark.ranks
Job = Callable[..., list[RankResult]]


def products(job: Job, ranks: int, *cases: dict[str, Any]) -> None:
    job("products.py", json.dumps(cases), ranks=ranks, timeout=300.0)


def test_one_axis_of_two(job: Job) -> None:
    products(
        job,
        2,
        {"data": 2},
        {"data_shard": 2},
        {"data_shard": 2, "model": "tied"},
        {"data_shard": 2, "model": "mlp"},
        {"tensor": 2},
        {"tensor": 2, "sequence": True},
        {"tensor": 2, "model": "tied"},
    )


def test_pipelines_of_two(job: Job) -> None:
    products(
        job,
        2,
        {"pipeline": 2},
        {"pipeline": 2, "schedule": "gpipe", "model": "mlp"},
        {"pipeline": 2, "schedule": "interleaved"},
    )


def test_two_axes_of_two(job: Job) -> None:
    products(
        job,
        4,
        {"data": 2, "data_shard": 2},
        {"data": 2, "tensor": 2},
        {"data_shard": 2, "tensor": 2},
        {"data_shard": 2, "tensor": 2, "sequence": True, "model": "tied"},
        {"data_shard": 4, "model": "mlp"},
        {"tensor": 4},
    )


def test_pipelines_with_another_axis(job: Job) -> None:
    products(
        job,
        4,
        {"pipeline": 2, "data": 2},
        {"pipeline": 2, "data_shard": 2},
        {"pipeline": 2, "tensor": 2, "sequence": True},
        {"pipeline": 2, "data_shard": 2, "schedule": "interleaved"},
        {"pipeline": 4, "model": "mlp"},
    )


@pytest.mark.parametrize("reduce", ["mean", pytest.param("sum", marks=pytest.mark.slow)])
def test_compiled(reduce: str, job: Job) -> None:
    options = {"graph": True, "reduce": [reduce]}
    products(job, 2, *({axis: 2, **options} for axis in ("data", "data_shard", "pipeline")))


def test_what_ranks_get_wrong_is_named_on_both(job: Job) -> None:
    job("mistakes.py", ranks=2)


@pytest.mark.slow
def test_three_axes_of_two(job: Job) -> None:
    products(
        job,
        8,
        {"pipeline": 2, "data_shard": 2, "tensor": 2},
        {"data": 2, "data_shard": 2, "tensor": 2},
        {"pipeline": 2, "data": 2, "data_shard": 2},
    )
