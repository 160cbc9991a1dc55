"""What counts as the same text, and what a run with an engine says of itself."""

from __future__ import annotations

import pytest

from parallelkit.demo.config import GREEDY, Settings
from parallelkit.demo.events import Followed, Step, Updated
from parallelkit.demo.record import TIE, Run, agreeing
from parallelkit.weights.report import EngineReport, TransferReport

SETTINGS = Settings(steps=2, every=2, engine="vllm")
TOKENS = [number % 7 for number in range(GREEDY)]


def updated(
    *,
    tokens: list[int] = TOKENS,
    margins: dict[int, float] | None = None,
    version: int = 1,
    step: int = 0,
) -> Updated:
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
    by_place = [(margins or {}).get(place, 1.0) for place in range(len(tokens))]
    return Updated(step, version, report.to_dict(), 3.0, "", b"", tokens, by_place)


def followed(tokens: list[int] = TOKENS, version: int = 1) -> Followed:
    return Followed(version, "text", greedy=tokens, written=500, gap=0.03)


def other_at(place: int) -> list[int]:
    return [*TOKENS[:place], 8, *TOKENS[place + 1 :]]


def test_equal_texts_agree() -> None:
    assert agreeing(updated(), followed()) == GREEDY


@pytest.mark.parametrize("place", [0, 5, GREEDY - 1])
def test_texts_may_part_where_two_tokens_are_equally_likely(place: int) -> None:
    assert agreeing(updated(margins={place: TIE / 2}), followed(other_at(place))) == place
    assert agreeing(updated(margins={place: TIE}), followed(other_at(place))) == -1
    assert agreeing(updated(), followed(other_at(place))) == -1


def test_after_a_tie_nothing_is_compared_and_before_it_everything() -> None:
    parted = [8] * GREEDY
    assert agreeing(updated(margins={0: 0.0}), followed(parted)) == 0
    assert agreeing(updated(margins={3: 0.0}), followed(parted)) == -1


@pytest.mark.parametrize("tokens", [[], TOKENS[:-1], [*TOKENS, 1]])
def test_texts_of_other_lengths_do_not_agree(tokens: list[int]) -> None:
    assert agreeing(updated(), followed(tokens)) == -1
    assert agreeing(updated(tokens=tokens), followed()) == -1
    assert agreeing(updated(tokens=tokens), followed(tokens)) == -1


def make_run(*last: int) -> Run:
    """Two versions; of the second the engine's tokens are `last`, or the trainer's."""
    run = Run(settings=SETTINGS)
    assert run.add(updated()) is None
    assert run.add(followed()) is run.versions[0]
    run.add(Step(1, 3.0))
    run.add(followed(list(last) or TOKENS, version=2))
    run.add(updated(version=2, step=2))
    return run


def test_a_good_run_with_an_engine() -> None:
    run = make_run()
    assert run.complete
    assert run.equal
    assert run.verdict == "the engine's likeliest tokens are the trainer's at every version"
    assert run.versions[0].comparison == f"{GREEDY} likeliest tokens equal the trainer's"
    assert run.versions[0].report.pause_seconds == 0.0125


def test_one_other_token_is_bad() -> None:
    run = make_run(*other_at(9))
    assert not run.equal
    assert run.verdict == "the engine's tokens are not the trainer's at version 2"
    assert run.versions[1].comparison == "TOKENS DIFFER"


def test_an_engine_that_said_no_tokens_is_bad() -> None:
    run = Run(settings=SETTINGS)
    run.add(updated())
    version = run.add(Followed(1, "text"))
    assert version is not None
    assert not version.equal
