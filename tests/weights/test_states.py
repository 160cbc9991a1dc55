"""The tables of states in docs/weights.md: every cell is made to happen, and is as it says."""

from __future__ import annotations

import json
import os
import re
import signal
import warnings
from pathlib import Path

import pytest

from parallelkit.errors import PartialCommitError, ProtocolError, TicketError, UpdateTimeoutError
from parallelkit.testing.brittle import BrittleArrays
from parallelkit.testing.engines import FakeEngine
from parallelkit.testing.handmade import to_publisher, to_subscriber
from parallelkit.testing.peer import sample_model
from parallelkit.testing.scripted import ScriptedSubscriber
from parallelkit.weights import messages as m
from parallelkit.weights.members import MAX_ANSWERS, Members
from parallelkit.weights.plan import plan_transfer
from parallelkit.weights.routes import Way
from parallelkit.weights.ticket import Ticket, TicketOffice

DOC = Path(__file__).resolve().parents[2] / "docs" / "weights.md"


def table(head):
    """Cells of the table whose first row begins with `head`: (row, column, text)."""
    lines = DOC.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(head))
    columns = [c.strip() for c in lines[start].strip("|").split("|")][1:]
    found = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        row, *cells = [c.strip() for c in line.strip("|").split("|")]
        assert len(cells) == len(columns), line
        found += [(row, column, cell) for column, cell in zip(columns, cells, strict=True)]
    return found


def cases(head, rows):
    """One for each cell, and each call or message that its row names."""
    cells = table(head)
    assert {row for row, _, _ in cells} == set(rows), "the page and the test have the same rows"
    return [
        pytest.param(call, column, cell, id=re.sub(r"[^\w, -]", "", f"{row}-{column}") + f"-{i}")
        for row, column, cell in cells
        for i, call in enumerate(rows[row])
    ]


def outcome(call):
    """As a cell says it."""
    try:
        call()
    except UpdateTimeoutError:
        return "waits"
    except Exception as error:
        return f"`{type(error).__name__}`"
    return "works"


