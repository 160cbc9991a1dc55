"""Kills at random moments instead of chosen phases; a few in every run, many with `--full`."""

from __future__ import annotations

import random
import signal
import threading
import time

import pytest

from parallelkit.errors import PartialCommitError, PeerLostError, UpdateAbortedError
from parallelkit.testing.peer import Peer, fill, sample_model, values
from parallelkit.weights import subscribe_weights

pytestmark = pytest.mark.ranks

ELEMENTS = 1 << 22  # 16 MB: an update takes long enough to be hit in the middle
SEEDS = [pytest.param(seed, marks=pytest.mark.slow if seed >= 4 else ()) for seed in range(60)]


def kill_later(peer: Peer, seconds: float) -> threading.Thread:
    def run() -> None:
        time.sleep(seconds)
        peer.signal(signal.SIGKILL)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("seed", SEEDS)
def test_a_subscriber_dies_at_any_moment(bench, seed):
    rng = random.Random(seed)
    bench.source = sample_model(1.0, ELEMENTS)
    publisher = bench.publish(timeout=20.0, verify=rng.choice(["digest", "readback", "off"]))
    survivor = bench.follow(model=sample_model(0.0, ELEMENTS))
    bench.update()
    with Peer("subscribe", elements=ELEMENTS) as victim:
        victim.send(publisher.new_ticket())
        name = victim.event("joined")["name"]
        killer = kill_later(victim, rng.uniform(0.0, 0.08))
        live = 1.0
        for number in range(2, 40):
            fill(bench.source, float(number))
            try:
                report = bench.update()
                assert values(survivor.model) == {float(number)}
                live = float(number)
                if name not in {m.name for m in report.members}:
                    break
            except UpdateAbortedError as error:
                assert name in str(error)
                assert isinstance(error.__cause__, PeerLostError)
                assert values(survivor.model) == {live}
            except PartialCommitError as error:
                assert error.report.quarantined == (name,)
                assert values(survivor.model) == {float(number)}
                live = float(number)
        else:
            pytest.fail("the victim was never missed")
        killer.join()


@pytest.mark.parametrize("seed", SEEDS)
def test_the_publisher_dies_at_any_moment(bench, seed):
    rng = random.Random(1000 + seed)
    settings = {"elements": ELEMENTS, "tickets": 2, "publish": {"timeout": 20.0}}
    with Peer("publish", **settings) as victim:
        followers = []
        for _ in range(2):
            model = sample_model(0.0, ELEMENTS)
            ticket = victim.event("ticket")["ticket"]
            subscriber = bench.stack.enter_context(subscribe_weights(model, ticket, timeout=20.0))
            followers.append(bench.wrap(subscriber, model))
        victim.event("ready")
        for number in range(1, 200):
            victim.send(f"{number}.0")
        killer = kill_later(victim, rng.uniform(0.0, 0.3))
        lost: list[BaseException] = []
        deadline = time.monotonic() + 30.0
        while len(lost) < 2 and time.monotonic() < deadline:
            running = [f for f in followers if not isinstance(f.error, PeerLostError)]
            for follower in running:
                follower.step(timeout=20.0)
            for follower in running:
                error = follower.done(timeout=25.0)
                version = follower.subscriber.version
                if follower.subscriber.state != "quarantined":
                    assert values(follower.model) == {float(version)}
                if error is not None:
                    assert isinstance(error, PeerLostError), error
                    lost.append(error)
        assert len(lost) == 2
        killer.join()
        assert {f.subscriber.state for f in followers} <= {"waiting", "current", "quarantined"}
        # One that is not in doubt is at most one version from the other.
        versions = [f.subscriber.version for f in followers]
        assert max(versions) - min(versions) <= 1
