"""Plain objects as msgpack, both ways. Nothing here can run code that a peer sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from parallelkit.errors import CollectiveError, NotPlainError
from parallelkit.protocols import Plain

#: The largest object that one broadcast carries, encoded.
MAX_BYTES: Final = 64 << 20
_MAX_DEPTH: Final = 100
#: What msgpack carries and gives back as it was, besides None, lists and dicts.
TYPES: Final = {bool: "bool", int: "int", float: "float", str: "str", bytes: "bytes"}


def encode(obj: Plain) -> bytes:
    """Encode None, bool, int, float, str, bytes, list, and dict with string keys.

    Types are compared exactly: a subclass (an enum, a numpy float) or a tuple would arrive as
    something else.

    Raises:
        NotPlainError: something else is in `obj`, or it is too large; the message says where.
    """
    check(obj, "the object", TYPES)
    try:
        data = msgspec.msgpack.encode(obj)
    except (OverflowError, UnicodeEncodeError, TypeError) as error:
        raise NotPlainError(f"the object cannot be sent: {error}") from error
    if len(data) > MAX_BYTES:
        raise NotPlainError(
            f"the object has {len(data)} bytes when encoded; the limit is {MAX_BYTES}. Send "
            "tensors with broadcast"
        )
    return data


def decode(data: bytes) -> Plain:
    """Decode what `encode` made.

    Raises:
        CollectiveError: the bytes are malformed.
    """
    try:
        obj: Plain = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CollectiveError(f"a peer sent a malformed object: {error}") from error
    return obj


def check(
    obj: object, path: str, types: Mapping[type, str], *, why: str = "", depth: int = 0
) -> None:
    """Raise unless `obj` holds values of exactly `types`, lists, and dicts with string keys alone.

    Args:
        path: what `obj` is, for the message.
        types: allowed besides None, and how each is called.
        why: after the type that was found, what is wrong with it.

    Raises:
        NotPlainError: something else is in `obj`; the message says where.
    """
    kind = type(obj)
    if depth > _MAX_DEPTH:
        raise NotPlainError(f"{path:.200} is nested deeper than {_MAX_DEPTH} levels")
    if kind is list:
        for index, item in enumerate(obj):  # type: ignore[arg-type, var-annotated]
            check(item, f"{path}[{index}]", types, why=why, depth=depth + 1)
    elif kind is dict:
        for key, item in obj.items():  # type: ignore[attr-defined]
            if type(key) is not str:
                raise NotPlainError(f"{path:.200} has the key {key!r:.80}; keys are strings")
            check(item, f"{path}[{key!r:.40}]", types, why=why, depth=depth + 1)
    elif obj is not None and kind not in types:
        raise NotPlainError(
            f"{path:.200} is of type {kind.__qualname__}{why}; allowed are None, "
            f"{', '.join(types.values())}, list, and dict with string keys"
        )
