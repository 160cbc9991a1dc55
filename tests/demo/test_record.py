"""What counts as the same text, and what a run with an engine says of itself."""

from __future__ import annotations

import attrs
import msgspec
import pytest

from parallelkit.demo.config import GREEDY, Settings
from parallelkit.demo.events import Followed, Likeliest, Step, Updated
from parallelkit.demo.record import TOLERANCE, Comparison, Run, compare
from parallelkit.weights.report import EngineReport, TransferReport

SETTINGS = Settings(steps=2, every=2, engine="vllm")
TOKENS = [number % 7 for number in range(GREEDY)]
LOGPROBS = [-0.1 * number for number in range(GREEDY)]
MINE = Likeliest(TOKENS, LOGPROBS, [1.0] * GREEDY)
THEIRS = Likeliest(TOKENS, LOGPROBS)


def other_at(place: int, *, logprob: float | None = None) -> Likeliest:
    """An engine's text with another token there, or with the same of another probability."""
    if logprob is None:
        return Likeliest([*TOKENS[:place], 8, *TOKENS[place + 1 :]], LOGPROBS)
    return Likeliest(TOKENS, [*LOGPROBS[:place], logprob, *LOGPROBS[place + 1 :]])


def tied_at(place: int, margin: float = TOLERANCE / 2) -> Likeliest:
    margins = [*MINE.margins[:place], margin, *MINE.margins[place + 1 :]]
    return msgspec.structs.replace(MINE, margins=margins)


def test_equal_texts_agree() -> None:
    found = compare(MINE, THEIRS)
    assert found == Comparison(same=GREEDY, tie=False, difference=0.0)
    assert found.equal


@pytest.mark.parametrize("place", [0, 5, GREEDY - 1])
def test_texts_may_part_where_two_tokens_are_equally_likely(place: int) -> None:
    found = compare(tied_at(place), other_at(place))
    assert (found.same, found.tie, found.equal) == (place, True, True)
    assert not compare(tied_at(place, TOLERANCE * 1.01), other_at(place)).equal
    assert not compare(MINE, other_at(place)).equal


def test_after_a_tie_nothing_is_compared_and_before_it_everything() -> None:
    parted = Likeliest([8] * GREEDY, [-9.0] * GREEDY)
    assert compare(tied_at(0), parted).equal
    assert not compare(tied_at(3), parted).equal


@pytest.mark.parametrize("place", [0, GREEDY - 1])
def test_probabilities_tell_versions_apart_that_write_the_same(place: int) -> None:
    close = compare(MINE, other_at(place, logprob=LOGPROBS[place] - TOLERANCE / 2))
    assert close.equal
    assert 0 < close.difference <= TOLERANCE
    far = compare(MINE, other_at(place, logprob=LOGPROBS[place] + TOLERANCE * 2))
    assert far.same == GREEDY
    assert not far.equal
    assert not compare(MINE, other_at(place, logprob=float("nan"))).equal


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (None, THEIRS),
        (MINE, None),
        (MINE, Likeliest(TOKENS[:-1], LOGPROBS[:-1])),
        (MINE, Likeliest(TOKENS, LOGPROBS[:-1])),
        (MINE, Likeliest([*TOKENS, 1], [*LOGPROBS, -1.0])),
        (THEIRS, THEIRS),
        (Likeliest([], []), Likeliest([], [])),
    ],
)
def test_half_a_comparison_is_none(mine: Likeliest | None, theirs: Likeliest | None) -> None:
    assert not compare(mine, theirs).equal


def updated(version: int = 1, step: int = 0) -> Updated:
    report = TransferReport(
        version=version,
        nbytes=1000,
        tensors=3,
        transport="shm",
        verify="digest",
        verified="every byte",
        phases={"begin": 0.001, "commit": 0.02},
        started_at=0.0,
        engines=(
            EngineReport(name="engine", state="committed", version=version, pause_seconds=0.0125),
        ),
    )
    return Updated(step, version, report.to_dict(), 3.0, "", likeliest=MINE)


def followed(text: Likeliest | None = THEIRS, version: int = 1) -> Followed:
    return Followed(version, "text", likeliest=text, written=500, gap=0.03)


def make_run(last: Likeliest | None = THEIRS) -> Run:
    """Two versions; of the second `last` is the engine's text."""
    run = Run(settings=SETTINGS)
    assert run.add(updated()) is None
    assert run.add(followed()) is run.versions[0]
    run.add(Step(1, 3.0))
    run.add(followed(last, version=2))
    run.add(updated(version=2, step=2))
    return run


def test_a_good_run_with_an_engine() -> None:
    run = make_run()
    assert run.complete
    assert run.equal
    assert run.verdict == "the engine's likeliest tokens are the trainer's at every version"
    assert run.versions[0].comparison == (
        f"{GREEDY} likeliest tokens equal the trainer's, their log-probabilities to 0"
    )
    assert run.versions[0].report.pause_seconds == 0.0125


@pytest.mark.parametrize("last", [other_at(9), other_at(9, logprob=-5.0), None])
def test_one_other_token_or_probability_is_bad(last: Likeliest | None) -> None:
    run = make_run(last)
    assert run.complete
    assert not run.equal
    assert run.verdict == "the engine's tokens are not the trainer's at version 2"
    assert run.versions[1].comparison == "TOKENS DIFFER"


def test_the_pause_of_an_engine_is_drawn() -> None:
    report = pytest.importorskip("parallelkit.demo.report")
    pause, gap = report.pauses_figure(make_run().versions).data
    assert list(pause.y) == [12.5, 12.5]
    assert list(gap.y) == [30.0, 30.0]
    module = [
        attrs.evolve(v, updated=_of_a_module(v.updated), followed=Followed(1, "text"))
        for v in make_run().versions
    ]
    assert len(report.pauses_figure(module).data) == 1


def _of_a_module(updated: Updated) -> Updated:
    return msgspec.structs.replace(updated, likeliest=None)
