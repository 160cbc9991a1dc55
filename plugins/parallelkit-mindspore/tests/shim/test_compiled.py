"""Modes semi_auto and auto, compiled by MindSpore for 8 ranks that are not there.

What a compiler of MindSpore's for Ascend plans is real here; that it would run is not shown.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from parallelkit.spawn import spawn_ranks

pytestmark = pytest.mark.ranks
HERE = Path(__file__).parent


@pytest.mark.parametrize(("job", "rank"), [("semi_auto", 0), ("auto", 0), ("stages", 4)])
def test_compiled_for_eight_ranks(planned: Path, tmp_path: Path, job: str, rank: int) -> None:
    (ended,) = spawn_ranks(
        [
            sys.executable,
            *("-W", "error", "-W", "ignore:getName() is deprecated:DeprecationWarning"),
            str(HERE / f"{job}_job.py"),
            *(str(planned), str(tmp_path)),
        ],
        1,
        timeout=240.0,
        env={
            "GLOG_v": "3",
            "MS_DEV_PRECOMPILE_ONLY": "1",  # stop before the backend, which is not there
            "OMP_NUM_THREADS": "1",
            "PLANNED_RANK": str(rank),
            "PLANNED_SIZE": "8",
            "RANK_ID": str(rank),
            "RANK_SIZE": "8",
        },
    )
    assert ended.returncode == 0, ended.stderr[-6000:]
