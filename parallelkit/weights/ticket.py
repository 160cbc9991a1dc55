"""Tickets: one string that lets one member group join one publisher.

A ticket carries the endpoint, the publisher's CURVE public key and a secret token. Whoever holds
it can join and read the weights, so it travels over private channels only (a pipe, a file of mode
0600, TLS). Each member rank uses it once; it expires; the publisher keeps only a hash of the token.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import threading
import time

import attrs
import msgspec

from parallelkit.errors import TicketError

PREFIX = "pk1."
MAX_TICKET_CHARS = 1024
MAX_MEMBERS = 65536
#: Tickets that are used up or have expired and are still told from unknown ones, the latest.
REMEMBERED = 1024
_NEVER = 1e12  #: seconds; what is longer has no float


@attrs.frozen
class Ticket:
    """What the string holds.

    Attributes:
        endpoint: `tcp://host:port` of the publisher's control channel.
        server_key: the publisher's CURVE public key, 40 characters of Z85.
        token: 32 secret bytes.
        members: how many member ranks join with it.
    """

    endpoint: str
    server_key: str
    token: bytes = attrs.field(repr=False)
    members: int = 1

    def encode(self) -> str:
        """The string form."""
        body = msgspec.msgpack.encode((self.endpoint, self.server_key, self.token, self.members))
        return PREFIX + base64.urlsafe_b64encode(_checksum(body) + body).decode().rstrip("=")

    @classmethod
    def decode(cls, text: str) -> Ticket:
        """Parse and check the string form.

        Raises:
            TicketError: it is no ticket, or was altered or cut.
        """
        if not isinstance(text, str) or not text.strip().startswith(PREFIX):
            raise TicketError(
                f"not a parallelkit ticket: {str(text)[:12]!r}...; a ticket starts with "
                f"{PREFIX!r} and comes from publisher.ticket or publisher.new_ticket()"
            )
        text = text.strip()
        try:
            if len(text) > MAX_TICKET_CHARS:
                raise ValueError("too long")
            encoded = text[len(PREFIX) :]
            padding = "=" * (-len(encoded) % 4)
            raw = base64.b64decode(encoded + padding, altchars=b"-_", validate=True)
            if base64.urlsafe_b64encode(raw).decode().rstrip("=") != encoded:
                raise ValueError("spelling")
            body = raw[8:]
            if not hmac.compare_digest(raw[:8], _checksum(body)):
                raise ValueError("checksum")
            endpoint, key, token, members = msgspec.msgpack.decode(
                body, type=tuple[str, str, bytes, int]
            )
            if len(key) != 40 or len(token) != 32 or not 1 <= members <= MAX_MEMBERS:
                raise ValueError("field")
        except (ValueError, msgspec.MsgspecError) as error:
            raise TicketError(
                "the ticket is damaged or was altered; copy it whole, or get a new one from "
                "publisher.new_ticket()"
            ) from error
        return cls(endpoint, key, token, members)


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=8, person=b"pk-ticket").digest()


@attrs.define(eq=False)
class IssuedTicket:
    """The publisher's side of a ticket.

    Attributes:
        number: 1, 2, ... in the order of issue; names the member group.
        label: name of the group in reports.
        token_hash: of the secret token.
        members: ranks that may join; joined: those that did.
        expires_at: on the monotonic clock, in seconds; None for never.
    """

    number: int
    label: str
    token_hash: bytes = attrs.field(repr=False)
    members: int
    expires_at: float | None
    joined: set[int] = attrs.field(factory=set)


class TicketOffice:
    """Issues tickets and redeems them. Safe to call from several threads."""

    def __init__(self, endpoint: str, server_key: str) -> None:
        self._endpoint = endpoint
        self._server_key = server_key
        self._issued: list[IssuedTicket] = []
        self._count = 0
        self._lock = threading.Lock()

    def issue(self, members: int, expires: float | None, name: str | None) -> tuple[str, int]:
        """Make a ticket; returns its string and number."""
        if (
            isinstance(members, bool)
            or not isinstance(members, int)
            or not 1 <= members <= MAX_MEMBERS
        ):
            raise TicketError(
                f"members is {members!r:.80}; a ticket is for 1 to {MAX_MEMBERS} member ranks"
            )
        a_number = isinstance(expires, int | float) and not isinstance(expires, bool)
        if expires is not None and not (a_number and expires > 0):
            raise TicketError(
                f"expires is {expires!r:.80}; give seconds above 0, or None for never"
            )
        if name is not None and (not isinstance(name, str) or not 0 < len(name) <= 200):
            raise TicketError(f"name is {name!r:.80}; it is a string of 1 to 200 characters")
        if name is not None and not name.isprintable():
            raise TicketError(f"name is {name!r:.80}; it has characters that cannot be printed")
        token = secrets.token_bytes(32)
        with self._lock:
            self._forget()
            number = self._count = self._count + 1
            label = name or f"subscriber-{number}"
            labels = {ticket.label for ticket in self._issued}
            while label in labels:
                label = f"{label}#{number}"  # names in reports are unique
            self._issued.append(
                IssuedTicket(
                    number=number,
                    label=label,
                    token_hash=hashlib.sha256(token).digest(),
                    members=members,
                    expires_at=None if expires is None else time.monotonic() + min(expires, _NEVER),
                )
            )
        return Ticket(self._endpoint, self._server_key, token, members).encode(), number

    def usable(self, number: int) -> bool:
        """Whether nobody used ticket `number` yet and it has not expired."""
        with self._lock:
            found = [t for t in self._issued if t.number == number]
            return bool(found) and not found[0].joined and not _expired(found[0])

    def label(self, number: int) -> str:
        """The name in reports of the group of ticket `number`."""
        with self._lock:
            return next(t.label for t in self._issued if t.number == number)

    def revoke(self, number: int) -> None:
        """Ticket `number` is good for nothing any more."""
        with self._lock:
            for ticket in self._issued:
                if ticket.number == number:
                    ticket.expires_at = 0.0

    def redeem(self, token: bytes, member: int) -> IssuedTicket:
        """Use a ticket for one member rank.

        Raises:
            TicketError: unknown, expired or used token, or a member rank it is not for.
        """
        hashed = hashlib.sha256(token).digest()
        with self._lock:
            found = [t for t in self._issued if hmac.compare_digest(t.token_hash, hashed)]
            if not found:
                raise TicketError(
                    "this publisher issued no such ticket: altered, of another run, or used or "
                    "expired long ago"
                )
            ticket = found[0]
            if _expired(ticket):
                raise TicketError(
                    "the ticket has expired; get a new one from publisher.new_ticket(expires=...)"
                )
            if not 0 <= member < ticket.members:
                raise TicketError(
                    f"member is {member}; this ticket is for member ranks 0 to {ticket.members - 1}"
                )
            if member in ticket.joined:
                raise TicketError(
                    f"member {member} of this ticket has joined already; each member rank may use "
                    "a ticket once: get a new one from publisher.new_ticket()"
                )
            ticket.joined.add(member)
            return ticket

    def _forget(self) -> None:
        """Drop tickets that nobody can use any more, but for the latest, which errors explain."""
        spent = [t for t in self._issued if len(t.joined) == t.members or _expired(t)]
        if len(spent) > REMEMBERED:
            dropped = set(spent[:-REMEMBERED])
            self._issued = [t for t in self._issued if t not in dropped]


def _expired(ticket: IssuedTicket) -> bool:
    return ticket.expires_at is not None and time.monotonic() > ticket.expires_at
