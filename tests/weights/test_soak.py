"""Hundreds of updates, with members that come and go: what is held stays the same.

`parallelkit bench soak` runs ten thousand.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from parallelkit.testing.brittle import BrittleArrays
from parallelkit.testing.peer import fill, sample_model, values
from parallelkit.weights import publish_weights, subscribe_weights

UPDATES, EVERY = 500, 50
#: Beyond what the allocator gives and takes back; a leak of 8 KB an update would be twice this.
SLACK_BYTES = 2 << 20


def held():
    """Resident bytes, descriptors, threads of this process."""
    rss = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return rss, len(os.listdir("/proc/self/fd")), threading.active_count()


def visit(publisher):
    """A member that joins, gets an update, and leaves."""
    model = sample_model()
    with subscribe_weights(model, publisher.new_ticket(), timeout=20.0) as subscriber:
        subscriber.serve()
        publisher.update()
        assert subscriber.step(20.0) == publisher.version
    # An update that begins before it is known to have left would be called off.
    deadline = time.monotonic() + 20.0
    while any(x.present for x in publisher.members):
        assert time.monotonic() < deadline, "it is not known to have left"
        time.sleep(0.002)


@pytest.mark.parametrize("aliased", [False, True])
def test_five_hundred_updates(aliased):
    source, model = BrittleArrays(sample_model(0.0, 1 << 12).arrays), sample_model(0.0, 1 << 12)
    seen, versions = [], []
    with (
        publish_weights(source, timeout=20.0, aliased=aliased) as publisher,
        subscribe_weights(model, publisher.ticket, timeout=20.0) as subscriber,
    ):
        subscriber.serve()
        for number in range(1, UPDATES + 1):
            fill(source, float(number % 1000))
            report = publisher.update()
            assert subscriber.step(20.0) == report.version == publisher.version
            assert values(model) == {number % 1000}
            versions.append(report.version)
            if number % EVERY == 0:
                source.fault = "look"
                with pytest.raises(OSError, match="made to fail"):
                    publisher.update()
                source.fault = "read"
                with pytest.raises(OSError, match="made to fail"):
                    publisher.update()
                seen.append(held())
    assert versions == sorted(set(versions))
    settled = seen[len(seen) // 2]
    assert {x[1:] for x in seen} == {settled[1:]}, "descriptors, threads"
    assert seen[-1][0] - settled[0] < SLACK_BYTES


def test_members_that_come_and_go_leave_nothing():
    source = sample_model(1.0)
    seen = []
    with publish_weights(source, timeout=20.0) as publisher:
        for number in range(40):
            fill(source, float(number))
            visit(publisher)
            if number >= 10:
                # The last one's connection may be on its way out.
                publisher._coordinator.server._wake()
                seen.append(held())
    assert min(x[1] for x in seen[-10:]) <= min(x[1] for x in seen[:10])
    assert min(x[2] for x in seen[-10:]) <= min(x[2] for x in seen[:10])
    assert seen[-1][0] - seen[10][0] < SLACK_BYTES
