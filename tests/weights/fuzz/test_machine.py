"""A publisher and up to three followers, over the real channel, in any order of anything.

After each step: the live weights of every follower are of exactly one version, the one that it
reports; versions never go back; the publisher's version is the last that was committed; who is
quarantined serves nothing; and nothing hangs (`parallelkit.testing.world`). For a long run, with
figures at its end:

    python tests/weights/fuzz/test_machine.py --minutes 10 --seed 1
"""

from __future__ import annotations

import argparse
import contextlib
import random
import secrets
import threading
import time
from collections import Counter

import attrs
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from parallelkit.errors import (
    ManifestMismatchError,
    PartialCommitError,
    PeerLostError,
    QuarantinedError,
    StateError,
    TicketError,
    UpdateAbortedError,
    UpdateTimeoutError,
    VersionError,
)
from parallelkit.testing.arrays import Arrays
from parallelkit.testing.brittle import SINK_FAULTS, SOURCE_FAULTS
from parallelkit.testing.handmade import ANSWERS, TO_PUBLISHER, HandMade, to_publisher
from parallelkit.testing.peer import PUBLISHER_PHASES, SUBSCRIBER_PHASES, values
from parallelkit.testing.world import TIMEOUT, World, brittle_model, no_hang, wait_for
from parallelkit.weights import messages as m
from parallelkit.weights import subscribe_weights
from parallelkit.weights.ticket import Ticket

VERIFY = st.sampled_from(["digest", "readback", "sample", "off"])
#: Kinds of trouble at a follower in an update, and where.
SINK = [("sink", at) for at in SINK_FAULTS]
UPSET = [(how, at) for how in ("raise", "interrupt", "cut") for at in SUBSCRIBER_PHASES]
#: What a member by hand does when it is addressed; only the first two go on.
MANNERS = ("answer", "answer", "answer", "twice", "stray", "nonsense", "cut", "leave")

tally: Counter[str] = Counter()


