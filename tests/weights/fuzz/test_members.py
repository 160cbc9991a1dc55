"""The desk that admits members, against any order of any messages; no socket is involved."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelkit.errors import ProtocolError, TicketError, TransportError
from parallelkit.testing.handmade import ANSWERS, TO_PUBLISHER, to_publisher
from parallelkit.testing.peer import sample_model
from parallelkit.weights import members
from parallelkit.weights import messages as m
from parallelkit.weights.kept import Kept
from parallelkit.weights.lanes import Hashed, Want
from parallelkit.weights.members import MAX_ANSWERS, Members
from parallelkit.weights.needs import Needs
from parallelkit.weights.plan import plan_transfer
from parallelkit.weights.routes import Way
from parallelkit.weights.ticket import Ticket, TicketOffice
from parallelkit.weights.truth import Truth

MANIFEST = sample_model().manifest()
PLAN = plan_transfer(MANIFEST)
ROUTES = [b"a", b"b"]
TEXTS = ["", "\n", "no", "two\nlines", "x" * 5000, "\x1b[2J\r"]


class Reception:
    """A desk with tickets: one for one, one for two, one that has expired, one of nobody."""

    def __init__(self, way=lambda peer: Way()):
        self.office = TicketOffice("tcp://127.0.0.1:1", "k" * 40)
        issued = [self.office.issue(n, None, None)[0] for n in (1, 2)]
        issued.append(self.office.issue(1, 1e-9, None)[0])
        self.tokens = [Ticket.decode(text).token for text in issued] + [bytes(32)]
        self.members = Members(
            manifest=MANIFEST,
            office=self.office,
            run_id=bytes(16),
            verify="digest",
            commit="staged",
            slots=1,
            timeout=5.0,
            way=way,
        )
        self.sessions = {}
        self.places = []  # on a ticket, of those who were told that they joined

    def receive(self, route, message):
        answers = self.members.receive(route, message)
        for to, answer in answers:
            assert to == route, "an answer goes to who asked"
            if isinstance(answer, m.Welcome):
                self.sessions[route] = answer.session
            if isinstance(answer, m.Joined):
                member = self.members._by_route[route]
                self.places.append((member.ticket.number, member.member))
        return answers

    def say(self, route, kind, session_of=None, ticket=0, right=True, **fields):
        session = self.sessions.get(route if session_of is None else session_of, bytes(16))
        digests = PLAN.digest if right else b""
        message = to_publisher(
            kind, session=session, token=self.tokens[ticket], digests=digests, **fields
        )
        return self.receive(route, message)

    def join(self, route, ticket=0, member=0):
        self.say(route, "hello", ticket=ticket, member=member)
        assert isinstance(self.say(route, "opened")[0][1], m.Joined)

    def states(self):
        return {id(x): (x.route, x.state, x.reason, x.version) for x in self.members._all}


def check(desk, before, route):
    """What holds whatever was said on `route`."""
    after = desk.states()
    for key, was in before.items():
        assert was[0] == route or after[key] == was, "it changed another connection's member"
    assert len(desk.places) == len(set(desk.places)), "a place on a ticket was used twice"
    for lines in (desk.members.absent(), desk.members.absent(new=True)):
        assert all(line.isprintable() or "\n" not in line for line in lines)
        assert all(len(line) < 1000 for line in lines)
    ready = desk.members.ready_for_update()
    assert all(x.state in ("joined", "quarantined") for x in ready)
    for x in ready:
        assert len(desk.members.groupmates(x)) == x.ticket.members - 1


SAID = st.fixed_dictionaries(
    {
        "route": st.sampled_from(ROUTES),
        # Most of it has to be right, or nobody would ever come far.
        "kind": st.sampled_from((*TO_PUBLISHER, *("hello", "opened", "refused") * 3)),
        "session_of": st.sampled_from([None] * 4 + ROUTES),
        "ticket": st.sampled_from([0, 0, 0, 1, 1, 2, 3]),
        "member": st.sampled_from([0, 0, 0, 1, 2]),
        "right": st.sampled_from([True, True, True, False]),
        "text": st.sampled_from(TEXTS),
        "version": st.integers(0, 2),
        "epoch": st.integers(0, 2),
    }
)
DONE = st.tuples(st.sampled_from(["lost", "listen", "ignore", "drop"]), st.sampled_from(ROUTES))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(SAID | SAID | SAID | DONE, min_size=8, max_size=40))
def test_any_order_of_any_messages(steps):
    desk = Reception()
    for step in steps:
        before = desk.states()
        if isinstance(step, tuple):
            what, route = step
            member = desk.members._by_route.get(route)
            if what == "lost":
                desk.members.lost(route)
            elif what != "drop":
                getattr(desk.members, what)()
            elif member is not None and member.present:
                desk.members.mark(member, "lost", "the publisher let it go")
        else:
            fields = dict(step)
            route, kind = fields.pop("route"), fields.pop("kind")
            key = desk.sessions.get(fields["session_of"] or route, bytes(16))
            member = desk.members._by_route.get(route)
            with contextlib.suppress(ProtocolError, TicketError):
                desk.say(route, kind, **fields)
                own = member is not None and key == member.session
                assert own or kind in ("hello", "refused"), "taken with a key that is not its own"
        check(desk, before, route)


# --- what it found, each as an example of its own ----------------------------------------------


def test_a_refusal_repeated_does_not_free_the_ticket_that_another_has_used():
    desk = Reception()
    desk.say(b"a", "hello")
    desk.say(b"a", "refused")
    desk.join(b"b")
    with pytest.raises(ProtocolError, match="refused in state refused"):
        desk.say(b"a", "refused")
    with pytest.raises(TicketError, match="joined already"):
        desk.say(b"c", "hello")


def test_who_has_joined_cannot_refuse_and_hand_its_ticket_on():
    desk = Reception()
    desk.join(b"a")
    with pytest.raises(ProtocolError, match="refused in state joined"):
        desk.say(b"a", "refused")
    with pytest.raises(TicketError, match="joined already"):
        desk.say(b"b", "hello")
    assert [x.state for x in desk.members.ready_for_update()] == ["joined"]


def test_a_refusal_without_a_reason_can_be_listed():
    desk = Reception()
    desk.say(b"a", "hello")
    desk.say(b"a", "refused", text="")
    assert desk.members.absent()[0].endswith(": refused, ")


def test_another_plan_is_refused_with_the_reason_and_the_place_is_free_again():
    desk = Reception()
    desk.say(b"a", "hello")
    with pytest.raises(ProtocolError, match="different transfer plans"):
        desk.say(b"a", "opened", right=False)
    assert "different transfer plans" in desk.members.absent()[0]
    desk.join(b"b")


def test_a_name_has_nothing_that_cannot_be_printed():
    desk = Reception()
    hello = to_publisher("hello", token=desk.tokens[0], text="two\nlines \x1b[2J")
    desk.receive(b"a", hello)
    assert desk.members._all[0].name.isprintable()


def test_a_peer_that_no_transport_reaches_uses_no_ticket_up():
    reach = []

    def way(peer):
        if not reach:
            raise TransportError("on another host")
        return Way()

    desk = Reception(way)
    with pytest.raises(TransportError, match="reaches the subscriber: on another host"):
        desk.say(b"a", "hello")
    reach.append(True)
    desk.join(b"a")


@pytest.mark.parametrize("kind", ANSWERS)
def test_answers_between_updates_are_dropped_and_within_one_they_are_few(kind):
    desk = Reception()
    desk.join(b"a")
    for _ in range(100):
        assert desk.say(b"a", kind) == []
    assert desk.members.inbox.get(0.0) is None
    desk.members.listen()
    for _ in range(MAX_ANSWERS):
        desk.say(b"a", kind)
    with pytest.raises(ProtocolError, match="more than 16 answers to one update"):
        desk.say(b"a", kind)
    desk.members.listen()
    assert desk.members.inbox.get(0.0) is None, "and the next begins with none"
    desk.say(b"a", kind)
    assert desk.members.inbox.get(0.0) is not None


def test_who_has_gone_is_not_called_back_by_a_late_word():
    desk = Reception()
    desk.join(b"a")
    (member,) = desk.members.ready_for_update()
    desk.members.lost(b"a")
    desk.members.settle(member, "joined", "", 3)
    assert (member.state, member.version) == ("lost", 3), "what it had reached is said all the same"
    assert desk.members.ready_for_update() == []


def test_of_members_that_are_gone_the_latest_are_listed_and_what_they_kept_is_not(monkeypatch):
    monkeypatch.setattr(members, "LISTED", 3)
    desk = Reception()
    for number in range(10):
        desk.tokens[0] = Ticket.decode(desk.office.issue(1, None, f"m{number}")[0]).token
        desk.join(b"a")
        if number < 9:
            desk.members.lost(b"a")
    assert len(desk.members.everyone()) == 10, "an update may be under way, in which they are"
    desk.members.begin_update(1.0)
    names = [x.ticket.label for x in desk.members.everyone()]
    assert names == ["m6", "m7", "m8", "m9"]
    assert len(desk.members.absent(new=True)) == 3
    assert [x.needs is None for x in desk.members.everyone()] == [True, True, True, False]
    assert desk.members.kinds() == [Needs.whole(MANIFEST)]
    desk.members.lost(b"a")
    desk.members.begin_update(1.0)
    assert [x.ticket.label for x in desk.members.everyone()] == ["m7", "m8", "m9"]
    assert len(desk.members.absent(new=True)) == 1
    assert desk.members.kinds() == [Needs.whole(MANIFEST)], "what was kept last, for keep_last"
    assert len(desk.members._told) == 3


def test_who_catches_up_is_there_after_the_decision_and_not_before():
    desk, whole = Reception(), Needs.whole(MANIFEST)
    digests = np.arange(1, len(PLAN.buckets) + 1, dtype=np.uint64)
    said = {0: Hashed(digests, PLAN.nbytes, None)}
    truths = {Want(whole): Truth.of(MANIFEST, whole, said, "digest", bytes(16), 3)}
    how = {"readback": False, "timeout": 5.0}
    desk.members.keep(Kept(version=3, epoch=2, slot=0, truths=truths, **how))
    desk.join(b"a")
    (member,) = desk.members.everyone()

    def say(kind):
        update = {"version": 3, "epoch": 2, "digests": truths[Want(whole)].wire}
        message = to_publisher(kind, session=desk.sessions[b"a"], **update)
        return [type(answer) for _, answer in desk.receive(b"a", message)]

    assert say("committed") == []
    assert member.version == 0, "nothing was decided"
    assert say("ready") == [m.Transfer]
    assert say("committed") == []
    assert say("prepared") == [m.Commit]
    assert say("ready") == say("prepared") == []
    assert (say("committed"), member.version, member.state) == ([], 3, "joined")
