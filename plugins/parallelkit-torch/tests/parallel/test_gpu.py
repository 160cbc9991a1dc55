"""What needs two GPUs: the products of two ranks over NCCL. Run by hand: `pytest -m gpu`."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

from parallelkit.spawn import RankResult

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ranks,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

CASES = [
    {"data": 2},
    {"data_shard": 2},
    {"data_shard": 2, "model": "tied"},
    {"data_shard": 2, "model": "mlp"},
    {"tensor": 2},
    {"tensor": 2, "sequence": True},
    {"tensor": 2, "model": "tied"},
    {"pipeline": 2},
    {"pipeline": 2, "schedule": "gpipe", "model": "mlp"},
    {"pipeline": 2, "schedule": "interleaved"},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_one_axis_of_two_over_nccl(
    job: Callable[..., list[RankResult]], case: dict[str, object]
) -> None:
    job("products.py", json.dumps([case]), "cuda", ranks=2, timeout=300.0)


def test_training_over_nccl(job: Callable[..., list[RankResult]]) -> None:
    job("launched.py", "cuda", ranks=2)
