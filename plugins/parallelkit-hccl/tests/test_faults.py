"""What goes wrong on one rank ends on every rank, in time and with its name."""

from __future__ import annotations

import signal

import pytest

pytestmark = pytest.mark.ranks
#: The fake library waits far longer than any deadline of ours.
PATIENCE = {"FAKEHCCL_SECONDS": "60"}


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_does_not_come_is_named(job, ranks):
    job("faults.py", "absent", ranks=ranks)


@pytest.mark.parametrize(
    "scenario",
    [
        "hanging_init",
        "failing_init",
        "failing_warm_up",
        "failing_call",
        "stuck_call",
        "other_sizes",
        "failing_close",
        "no_memory",
        "foreign_root_info",
    ],
)
def test_a_fault(job, scenario):
    job("faults.py", scenario, **PATIENCE)


def test_a_rank_that_is_killed(job):
    job("faults.py", "death", ends={1: -signal.SIGKILL}, **PATIENCE)


def test_a_rank_that_is_killed_beside_an_old_library(job, build):
    """Its streams know no timeout: our own deadline ends the wait."""
    old = build("-DOLD")
    job("faults.py", "death", ends={1: -signal.SIGKILL}, library=old, **PATIENCE)
