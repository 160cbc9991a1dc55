"""Arguments of wrong types and values: the project's own error, at once, and nothing left open."""

import contextlib
import errno
import gc
import math
import os
import resource
import threading
import time
import weakref

import numpy as np
import pytest

from parallelkit.errors import (
    ManifestError,
    NeedsError,
    RankMismatchError,
    TicketError,
    TransportError,
    WeightTransferError,
)
from parallelkit.testing.meeting import meet, on_ranks
from parallelkit.testing.peer import sample_model
from parallelkit.weights import publish_weights, subscribe_weights
from parallelkit.weights.layout import Mesh, ShardLayout
from parallelkit.weights.manifest import Manifest, TensorSpec
from parallelkit.weights.ticket import Ticket, TicketOffice

ARRAY = np.zeros(3)  # its truth value and comparisons raise
NO_NUMBERS = ["5", b"5", [], {}, ARRAY, True, math.nan, math.inf, -1, 1e300, 10**400]


@pytest.mark.parametrize("name", ["aliased", "keep_last"])
@pytest.mark.parametrize("value", [None, 1, "no", [], ARRAY])
def test_flags_are_true_or_false(name, value):
    with pytest.raises(WeightTransferError, match=f"{name} is .*; it is True or False"):
        publish_weights(sample_model(), **{name: value})


@pytest.mark.parametrize("name", ["commit", "verify", "transport"])
@pytest.mark.parametrize("value", [None, 5, b"shm", [], ARRAY, "x" * 100_000])
def test_choices_are_strings_that_are_known(name, value):
    with pytest.raises(WeightTransferError, match=name) as caught:
        publish_weights(sample_model(), **{name: value})
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    "other", [{"encrypt": False}, {"named": True}, {"aliased": True}, {"keep_last": True}]
)
def test_ranks_that_give_other_options_are_told(other):
    def publish(group):
        return publish_weights(
            sample_model(), group=group, timeout=10.0, **other if group.rank else {}
        )

    results = on_ranks(meet(2, timeout=10.0), publish)
    assert [type(result) for result in results] == [RankMismatchError] * 2
    assert next(iter(other)) in str(results[0])


@pytest.mark.parametrize("value", ["5", b"5", [], {}, ARRAY, True, math.nan, math.inf, -1, 1.5])
def test_how_many_to_wait_for(bench, value):
    with pytest.raises(WeightTransferError, match="members is"):
        bench.publish().wait(value, timeout=0.01)


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_how_long_to_wait(bench, value):
    publisher = bench.publish()
    follower = bench.follow()
    with pytest.raises(WeightTransferError, match="timeout is .* from 0 and at most a week"):
        publisher.wait(2, timeout=value)
    with pytest.raises(WeightTransferError, match="timeout is .* from 0 and at most a week"):
        follower.subscriber.step(value)
    follower.subscriber.serve()
    with pytest.raises(WeightTransferError, match="timeout is .* from 0 and at most a week"):
        follower.subscriber.step(value)


@pytest.mark.parametrize("value", ["0", None, [], ARRAY, True, math.nan, -1, 65536, 10**400])
def test_a_member_is_a_rank(bench, value):
    with pytest.raises(TicketError, match="member is"):
        subscribe_weights(sample_model(), bench.publish().ticket, member=value)


def test_a_ticket_may_live_longer_than_numbers_are():
    office = TicketOffice("tcp://127.0.0.1:1", "k" * 40)
    _, number = office.issue(1, 10**400, None)
    assert office.usable(number)


def test_labels_are_unique_whatever_names_are_given():
    office = TicketOffice("tcp://127.0.0.1:1", "k" * 40)
    names = ["a#3", "a", "a", None, "subscriber-6", None, "subscriber-6#7", "subscriber-6"]
    labels = []
    for name in names:
        text, _ = office.issue(1, None, name)
        labels.append(office.redeem(Ticket.decode(text).token, 0).label)
    assert len(set(labels)) == len(labels), labels


@pytest.mark.parametrize(
    "endpoint",
    ["127.0.0.1\0:0", "127.0.0.1\n:0", "255.255.255.255:0", "224.0.0.1:0", "[ff02::1]:0"],
)
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_addresses_that_nobody_could_connect_to(endpoint, transport):
    with pytest.raises(TransportError, match="cannot be used"):
        publish_weights(sample_model(), endpoint=endpoint, transport=transport)


def _segments():
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum("memfd:parallelkit" in link for link in links)


def test_an_arena_goes_with_its_publisher_and_not_with_the_garbage():
    """Both transports serve it; it may be as large as the model."""
    before = _segments()
    gc.disable()
    try:
        with pytest.raises(TransportError, match="cannot listen"):  # the arena is there by then
            publish_weights(sample_model(), endpoint="192.0.2.1:0")
        assert _segments() == before
        publisher = publish_weights(sample_model(), endpoint="127.0.0.1:0", transport="tcp")
        arena = publisher._coordinator.exporter.arena
        (transport,) = arena._transports
        publisher.close()
        assert transport.buffer.nbytes == 0
        assert transport._gate._arena.nbytes == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("options", [{}, {"aliased": True}, {"keep_last": True}])
