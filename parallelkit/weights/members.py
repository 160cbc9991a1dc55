"""Who takes part: the table of members, and the admission of new ones.

A member joins in two messages: `Hello` with a ticket is answered by `Welcome` with the manifest and
with the way to every rank that hands parts out; `Opened` says that the target needs exactly that,
what it keeps, and the digest of its plan. Both are handled in the control thread, so a subscriber
can join while the trainer is busy. From then on the member takes part in every update that begins
later, once its whole group is there.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import attrs

from parallelkit.errors import CoverageError, NeedsError, ProtocolError, TransportError
from parallelkit.specs import HostIdentity
from parallelkit.weights import messages as m
from parallelkit.weights.control import ControlServer, Desk, Inbox, Lost, Received
from parallelkit.weights.coverage import check_coverage
from parallelkit.weights.kept import REMEMBERED, Kept
from parallelkit.weights.lanes import DEVICE, HOST, Want
from parallelkit.weights.manifest import Manifest
from parallelkit.weights.needs import Needs
from parallelkit.weights.plan import plan_transfer
from parallelkit.weights.routes import Way
from parallelkit.weights.ticket import IssuedTicket, TicketOffice

Answers = list[tuple[bytes, Any]]

#: Members that are gone and still listed, the latest ones.
LISTED: Final = 256
#: Answers of one member that are kept in one update; it needs three.
MAX_ANSWERS: Final = 16


@attrs.define(eq=False)
class Member:
    """One subscriber.

    Attributes:
        name: unique, for reports: `subscriber-1.0 (pid 4242)`.
        ticket: of its group; member: its rank within.
        state: `opening` (welcomed), `joined`, `quarantined`, `lost`, `left` or `refused`.
        version: last committed version, as its acknowledgement said; 0 for none.
        reason: why it is quarantined, lost or refused.
        partial: whether nobody in its group need keep what the others do not.
        transport: how it reaches the publisher's ranks: `shm`, `tcp`, or both.
        lane: how it gets its bytes, `host` or `device`; instead: why not by its device, where
            others could.
        in_place: whether it fetches after the decision, straight into live memory.
        told: by rank, the offer that it knows, in the lane `device`.
        needs: what it keeps; known once it has joined, until an update begins after it has gone.
        catching: the version that it is being brought to by itself; decided: whether it may
            have put that in place.
    """

    name: str
    ticket: IssuedTicket
    member: int
    route: bytes
    session: bytes = attrs.field(repr=False)
    identity: HostIdentity = attrs.field(repr=False)
    state: str = "opening"
    version: int = 0
    reason: str = ""
    transport: str = ""
    lane: str = HOST
    instead: str = ""
    in_place: bool = False
    told: dict[int, bytes] = attrs.field(factory=dict, repr=False)
    needs: Needs | None = attrs.field(default=None, repr=False)
    partial: bool = attrs.field(default=False, repr=False)
    catching: Kept | None = attrs.field(default=None, repr=False)
    decided: bool = attrs.field(default=False, repr=False)

    @property
    def want(self) -> Want:
        """What it gets; of one that has joined."""
        assert self.needs is not None
        return Want(self.needs, self.lane)

    @property
    def present(self) -> bool:
        """Whether it is connected and open, quarantined or not."""
        return self.state in ("joined", "quarantined")


class Members(Desk):
    """The table. Its methods may be called from any thread."""

    def __init__(
        self,
        *,
        manifest: Manifest,
        office: TicketOffice,
        run_id: bytes,
        verify: str,
        commit: str,
        slots: int,
        timeout: float,
        way: Callable[[HostIdentity], Way],
        version: int = 0,
    ) -> None:
        """
        Args:
            manifest: what is published.
            office: redeems tickets.
            run_id, verify, commit, slots, timeout: told to each member.
            way: tells how a peer reaches each rank, with passes; or raises `TransportError`.
            version: the last committed version; whoever commits moves the attribute.
        """
        self.inbox = Inbox()
        self.changed = threading.Condition()
        self._manifest = manifest
        self._office = office
        self._run_id = run_id
        self._verify = verify
        self._commit = commit
        self._slots = slots
        self._timeout = timeout
        self._way = way
        self.version = version
        self._by_route: dict[bytes, Member] = {}
        self._all: list[Member] = []
        self._past: dict[Needs, None] = {}  # kinds of members that are gone, the latest last
        self._told: set[Member] = set()
        self._kept: Kept | None = None
        self._heard: dict[bytes, int] | None = None  # answers to the update under way, by route

    def everyone(self) -> list[Member]:
        """All members that are here, and the latest that are gone, by time of joining."""
        with self.changed:
            return [m for m in self._all if m.state not in ("opening", "refused")]

    def of_ticket(self, number: int) -> list[Member]:
        """Everyone who came with ticket `number`, those included that did not join."""
        with self.changed:
            return [m for m in self._all if m.ticket.number == number]

    def ready_for_update(self) -> list[Member]:
        """Members of complete groups."""
        with self.changed:
            present: dict[int, list[Member]] = {}
            for member in self._all:
                if member.present:
                    present.setdefault(member.ticket.number, []).append(member)
            return [
                member
                for group in present.values()
                if len(group) == group[0].ticket.members
                for member in group
            ]

    def absent(self, *, new: bool = False) -> list[str]:
        """One line for each member that is gone or was refused, and each incomplete group.

        Args:
            new: only who is gone since the last call that asked for the new ones.
        """
        with self.changed:
            gone = [
                x
                for x in self._all
                if x.state in ("lost", "left", "refused") and not (new and x in self._told)
            ]
            if new:
                self._told.update(gone)
            lines = [f"{x.name}: {x.state}, {_first_line(x.reason)}" for x in gone]
            present: dict[IssuedTicket, int] = {}
            for x in self._all:
                if x.present:
                    present[x.ticket] = present.get(x.ticket, 0) + 1
            return lines + [
                f"{ticket.label}: waits for {ticket.members - count} more of {ticket.members}"
                for ticket, count in present.items()
                if count < ticket.members
            ]

    def groupmates(self, member: Member) -> list[Member]:
        """The other present members of a member's group."""
        with self.changed:
            return [
                other
                for other in self._all
                if other is not member and other.ticket is member.ticket and other.present
            ]

    def kinds(self) -> list[Needs]:
        """What members keep, each kind once: those that are here, and the latest of others."""
        with self.changed:
            here = [x.needs for x in self._all if x.needs is not None and x.present]
            gone = [x.needs for x in reversed(self._all) if x.needs is not None and not x.present]
            gone += reversed(self._past)
        kinds = dict.fromkeys(here)
        return [*kinds, *(n for n in dict.fromkeys(gone) if n not in kinds)][
            : len(kinds) + REMEMBERED
        ]

    def keep(self, kept: Kept) -> Answers:
        """Give a version to members that join from now on, and to those that lack it.

        Returns:
            Messages to send.
        """
        with self.changed:
            self._kept = kept
            late = [x for x in self._all if x.state == "joined" and x.version < kept.version]
            return [answer for member in late for answer in self._catch_up(member)]

    def begin_update(self, seconds: float) -> None:
        """An update begins: end what is under way with single members.

        Rounds that were decided are waited for, so many seconds; the others are dropped.
        """
        deadline = time.monotonic() + seconds
        with self.changed:
            self._kept = None
            while any(x.catching and x.decided for x in self._all):
                left = deadline - time.monotonic()
                if left <= 0 or not self.changed.wait(left):
                    break
            for member in self._all:
                if member.catching and member.decided:
                    member.state = "quarantined"
                    member.reason = f"no acknowledgement of version {member.catching.version}"
                member.catching, member.decided = None, False
            self._forget()

    def mark(
        self, member: Member, state: str, reason: str = "", version: int | None = None
    ) -> None:
        """Set a member's state, and its version where one is given."""
        with self.changed:
            member.state, member.reason = state, reason
            if version is not None:
                member.version = version
            if not member.present:
                member.catching, member.decided = None, False
            self.changed.notify_all()

    def settle(self, member: Member, state: str, reason: str, version: int | None) -> None:
        """As `mark`; of a member that has gone meanwhile only the version that it had reached."""
        with self.changed:
            if member.present:
                self.mark(member, state, reason, version)
            elif version is not None:
                member.version = version

    def listen(self) -> None:
        """An update begins: from now on answers are kept for it."""
        with self.changed:
            self._heard = {}
            self.inbox.clear()

    def ignore(self) -> None:
        """No update is under way: answers are late, and are dropped."""
        with self.changed:
            self._heard = None

    def receive(self, route: bytes, message: m.ToPublisher) -> Answers:
        """Admit, or pass on to the update under way; called by the control thread."""
        with self.changed:
            member = self._by_route.get(route)
            if isinstance(message, m.Hello):
                if member is not None:
                    raise ProtocolError("a second hello on one connection")
                return self._welcome(route, message)
            if member is None:
                raise ProtocolError("no hello came first on this connection")
            if isinstance(message, m.Refused):
                if member.state != "opening":  # its ticket may be in other hands by now
                    raise ProtocolError(f"refused in state {member.state}")
                self._refuse(member, message.message)
                return []
            if not secrets.compare_digest(message.session, member.session):
                raise ProtocolError("a message with another member's session key")
            if isinstance(message, m.Opened):
                return self._open(member, message)
            if isinstance(message, m.Leave):
                if member.state not in ("refused", "lost"):  # which says more
                    member.state, member.reason = "left", "it closed"
                self._by_route.pop(route)
                self.inbox.put(Lost(route))
                member.catching, member.decided = None, False
                self.changed.notify_all()
                return []
            if member.catching is not None and member.catching.mine(message):
                return self._catching(member, member.catching, message)
            if self._heard is None:
                return []
            self._heard[route] = self._heard.get(route, 0) + 1
            if self._heard[route] > MAX_ANSWERS:
                raise ProtocolError(f"more than {MAX_ANSWERS} answers to one update")
            self.inbox.put(Received(route, message))
            return []

    def known(self, route: bytes) -> bool:
        """Whether a hello with a good ticket came from there."""
        with self.changed:
            return route in self._by_route

    def lost(self, route: bytes) -> None:
        """A connection ended; called by the control thread."""
        with self.changed:
            member = self._by_route.pop(route, None)
            if member is None:
                return
            member.catching, member.decided = None, False
            if member.present:
                member.state, member.reason = "lost", "its connection ended"
                self.inbox.put(Lost(route))
            elif member.state == "opening":
                self._refuse(member, "it went away while joining")
            self.changed.notify_all()

    def _welcome(self, route: bytes, hello: m.Hello) -> Answers:
        if hello.protocol != m.PROTOCOL:
            raise ProtocolError(
                f"the subscriber speaks protocol {hello.protocol} (parallelkit {hello.library}), "
                f"this publisher {m.PROTOCOL}: install the same major version at both ends"
            )
        ticket = self._office.redeem(hello.token, hello.member)
        identity = m.identity_of(hello)
        try:
            way = self._way(identity)
        except BaseException as error:
            ticket.joined.discard(hello.member)  # it did not join
            if isinstance(error, TransportError):
                raise TransportError(f"no transport reaches the subscriber: {error}") from error
            raise
        host = hello.host if hello.host.isprintable() else ascii(hello.host)
        name = f"{ticket.label}.{hello.member} (pid {hello.pid} on {host})"
        member = Member(name, ticket, hello.member, route, secrets.token_bytes(16), identity)
        member.transport = "+".join(sorted({source.transport for source in way.sources}))
        member.lane, member.instead = way.lane, way.instead
        member.in_place = self._commit == "in_place" or (self._commit == "auto" and way.in_place)
        if way.lane == DEVICE:
            member.told = {source.rank: source.offer for source in way.sources}
        self._by_route[route] = member
        self._all.append(member)
        return [
            (
                route,
                m.Welcome(
                    session=member.session,
                    run_id=self._run_id,
                    name=name,
                    version=self.version,
                    **m.manifest_fields(self._manifest),
                    manifest_digest=self._manifest.digest(),
                    sources=way.sources,
                    lane=way.lane,
                    slots=self._slots,
                    verify=self._verify,
                    commit="in_place" if member.in_place else "staged",
                    timeout=self._timeout,
                ),
            )
        ]

    def _refuse(self, member: Member, reason: str) -> None:
        """It does not join; its place on the ticket is free again."""
        member.state, member.reason = "refused", reason
        member.ticket.joined.discard(member.member)
        self.changed.notify_all()

    def _open(self, member: Member, message: m.Opened) -> Answers:
        if member.state != "opening":
            raise ProtocolError(f"opened in state {member.state}")
        try:
            member.needs = self._needs(message.kept)
            plan = plan_transfer(self._manifest, member.needs)
        except NeedsError as error:
            text = f"what the target keeps is refused: {error}"
            self._refuse(member, text)
            raise ProtocolError(text) from error
        if not secrets.compare_digest(message.plan_digest, plan.digest):
            text = "the two ends computed different transfer plans"
            self._refuse(member, text)
            raise ProtocolError(text)
        member.state, member.partial = "joined", message.partial
        uncovered = self._uncovered(member)
        if uncovered:
            return uncovered
        self.changed.notify_all()
        return [(member.route, m.Joined(version=self.version)), *self._catch_up(member)]

    def _uncovered(self, member: Member) -> Answers:
        """Refuse a group that is complete now and lacks something; what each of them is told."""
        group = [member, *self.groupmates(member)]
        if len(group) < member.ticket.members or any(x.partial for x in group):
            return []
        who = f"the {len(group)} members of {member.ticket.label}"
        try:
            kept = (x.needs for x in group if x.needs is not None)
            check_coverage(self._manifest, kept, who if len(group) > 1 else member.name)
        except CoverageError as error:
            text = m.clip(str(error), 60000)
            for x in group:
                x.catching, x.decided = None, False
                self._refuse(x, text)
            return [(x.route, m.Refused(error="CoverageError", message=text)) for x in group]
        return []

    def _catch_up(self, member: Member) -> Answers:
        """Begin to bring a member to the version that is kept, if there is one for its kind."""
        kept = self._kept
        if (
            kept is None
            or member.needs is None
            or member.want not in kept.truths
            or member.catching is not None
        ):
            return []
        member.catching, member.decided = kept, False
        return [(member.route, kept.begin())]

    def _catching(self, member: Member, kept: Kept, message: m.ToPublisher) -> Answers:
        """Go on with that."""
        if not isinstance(message, m.Failed) and isinstance(message, m.Committed) != member.decided:
            return []  # out of turn
        step = kept.answer(member.want, message, in_place=member.in_place)
        if step.failure and member.decided:
            member.state, member.reason = "quarantined", step.failure
        if step.done:
            member.state, member.reason, member.version = "joined", "", kept.version
        member.decided = member.decided or step.decided
        if step.over:
            member.catching, member.decided = None, False
        self.changed.notify_all()
        return [] if step.send is None else [(member.route, step.send)]

    def _needs(self, kept: m.Kept | None) -> Needs:
        """What a member keeps; members that keep the same have one object."""
        if kept is None:
            needs = Needs.whole(self._manifest)
        else:
            needs = Needs.from_wire(self._manifest, kept.regions, kept.which)
        return next((x.needs for x in self._all if x.needs is not None and x.needs == needs), needs)

    def _forget(self) -> None:
        """Drop what is known of members that are gone, but for names and reasons of the latest."""
        gone = [x for x in self._all if not x.present and x.state != "opening"]
        for member in gone:
            if member.needs is not None:
                self._past.pop(member.needs, None)
                self._past[member.needs] = None
                member.needs = None
        for needs in list(self._past)[:-REMEMBERED]:
            del self._past[needs]
        dropped = set(gone[:-LISTED])
        self._all = [x for x in self._all if x not in dropped]
        self._told -= dropped


def _first_line(text: str) -> str:
    """The first line; where it announces a list, with the first of the list."""
    first, *rest = text.splitlines() or [""]
    return first[:200] + (f" {rest[0].strip()[:200]}" if rest and first.endswith(":") else "")


def dismiss(server: ControlServer, members: Members, member: Member, reason: str) -> None:
    """Let a member go: it is told, and takes part in nothing any more."""
    server.send(member.route, m.Close(reason=reason))
    members.mark(member, "lost", reason)
