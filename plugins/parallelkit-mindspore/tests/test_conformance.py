"""The common suites on MindSpore."""

from __future__ import annotations

import pytest

from parallelkit.testing.conformance import suites

pytestmark = pytest.mark.ranks
ADAPTER = "parallelkit_mindspore.testing:adapter"
ENVIRON = {"GLOG_v": "3"}  # errors only
#: MindSpore's exit handler calls what Python has deprecated.
WARNINGS = ("error", "ignore:getName() is deprecated:DeprecationWarning")


class TestGroup(suites.GroupSuite):
    adapter, environ, warnings = ADAPTER, ENVIRON, WARNINGS


class TestArrival(suites.ArrivalSuite):
    adapter, environ, warnings = ADAPTER, ENVIRON, WARNINGS


class TestContext(suites.ContextSuite):
    adapter, environ, warnings = ADAPTER, ENVIRON, WARNINGS


class TestExecution(suites.ExecutionSuite):
    adapter, environ, warnings = ADAPTER, ENVIRON, WARNINGS


class TestWeights(suites.WeightSuite):
    adapter, environ, warnings = ADAPTER, ENVIRON, WARNINGS
