"""The few pieces of ASGI that the guard needs: where a request goes, its token, body and answer."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

import msgspec

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

#: What a caller may take to send a body, in seconds.
BODY_SECONDS: Final = 10.0


class RequestError(Exception):
    """An answer other than 200; not for users to see as an exception."""

    def __init__(self, status: int, message: str, *, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}


class GoneError(Exception):
    """The caller went away before its body was complete: there is nobody to answer."""


def route_path(scope: Scope) -> str:
    """Return the path that the application's router will look for, by the rule of Starlette."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    if not root or not path.startswith(root):
        return path
    if path == root:
        return ""
    return path[len(root) :] if path[len(root)] == "/" else path


def under(path: str, prefix: str) -> bool:
    """Whether `path` is `prefix` or below it; `/v1x` is not below `/v1`."""
    return path == prefix or path.startswith(prefix + "/")


def digest(token: str | bytes) -> bytes:
    """Hash a token, so that all have the same length when they are compared."""
    return hashlib.sha256(token.encode() if isinstance(token, str) else token).digest()


def bears(scope: Scope, expected: bytes) -> bool:
    """Whether the one `Authorization` header has the token with this digest; constant time."""
    given = [value for key, value in scope["headers"] if key.lower() == b"authorization"]
    if len(given) != 1:
        return False
    scheme, _, token = given[0].partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(digest(token), expected)


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Read at most `limit` bytes, for at most `BODY_SECONDS`.

    Raises:
        RequestError: 413, it is longer; 408, it took too long.
        GoneError: the caller went away.
    """
    too_long = RequestError(413, f"the body is longer than {limit} bytes")
    for key, value in scope["headers"]:
        if key.lower() == b"content-length" and value.isdigit() and int(value[:20]) > limit:
            raise too_long
    end = time.monotonic() + BODY_SECONDS
    body = bytearray()
    while True:
        try:
            message = await asyncio.wait_for(receive(), max(end - time.monotonic(), 0.0))
        except TimeoutError:
            raise RequestError(408, f"no whole body within {BODY_SECONDS:g} s") from None
        if message["type"] != "http.request":
            raise GoneError
        body += message.get("body", b"")
        if len(body) > limit:
            raise too_long
        if not message.get("more_body", False):
            return bytes(body)


async def answer(
    send: Send, status: int, value: Any, headers: dict[str, str] | None = None
) -> None:
    """Send a whole JSON response."""
    body = msgspec.json.encode(value)
    pairs = {"content-type": "application/json", "content-length": str(len(body))}
    pairs |= headers or {}
    encoded = [(key.encode("ascii"), text.encode("ascii")) for key, text in pairs.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body, "more_body": False})
