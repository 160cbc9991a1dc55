"""If a call fails on some workers of an engine, the last one says so for all."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch")

from parallelkit_vllm.answering import settle
from parallelkit_vllm.errors import WorkerError

SECONDS = 60.0


class Round:
    """How workers that are threads tell each other."""

    def __init__(self, size):
        self._texts = [b""] * size
        self._barrier = threading.Barrier(size)

    def exchange(self, rank):
        def give(mine):
            assert len(mine) <= 4096
            self._texts[rank] = mine
            self._barrier.wait(SECONDS)
            return list(self._texts)

        return give


def outcomes(*calls):
    """What each worker returned or raised."""
    told = Round(len(calls))
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [
            pool.submit(settle, call, rank, told.exchange(rank)) for rank, call in enumerate(calls)
        ]
        return [f.exception(SECONDS) or f.result() for f in futures]


def raising(error):
    def call():
        raise error

    return call


def good():
    return "good"


def test_all_answer_if_none_fails():
    assert outcomes(good, good, good) == ["good"] * 3


@pytest.mark.parametrize("failed", [[0], [1], [2], [0, 1], [0, 1, 2]])
def test_the_last_alone_raises_whoever_failed(failed):
    """What vLLM reads before the error, it reads of all; nothing stays for the next call."""
    cause = KeyError("x")
    got = outcomes(*(raising(cause) if at in failed else good for at in range(3)))
    assert got[:2] == [None, None]
    assert isinstance(got[2], WorkerError)
    assert got[2].ranks == tuple(failed)
    assert str(got[2]) == f"worker {', '.join(map(str, failed))}: KeyError: 'x'"
    assert got[2].__cause__ is (cause if 2 in failed else None)


def test_different_errors_are_all_named():
    (_, error) = outcomes(raising(ValueError("one")), raising(OSError("two")))
    assert str(error) == "worker 0: ValueError: one; worker 1: OSError: two"


def test_a_long_text_is_cut():
    (_, error) = outcomes(raising(ValueError("é" * 5000)), good)
    assert 1000 < len(str(error)) < 4200


def test_an_engine_of_one_worker_raises_what_was_raised():
    with pytest.raises(KeyError):
        settle(raising(KeyError("x")), 0, None)
    assert settle(good, 0, None) == "good"
