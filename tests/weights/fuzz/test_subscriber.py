"""A subscriber against a publisher that says anything, by a model of what it may do."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from parallelkit.errors import (
    PeerLostError,
    ProtocolError,
    QuarantinedError,
    StateError,
    UpdateAbortedError,
    UpdateTimeoutError,
)
from parallelkit.testing.handmade import TO_SUBSCRIBER, to_subscriber
from parallelkit.testing.peer import sample_model, values
from parallelkit.testing.scripted import ScriptedSubscriber
from parallelkit.weights import messages as m

MISSING = object()


class Book:
    """What a subscriber should make of a script: the rules, written a second time and plainly."""

    def __init__(self, script):
        self.script = list(script)
        self.version, self.value, self.doubt = 0, 0.0, False
        self.arena = (0.0, 0)  # value, epoch

    def next(self):
        """The next message's kind, version and epoch; None at the end, an error for a loss."""
        while self.script:
            kind, version, epoch = self.script.pop(0)
            if kind == "publish":
                self.arena = (version, epoch)
            elif kind == "lose":
                return PeerLostError
            else:
                return kind, version, epoch
        return None

    def step(self):
        """One step; returns the class of its error, or None."""
        while True:
            got = self.next()
            if got is None or got is PeerLostError:
                return got
            kind, version, epoch = got
            if kind in ("close", "refused"):
                return PeerLostError if kind == "close" else ProtocolError
            if kind == "begin":
                break
        if version <= self.version:
            return ProtocolError
        error = self._wait("transfer", epoch)
        if error is not None:
            return error
        if self.arena[1] != epoch:  # called off; the reason may be there already
            error = self._wait("transfer", epoch)
            return UpdateAbortedError if error in (None, UpdateTimeoutError) else error
        error = self._wait("commit", epoch)
        if error is not None:
            self.doubt = self.doubt or error is not UpdateAbortedError
            return error
        if self.arena[1] != epoch:
            self.doubt = True
            return QuarantinedError
        self.version, self.value, self.doubt = version, self.arena[0], False
        return None

    def _wait(self, wanted, epoch):
        while True:
            got = self.next()
            if got is None:
                return UpdateTimeoutError
            if got is PeerLostError:
                return got
            kind, _, of = got
            if kind in ("close", "refused"):
                return PeerLostError if kind == "close" else ProtocolError
            if kind in ("welcome", "joined") or of != epoch:
                continue
            if kind == "abort":
                return UpdateAbortedError
            return None if kind == wanted else ProtocolError


KINDS = (*TO_SUBSCRIBER, *("begin", "transfer", "commit", "abort") * 3)


@st.composite
def scripts(draw):
    """Messages of epochs near the arena's, which moves with each thing published."""
    script, epoch = [], 1
    for _ in range(draw(st.integers(1, 6))):
        what = draw(st.sampled_from(["round", "round", "round", "message", "lose", "publish"]))
        if what == "publish":
            epoch += 1
            script.append(("publish", float(epoch), epoch))
        elif what == "lose":
            script.append(("lose", 0, 0))
        elif what == "message":
            near = epoch + draw(st.integers(-1, 1))
            script.append((draw(st.sampled_from(KINDS)), draw(st.integers(0, 9)), near))
        else:  # an update as it should be, with something put in or left out
            epoch += 1
            version = draw(st.integers(1, 9))
            part = [("begin", version, epoch), ("publish", float(epoch), epoch)]
            part += [("transfer", version, epoch), ("commit", version, epoch)]
            for _ in range(draw(st.integers(0, 2))):
                at = draw(st.integers(0, len(part)))
                if draw(st.booleans()):
                    near = epoch + draw(st.sampled_from([0, 0, -1, 1]))
                    part.insert(at, (draw(st.sampled_from(KINDS)), version, near))
                elif at < len(part):
                    part.pop(at)
            script += part
    return script


def play(end, script):
    def item(kind, version, epoch):
        if kind == "publish":
            return end.publish(sample_model(version, 16), epoch)
        if kind == "lose":
            return end.lose
        return to_subscriber(kind, version=version, epoch=epoch)

    end.client.script = [item(*step) for step in script]


@settings(max_examples=250, deadline=None, derandomize=True)
@given(script=scripts(), verify=st.sampled_from(["digest", "readback", "sample", "off"]))
def test_live_weights_are_those_of_the_version_it_reports(script, verify):
    model = sample_model(0.0, 16)
    end, book = ScriptedSubscriber(model, verify), Book(script)
    play(end, script)
    subscriber = end.subscriber
    try:
        while book.script:
            before, expected = subscriber.version, book.step()
            error = MISSING
            try:
                subscriber.step(0)
                error = None
            except Exception as caught:
                error = type(caught)
            assert error is expected
            assert subscriber.version == book.version >= before
            assert values(model) == {book.value}
            check_use(subscriber, model, book)
    finally:
        subscriber.close()
    assert isinstance(end.client.sent[-1], m.Leave)


def check_use(subscriber, model, book):
    if book.doubt:
        assert subscriber.state == "quarantined"
        refusal = QuarantinedError
    elif book.version == 0:
        assert subscriber.state == "waiting"
        refusal = StateError
    else:
        assert subscriber.state == "current"
        refusal = None
    try:
        with subscriber.use() as arrays:
            assert refusal is None
            assert arrays is model.arrays
    except (QuarantinedError, StateError) as error:
        assert type(error) is refusal


@settings(max_examples=80, deadline=None, derandomize=True)
@given(script=scripts())
def test_what_it_answers_is_of_the_update_it_answers(script):
    """Every answer carries session, version and epoch of a begin that came before it."""
    end = ScriptedSubscriber(sample_model(0.0, 16))
    play(end, script)
    begun = {(version, epoch) for kind, version, epoch in script if kind == "begin"}
    while end.client.script:
        try:
            end.subscriber.step(0)
        except Exception:
            continue
    for message in end.client.sent:
        assert message.session == b"s" * 16
        assert (message.version, message.epoch) in begun
    order = [type(message).__name__ for message in end.client.sent]
    for one, two in itertools.pairwise(order):
        if two == "Committed":
            assert one == "Prepared"
        if two == "Prepared":
            assert one == "Ready"
    end.subscriber.close()
