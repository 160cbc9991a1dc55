"""Real ranks over the fake library: what is sent arrives."""

from __future__ import annotations

import pytest


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 3])
def test_transfers(job, ranks):
    job("moves.py", ranks=ranks)


@pytest.mark.ranks
def test_an_old_library(job, build):
    """Without error texts and without a timeout for streams."""
    job("moves.py", library=build("-DOLD"))
