"""The common suites on torch."""

from __future__ import annotations

import pytest

from parallelkit.testing.conformance import suites

pytestmark = pytest.mark.ranks
ADAPTER = "parallelkit_torch.testing:adapter"


class TestGroup(suites.GroupSuite):
    adapter = ADAPTER
    forbidden = ("Warning", "destroy_process_group")


class TestArrival(suites.ArrivalSuite):
    adapter = ADAPTER


class TestContext(suites.ContextSuite):
    adapter = ADAPTER


class TestExecution(suites.ExecutionSuite):
    adapter = ADAPTER


class TestWeights(suites.WeightSuite):
    adapter = ADAPTER