def test_a_closed_publisher_keeps_no_model_alive(options):
    model = sample_model(1.0)
    gone = weakref.ref(model)
    gc.disable()
    try:
        publish_weights(model, **options).close()
        del model
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("serve", [False, True])
def test_a_closed_subscriber_keeps_no_target_alive(bench, serve):
    publisher = bench.publish()
    target = sample_model()
    gone = weakref.ref(target)
    gc.disable()
    try:
        subscriber = subscribe_weights(target, publisher.ticket)
        if serve:
            subscriber.serve()
            publisher.update()
        subscriber.close()
        del subscriber, target
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_dropped_subscriber_leaves(bench, transport):
    publisher = bench.publish(transport=transport)
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    subscriber = subscribe_weights(sample_model(), publisher.ticket)
    assert len(os.listdir("/proc/self/fd")) > before
    del subscriber
    with publisher._coordinator.members.changed:
        left = publisher._coordinator.members.changed.wait_for(
            lambda: publisher.members[0].state == "left", 10.0
        )
    assert left, publisher.members
    until = time.monotonic() + 10.0
    while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < until:
        time.sleep(0.02)  # the publisher's end of the connections
    assert len(os.listdir("/proc/self/fd")) == before
    assert threading.active_count() == threads


@contextlib.contextmanager
def few_descriptors():
    """Within, this process can open five more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 10, hard))
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for fd in taken[-5:]:
            os.close(taken.pop(taken.index(fd)))
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_process_that_may_open_nothing_more_is_told_so_and_lives(bench, transport):
    """ZeroMQ would end the process."""
    publisher = bench.publish(transport=transport)
    ticket, before = publisher.ticket, len(os.listdir("/proc/self/fd"))
    with few_descriptors():
        with pytest.raises(TransportError, match="cannot open 32 more.*ulimit -n"):
            publish_weights(sample_model(), transport=transport)
        with pytest.raises(TransportError, match="cannot open 32 more.*ulimit -n"):
            subscribe_weights(sample_model(), ticket)
    assert len(os.listdir("/proc/self/fd")) == before
    bench.follow(ticket)
    assert bench.update().version == 1


def test_a_reply_that_cannot_be_sent_ends_no_thread(bench):
    publisher = bench.publish(transport="tcp")
    (transport,) = publisher._coordinator.exporter.arena._transports
    router = transport._router

    class Exhausted:
        def send_multipart(self, *args, **options):
            raise OSError(errno.EMFILE, "Too many open files")

    transport._router = Exhausted()
    transport._send(b"nobody", [b"x"])
    transport._router = router
    bench.follow()
    assert bench.update().version == 1


# --- what sources, sinks and manifests are made of ---------------------------------------------


def spec(**fields):
    return TensorSpec(**{"name": "a", "dtype": "float32", "shape": (2,)} | fields)


@pytest.mark.parametrize(
    "make",
    [
        lambda: spec(shape=None),
        lambda: spec(shape=5),
        lambda: spec(alias_of=[]),
        lambda: spec(alias_of=5),
        lambda: spec(layout="x"),
        lambda: Manifest(None),
        lambda: Manifest("ab"),
        lambda: Manifest([None]),
        lambda: Manifest([spec(), spec()]),
        lambda: Manifest([spec()], mesh="x"),
        lambda: Mesh(None, None),
        lambda: Mesh("x", 5),
        lambda: ShardLayout(5),
        lambda: ShardLayout([5]),
    ],
)
def test_whatever_is_no_manifest_is_a_manifest_error(make):
    with pytest.raises(ManifestError):
        make()


def altered(**methods):
    """A model in whose class some methods are others."""
    model = sample_model(1.0)
    model.__class__ = type("Altered", (type(model),), methods)
    return model


@pytest.mark.parametrize("value", [None, 5, [], "x", Manifest])
def test_a_source_or_sink_that_gives_no_manifest_is_named(bench, value):
    with pytest.raises(ManifestError, match="a Altered gave .* in place of a Manifest"):
        publish_weights(altered(manifest=lambda self: value))
    publisher = bench.publish()
    ticket = publisher.ticket
    with pytest.raises(ManifestError, match="a Altered gave .* in place of a Manifest"):
        subscribe_weights(altered(needs=lambda self: value), ticket)
    assert publisher.ticket == ticket, "it was not used up"


@pytest.mark.parametrize("value", [None, 5])
def test_regions_that_are_no_list_are_refused(bench, value):
    with pytest.raises(NeedsError, match="regions of a Altered are no list"):
        subscribe_weights(altered(regions=lambda self: value), bench.publish().ticket)


@pytest.mark.parametrize("value", [None, 5, b"x", "x"])
def test_a_source_that_gives_no_memory_names_the_tensor(bench, value):
    bench.source = altered(host_bytes=lambda self, index: value)
    bench.publish()
    bench.follow()
    with pytest.raises(ManifestError, match=f"gave a {type(value).__name__} for 'body'"):
        bench.update()
