"""Weights of Cells in processes of their own: on two ranks, and at what memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.ranks


def test_two_data_parallel_ranks_publish_and_all_hear_of_it(job: Callable[..., Any]) -> None:
    job("weights_ranks.py")


def test_a_cell_of_200_mb_is_not_copied_beyond_the_segment(job: Callable[..., Any]) -> None:
    (result,) = job("weights_memory.py", ranks=1)
    assert result.stdout.count("MB above before") == 2