class Machine(RuleBasedStateMachine):
    """See the module."""

    world: World | None = None

    @initialize(verify=VERIFY, aliased=st.booleans())
    def publish(self, verify, aliased):
        self.world = World(verify=verify, aliased=aliased)
        self.fellows = self.world.fellows
        self.publisher = self.world.publisher
        self.used = []
        self.visits = 0  # of strangers, which are slow, and enough when they are a few
        tally["publishers"] += 1

    def teardown(self):
        if self.world is not None:
            self.world.abandon()

    @invariant()
    def holds(self):
        if self.world is not None:
            tally["steps"] += 1
            self.world.check()

    def one(self, data):
        return self.fellows[data.draw(st.integers(0, len(self.fellows) - 1))]

    @property
    def armed(self):
        return any(fellow.model.fault for fellow in self.fellows)

    # --- who is there --------------------------------------------------------------------------

    @precondition(lambda self: len(self.fellows) < 3)
    @rule(serving=st.booleans())
    def join(self, serving):
        self.used.append((self.publisher.new_ticket(), 0))
        self.world.join(self.used[-1][0], serving=serving)
        tally["joined"] += 1

    @precondition(lambda self: len(self.fellows) < 2)
    @rule(serving=st.booleans(), first=st.integers(0, 1))
    def join_as_two(self, serving, first):
        ticket = self.publisher.new_ticket(members=2)
        for member in (first, 1 - first):
            self.world.join(ticket, serving=serving, member=member)
        self.used.append((ticket, first))
        tally["joined"] += 2

    @precondition(lambda self: len(self.fellows) < 3)
    @rule()
    def join_after_a_mismatch(self):
        ticket = self.publisher.new_ticket()
        with no_hang(), pytest.raises(ManifestMismatchError):
            subscribe_weights(Arrays({"x": np.zeros(3)}), ticket, timeout=TIMEOUT)
        wait_for(lambda: not self.world.coordinator.office._issued[-1].joined)
        self.world.join(ticket, serving=False)
        tally["joined"] += 1

    @precondition(lambda self: self.fellows)
    @rule(data=st.data(), how=st.sampled_from(["close", "cut", "drop"]))
    def go(self, data, how):
        fellow = self.one(data)
        if how == "drop":
            self.publisher.drop(fellow.subscriber.name)
        elif how == "cut":
            fellow.cut()
        with no_hang():
            self.world.remove(fellow)
        tally[f"gone by {how}"] += 1

    @precondition(lambda self: self.visits < 6)
    @rule(kind=st.sampled_from(["used", "expired", "altered", "forged", "rank", "key"]))
    def bad_ticket(self, kind):
        self.visits += 1
        text, member = self.publisher.new_ticket(), 0
        good = Ticket.decode(text)
        if kind == "used" and self.used:
            text, member = self.used[-1]
        elif kind == "expired":
            text = self.publisher.new_ticket(expires=1e-6)
        elif kind == "forged":
            text = attrs.evolve(good, token=secrets.token_bytes(32)).encode()
        elif kind == "key":
            text = attrs.evolve(good, server_key="k" * 40).encode()
        elif kind == "rank":
            member = 1
        else:
            text = text[:40] + ("A" if text[40] != "A" else "B") + text[41:]
        with no_hang(), pytest.raises(TicketError):
            subscribe_weights(brittle_model(), text, member=member, timeout=TIMEOUT)
        tally["bad tickets refused"] += 1

    @precondition(lambda self: self.publisher.version > 3)
    @rule(verify=VERIFY, aliased=st.booleans())
    def close_and_publish_again(self, verify, aliased):
        self.world.close()
        with pytest.raises(StateError, match="after close"):
            self.publisher.update()
        self.publish(verify, aliased)

    # --- updates -------------------------------------------------------------------------------

    @rule()
    def update(self):
        self._update("update")

    @rule(ahead=st.integers(2, 5))
    def update_with_a_gap(self, ahead):
        version = self.publisher.version + ahead
        self._update("update with a gap", version=version)
        assert self.armed or self.publisher.version == version

    @precondition(lambda self: self.fellows and not self.armed)
    @rule(data=st.data(), trouble=st.sampled_from(SINK))
    def update_with_a_sink_that_fails(self, data, trouble):
        target = self.one(data)
        self._arm(data, target, trouble[1])
        self._update(f"sink fails to {trouble[1]}", clean=False)
        if not target.serving:
            target.model.fault = ""

    @precondition(lambda self: self.fellows and not self.armed)
    @rule(data=st.data(), trouble=st.sampled_from(UPSET))
    def update_with_a_follower_that_fails(self, data, trouble):
        how, at = trouble
        self.one(data).upset(how, at)
        unheard = at == "committed" and how != "cut"  # it is there, and the publisher must wait
        self._update(f"{how} at {at}", clean=False, short=unheard)

    @rule(where=st.sampled_from(SOURCE_FAULTS))
    def update_with_a_source_that_fails(self, where):
        self.world.source.fault = where
        early = where == "look" or self.world.aliased  # before anybody is told
        idle = [f for f in self.fellows if early and not f.serving]
        self._update(f"source fails to {where}", clean=False, idle=idle)
        self.world.source.fault = ""

    @rule()
    def update_with_a_byte_changed_in_the_arena(self):
        noticed = self.world.verify in ("digest", "readback") and not self.world.aliased
        outcome = self._update(
            "arena damaged", clean=False, at="stage" if noticed else "", call=self._corrupt
        )
        assert not (noticed and self.fellows) or isinstance(outcome, UpdateAbortedError)

    @precondition(lambda self: any(not f.serving for f in self.fellows))
    @rule(data=st.data())
    def update_with_one_idle(self, data):
        target = data.draw(st.sampled_from([f for f in self.fellows if not f.serving]))
        outcome = self._update("one is idle", clean=False, idle=[target], short=True)
        assert isinstance(outcome, UpdateAbortedError)

    @rule()
    def update_within_an_update(self):
        self._update("again within", at="stage", call=self._again)

    @precondition(lambda self: self.publisher.version > 3)
    @rule(phase=st.sampled_from(PUBLISHER_PHASES))
    def close_within_an_update(self, phase):
        self._update(f"closed at {phase}", clean=False, at=phase, call=self.publisher.close)
        if self.world.closed:
            self.world.close()
            self.publish(self.world.verify, self.world.aliased)

    def _update(self, name, clean=True, **how):
        """Run it; if it is `clean`, nothing may go wrong. Returns its error."""
        clean = clean and not self.armed
        outcome = self.world.update(**how)
        assert not clean or outcome is None, f"nothing went wrong, but: {outcome!r}"
        tally[f"{name}: {type(outcome).__name__ if outcome else 'committed'}"] += 1
        return outcome

    def _arm(self, data, target, where):
        """A fault at a follower; where it serves, it strikes as the version goes live."""
        if where in ("damage", "read") and self.world.verify != "readback":
            return  # nobody would notice
        target.model.fault = where
        target.model.error = data.draw(st.sampled_from([OSError("made to fail"), MemoryError()]))

    def _corrupt(self):
        self.world.coordinator.exporter.arena.bytes[5] ^= 1

    def _again(self):
        with pytest.raises(StateError, match="one update at a time"):
            self.publisher.update()

    @rule(wrong=st.sampled_from([None, 0, -1, True, 1.5, "2", 2**62]))
    def update_to_a_bad_version(self, wrong):
        with pytest.raises(VersionError):
            self.publisher.update(self.publisher.version if wrong is None else wrong)

    # --- strays --------------------------------------------------------------------------------

    @precondition(lambda self: self.visits < 6)
    @rule(data=st.data(), far=st.sampled_from(["connected", "welcomed", "joined"]))
    def stranger(self, data, far):
        """Somebody with a ticket says anything, as far as it has come."""
        self.visits += 1
        with no_hang(), HandMade(self.publisher.new_ticket(), TIMEOUT) as peer:
            answer = peer.hello() if far != "connected" else None
            assert isinstance(answer, m.Welcome) == (far != "connected")
            answer = peer.open() if far == "joined" else None
            assert isinstance(answer, m.Joined) == (far == "joined")
            for _ in range(data.draw(st.integers(1, 6))):
                self._stray(data, peer)
                tally["strays"] += 1
        self.world.wait_for_strangers()
        with contextlib.suppress(UpdateTimeoutError):
            self.publisher.wait(4, timeout=0.001)
        assert self.publisher.explain()

    def _stray(self, data, peer):
        kind = data.draw(st.sampled_from((*TO_PUBLISHER, "bytes")))
        if kind == "bytes":
            peer.send(data.draw(st.binary(max_size=200)))
            return
        other = self.one(data).subscriber._talk._session if self.fellows else bytes(16)
        epoch = self.world.coordinator.epoch
        peer.say(
            kind,
            session=data.draw(st.sampled_from([peer.session, other, bytes(16)])),
            version=max(0, self.publisher.version + data.draw(st.integers(-1, 2))),
            epoch=max(0, epoch + data.draw(st.integers(-1, 2))),
            digests=data.draw(st.sampled_from([b"", b"x", bytes(8), bytes(800)])),
            text=data.draw(st.sampled_from(["", "no", "two\nlines", "x" * 3000])),
        )

    @precondition(lambda self: self.fellows)
    @rule(
        data=st.data(),
        kinds=st.lists(st.sampled_from(ANSWERS), min_size=1, max_size=5),
        version=st.integers(0, 1),
        epoch=st.integers(-1, 0),
    )
    def member_out_of_turn(self, data, kinds, version, epoch):
        """A member's own connection and session, and answers to an update that is over."""
        fellow = self.one(data)
        if fellow.serving:  # its thread has the socket
            return
        update = {
            "session": fellow.subscriber._talk._session,
            "version": self.publisher.version + version,
            "epoch": max(0, self.world.coordinator.epoch + epoch),
        }
        for kind in kinds:
            fellow.subscriber._client.send(to_publisher(kind, **update))
            tally["answers out of turn"] += 1

    @rule(
        manners=st.lists(st.sampled_from(MANNERS), min_size=3, max_size=3),
        chance=st.integers(0, 2**32),
    )
    def update_with_one_by_hand(self, manners, chance):
        """A member by hand gives right answers for a while, and then others, or none."""
        if self.armed:
            return
        with HandMade(self.publisher.new_ticket(), TIMEOUT) as peer:
            assert isinstance(peer.hello(), m.Welcome)
            assert isinstance(peer.open(), m.Joined)
            given = (peer, manners, random.Random(chance))
            thread = threading.Thread(target=by_hand, args=given, daemon=True)
            thread.start()
            outcome = self.world.update()
            thread.join(TIMEOUT + 10.0)
            assert not thread.is_alive()
        assert outcome is None or isinstance(outcome, UpdateAbortedError | PartialCommitError)
        right = set(manners) <= {"answer", "twice"}
        assert not right or outcome is None, f"it answered as it should: {outcome!r}"
        self.world.wait_for_strangers()
        tally[f"by hand: {type(outcome).__name__ if outcome else 'committed'}"] += 1

    # --- what followers do ---------------------------------------------------------------------

    @precondition(lambda self: any(fellow.serving for fellow in self.fellows))
    @rule(data=st.data(), fault=st.sampled_from(["", "", "begin", "write", "finish"]))
    def flip(self, data, fault):
        fellow = data.draw(st.sampled_from([f for f in self.fellows if f.serving]))
        fellow.model.fault = fault
        error = fellow.poll()
        struck, fellow.model.fault = fellow.model.fault != fault, ""
        assert not struck or isinstance(error, QuarantinedError)
        assert not isinstance(error, PeerLostError)
        tally["flips"] += 1

    @precondition(lambda self: self.fellows)
    @rule(data=st.data(), update=st.booleans())
    def use(self, data, update):
        fellow = self.one(data)
        state = fellow.subscriber.state
        try:
            with fellow.subscriber.use() as arrays:
                assert arrays is fellow.model.arrays
                live = values(fellow.model)
                assert len(live) == 1
                if update and not self.armed and all(f.serving for f in self.fellows):
                    assert self.world.update() is None
                with pytest.raises(StateError, match="inside `with"):
                    fellow.subscriber.step(0)
                assert values(fellow.model) == live, "it changed while it was used"
            tally["used"] += 1
        except QuarantinedError:
            assert fellow.subscriber.state == "quarantined"
        except StateError:
            assert state == fellow.subscriber.state == "waiting"


