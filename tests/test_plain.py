"""Objects on the wire: plain ones come back the same, others are refused with their place."""

from __future__ import annotations

import enum
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelkit import plain
from parallelkit.errors import CollectiveError, NotPlainError

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


@given(PLAIN)
def test_plain_objects_come_back_the_same(obj: object) -> None:
    assert plain.decode(plain.encode(obj)) == obj  # type: ignore[arg-type]


def test_not_a_number_and_infinity() -> None:
    back = plain.decode(plain.encode([math.nan, math.inf]))
    assert isinstance(back, list)
    assert math.isnan(back[0])  # type: ignore[arg-type]
    assert back[1] == math.inf


@pytest.mark.parametrize(
    ("obj", "said"),
    [
        ((1, 2), "tuple"),
        ({1: 2}, "key 1"),
        ({"a": [1, {2}]}, r"\['a'\]\[1\] is of type set"),
        (Colour.RED, "Colour"),
        (Text("x"), "Text"),
        (np.float64(1), "float64"),
        (object(), "object"),
        (2**64, "cannot be sent"),
        ("\ud800", "cannot be sent"),
        (bytearray(2), "bytearray"),
    ],
)
def test_others_are_refused(obj: object, said: str) -> None:
    with pytest.raises(NotPlainError, match=said):
        plain.encode(obj)  # type: ignore[arg-type]


def test_cycles_and_deep_nesting_are_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(NotPlainError, match="deeper than 100"):
        plain.encode(loop)  # type: ignore[arg-type]


def test_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "MAX_BYTES", 100)
    with pytest.raises(NotPlainError, match="the limit is 100"):
        plain.encode(b"x" * 101)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x92\x01", b"\x80\x80\x80"])
def test_malformed_bytes(data: bytes) -> None:
    with pytest.raises(CollectiveError, match="malformed"):
        plain.decode(data)
