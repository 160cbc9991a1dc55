"""Passes: made with the secret of a publisher's ranks, for one rank, used once."""

from __future__ import annotations

import itertools
import secrets
import threading
import time

import pytest

from parallelkit.errors import TransportError
from parallelkit.weights import passes
from parallelkit.weights.passes import (
    KEY_BYTES,
    NONCE_BYTES,
    PASS_BYTES,
    SECRET_BYTES,
    Passes,
    issue,
    key_of,
)

SECRET = bytes(range(SECRET_BYTES))


def test_a_pass_works_once_at_its_rank():
    desk = Passes(SECRET, 2)
    pass_ = issue(SECRET, 2)
    assert len(pass_) == PASS_BYTES == NONCE_BYTES + KEY_BYTES
    assert [desk.redeem(pass_) for _ in range(3)] == [True, False, False]


def test_a_pass_works_as_often_as_it_may():
    desk = Passes(SECRET, 0, uses=3)
    pass_ = issue(SECRET, 0)
    assert [desk.redeem(pass_) for _ in range(5)] == [True] * 3 + [False] * 2


def test_every_pass_is_another_one():
    assert len({issue(SECRET, 0) for _ in range(1000)}) == 1000


def test_passes_of_another_rank_or_secret_do_not_work():
    desk = Passes(SECRET, 2)
    assert not desk.redeem(issue(SECRET, 1))
    assert not desk.redeem(issue(secrets.token_bytes(SECRET_BYTES), 2))


@pytest.mark.parametrize("length", [0, 1, NONCE_BYTES, PASS_BYTES - 1, PASS_BYTES + 1, 4096])
def test_a_pass_of_another_length_does_not_work(length):
    pass_ = (issue(SECRET, 0) + bytes(4096))[:length]
    assert not Passes(SECRET, 0).redeem(pass_)


@pytest.mark.parametrize("at", range(0, PASS_BYTES, 5))
def test_an_altered_pass_does_not_work_and_uses_nothing_up(at):
    desk = Passes(SECRET, 0)
    pass_ = bytearray(issue(SECRET, 0))
    pass_[at] ^= 1
    assert not desk.redeem(bytes(pass_))
    pass_[at] ^= 1
    assert desk.redeem(bytes(pass_))


def test_the_secret_is_not_in_a_pass():
    assert SECRET[:8] not in issue(SECRET, 0)


def test_the_key_follows_from_nonce_rank_and_secret():
    pass_ = issue(SECRET, 7)
    nonce, key = pass_[:NONCE_BYTES], pass_[NONCE_BYTES:]
    assert key == key_of(SECRET, 7, nonce) == Passes(SECRET, 7).key(nonce)
    assert len({key_of(SECRET, rank, nonce) for rank in range(50)}) == 50


@pytest.mark.parametrize("secret", [b"", b"x" * 31, b"x" * 33])
def test_a_secret_of_another_length_is_refused(secret):
    with pytest.raises(TransportError, match="32 bytes"):
        issue(secret, 0)
    with pytest.raises(TransportError, match="32 bytes"):
        Passes(secret, 0)


@pytest.mark.parametrize("rank", [-1, 1 << 32])
def test_an_impossible_rank_is_refused(rank):
    with pytest.raises(TransportError, match="rank"):
        issue(SECRET, rank)


def test_memory_is_bounded_and_no_used_pass_works_again(monkeypatch):
    monkeypatch.setattr(passes, "REMEMBERED", 20)
    clock = itertools.count(1000)
    monkeypatch.setattr(time, "time_ns", lambda: next(clock))
    desk = Passes(SECRET, 0)
    early = issue(SECRET, 0)  # older than all that follow, and not used
    issued = [issue(SECRET, 0) for _ in range(200)]
    for pass_ in issued:
        assert desk.redeem(pass_)
        assert len(desk._used) <= 20
    assert not any(desk.redeem(pass_) for pass_ in issued)
    assert not desk.redeem(early), "older than what is remembered"
    assert desk.redeem(issue(SECRET, 0))


def test_two_threads_cannot_both_use_a_pass():
    desk = Passes(SECRET, 0)
    issued = [issue(SECRET, 0) for _ in range(500)]
    barrier, counts = threading.Barrier(4), [0] * 4

    def use(number):
        barrier.wait(30)
        counts[number] = sum(desk.redeem(pass_) for pass_ in issued)

    threads = [threading.Thread(target=use, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sum(counts) == len(issued)
