"""The conformance suites themselves: a backend in NumPy passes, and each fault is found."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallelkit.errors import PluginContractError
from parallelkit.testing.conformance import contexts, execution, groups, parts, suites, weights
from parallelkit.testing.conformance.adapter import Adapter, load

HERE = Path(__file__).parent
ENVIRON = {"PYTHONPATH": str(HERE)}


class TestGroup(suites.GroupSuite):
    adapter, ranks, environ = "tiny:adapter", 1, ENVIRON


class TestContext(suites.ContextSuite):
    adapter, ranks, environ = "tiny:adapter", 1, ENVIRON


class TestExecution(suites.ExecutionSuite):
    adapter, environ = "tiny:adapter", ENVIRON


class TestWeights(suites.WeightSuite):
    adapter, environ = "tiny:adapter", ENVIRON


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    """The class of adapters."""
    monkeypatch.syspath_prepend(str(HERE))
    import tiny

    yield tiny.Adapter
    del sys.modules["tiny"]


def outcomes(job: parts.Parts, adapter: Adapter, folder: Path) -> dict[str, parts.Outcome]:
    """Run the parts here, as rank 0 of 1."""
    case = parts.Case(
        adapter=adapter,
        reference="tiny:adapter",
        home=folder,
        features=parts.features_of(adapter),
        folder=folder,
        rank=0,
        world=1,
    )
    found: list[parts.Outcome] = []
    parts.run(job, case, found)
    return {outcome.part: outcome for outcome in found}


@pytest.mark.parametrize(
    ("fault", "job", "part"),
    [
        ("changes_inputs", groups, "reductions"),
        ("forgets_dtype", groups, "reductions"),
        ("takes_any_op", groups, "wrong_arguments"),
        ("takes_objects", groups, "plain_objects"),
        ("works_when_closed", groups, "close"),
        ("loses_scalars", groups, "odd_shapes"),
        ("doubles_gradients", contexts, "standalone"),
        ("wraps_in_eager", execution, "eager"),
        ("takes_any_option", execution, "refusals"),
        ("loses_ties", weights, "manifests"),
        ("writes_elsewhere", weights, "bytes_in_and_out"),
    ],
)
def test_each_fault_is_found(tiny, tmp_path, clean_launch, fault, job, part):
    clean_launch()
    found = outcomes(job.PARTS, tiny(fault), tmp_path)
    *before, last = found.values()
    assert (last.part, last.state) == (part, "failed")
    assert "Error" in last.why
    assert {outcome.state for outcome in before} <= {"passed", "skipped"}


def test_what_is_not_claimed_is_skipped_with_the_reason(tiny, tmp_path, clean_launch):
    clean_launch()
    found = outcomes(contexts.PARTS, tiny(), tmp_path)
    assert found["mean_and_sum"].state == "skipped"
    assert found["mean_and_sum"].why == "the plugin does not claim axis.data, context.data"
    assert found["standalone"].state == "passed"
    assert outcomes(groups.PARTS, tiny(), tmp_path)["late_rank"].why == (
        "needs 2 ranks, 1 were started"
    )


def test_every_part_needs_what_torch_claims():
    """A part that needs a feature which nobody can claim would never run."""
    from parallelkit_torch.plugin import FEATURES

    known = set(FEATURES)
    for job in (groups, contexts, execution, weights):
        for part in job.PARTS.all:
            assert part.needs <= known, part.name


@pytest.mark.parametrize("written", ["tiny", "tiny:", ":adapter", ""])
def test_how_an_adapter_is_written(written):
    with pytest.raises(PluginContractError, match="package.module:name"):
        load(written)


def test_what_is_no_adapter():
    with pytest.raises(PluginContractError, match="lacks .*mlp.*reopens"):
        load("json:dumps")


def test_a_rank_that_dies_fails_its_parts(tiny, tmp_path, monkeypatch):
    """Nothing passes by being silent."""
    finished = suites.run(
        groups.__name__, "no_such_module:adapter", tmp_path, ranks=1, environ={}, timeout=60
    )
    with pytest.raises(pytest.fail.Exception, match="rank 0 did not get here"):
        finished.check("init")
    assert finished.results[0].returncode != 0
    assert "no_such_module" in finished.end_of(0)