def by_hand(peer, manners, chance):
    """Answer an update's messages, each in its manner."""
    for manner in manners:
        message = peer.hear()
        if not isinstance(message, m.Begin | m.Transfer | m.Commit):
            return
        if manner in ("answer", "twice"):
            for _ in range(1 + (manner == "twice")):
                peer.answer(message)
            continue
        update = {"version": message.version, "epoch": message.epoch}
        if manner == "stray":
            for _ in range(chance.randint(1, 25)):
                digests = chance.choice([b"", b"x", bytes(8), bytes(16)])
                peer.say(chance.choice(TO_PUBLISHER), **update, digests=digests, text="")
        elif manner == "nonsense":
            peer.send(chance.randbytes(chance.randint(0, 5000)))
        elif manner == "leave":
            peer.say("leave")
        peer.close()
        return


def fixed(examples, steps, **more):
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        **more,
    )


def test_a_short_run():
    run_state_machine_as_test(Machine, settings=fixed(20, 25, derandomize=True))


@pytest.mark.slow
def test_a_longer_run():
    run_state_machine_as_test(Machine, settings=fixed(150, 40, derandomize=True))


def main():
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--minutes", type=float, default=10.0)
    made.add_argument("--seed", type=int, default=0, help="of the first batch; the next is one up")
    args = made.parse_args()
    started, batch = time.monotonic(), args.seed
    while time.monotonic() - started < 60 * args.minutes:
        machine = seed(batch)(type("Machine", (Machine,), {}))
        run_state_machine_as_test(machine, settings=fixed(10, 50, phases=(Phase.generate,)))
        batch += 1
    print(f"batches {args.seed} to {batch - 1} in {time.monotonic() - started:.0f} s")
    for name, count in sorted(tally.items()):
        print(f"{count:8} {name}")


if __name__ == "__main__":
    main()
