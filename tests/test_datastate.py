"""States of loaders: plain, checked, and the same on every part."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelkit.data import MODES, position_after
from parallelkit.datastate import FORMAT, LoaderState
from parallelkit.errors import DataShardError, DataStateError


def state(**values: Any) -> LoaderState:
    defaults: dict[str, Any] = {
        "kind": "items",
        "length": 10,
        "mode": "pad",
        "shuffle": True,
        "seed": -3,
        "epoch": 2,
        "consumed": 4,
    }
    return LoaderState(**(defaults | values))


@pytest.mark.parametrize(
    "made",
    [
        state(),
        state(finished=True, consumed=10),
        state(kind="stream", length=None, consumed=2**40),
        state(kind="batches", order="00ff"),
        state(seed=-(2**63), epoch=2**63 - 1),
    ],
)
def test_there_and_back(made: LoaderState) -> None:
    plain = made.plain()
    assert LoaderState.from_plain(plain) == made
    assert LoaderState.from_plain(json.loads(json.dumps(plain))) == made
    assert LoaderState.from_plain(msgspec.msgpack.decode(msgspec.msgpack.encode(plain))) == made


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": "other/1"}, "format is 'other/1'"),
        ({"kind": "rows"}, "kind"),
        ({"consumed": -1}, "consumed is -1"),
        ({"consumed": 11}, "consumed is 11 of 10"),
        ({"consumed": 1.5}, "consumed"),
        ({"consumed": True}, "consumed"),
        ({"length": None}, "length is None for the kind 'items'"),
        ({"length": -1, "consumed": 0}, "length is -1"),
        ({"kind": "stream"}, "length is 10 for the kind 'stream'"),
        ({"mode": "wrap"}, "mode is 'wrap'"),
        ({"shuffle": 1}, "shuffle"),
        ({"seed": 2**63}, "64 bits"),
        ({"epoch": "2"}, "epoch"),
        ({"extra": 1}, "extra"),
    ],
)
def test_damaged(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(DataStateError, match=said):
        LoaderState.from_plain(state().plain() | changes)


@pytest.mark.parametrize("value", [None, 3, [], {}, {"format": FORMAT}, "state"])
def test_foreign(value: object) -> None:
    with pytest.raises(DataStateError, match="cannot be read"):
        LoaderState.from_plain(value)


def test_of_another_loader() -> None:
    saved, here = state(), state(length=11, mode="drop", shuffle=False, seed=0, epoch=0, consumed=0)
    with pytest.raises(DataStateError) as caught:
        saved.check_fits(here)
    assert [line.split(":")[0] for line in caught.value.differences] == [
        "length",
        "mode",
        "shuffle",
        "seed",
    ]
    assert "length: saved 10, here 11" in str(caught.value)
    assert isinstance(caught.value, DataShardError)
    saved.check_fits(state(epoch=9, consumed=0))  # where it is may differ


@given(
    st.integers(0, 40),
    st.integers(1, 6),
    st.sampled_from(MODES),
    st.integers(1, 4),
    st.booleans(),
    st.integers(0, 12),
)
def test_after_some_batches(
    length: int, count: int, mode: str, size: int, drop_last: bool, batches: int
) -> None:
    options: dict[str, Any] = {"count": count, "batch_size": size, "drop_last": drop_last}
    begun = state(length=length, mode=mode, consumed=0)
    made = begun.after(batches, ended=False, **options)
    assert made.consumed == position_after(batches, length=length, mode=mode, **options)
    assert made.finished == (made.consumed == length)
    assert LoaderState.from_plain(made.plain()) == made
    ended = begun.after(batches, ended=True, **options)
    assert (ended.consumed, ended.finished) == (length, True)


def test_streams_count_on() -> None:
    begun = state(kind="stream", length=None, consumed=6)
    options: dict[str, Any] = {"count": 3, "batch_size": 2, "drop_last": False}
    made = begun.after(4, ended=False, **options)
    assert (made.consumed, made.finished) == (30, False)
    assert begun.after(4, ended=True, **options).finished
