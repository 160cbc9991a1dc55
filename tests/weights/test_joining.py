"""What a subscriber refuses of a publisher that says things that cannot be."""

from __future__ import annotations

import contextlib
import time

import attrs
import pytest

from parallelkit import hooks
from parallelkit.errors import NeedsError, ProtocolError, TransportError
from parallelkit.testing.parts import PartsSink
from parallelkit.testing.peer import sample_model, values
from parallelkit.weights import joining, subscribe_weights
from parallelkit.weights import messages as m
from parallelkit.weights.layout import Region
from parallelkit.weights.needs import Needs


@pytest.fixture
def told(monkeypatch):
    """Lets a test change what the publisher's `Welcome` says."""
    changes = {}
    real = joining._expect

    def expect(client, kind, deadline, timeout):
        message = real(client, kind, deadline, timeout)
        if kind is not m.Welcome:
            return message
        fields = {name: getattr(message, name) for name in message.__struct_fields__}
        return m.Welcome(**fields | {k: f(fields[k]) for k, f in changes.items()})

    monkeypatch.setattr(joining, "_expect", expect)
    return changes


def refused(publisher, error, match, target=None):
    with pytest.raises(error, match=match):
        subscribe_weights(target or sample_model(), publisher.new_ticket(), timeout=5.0)
    with contextlib.suppress(Exception):
        publisher.wait(timeout=0.05)
    assert not publisher.members, "it has not joined"


def source_of(**fields):
    return lambda sources: [
        m.Source(**{name: getattr(s, name) for name in s.__struct_fields__} | fields)
        for s in sources
    ]


def test_another_manifest_than_the_digest_says(bench, told):
    told["manifest_digest"] = lambda digest: bytes(16)
    refused(bench.publish(), ProtocolError, "read different manifests")


def test_a_rank_that_is_not_said_how_to_reach(bench, told):
    told["sources"] = lambda sources: []
    refused(bench.publish(), ProtocolError, "did not say how its rank 0 is reached")


def test_an_arena_of_another_size_than_was_said(bench, told):
    told["sources"] = source_of(nbytes=4096)
    refused(bench.publish(), ProtocolError, "arena of the publisher's rank 0 has")


def test_an_arena_that_is_smaller_than_the_plan(bench, told):
    told["sources"] = source_of(nbytes=256)
    publisher = bench.publish(transport="tcp")
    refused(publisher, ProtocolError, "rank 0 has 256 bytes, the plan needs")


def test_a_transport_that_nobody_has(bench, told):
    told["sources"] = source_of(transport="pigeon")
    refused(bench.publish(), TransportError, "no plugin installed here has .*'pigeon'")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_pass_that_is_not_ours(bench, told, transport):
    told["sources"] = source_of(key=bytes(56))
    publisher = bench.publish(transport=transport)
    with pytest.raises(TransportError):
        subscribe_weights(sample_model(), publisher.new_ticket(), timeout=5.0)


def test_a_target_that_keeps_what_is_not_there(bench):
    publisher = bench.publish()
    manifest = bench.source.manifest()
    sink = PartsSink(manifest, Needs.whole(manifest), frozenset())
    sink._regions[0] = Region((1,), (1 << 16,))
    refused(publisher, NeedsError, "'body'", sink)
    sink._regions.pop()
    refused(publisher, NeedsError, "regions for 4 tensors", sink)


def test_the_publisher_refuses_what_cannot_be_kept(bench, monkeypatch):
    """A subscriber that does not check itself is refused by the publisher."""
    publisher = bench.publish()
    monkeypatch.setattr(
        joining, "needs_of", lambda sink, needs, published: _Lies(Needs.whole(published))
    )
    with pytest.raises(ProtocolError, match="what the target keeps is refused.*'body'"):
        subscribe_weights(sample_model(), publisher.new_ticket(), timeout=5.0)
    monkeypatch.undo()
    bench.follow()
    assert bench.update().version == 1


class _Lies:
    """Needs that say something else on the wire."""

    def __init__(self, needs):
        self._needs = needs

    def to_wire(self):
        rows, which = self._needs.to_wire()
        return [([1], [1 << 16]), *rows[1:]], which

    def __len__(self):
        return len(self._needs)

    def __getitem__(self, tensor):
        return self._needs[tensor]

    def __getattr__(self, name):
        return getattr(self._needs, name)


def test_plans_that_differ_are_refused_by_the_publisher(bench, monkeypatch):
    publisher = bench.publish()
    real = joining.plan_transfer

    def other(published, kept):
        return attrs.evolve(real(published, kept), bucket_bytes=1 << 20)

    monkeypatch.setattr(joining, "plan_transfer", other)
    refused(publisher, ProtocolError, "computed different transfer plans")


def test_transports_that_were_opened_are_closed_when_a_later_one_fails(job, spread, monkeypatch):
    run = job(spread())
    opened = []
    real = hooks.connect_transport

    def connect(*given):
        if opened:
            raise TransportError("no way to the second")
        opened.append(real(*given))
        return opened[0]

    monkeypatch.setattr(hooks, "connect_transport", connect)
    with pytest.raises(TransportError, match="no way to the second"):
        run.join(Needs.whole(run.manifest))
    with pytest.raises(ValueError, match="released"):
        _ = opened[0].memory


@pytest.mark.parametrize("count", [1, 4])
def test_tcp_pulls_over_as_many_connections_as_asked_for(bench, count):
    publisher = bench.publish(transport="tcp")
    follower = bench.follow(connections=count)
    ends = follower.subscriber._placement.readers._transports.values()
    assert [len(end._lines) for end in ends] == [count]
    assert bench.update().version == publisher.version == 1
    assert values(follower.model) == {1.0}


def test_an_option_of_another_transport_than_the_one_that_reaches_is_not_minded(bench):
    bench.publish(transport="shm")
    bench.follow(connections=4)
    assert bench.update().version == 1


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"connections": 0}, "connections is 0; allowed are 1 to 16"),
        ({"connections": 17}, "connections is 17; allowed are 1 to 16"),
        ({"connections": True}, "connections is True; allowed are 1 to 16"),
        ({"connections": "2"}, "connections is '2'; allowed are 1 to 16"),
        (
            {"conections": 2, "a": 1},
            r"no argument a, conections.* options are: connections \(tcp\)",
        ),
        ({"encrypt": False}, r"subscribe_weights has no argument encrypt"),
    ],
)
def test_options_that_are_none_are_refused_and_the_ticket_is_not_used_up(
    bench, transport, options, match
):
    publisher = bench.publish(transport=transport)
    ticket = publisher.new_ticket()
    with pytest.raises(TransportError, match=match):
        subscribe_weights(sample_model(), ticket, timeout=5.0, **options)
    deadline = time.monotonic() + 5.0
    while "refused" not in str(publisher._coordinator.members.absent()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    bench.follow(ticket)
