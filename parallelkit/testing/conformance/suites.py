"""The suites as pytest classes. Subclass them, say which adapter, and run pytest.

    from parallelkit.testing.conformance import suites

    class TestGroup(suites.GroupSuite):
        adapter = "my_package.testing:adapter"

    class TestContext(suites.ContextSuite):
        adapter = "my_package.testing:adapter"

Each suite starts its processes once, and every part of it is a test of its own. Needs pytest.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest

from parallelkit.spawn import RankResult, spawn_ranks
from parallelkit.testing.conformance import arrivals, contexts, execution, groups, weights
from parallelkit.testing.conformance.parts import Outcome, outcomes_file


@attrs.frozen(kw_only=True)
class Finished:
    """A job that ended.

    Attributes:
        results: how each rank ended; outcomes: how each part went, by rank.
    """

    results: list[RankResult]
    outcomes: list[list[Outcome]]

    def check(self, part: str) -> None:
        """Pass, fail or skip as the part did, on all ranks."""
        states = [{o.part: o for o in outcomes}.get(part) for outcomes in self.outcomes]
        for rank, outcome in enumerate(states):
            if outcome is not None and outcome.state == "failed":
                pytest.fail(f"rank {rank}:\n{outcome.why}", pytrace=False)
        for rank, outcome in enumerate(states):
            if outcome is None:
                pytest.fail(f"rank {rank} did not get here.\n{self.end_of(rank)}", pytrace=False)
            if outcome.state == "skipped":
                pytest.skip(outcome.why)

    def end_of(self, rank: int) -> str:
        """How a rank ended, and the end of what it said."""
        result = self.results[rank]
        how = "ran out of time" if result.timed_out else f"ended with {result.returncode}"
        return f"rank {rank} {how}:\n{result.stderr[-4000:]}"


class Suite:
    """Base of the suites.

    Attributes to set:
        adapter: `"package.module:name"` of an `adapter.Adapter`, importable in a new process.
        ranks: processes to start; parts that need more are skipped.
        environ: variables for them, besides those that say which rank each is.
        timeout: seconds for a whole suite.
        warnings: filters, as Python's `-W` takes them; the framework's own noise goes here.
        forbidden: texts that no rank may write to its error output.
    """

    adapter: ClassVar[str]
    ranks: ClassVar[int] = 2
    environ: ClassVar[Mapping[str, str]] = {}
    timeout: ClassVar[float] = 240.0
    warnings: ClassVar[tuple[str, ...]] = ("error",)
    forbidden: ClassVar[tuple[str, ...]] = ("Warning",)

    module: ClassVar[str]

    @pytest.fixture(scope="class")
    @classmethod
    def finished(cls, tmp_path_factory: pytest.TempPathFactory) -> Finished:
        """The job, run to its end."""
        return run(
            cls.module,
            cls.adapter,
            tmp_path_factory.mktemp("conformance"),
            ranks=cls.ranks,
            environ=cls.environ,
            timeout=cls.timeout,
            warnings=cls.warnings,
        )

    def test_processes_end_well(self, finished: Finished) -> None:
        """Exit code 0, no warning, no complaint."""
        for rank, result in enumerate(finished.results):
            assert result.returncode == 0, finished.end_of(rank)
            for text in self.forbidden:
                assert text not in result.stderr, finished.end_of(rank)


class GroupSuite(Suite):
    """Process groups: values, errors, subgroups, life cycle, late ranks."""

    ranks = 3
    module = groups.__name__

    @pytest.mark.parametrize("part", groups.PARTS.names)
    def test_group(self, finished: Finished, part: str) -> None:
        finished.check(part)


class ArrivalSuite(Suite):
    """Process groups that miss a rank at the start."""

    ranks = 3
    module = arrivals.__name__

    @pytest.mark.parametrize("part", arrivals.PARTS.names)
    def test_arrival(self, finished: Finished, part: str) -> None:
        finished.check(part)


class ContextSuite(Suite):
    """Parallel contexts: gradients, steps, seeds, data, checkpoints."""

    module = contexts.__name__

    @pytest.mark.parametrize("part", contexts.PARTS.names)
    def test_context(self, finished: Finished, part: str) -> None:
        finished.check(part)


class ExecutionSuite(Suite):
    """Execution modes, `check_graph` and `compare_modes`."""

    ranks = 1
    module = execution.__name__

    @pytest.mark.parametrize("part", execution.PARTS.names)
    def test_execution(self, finished: Finished, part: str) -> None:
        finished.check(part)


class WeightSuite(Suite):
    """Weights published by one process and followed by another."""

    ranks = 1
    module = weights.__name__

    @pytest.mark.parametrize("part", weights.PARTS.names)
    def test_weights(self, finished: Finished, part: str) -> None:
        finished.check(part)


def run(
    module: str,
    adapter: str,
    folder: Path,
    *,
    ranks: int,
    environ: Mapping[str, str],
    timeout: float,
    warnings: Sequence[str] = ("error",),
) -> Finished:
    """Run a job module on `ranks` processes, under the filters `warnings`."""
    filters = [f"-W{text}" for text in warnings]
    argv = [sys.executable, *filters, "-m", module]
    argv += ["--adapter", adapter, "--folder", str(folder)]
    env = {"OMP_NUM_THREADS": "1", **environ}
    results = spawn_ranks(argv, ranks, timeout=timeout, env=env, grace=30.0)
    outcomes = [read_outcomes(folder, rank) for rank in range(ranks)]
    return Finished(results=results, outcomes=outcomes)


def read_outcomes(folder: Path, rank: int) -> list[Outcome]:
    """What a rank wrote down; nothing if it did not get that far."""
    path = outcomes_file(folder, rank)
    found: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return [Outcome(**outcome) for outcome in found]
