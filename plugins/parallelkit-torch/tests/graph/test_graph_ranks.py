"""Compiling what is spread over real ranks; see `jobs/compiling.py`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from parallelkit.spawn import RankResult

pytestmark = pytest.mark.ranks


def test_compiling(job: Callable[..., list[RankResult]]) -> None:
    job("compiling.py", ranks=2, timeout=300)
