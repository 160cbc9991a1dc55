"""One update at the coordinator, against members that answer anything; no socket is involved."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelkit.errors import CorruptionError, ProtocolError, StateError, UpdateAbortedError
from parallelkit.testing.handmade import ANSWERS, to_publisher
from parallelkit.testing.peer import sample_model
from parallelkit.testing.scripted import ScriptedServer
from parallelkit.weights import messages as m
from parallelkit.weights.control import Stop
from parallelkit.weights.lanes import Hashed, Want
from parallelkit.weights.members import Members
from parallelkit.weights.needs import Needs
from parallelkit.weights.plan import plan_transfer
from parallelkit.weights.routes import Way
from parallelkit.weights.ticket import Ticket, TicketOffice
from parallelkit.weights.truth import Truth
from parallelkit.weights.update import Update

MANIFEST = sample_model(elements=3 << 20).manifest()
PLAN = plan_transfer(MANIFEST)  # some buckets
WHOLE = Needs.whole(MANIFEST)
DIGESTS = np.arange(1, len(PLAN.buckets) + 1, dtype=np.uint64)
RIGHT = DIGESTS.astype("<u8").tobytes()
VERSION, EPOCH = 7, 5
SAID = {0: Hashed(DIGESTS, PLAN.nbytes, None)}
TRUTHS = {Want(WHOLE): Truth.of(MANIFEST, WHOLE, SAID, "digest", bytes(16), VERSION)}


class Scene:
    """An update of some members, each on a route of its own."""

    def __init__(self, count=2):
        office = TicketOffice("tcp://127.0.0.1:1", "k" * 40)
        self.members = Members(
            manifest=MANIFEST,
            office=office,
            run_id=bytes(16),
            verify="digest",
            commit="staged",
            slots=1,
            timeout=5.0,
            way=lambda peer: Way(),
            version=VERSION - 1,
        )
        self.server = ScriptedServer()
        for i in range(count):
            token = Ticket.decode(office.issue(1, None, None)[0]).token
            self.members.receive(b"%d" % i, to_publisher("hello", token=token))
            opened = to_publisher(
                "opened", session=self.members._all[i].session, digests=PLAN.digest
            )
            self.members.receive(b"%d" % i, opened)
        self.update = Update(
            server=self.server,
            table=self.members,
            version=VERSION,
            epoch=EPOCH,
            slot=0,
            members=self.members.ready_for_update(),
            timeout=1e-9,  # nothing is waited for: what is said is there already
        )
        self.update.begin()

    def say(self, member, kind, digests=RIGHT, version=VERSION, epoch=EPOCH):
        who = self.update.members[member]
        if kind == "lost":
            self.members.lost(who.route)
            return
        message = to_publisher(
            kind, session=who.session, version=version, epoch=epoch, digests=digests
        )
        with contextlib.suppress(ProtocolError):  # gone, or too many
            self.members.receive(who.route, message)

    def prepare(self):
        for member in range(len(self.update.members)):
            self.say(member, "ready")
        self.update.wait_ready()
        self.update.transfer(lambda rank: b"")


#: Most of what is said has to be right, or no update would ever come to its second half.
GOOD = {"ready": ("ready",), "prepared": ("prepared",), "committed": ("committed", "staged")}


def said(kind):
    """Strays before the right answers, those, and strays after them."""
    right = [(i, k, RIGHT, VERSION, EPOCH) for i in (0, 1) for k in GOOD[kind]]
    wrong = [b"", RIGHT[:-8], RIGHT[:-1], RIGHT + b"x", b"\0" * len(RIGHT)]
    stray = st.tuples(
        st.integers(0, 1),
        st.sampled_from(GOOD[kind] * 12 + (*ANSWERS, "lost", "leave")),
        st.sampled_from([RIGHT] * 4 + wrong),
        st.sampled_from([VERSION] * 4 + [VERSION - 1, VERSION + 1]),
        st.sampled_from([EPOCH] * 3 + [EPOCH - 1, EPOCH + 1]),
    )
    return st.tuples(st.lists(stray, max_size=2), st.just(right), st.lists(stray, max_size=2))


@settings(max_examples=250, deadline=None, derandomize=True)
@given(
    parts=st.tuples(said("ready"), said("prepared"), said("committed")),
    honest=st.sampled_from([(True, True, True), (False, True, True), (True, False, True)] * 2)
    | st.just((True, True, False)),
    shuffled=st.randoms(use_true_random=False),
)
def test_nothing_but_right_answers_of_all_leads_to_a_commit(parts, honest, shuffled):
    scene = Scene()
    heard = []

    def play(part):
        before, right, after = parts[part]
        if not honest[part]:
            right = [shuffled.choice(right)]
        for item in [*before, *right, *after]:
            heard.append(item)
            scene.say(*item)

    def has_said(member, kinds, digests=None):
        return any(
            (i, v, e) == (member, VERSION, EPOCH) and k in kinds and digests in (None, d)
            for i, k, d, v, e in heard
        )

    try:
        play(0)
        scene.update.wait_ready()
        scene.update.transfer(lambda rank: b"")
        play(1)
        scene.update.wait_prepared()
        scene.update.compare(TRUTHS)
    except UpdateAbortedError as error:
        assert error.failures
        assert {x.name for x in scene.update.members} >= set(error.failures)
        assert not any(isinstance(message, m.Commit) for _, message in scene.server.sent)
        return
    for member in (0, 1):
        assert has_said(member, ["ready"])
        assert has_said(member, ["prepared"], RIGHT)
    play(2)
    told = {}
    reports = scene.update.commit(
        TRUTHS, readback=False, settled=lambda who, report: told.setdefault(who.name, report)
    )
    assert told == {report.name: report for report in reports}
    for member, report in enumerate(reports):
        who = scene.update.members[member]
        if report.state in ("committed", "staged"):
            assert has_said(member, ["committed", "staged"])
            assert report.version == VERSION
            assert who.state in ("joined", "lost", "left")
        else:
            assert report.state in ("quarantined", "lost")
            assert report.version == 0
            assert report.reason
            assert who.state in ("quarantined", "lost", "left")
        assert (who.version == VERSION) <= (report.version == VERSION)


@pytest.mark.parametrize("digests", [b"x", RIGHT[:-1], RIGHT + b"x"])
def test_digests_that_are_no_digests_name_the_member(digests):
    scene = Scene()
    scene.prepare()
    scene.say(0, "prepared")
    scene.say(1, "prepared", digests)
    scene.update.wait_prepared()
    with pytest.raises(UpdateAbortedError, match=r"sent (malformed|\d+) digests") as caught:
        scene.update.compare(TRUTHS)
    assert list(caught.value.failures) == [scene.update.members[1].name]
    assert isinstance(caught.value.__cause__, CorruptionError)


def test_a_stop_that_comes_before_the_first_message_is_not_forgotten():
    scene = Scene()
    scene.members.inbox.put(Stop())
    scene.update.begin()
    with pytest.raises(StateError, match="close\\(\\) while update"):
        scene.update.wait_ready()
