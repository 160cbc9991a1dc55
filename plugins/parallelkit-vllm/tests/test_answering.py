"""If a call fails on some workers of an engine, the last one says so for all."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch")

import torch
from parallelkit_vllm.answering import StoreExchange, settle
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


@pytest.mark.parametrize("silent", [0, 1, 2])
def test_one_that_is_silent_is_named_by_the_last_alone(silent, caplog):
    """Where the last is silent, nobody raises: vLLM waits for its answer, or knows it is dead."""
    outcome = []
    for rank in (r for r in range(3) if r != silent):
        texts = [None if at == silent else b"" for at in range(3)]
        try:
            outcome.append(settle(good, rank, lambda mine, texts=texts: texts))
        except WorkerError as error:
            outcome.append(error)
            assert error.ranks == (silent,)
            assert f"worker {silent}: did not say in time" in str(error)
    assert [type(x) for x in outcome] == (
        [type(None)] * 2 if silent == 2 else [type(None), WorkerError]
    )
    assert "did not say in time" in caplog.text


# --- by torch's store


class Store:
    """The exchanges of so many workers, and one round of them that takes so many seconds."""

    def __init__(self, size):
        self.store = torch.distributed.HashStore()
        self.each = [StoreExchange(self.store, size, rank) for rank in range(size)]

    def round(self, texts, seconds=SECONDS):
        with ThreadPoolExecutor(len(texts)) as pool:
            futures = {at: pool.submit(self.each[at], t, seconds) for at, t in texts.items()}
            return {at: f.result(SECONDS) for at, f in futures.items()}


def test_each_hears_all_round_by_round():
    told = Store(3)
    for i in range(5):
        texts = [f"{rank} in {i}".encode() * (rank != 1) for rank in range(3)]
        assert told.round(dict(enumerate(texts))) == dict.fromkeys(range(3), texts)
    assert told.store.num_keys() <= 6 + 1  # two rounds, and one that torch keeps


def test_a_round_without_one_ends_and_the_next_one_is_right():
    """As if vLLM refused the call on one worker before it came to ours."""
    told = Store(3)
    told.round({0: b"a", 1: b"b", 2: b"c"})
    for absent in range(3):
        texts = {rank: b"old" for rank in range(3) if rank != absent}
        heard = told.round(texts, 0.2)
        for rank in texts:
            assert heard[rank][absent] is None
        assert told.round({0: b"x", 1: b"", 2: b"z"}) == {r: [b"x", b"", b"z"] for r in range(3)}


def test_one_that_comes_late_does_not_shift_the_rounds():
    told = Store(2)
    assert told.round({1: b"early"}, 0.1) == {1: [None, b"early"]}
    assert told.round({0: b"late"}, 0.1) == {0: [b"late", None]}
    assert told.round({0: b"x", 1: b"y"}) == {r: [b"x", b"y"] for r in range(2)}


def test_a_long_text_passes_the_store():
    told = Store(2)
    long = ("é" * 2048).encode()
    assert told.round({0: long, 1: b""})[1] == [long, b""]
