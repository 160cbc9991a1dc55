"""The control plane: agreement, bytes, and what each rank learns when another is gone or late."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from parallelkit.errors import CollectiveError, CollectiveTimeoutError
from parallelkit.meeting import Star
from parallelkit.meeting.frames import Kind

from .conftest import in_threads

Make = Callable[..., list[Star]]


def everywhere(stars: Sequence[Star], call: Callable[[Star], Any], **delays: float) -> list[Any]:
    waits = {int(rank[1:]): seconds for rank, seconds in delays.items()}
    return in_threads(*((lambda s=s: call(s)) for s in stars), delays=waits)


def add(into: memoryview, others: Sequence[memoryview]) -> None:
    total = np.frombuffer(into, np.int64)
    for other in others:
        total += np.frombuffer(other, np.int64)


def test_exchange_and_agree(stars: Make) -> None:
    group = stars(4)
    for round_ in range(3):
        found = everywhere(group, lambda s, n=round_: s.exchange(f"call {n}", bytes([s.rank])))
        assert found == [[b"\0", b"\1", b"\2", b"\3"]] * 4
    assert everywhere(group, lambda s: s.agree("x")) == [None] * 4


def test_a_difference_is_shown_to_all_and_breaks_nothing(stars: Make) -> None:
    group = stars(3)
    errors = everywhere(group, lambda s: s.agree(f"sum of [{s.rank // 2}]"))
    for error in errors:
        assert type(error) is CollectiveError
        assert "rank(s) 0, 1: sum of [0]\n  rank(s) 2: sum of [1]" in str(error)
    assert everywhere(group, lambda s: s.agree("again")) == [None] * 3
    errors = everywhere(group, lambda s: s.agree("x" * 2000 + str(s.rank)))
    assert all("x... " in str(error) and len(str(error)) < 4000 for error in errors)


@pytest.mark.parametrize("src", [0, 1, 2])
@pytest.mark.parametrize("size", [0, 1, 70_000, 9 << 20])
def test_bytes_of_a_length_that_one_knows(stars: Make, src: int, size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    found = everywhere(
        stars(3), lambda s: s.send_bytes("x", data[:size] if s.rank == src else b"", src, 1 << 30)
    )
    assert found == [data[:size]] * 3


def test_more_bytes_than_allowed(stars: Make) -> None:
    errors = everywhere(stars(2), lambda s: s.send_bytes("x", b"12345", 1, 4))
    assert ["announced 5 bytes" in str(error) for error in errors] == [True, True]


@pytest.mark.parametrize("elements", [0, 1, 1000, (1 << 20) + 1])
def test_tensors(stars: Make, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    group = stars(3)

    def run(star: Star) -> None:
        mine = np.arange(elements, dtype=np.int64) + star.rank
        data = mine.copy()
        star.all_reduce("sum", memoryview(data).cast("B") if elements else memoryview(b""), add)
        assert (data == 3 * np.arange(elements) + 3).all()
        data = mine.copy()
        star.broadcast("b", memoryview(data).cast("B") if elements else memoryview(b""), 2)
        assert (data == np.arange(elements) + 2).all()
        rows = np.zeros((3, elements), np.int64)
        rows[star.rank] = mine
        star.all_gather("g", [memoryview(row).cast("B") for row in rows] if elements else [])
        assert (rows == np.arange(elements) + np.arange(3)[:, None]).all()
        rows = np.stack([np.arange(elements, dtype=np.int64) * (k + 1) for k in range(3)])
        parts = [memoryview(row).cast("B") for row in rows] if elements else []
        star.reduce_scatter("s", parts, add)
        assert (rows[star.rank] == np.arange(elements) * 3 * (star.rank + 1)).all()

    assert everywhere(group, run) == [None] * 3


def test_who_does_not_come_is_named_and_learns_that_it_is_late(stars: Make) -> None:
    group = stars(3, timeout=1.0)
    errors = everywhere(group, lambda s: s.agree("step"), r2=2.5)
    for error in errors[:2]:
        assert isinstance(error, CollectiveTimeoutError)
        assert error.missing == (2,)
        assert "rank(s) 2 did not take part within 1 s" in str(error)
    assert not isinstance(errors[2], CollectiveTimeoutError)
    assert "this rank came too late" in str(errors[2])
    for star in group:
        with pytest.raises(CollectiveError, match="broken group; earlier: .*step"):
            star.agree("next")


def test_rank_zero_late(stars: Make) -> None:
    errors = everywhere(stars(3, timeout=1.0), lambda s: s.agree("step"), r0=3.0)
    assert [e.missing for e in errors[1:]] == [(0,), (0,)]
    assert "this rank came too late" in str(errors[0])


def test_a_rank_that_gives_up_first_names_the_right_one(stars: Make) -> None:
    """Rank 1 waits from the start, rank 0 from shortly before the end, rank 2 never comes."""
    group = stars(3, timeout=2.0)
    errors = everywhere(group[:2], lambda s: s.agree("step"), r0=0.5)
    assert [e.missing for e in errors] == [(2,), (2,)]


def test_one_call_s_own_deadline(stars: Make) -> None:
    group = stars(2, timeout=60.0)
    began = time.monotonic()
    errors = everywhere(group[:1], lambda s: s.agree("step", 0.3))
    assert errors[0].missing == (1,)
    assert time.monotonic() - began < 20


def vanish(star: Any) -> None:
    """What a kill does: the connections end, nothing is said."""
    for peer in (*getattr(star, "_peers", {}).values(), *filter(None, [getattr(star, "_hub", 0)])):
        peer._socket.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("gone", [0, 2])
def test_a_dead_rank_is_noticed_at_once_and_named(stars: Make, gone: int) -> None:
    group = stars(3, timeout=60.0)
    began = time.monotonic()
    errors = everywhere(
        group, lambda s: vanish(s) if s.rank == gone else s.agree("step"), **{f"r{gone}": 0.3}
    )
    del errors[gone]
    for error in errors:
        assert type(error) is CollectiveError
        assert f"rank(s) {gone} are gone" in str(error)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_dies_in_the_middle_of_a_tensor(stars: Make, gone: int) -> None:
    group = stars(3, timeout=60.0)
    data = np.zeros(4 << 20, np.int64)

    def run(star: Star) -> None:
        if star.rank == gone:
            star._exchange("sum", b"", _Long())  # type: ignore[arg-type]
            vanish(star)
        else:
            star.all_reduce("sum", memoryview(data.copy()).cast("B"), add)

    errors = everywhere(group, run)
    del errors[gone]
    assert all("are gone" in str(error) for error in errors), errors
    assert sum(f"rank(s) {gone} are gone" in str(error) for error in errors) >= 1


class _Long:
    left = elapsed = 30.0
    seconds = 60.0


def test_a_rank_that_leaves_is_not_a_dead_one(stars: Make) -> None:
    for who in (0, 1):
        group = stars(2, timeout=60.0)
        errors = everywhere(
            group, lambda s, who=who: s.leave(0.5) if s.rank == who else s.agree("step")
        )
        assert f"rank(s) {who} have closed the group" in str(errors[1 - who])


def test_leaving_waits_for_the_others_up_to_a_limit(stars: Make) -> None:
    group = stars(2)
    began = time.monotonic()
    group[0].leave(0.4)
    assert 0.3 < time.monotonic() - began < 20
    group[0].leave(0.4)
    group[1].leave()
    group[1].leave()


def test_rank_zero_learns_when_the_others_processes_end(stars: Make) -> None:
    group: list[Any] = stars(2)
    assert everywhere(group, lambda s: s.leave(5.0, linger=True)) == [None] * 2
    descriptor = group[1]._hub.fileno()
    assert not group[1].linger(0.0), "rank 0 is there still"
    began = time.monotonic()
    assert not group[0].linger(0.3)
    assert time.monotonic() - began >= 0.3
    os.close(descriptor)  # what the end of the process does
    group = stars(2)
    assert everywhere(group, lambda s: s.leave(5.0, linger=True)) == [None] * 2
    group[0].leave()
    assert group[1].linger(0.0), "rank 0 is gone"


@pytest.mark.parametrize("liar", [0, 1])
@pytest.mark.parametrize(
    ("kind", "payload"),
    [(Kind.DATA, b"abc"), (Kind.CALL, b"\xc1"), (Kind.GO, b"\xc1"), (Kind.BAD, b"\xc1")],
)
def test_what_the_protocol_does_not_allow(
    stars: Make, liar: int, kind: Kind, payload: bytes
) -> None:
    group: list[Any] = stars(2)

    def run(star: Any) -> None:
        if star.rank == liar:
            peer = star._hub if liar else star._peers[1]
            peer.send(kind, payload, _Long())
        else:
            star.agree("step")

    error = everywhere(group, run)[1 - liar]
    assert isinstance(error, CollectiveError), error
    assert group[1 - liar].broken


def test_an_interrupted_call_breaks_the_group(stars: Make) -> None:
    group = stars(2)

    def stop(into: memoryview, others: Sequence[memoryview]) -> None:
        raise KeyboardInterrupt

    def run(star: Star) -> None:
        data = memoryview(bytearray(8))
        if star.rank:
            star.all_reduce("sum", data, add)
        else:
            with pytest.raises(KeyboardInterrupt):
                star.all_reduce("sum", data, stop)
            star.leave()

    assert "have closed the group" in str(everywhere(group, run)[1])
    with pytest.raises(CollectiveError, match="left by KeyboardInterrupt"):
        group[0].agree("next")