def in_a_child(call):
    """The outcome of a call in a forked child."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # this process has threads
        pid = os.fork()
    if pid == 0:
        signal.alarm(30)  # a lock that another thread held stays held here
        os.write(writing, json.dumps(outcome(call)).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = json.load(pipe)
    os.waitpid(pid, 0)
    return said


# --- calls at a subscriber ---------------------------------------------------------------------


def enter(subscriber):
    with subscriber.use() as arrays:
        assert arrays is not None


SUBSCRIBER = {
    "`step()`": [lambda s: s.step(0.05)],
    "`step(0)`": [lambda s: s.step(0)],
    "`use()`": [enter],
    "`serve()`": [lambda s: s.serve()],
    "`close()`": [lambda s: s.close()],
    "`version`, `state`": [lambda s: s.version, lambda s: s.state],
}


def subscriber_in(state, bench):
    publisher = bench.publish()
    follower = bench.follow(model=BrittleArrays(sample_model().arrays))
    if state == "waiting":
        return follower.subscriber
    bench.update()
    if state == "quarantined":
        follower.model.fault = "finish"
        with pytest.raises(PartialCommitError):
            bench.update()
    elif state == "staged":
        follower.subscriber.serve()
        publisher.update()
    elif state == "publisher gone":
        publisher.close()
    elif state == "closed":
        follower.subscriber.close()
    named = {"waiting", "quarantined", "closed"}
    assert follower.subscriber.state == (state if state in named else "current")
    return follower.subscriber


@pytest.mark.parametrize(("call", "state", "cell"), cases("| call | waiting |", SUBSCRIBER))
def test_calls_at_a_subscriber(bench, call, state, cell):
    subscriber = subscriber_in(state, bench)
    if state == "in use":
        with subscriber.use():
            assert outcome(lambda: call(subscriber)) == cell
    elif state == "forked":
        assert in_a_child(lambda: call(subscriber)) == cell
        bench.update()
        assert subscriber.version == 2, "the parent's is as it was"
    else:
        assert outcome(lambda: call(subscriber)) == cell


# --- calls at a publisher ----------------------------------------------------------------------

PUBLISHER = {
    "`update()`": [lambda p: p.update()],
    "`update(version)`, not above the last": [lambda p: p.update(1), lambda p: p.update(0)],
    "`wait()`": [lambda p: p.wait()],
    "`ticket`, `new_ticket()`": [lambda p: p.ticket, lambda p: p.new_ticket()],
    "`attach(engine)`": [lambda p: p.attach(p.test_engines[1])],
    "`attach(engine)`, attached already": [lambda p: p.attach(p.test_engines[0])],
    "`attach(engine)`, which no plugin knows": [lambda p: p.attach(object())],
    "`engines`": [lambda p: p.engines],
    "`members`": [lambda p: p.members],
    "`drop(name)`": [lambda p: p.drop("engine.0 " + str(p.test_suffix))],
    "`version`, `plan`, `explain()`": [
        lambda p: p.version,
        lambda p: p.plan,
        lambda p: p.explain(),
    ],
    "`close()`": [lambda p: p.close()],
}


@pytest.mark.parametrize(("call", "state", "cell"), cases("| call | open |", PUBLISHER))
def test_calls_at_a_publisher(bench, spy, monkeypatch, request, call, state, cell):
    publisher = bench.publish()
    follower = bench.follow(publisher.new_ticket(name="engine"))
    publisher.test_suffix = follower.subscriber.name.partition(" ")[2]
    follower.subscriber.serve()
    publisher.test_engines = [FakeEngine("one", workers=1), FakeEngine("two", workers=1)]
    for engine in publisher.test_engines:
        bench.stack.callback(engine.end)
    if "already" in request.node.callspec.id:
        publisher.attach(publisher.test_engines[0])
    publisher.update()
    assert publisher.ticket
    if state == "updating":
        said = []
        spy(publisher, "stage", lambda: said.append(outcome(lambda: call(publisher))))
        ended = outcome(publisher.update)
        assert said == [cell]
        assert (ended == "works") or call in PUBLISHER["`close()`"] + PUBLISHER["`drop(name)`"]
        return
    if state == "forked":
        assert in_a_child(lambda: call(publisher)) == cell
        assert publisher.update().version == 2, "the parent's is as it was"
        return
    if state == "closed":
        publisher.close()
    elif state == "failed":
        server = publisher._coordinator.server
        monkeypatch.setattr(server, "_flush", lambda: 1 / 0)
        server._wake()
        server._thread.join(10.0)
        assert not server._thread.is_alive()
    assert outcome(lambda: call(publisher)) == cell


# --- messages at a subscriber ------------------------------------------------------------------

#: Kind, version and epoch, from those of the update under way (in *idle*, of the one to come).
TO_SUBSCRIBER = {
    "`begin`": [("begin", 2, 0)],
    "`begin`, later": [("begin", 3, 1)],
    "`begin`, earlier": [("begin", 3, -1)],
    "`begin`, later, of a version that is here": [("begin", 1, 1)],
    "`transfer`": [("transfer", 2, 0)],
    "`commit`": [("commit", 2, 0)],
    "`abort`": [("abort", 2, 0)],
    "`transfer`, `commit`, `abort`, another": [
        (kind, 2, by) for kind in ("transfer", "commit", "abort") for by in (-1, 1)
    ],
    "`welcome`, `joined`": [("welcome", 2, 0), ("joined", 2, 0)],
    "`refused`": [("refused", 2, 0)],
    "`close`, or the end of the connection": [("close", 2, 0), ("lost", 2, 0)],
}
ORDER = ("begin", "transfer", "commit")


@pytest.mark.parametrize(("said", "state", "cell"), cases("| message | idle |", TO_SUBSCRIBER))
def test_messages_at_a_subscriber(said, state, cell):
    """The message is put before the rest of a good update, which tells what became of it."""
    model = sample_model(0.0, 16)
    end = ScriptedSubscriber(model)
    first = [to_subscriber(kind, version=1, epoch=1) for kind in ORDER]
    end.client.script = [end.publish(sample_model(1.0, 16), 1), *first]
    assert end.subscriber.step(0) == 1
    end.client.sent.clear()
    kind, version, by = said
    stray = end.lose if kind == "lost" else to_subscriber(kind, version=version, epoch=5 + by)
    at = ["idle", "ready", "prepared"].index(state)
    rest = [to_subscriber(kind, version=2, epoch=5) for kind in ORDER]
    end.client.script = [end.publish(sample_model(2.0, 16), 5), *rest[:at], stray, *rest[at:]]
    ended = outcome(lambda: end.subscriber.step(0))
    sent = [type(x).__name__ for x in end.client.sent]
    if cell == "ignored":
        assert (ended, end.subscriber.version) == ("works", 2)
        assert sent == ["Ready", "Prepared", "Committed"]
    elif cell == "taken":
        _check_taken(end, kind, by, rest, at)
    else:
        assert ended == cell
        assert end.subscriber.version == 1
        told = (
            cell == "`ProtocolError`" and kind != "refused" and (state, kind) != ("idle", "begin")
        )
        if told or (state, kind) == ("idle", "begin"):
            assert sent[-1] == "Failed"
        superseded = kind == "begin" and by > 0
        doubt = state == "prepared" and cell != "`UpdateAbortedError`" and not superseded
        assert end.subscriber.state == ("quarantined" if doubt else "current")
    end.subscriber.close()


def _check_taken(end, kind, by, rest, at):
    """It was taken for what it says: the step went on from there, as if it had come in its turn."""
    expected = {"begin": "Ready", "transfer": "Prepared", "commit": "Committed"}[kind]
    assert expected in [type(x).__name__ for x in end.client.sent]
    if kind == "begin" and by:
        assert 5 + by in [x.epoch for x in end.client.sent if type(x).__name__ == "Ready"]
        assert end.subscriber.state == "current", "the one before was not decided"
    if kind == "commit":
        assert end.subscriber.version == 2
        assert len(end.client.script) == len(rest) - at, "it did not wait for the other"


# --- messages at a publisher -------------------------------------------------------------------

MANIFEST = sample_model().manifest()
PLAN = plan_transfer(MANIFEST)
ANSWERS = ("ready", "prepared", "committed", "failed")
NORMAL, ANOTHER, MANY, STOLEN = "normal", "another epoch", "many", "stolen"
TO_PUBLISHER = {
    "`hello`": [("hello", NORMAL)],
    "`hello`, with a used ticket": [("hello", "used")],
    "`opened`": [("opened", NORMAL)],
    "`opened`, for another plan": [("opened", "plan")],
    "`refused`": [("refused", NORMAL)],
    "`ready`, `prepared`, `committed`, `failed`": [(kind, NORMAL) for kind in ANSWERS],
    "the same, another": [(kind, ANOTHER) for kind in ANSWERS],
    "the same, the 17th in one update": [(kind, MANY) for kind in ANSWERS],
    "`leave`": [("leave", NORMAL)],
    "any but `hello` and `refused`, with another's session key": [
        (kind, STOLEN) for kind in ("opened", *ANSWERS, "leave")
    ],
}
EPOCH = 5


class Desk:
    """The desk, with one that has joined on route `b`, and one on `a` in a state."""

    def __init__(self, state):
        self.office = TicketOffice("tcp://127.0.0.1:1", "k" * 40)
        self.members = Members(
            manifest=MANIFEST,
            office=self.office,
            run_id=bytes(16),
            verify="digest",
            commit="staged",
            slots=1,
            timeout=5.0,
            way=lambda peer: Way(),
        )
        self.used = self._token()
        self.say(b"b", "hello", token=self.used)
        self.say(b"b", "opened")
        if state == "none":
            return
        self.say(b"a", "hello", token=self._token())
        if state == "refused":
            self.say(b"a", "refused")
        elif state != "opening":
            self.say(b"a", "opened")
        if state == "dropped":
            self.members.mark(self.members._by_route[b"a"], "lost", "the publisher let it go")
        elif state == "updating":
            self.members.listen()

    def _token(self):
        return Ticket.decode(self.office.issue(1, None, None)[0]).token

    def session(self, route):
        member = self.members._by_route.get(route)
        return bytes(16) if member is None else member.session

    def say(self, route, kind, session=None, digests=PLAN.digest, epoch=EPOCH, token=None):
        message = to_publisher(
            kind,
            session=self.session(route) if session is None else session,
            digests=digests,
            version=1,
            epoch=epoch,
            token=self._token() if token is None else token,
        )
        return self.members.receive(route, message)

    def look(self):
        """All that can change."""
        rows = [(x.route, x.state, x.version) for x in self.members._all]
        return rows, [set(t.joined) for t in self.office._issued]


def test_a_member_that_left_meanwhile_keeps_the_version_that_it_had_reached():
    desk = Desk("updating")
    member = desk.members._by_route[b"a"]
    desk.say(b"a", "leave")
    desk.members.settle(member, "joined", "", 1)
    assert (member.state, member.version) == ("left", 1)


@pytest.mark.parametrize(("said", "state", "cell"), cases("| message | none |", TO_PUBLISHER))
def test_messages_at_a_publisher(said, state, cell):
    desk = Desk(state)
    kind, way = said
    how = {
        "used": {"token": desk.used},
        "plan": {"digests": bytes(16)},
        ANOTHER: {"epoch": EPOCH + 1},
        STOLEN: {"session": desk.session(b"b")},
    }.get(way, {})
    if way == MANY and state != "none":
        for _ in range(MAX_ANSWERS):
            desk.say(b"a", kind)
        desk.members.inbox.clear()
    before = desk.look()
    try:
        answers = desk.say(b"a", kind, **how)
        refused = False
    except (ProtocolError, TicketError):
        answers, refused = [], True
    rows, joined = desk.look()
    joined = joined[: len(before[1])]  # a hello of the test has a new ticket
    heard = desk.members.inbox.get(0.0)
    assert refused == cell.startswith("refused")
    if cell == "ignored":
        late = heard is not None and heard.message.epoch != EPOCH  # which an update ignores
        assert heard is None or late
        assert (rows, joined) == before
    elif cell == "refused, and its place is free":
        assert rows[-1][1] == "refused"
        assert joined[1] == set()
    elif cell == "refused":
        assert heard is None
        assert (rows, joined) == before
    elif cell == "taken":
        _check_answer(kind, state, answers, heard, rows[-1])


def _check_answer(kind, state, answers, heard, row):
    if kind == "hello":
        assert isinstance(answers[0][1], m.Welcome)
    elif kind == "opened":
        assert isinstance(answers[0][1], m.Joined)
        assert row[1] == "joined"
    elif kind == "refused":
        assert row[1] == "refused"
    elif kind == "leave":
        assert row[1] == {"refused": "refused", "dropped": "lost"}.get(state, "left")
        assert heard is not None
    else:
        assert heard.message.epoch == EPOCH
