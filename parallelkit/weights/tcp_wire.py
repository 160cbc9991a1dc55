"""What goes over the connections of the `tcp` transport: typed requests, and replies with bytes.

A request is one frame of msgpack. A reply is a header in msgpack and, for a pull, the packed bytes
of its spans in any number of frames. Unknown types, fields and sizes are refused.

Connections are encrypted with CURVE keys. Without (`encrypt=False`) each message ends with a frame
more: a keyed digest of the rest, under a key that only the two ends know. Then bytes can be read on
their way, but not changed, and a message cannot be played again: each has a number of its own.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final

import msgspec

from parallelkit.errors import ProtocolError
from parallelkit.weights.messages import Count, Short, Text
from parallelkit.weights.passes import NONCE_BYTES, PASS_BYTES
from parallelkit.weights.regions import Span

PROTOCOL: Final = 1
#: Most bytes of the arena in one reply, and most spans in one request.
REPLY_BYTES: Final = 4 << 20
REQUEST_SPANS: Final = 512
#: Largest frame that a publisher reads, and the largest of a connection that showed no pass yet.
MAX_REQUEST: Final = 512 << 10
MAX_HELLO: Final = 4096
#: Largest header of a reply; the frames with bytes have at most `REPLY_BYTES`.
MAX_HEADER: Final = 4096
#: Connections that may share one pass, and requests that may wait for replies on each.
MAX_CONNECTIONS: Final = 16
MAX_WAITING: Final = 8
SESSION_BYTES: Final = 16
TAG_BYTES: Final = 32

_ENDPOINT: Final = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[0-9.]+):(\d{1,5})")

Session = Annotated[bytes, msgspec.Meta(min_length=SESSION_BYTES, max_length=SESSION_BYTES)]
Key = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=PASS_BYTES)]
Spans = Annotated[list[Span], msgspec.Meta(max_length=REQUEST_SPANS)]


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="t"):
    """Base of all messages."""


class Hello(_Message, frozen=True, tag="hello"):
    """The first message of a session: a pass; without encryption only its nonce, and a digest."""

    protocol: Count
    key: Key
    challenge: Session


class Join(_Message, frozen=True, tag="join"):
    """The first message of each further connection of a session; `number` from 1."""

    session: Session
    number: Count


class Pull(_Message, frozen=True, tag="pull"):
    """Send the bytes of these spans, if this is still the epoch."""

    id: Count
    epoch: Count
    spans: Spans


class Look(_Message, frozen=True, tag="look"):
    """Which epoch is it?"""

    id: Count


class Hi(_Message, frozen=True, tag="hi"):
    """You are in."""

    session: Session
    nbytes: Count


class Data(_Message, frozen=True, tag="data"):
    """The bytes that follow, `nbytes` in all."""

    id: Count
    nbytes: Count


class Epoch(_Message, frozen=True, tag="epoch"):
    """This is the epoch: the answer to `Look`, and to a `Pull` of another one."""

    id: Count
    epoch: Count


class No(_Message, frozen=True, tag="no"):
    """The request (`id` 0: the connection) is refused."""

    id: Count
    message: Text


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to reach the arena of one rank.

    Attributes:
        endpoint: `tcp://address:port`, numeric.
        rank: the publisher's rank.
        nbytes: of its arena.
        key: its CURVE public key, 40 characters; empty where connections are not encrypted.
    """

    endpoint: Short
    rank: Count
    nbytes: Count
    key: Annotated[str, msgspec.Meta(pattern=r"^(.{40})?\Z")]


Request = Hello | Join | Pull | Look
Reply = Hi | Data | Epoch | No

_encoder: Final = msgspec.msgpack.Encoder()
_requests: Final = msgspec.msgpack.Decoder(Request)
_replies: Final = msgspec.msgpack.Decoder(Reply)
_offers: Final = msgspec.msgpack.Decoder(Offer)


def encode(message: Request | Reply | Offer) -> bytes:
    """Wire form."""
    return _encoder.encode(message)


def decode_request(data: Any) -> Request:
    """Parse what a subscriber sent; `ProtocolError` if it is no request."""
    try:
        return _requests.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"a data connection sent something that is no request: {error}") from (
            error
        )


def decode_reply(data: Any) -> Reply:
    """Parse the header of what a publisher sent; `ProtocolError` if it is none."""
    try:
        if len(data) > MAX_HEADER:
            raise ProtocolError(f"a reply has a header of {len(data)} bytes, of {MAX_HEADER}")
        return _replies.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"the publisher sent something that is no reply: {error}") from error


def decode_offer(data: bytes) -> Offer:
    """Parse and check an offer; `ProtocolError` if it is none of this transport's."""
    try:
        offer = _offers.decode(data)
        match = _ENDPOINT.fullmatch(offer.endpoint)
        if match is None or not 0 < int(match[2]) < 65536:
            raise ValueError(f"endpoint {offer.endpoint!r}; it is 'tcp://address:port', numeric")
        if ipaddress.ip_address(match[1].strip("[]")).is_unspecified:
            raise ValueError(f"endpoint {offer.endpoint!r}, which is no address of one host")
        offer.key.encode("ascii")
    except (msgspec.MsgspecError, ValueError) as error:
        raise ProtocolError(f"the tcp offer is malformed: {error}") from error
    return offer


def tag(key: bytes, who: str, header: Any, payload: Sequence[Any] = ()) -> bytes:
    """The keyed digest of a message; `who` sent it, `"publisher"` or `"subscriber"`.

    HMAC of SHA-256: twice as fast as BLAKE2b where the processor has instructions for it.
    """
    digest = hmac.new(key, f"pk-tcp-{who}:{len(header)}:".encode(), "sha256")
    digest.update(header)
    for frame in payload:
        digest.update(frame)
    return digest.digest()


def same_tag(given: Any, expected: bytes) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(bytes(given[: TAG_BYTES + 1]), expected)


def connection_key(secret: bytes, challenge: bytes, session: bytes, number: int) -> bytes:
    """The key of one connection's digests, from the secret half of the pass."""
    text = challenge + session + number.to_bytes(8, "big")
    return hashlib.blake2b(text, key=secret, digest_size=32, person=b"pk-tcp-key").digest()


def cut(span: Span, nbytes: int) -> Iterator[Span]:
    """Split a span into spans of at most `nbytes` each, in its own order; empty ones vanish."""
    size = span.nbytes
    if size <= nbytes:
        if size:
            yield span
        return
    if not span.steps:
        for start in range(0, span.run, nbytes):
            yield Span(span.offset + start, min(nbytes, span.run - start))
        return
    (count, far), inner = span.steps[0], span.steps[1:]
    each = size // count
    if each > nbytes:
        for i in range(count):
            yield from cut(Span(span.offset + i * far, span.run, inner), nbytes)
        return
    group = nbytes // each
    for i in range(0, count, group):
        steps = ((min(group, count - i), far), *inner)
        yield Span(span.offset + i * far, span.run, steps)
