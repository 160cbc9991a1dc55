"""Where Torch and MindSpore behave differently, parallelkit does not: row by row, on both.

The rows are those of `docs/differences.md`. What may end a process happens in a process of its own.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from parallelkit.spawn import FOREIGN, FOREIGN_PREFIXES, RankResult
from parallelkit.testing.conformance.suites import Finished, read_outcomes

HERE = Path(__file__).parent
TABLE = HERE.parent / "docs" / "differences.md"
FRAMEWORKS = ("torch", "mindspore")
#: Rows that are no part of the process below, and the test that is for them.
ELSEWHERE = {"wide_plan_in_one_process": "test_wide_plan_in_one_process"}


def rows() -> list[str]:
    """The names of the rows, first column of the table."""
    return re.findall(r"^\| `(\w+)` \|", TABLE.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Finished]:
    """Go through all rows in one process of a framework, started once, by no launcher."""

    @functools.cache
    def run(framework: str) -> Finished:
        folder = tmp_path_factory.mktemp(framework)
        env = {n: v for n, v in os.environ.items() if n not in FOREIGN}
        env = {n: v for n, v in env.items() if not n.startswith(FOREIGN_PREFIXES)}
        adapter = f"parallelkit_{framework}.testing:adapter"
        done = subprocess.run(
            [sys.executable, "-m", "differences", "--adapter", adapter, "--folder", str(folder)],
            env=env | {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1", "GLOG_v": "3"},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=180,
            start_new_session=True,
        )
        result = RankResult(
            rank=0, returncode=done.returncode, stdout=done.stdout, stderr=done.stderr
        )
        return Finished(results=[result], outcomes=[read_outcomes(folder, 0)])

    return run


@pytest.mark.ranks
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("row", [row for row in rows() if row not in ELSEWHERE])
def test_row(finished: Callable[[str], Finished], framework: str, row: str) -> None:
    finished(framework).check(row)


@pytest.mark.ranks
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_process_ends_well(finished: Callable[[str], Finished], framework: str) -> None:
    """No signal, no warning, though much went wrong in it."""
    end = finished(framework).results[0]
    assert end.returncode == 0, end.stderr
    assert "Warning" not in end.stderr, end.stderr
    assert finished(framework).outcomes[0]


def test_wide_plan_in_one_process() -> None:
    """Eight ranks are planned by one, with no framework and no device."""
    code = (
        "import sys, parallelkit as pk; plan = pk.plan(8, data=2, tensor=4); "
        "print(plan.degree('tensor'), plan.data_shard_count, "
        "sorted({'torch', 'mindspore'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split(maxsplit=2) == ["4", "2", "[]\n"]


def test_the_table_has_a_row_for_every_part() -> None:
    parts = re.findall(
        r"^def (\w+)\(case: Case\)", (HERE / "differences.py").read_text(), re.MULTILINE
    )
    assert sorted(rows()) == sorted([*parts, *ELSEWHERE])
