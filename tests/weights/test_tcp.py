"""The tcp transport beyond the contract: hostile requests, altered bytes, slow peers, addresses."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import attrs
import msgspec
import numpy as np
import pytest
import zmq

from parallelkit.errors import (
    PeerLostError,
    ProtocolError,
    StateError,
    TransportError,
    UpdateTimeoutError,
)
from parallelkit.specs import HostIdentity, TransportRequest
from parallelkit.testing.conformance.serving import pattern
from parallelkit.testing.conformance.transports import some_spans
from parallelkit.weights import tcp_client, tcp_gate
from parallelkit.weights import tcp_wire as w
from parallelkit.weights.passes import NONCE_BYTES, Passes, issue
from parallelkit.weights.regions import Span, view
from parallelkit.weights.tcp import TcpPublisher, TcpSubscriber, candidate
from parallelkit.weights.tcp_gate import DIRECT_BYTES, Gate, pack
from parallelkit.weights.tcp_server import interface_towards

SECRET = bytes(range(32))
RANK = 5
SIZE = 1 << 20


def soon(seconds=30.0):
    return time.monotonic() + seconds


@pytest.fixture(params=[True, False], ids=["encrypted", "plain"])
def encrypt(request):
    return request.param


@pytest.fixture
def publisher(encrypt):
    with contextlib.closing(
        TcpPublisher(SIZE, secret=SECRET, rank=RANK, encrypt=encrypt)
    ) as publisher:
        np.frombuffer(publisher.buffer, np.uint8)[:] = pattern(SIZE)
        yield publisher


@pytest.fixture
def join(publisher):
    with contextlib.ExitStack() as stack:

        def connect(offer=None, key=None, **options):
            offer = publisher.offer() if offer is None else offer
            key = issue(SECRET, RANK) if key is None else key
            return stack.enter_context(contextlib.closing(TcpSubscriber(offer, key, **options)))

        yield connect


def pulled(end, *spans, epoch=0, seconds=30.0):
    into = [np.zeros(span.nbytes, np.uint8) for span in spans]
    end.pull(spans, into, epoch=epoch, deadline=soon(seconds))
    return [array.tobytes() for array in into]


def changed(offer, **fields):
    return msgspec.msgpack.encode(msgspec.msgpack.decode(offer) | fields)


# --- cutting and packing -----------------------------------------------------------------------


@pytest.mark.parametrize("limit", [13, 100, 1000, 10**6])
def test_a_span_that_is_cut_has_the_same_bytes_in_the_same_order(limit):
    memory = pattern(300_000)
    for span in some_spans(memory.nbytes, limit, 20):
        pieces = list(w.cut(span, limit))
        assert all(0 < piece.nbytes <= limit for piece in pieces)
        joined = b"".join(view(memory, piece).tobytes() for piece in pieces)
        assert joined == view(memory, span).tobytes()


def test_a_span_is_cut_no_finer_than_needed():
    assert list(w.cut(Span(3, 10), 10)) == [Span(3, 10)]
    assert list(w.cut(Span(3, 0), 10)) == []
    assert list(w.cut(Span(0, 10, ((7, 20),)), 30)) == [
        Span(0, 10, ((3, 20),)),
        Span(60, 10, ((3, 20),)),
        Span(120, 10, ((1, 20),)),
    ]
    assert list(w.cut(Span(0, 25, ((2, 30),)), 20)) == [
        *(Span(0, 20), Span(20, 5), Span(30, 20), Span(50, 5))
    ]


@pytest.mark.parametrize("seed", range(3))
def test_packed_frames_are_the_bytes_of_the_spans(seed):
    memory = pattern(500_000)
    long = [Span(i, DIRECT_BYTES + i) for i in range(0, 2000, 999)]
    spans = [s for pair in zip(some_spans(500_000, seed, 3), long, strict=True) for s in pair]
    frames = pack(memory.data, spans)
    assert b"".join(map(bytes, frames)) == b"".join(view(memory, s).tobytes() for s in spans)
    own = [f for f in frames if np.shares_memory(np.frombuffer(f, np.uint8), memory)]
    assert len(own) == len(long), "long runs are not copied"


def test_packing_checks_bounds_itself():
    for span in (Span(99, 2), Span(0, 50, ((3, 50),)), Span(-1, 1), Span(10, DIRECT_BYTES)):
        with pytest.raises(ProtocolError, match="inside a memory"):
            pack(memoryview(bytearray(100)), [span])


def test_replies_are_put_where_they_belong_however_they_are_framed():
    data = pattern(1000)
    for cuts in ([1000], [1, 999], [0, 400, 0, 600], [100] * 10):
        targets = [np.zeros(n, np.uint8) for n in (1, 299, 500, 200)]
        ends = np.cumsum(cuts)
        frames = [data[e - n : e].data for e, n in zip(ends, cuts, strict=True)]
        tcp_client.scatter(frames, targets)
        assert np.array_equal(np.concatenate(targets), data)


# --- offers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "endpoint",
    [
        *("ipc:///tmp/x", "inproc://x", "tcp://localhost:5000", "tcp://*:5000", "127.0.0.1:5000"),
        *("tcp://0.0.0.0:5000", "tcp://[::]:5000", "tcp://127.0.0.1:0", "tcp://127.0.0.1:65536"),
        *("tcp://127.0.0.1", "tcp://127.0.0.1:5000;tcp://127.0.0.1:5001", "tcp://1.2.3:5000", ""),
        "tcp://127.0.0.1:5000\n",
    ],
)
def test_an_offer_of_another_address_is_refused(publisher, join, endpoint):
    with pytest.raises(ProtocolError, match="offer is malformed"):
        join(changed(publisher.offer(), endpoint=endpoint))


@pytest.mark.parametrize(
    "fields",
    [{"rank": -1}, {"nbytes": "9"}, {"key": "x" * 39}, {"key": "é" * 40}, {"more": 1}],
)
def test_an_offer_with_another_field_is_refused(publisher, join, fields):
    with pytest.raises(ProtocolError, match="offer is malformed"):
        join(changed(publisher.offer(), **fields))


def test_an_offer_with_other_bytes_is_refused(publisher, join):
    with pytest.raises(ProtocolError, match="greets"):
        join(changed(publisher.offer(), nbytes=SIZE + 1))


@pytest.mark.parametrize("encrypt", [True], indirect=True)
def test_a_publisher_with_another_key_is_refused(publisher, join):
    other = zmq.curve_keypair()[0].decode()
    with pytest.raises((TransportError, PeerLostError), match="rank 5"):
        join(changed(publisher.offer(), key=other), timeout=10)


@pytest.mark.parametrize("encrypt", [True], indirect=True)
def test_an_encrypting_publisher_does_not_talk_without(publisher, join):
    with pytest.raises((TransportError, PeerLostError, UpdateTimeoutError)):
        join(changed(publisher.offer(), key=""), timeout=2)


@pytest.mark.parametrize("encrypt", [False], indirect=True)
def test_without_encryption_the_publisher_has_to_know_the_pass_too(publisher, join):
    """Whoever listens in the publisher's place cannot make the digest of its greeting."""
    greeting = w.encode(w.Hi(bytes(16), SIZE))
    publisher._gate.answer = lambda route, frames: [greeting]
    with pytest.raises(ProtocolError, match="without its digest"):
        join()
    forged = w.tag(bytes(32), "publisher", greeting)
    publisher._gate.answer = lambda route, frames: [greeting, forged]
    with pytest.raises(ProtocolError, match="altered"):
        join()


# --- requests made by hand ---------------------------------------------------------------------


@attrs.define
class Peer:
    """A subscriber that says whatever it likes, to a gate without sockets."""

    gate: Gate
    encrypted: bool
    key: bytes = b""
    secret: bytes = b""
    challenge: bytes = bytes(16)
    session: bytes = b""

    def say(self, request, route=b"r", key=None, payload=None):
        data = w.encode(request) if payload is None else payload
        frames = [data]
        if not self.encrypted:
            frames.append(w.tag(self.key if key is None else key, "subscriber", data))
        return self.raw(frames, route)

    def raw(self, frames, route=b"r"):
        answer = self.gate.answer(route, [memoryview(f) for f in frames])
        return w.decode_reply(bytes(answer[0])), [bytes(f) for f in answer[1:]]

    def hello(self, route=b"r", pass_=None, **fields):
        pass_ = issue(SECRET, RANK) if pass_ is None else pass_
        self.secret = pass_[NONCE_BYTES:]
        shown = pass_ if self.encrypted else pass_[:NONCE_BYTES]
        hello = w.Hello(**({"protocol": 1, "key": shown, "challenge": self.challenge} | fields))
        reply, rest = self.say(hello, route, key=self.secret)
        if isinstance(reply, w.Hi):
            self.session = reply.session
            self.key = self.connection(0)
        return reply, rest

    def connection(self, number):
        return w.connection_key(self.secret, self.challenge, self.session, number)

    def join(self, number, route):
        return self.say(w.Join(self.session, number), route, key=self.connection(number))


@pytest.fixture
def arena():
    return pattern(SIZE)


@pytest.fixture
def epoch():
    return [4]


@pytest.fixture
def peer(arena, epoch, encrypt):
    gate = Gate(arena.data, Passes(SECRET, RANK), lambda: epoch[0], encrypted=encrypt)
    return Peer(gate, encrypt)


def refused(answer, text):
    reply = answer[0]
    assert isinstance(reply, w.No), reply
    assert text in reply.message
    return True


def test_a_peer_with_a_pass_gets_what_it_asks_for(peer, arena):
    assert isinstance(peer.hello()[0], w.Hi)
    reply, frames = peer.say(w.Pull(1, 4, [Span(0, 9), Span(SIZE - 3, 3)]))
    assert reply == w.Data(1, 12)
    assert frames[0] == arena[:9].tobytes() + arena[-3:].tobytes()
    assert peer.say(w.Look(2))[0] == w.Epoch(2, 4)


def test_replies_without_encryption_end_with_a_digest(arena, epoch):
    peer = Peer(Gate(arena.data, Passes(SECRET, RANK), lambda: 4, encrypted=False), False)
    peer.hello()
    _, (data, mark) = peer.say(w.Pull(1, 4, [Span(0, 9)]))
    assert mark == w.tag(peer.key, "publisher", w.encode(w.Data(1, 9)), [data])


@pytest.mark.parametrize("request_", [w.Look(1), w.Pull(1, 4, [Span(0, 9)])])
def test_without_a_pass_nothing_is_answered(peer, request_):
    assert refused(peer.say(request_, key=bytes(32)), "shown no pass")
    assert not peer.gate.known(b"r")


def test_a_pass_is_for_one_connection_and_one_session(peer):
    pass_ = issue(SECRET, RANK)
    peer.hello(pass_=pass_)
    assert refused(peer.say(w.Look(1), b"other", key=bytes(32)), "shown no pass")
    assert refused(peer.hello(b"other", pass_), "used before")
    assert peer.gate.known(b"r")


def test_a_pass_shown_twice_on_a_connection_is_refused(peer):
    peer.hello()
    again = peer.say(w.Hello(1, issue(SECRET, RANK), bytes(16)))
    assert refused(again, "one again")
    assert peer.say(w.Look(1))[0] == w.Epoch(1, 4)


def test_another_protocol_is_refused(peer):
    assert refused(peer.hello(protocol=2), "install the same parallelkit")


def test_the_other_half_of_a_pass_is_no_pass(arena):
    peer = Peer(Gate(arena.data, Passes(SECRET, RANK), lambda: 4, encrypted=True), True)
    assert refused(peer.hello(key=issue(SECRET, RANK)[:NONCE_BYTES]), "pass is refused")


def test_a_large_first_message_is_refused_unread(peer, monkeypatch):
    monkeypatch.setattr(tcp_gate.w, "decode_request", lambda data: pytest.fail("was parsed"))
    assert refused(peer.say(None, payload=bytes(w.MAX_HELLO + 1), key=bytes(32)), "first message")


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x80", b"\x93\x01\x02", os.urandom(200)])
def test_noise_is_refused(peer, payload):
    assert refused(peer.say(None, payload=payload, key=bytes(32)), "no request")
    peer.hello()
    assert refused(peer.say(None, payload=payload), "no request")


def test_deep_nesting_is_refused(peer):
    peer.hello()
    assert refused(peer.say(None, payload=b"\x91" * 100_000), "no request")


@pytest.mark.parametrize("count", [0, 1, 2, 3, 50])
def test_another_number_of_frames_is_refused(peer, count):
    if count != (1 if peer.encrypted else 2):
        assert refused(peer.raw([w.encode(w.Look(1))] * count), "frames")


@pytest.mark.parametrize(
    "fields",
    [
        *({"epoch": -1}, {"id": -1}, {"id": 2**63}, {"spans": [[0, 1]] * 513}, {"more": 1}),
        *({"spans": [[0]]}, {"spans": [["0", 1, []]]}, {"spans": [[0, 1, [[1]]]]}, {"spans": 1}),
        {"spans": [[0.5, 1, []]]},
    ],
)
def test_other_fields_are_refused(peer, fields):
    peer.hello()
    message = {"t": "pull", "id": 1, "epoch": 4, "spans": [[0, 1, []]]}
    assert peer.say(None, payload=msgspec.msgpack.encode(message))[0] == w.Data(1, 1)
    message = message | {"id": 2} | fields
    assert refused(peer.say(None, payload=msgspec.msgpack.encode(message)), "no request")


@pytest.mark.parametrize(
    "span",
    [
        *(Span(SIZE, 1), Span(0, SIZE + 1), Span(-1, 2), Span(0, 1, ((2, SIZE),)), Span(5, -1)),
        *(Span(0, 1, ((1 << 40, 1),)), Span(9, 1, ((2, -4),)), Span(0, 1, ((1, 1),) * 17)),
        *(Span(2**63, 1), Span(0, 2**63), Span(0, 1, ((2**63, 2**63),))),
        *(Span(0, 1, ((1 << 62, 0),)), Span(0, SIZE, ((1 << 62, 0), (1 << 62, 0)))),
    ],
)
def test_a_span_outside_of_the_arena_is_refused(peer, span):
    peer.hello()
    assert refused(peer.say(w.Pull(1, 4, [Span(0, 1), span])), "not inside a memory")
    assert peer.say(w.Pull(2, 4, [Span(0, 1)]))[0] == w.Data(2, 1)


@pytest.mark.parametrize(
    "spans",
    [
        [Span(0, SIZE)] * 5,
        [Span(0, SIZE), Span(0, 1 << 16, ((1 << 4, 1 << 16),)), Span(0, SIZE)] * 2,
        [Span(0, SIZE)] * w.REQUEST_SPANS,
    ],
)
def test_a_request_for_too_much_is_refused_before_memory_is_taken(peer, spans):
    peer.hello()
    assert refused(peer.say(w.Pull(1, 4, spans)), "are allowed")


def test_a_pull_of_another_epoch_gets_the_epoch_and_no_byte(peer, epoch):
    peer.hello()
    reply, rest = peer.say(w.Pull(1, 3, [Span(0, 100)]))
    assert reply == w.Epoch(1, 4)
    assert len(rest) == (0 if peer.encrypted else 1)
    epoch[0] = 5
    assert peer.say(w.Pull(2, 4, [Span(0, 100)]))[0] == w.Epoch(2, 5)


def test_a_request_that_is_played_again_is_refused(peer):
    peer.hello()
    assert peer.say(w.Look(3))[0] == w.Epoch(3, 4)
    for number in (3, 2, 0):
        assert refused(peer.say(w.Look(number)), "after request 3")
    assert peer.say(w.Look(4))[0] == w.Epoch(4, 4)


def test_further_connections_join_a_session(peer):
    peer.hello()
    assert peer.join(1, b"s")[0] == w.Hi(peer.session, SIZE)
    assert peer.say(w.Look(1), b"s", key=peer.connection(1))[0] == w.Epoch(1, 4)
    assert refused(peer.join(1, b"t"), "may be used once")
    for number in (0, 16, 2**40):
        assert refused(peer.join(number, b"t"), "may be used once")
    assert peer.join(15, b"t")[0] == w.Hi(peer.session, SIZE)


def test_a_session_ends_with_its_last_connection(peer):
    peer.hello()
    peer.join(1, b"s")
    peer.gate.lost(b"r")
    assert isinstance(peer.join(2, b"t")[0], w.Hi)
    peer.gate.lost(b"s")
    peer.gate.lost(b"t")
    peer.gate.lost(b"t")
    assert refused(peer.join(3, b"u"), "not open")
    assert not peer.gate._sessions
    assert not peer.gate._lines


def test_an_unknown_session_is_refused(peer):
    peer.hello()
    peer.session = os.urandom(16)
    assert refused(peer.join(1, b"s"), "not open")


@pytest.mark.parametrize("encrypt", [False], indirect=True)
class TestDigests:
    def test_a_first_message_needs_the_secret_half(self, peer):
        pass_ = issue(SECRET, RANK)
        hello = w.Hello(1, pass_[:NONCE_BYTES], bytes(16))
        assert refused(peer.say(hello, key=bytes(32)), "digest of a request is wrong")
        assert isinstance(peer.hello(pass_=pass_)[0], w.Hi), "it is not used up by that"

    def test_a_first_message_that_is_played_again_is_refused(self, peer):
        pass_ = issue(SECRET, RANK)
        hello = w.encode(w.Hello(1, pass_[:NONCE_BYTES], bytes(16)))
        frames = [hello, w.tag(pass_[NONCE_BYTES:], "subscriber", hello)]
        assert isinstance(peer.raw(frames)[0], w.Hi)
        assert refused(peer.raw(frames, b"other"), "used before")

    def test_a_request_needs_the_key_of_its_own_connection(self, peer):
        peer.hello()
        peer.join(1, b"s")
        for key in (bytes(32), peer.secret, peer.connection(1)):
            assert refused(peer.say(w.Look(1), key=key), "digest of a request is wrong")
        assert peer.say(w.Look(1))[0] == w.Epoch(1, 4)

    def test_altered_requests_are_refused(self, peer):
        peer.hello()
        data = w.encode(w.Pull(1, 4, [Span(0, 9)]))
        mark = w.tag(peer.key, "subscriber", data)
        for frames in (
            [w.encode(w.Pull(1, 4, [Span(1, 9)])), mark],
            [data, mark[:-1]],
            [data, mark + b"\0"],
            [data, b""],
            [data, w.tag(peer.key, "publisher", data)],
        ):
            assert refused(peer.raw(frames), "digest of a request is wrong")
        assert peer.raw([data, mark])[0] == w.Data(1, 9)


def test_the_digest_tells_header_and_bytes_apart():
    tags = {w.tag(bytes(32), "publisher", a, b) for a, b in ((b"ab", [b"c"]), (b"a", [b"bc"]))}
    assert len(tags) == 2
    assert w.tag(bytes(32), "publisher", b"a", [b"bc", b"d"]) == w.tag(
        bytes(32), "publisher", b"a", [b"b", b"cd"]
    ), "how the bytes are framed does not matter"


# --- on the wire -------------------------------------------------------------------------------


class Relay:
    """A TCP relay between two ends that keeps what it passes on, and may alter it."""

    def __init__(self, offer):
        endpoint = msgspec.msgpack.decode(offer)["endpoint"].removeprefix("tcp://")
        self.target = (endpoint.rpartition(":")[0], int(endpoint.rpartition(":")[2]))
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.offer = changed(offer, endpoint=f"tcp://127.0.0.1:{self.listener.getsockname()[1]}")
        self.seen = bytearray()
        self.flip_after = None
        self.open = True
        self.sockets = []
        self.threads = [threading.Thread(target=self._accept)]
        self.threads[0].start()

    def _accept(self):
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            if not self.open:
                near.close()
                return
            far = socket.create_connection(self.target)
            self.sockets += [near, far]
            for a, b, down in ((near, far, False), (far, near, True)):
                thread = threading.Thread(target=self._pump, args=(a, b, down))
                self.threads.append(thread)
                thread.start()

    def _pump(self, source, target, down):
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                if down:
                    if self.flip_after is not None and len(data) > 1000:
                        data[500] ^= 1
                        self.flip_after = None
                    self.seen += data
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self):
        self.open = False
        with contextlib.suppress(OSError):
            socket.create_connection(self.listener.getsockname()).close()
        for end in self.sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join(30)
        for end in [self.listener, *self.sockets]:
            end.close()


@pytest.fixture
def relay(publisher):
    with contextlib.closing(Relay(publisher.offer())) as relay:
        yield relay


def test_bytes_can_be_read_on_their_way_only_without_encryption(relay, join, encrypt):
    data = pattern(SIZE)[:50_000].tobytes()
    assert pulled(join(relay.offer), Span(0, 50_000)) == [data]
    assert (data[1000:2000] in relay.seen) == (not encrypt)


def test_a_pass_can_be_read_on_its_way_in_neither_case(publisher, encrypt):
    pass_ = issue(SECRET, RANK)
    sent = []
    answer = publisher._gate.answer
    publisher._gate.answer = lambda route, frames: (
        sent.extend(bytes(f) for f in frames) or answer(route, frames)
    )
    with contextlib.closing(TcpSubscriber(publisher.offer(), pass_)):
        assert (pass_[NONCE_BYTES:] in b"".join(sent)) == encrypt, "inside of the encryption"


def test_bytes_altered_on_their_way_do_not_arrive(relay, join):
    end = join(relay.offer, connections=1)
    target = np.full(100_000, 0xEE, np.uint8)
    relay.flip_after = 0
    with pytest.raises((ProtocolError, PeerLostError, UpdateTimeoutError)):
        end.pull([Span(0, 100_000)], [target], epoch=0, deadline=soon(5))
    assert set(target) == {0xEE}, "not even one of them"


def test_a_connection_that_is_cut_is_a_lost_peer(relay, join):
    end = join(relay.offer)
    assert pulled(end, Span(0, 5))
    relay.close()
    for _ in range(2):
        with pytest.raises(PeerLostError, match="publisher rank 5") as caught:
            pulled(end, Span(0, 5))
        assert caught.value.peers


# --- epochs within a pull ----------------------------------------------------------------------


@pytest.mark.parametrize("after", [1, 2, "all"])
def test_a_bump_within_a_pull_voids_it(publisher, join, after):
    end = join()
    answer, count = publisher._gate.answer, 0

    def answer_and_bump(route, frames):
        nonlocal count
        reply = answer(route, frames)
        kind = w.decode_reply(bytes(reply[0]))
        if isinstance(kind, w.Data):
            count += 1
            if count == after or (after == "all" and count == 4):
                publisher.bump()
        return reply

    publisher._gate.answer = answer_and_bump
    total = 2 << 20
    spans = [Span(0, SIZE)] * 2  # four requests: half a MiB each
    with pytest.raises(TransportError, match="is at epoch 1, not 0"):
        pulled(end, *spans)
    assert count in (1, 2, 3, 4)
    assert sum(map(len, pulled(end, *spans, epoch=1))) == total


# --- waiting -----------------------------------------------------------------------------------


@pytest.fixture
def slow(publisher):
    """Lets the publisher answer only while the event is set."""
    go, answer = threading.Event(), publisher._gate.answer
    go.set()
    publisher._gate.answer = lambda route, frames: go.wait(30) and answer(route, frames)
    yield go
    go.set()


def test_the_deadline_holds_and_late_replies_are_not_mistaken(publisher, join, slow):
    end = join()
    slow.clear()
    for _ in range(3):
        start = time.monotonic()
        with pytest.raises(UpdateTimeoutError, match="publisher rank 5") as caught:
            pulled(end, Span(0, SIZE), seconds=0.2)
        assert time.monotonic() - start < 20
        assert "publisher rank 5" in caught.value.missing[0]
    with pytest.raises(UpdateTimeoutError):
        end.epoch(deadline=soon(0.1))
    slow.set()
    for span in some_spans(SIZE, 1, 20):
        assert pulled(end, span) == [view(pattern(SIZE), span).tobytes()]


def test_a_late_reply_of_bytes_that_were_written_over_is_not_taken_for_an_altered_one(
    publisher, join, encrypt, slow
):
    """Its digest is of the bytes before; nobody waits for it any more."""
    end = join(connections=1)
    answer, late = publisher._gate.answer, [True]

    def written_over(route, frames):
        reply = answer(route, frames)
        if late and not encrypt:
            late.clear()
            reply[1] = bytes(len(reply[1]))
        return reply

    publisher._gate.answer = written_over
    slow.clear()
    with pytest.raises(UpdateTimeoutError):
        pulled(end, Span(0, 1 << 16), seconds=0.2)
    slow.set()
    assert pulled(end, Span(3, 5)) == [pattern(SIZE)[3:8].tobytes()]


def test_close_ends_a_call_that_waits(join, slow):
    end = join()
    slow.clear()
    threading.Timer(0.2, end.close).start()
    with pytest.raises(StateError, match="close"):
        pulled(end, Span(0, 5))
    end.close()
    with pytest.raises(StateError, match="closed"):
        pulled(end, Span(0, 5))
    with pytest.raises(StateError, match="closed"):
        end.epoch(deadline=soon())


def test_close_within_a_call_of_the_same_thread_comes_after_it(join, monkeypatch):
    """As a signal handler does."""
    end = join()
    original = tcp_client.scatter

    def closing(frames, targets):
        end.close()
        with pytest.raises(StateError, match="within another"):
            end.epoch(deadline=soon())
        original(frames, targets)

    monkeypatch.setattr(tcp_client, "scatter", closing)
    with pytest.raises(StateError, match="close"):
        pulled(end, Span(0, 5))
    assert end._context is None


@pytest.mark.parametrize("encrypt", [True], indirect=True)
def test_nothing_that_listens_is_a_lost_peer(publisher, join):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(PeerLostError, match="nothing listens there"):
        join(changed(publisher.offer(), endpoint=f"tcp://127.0.0.1:{port}"), timeout=20)


def test_a_listener_that_says_nothing_is_waited_for_until_the_timeout(publisher, join):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        endpoint = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(UpdateTimeoutError, match="publisher rank 5"):
            join(changed(publisher.offer(), endpoint=endpoint), timeout=0.5)


# --- connections -------------------------------------------------------------------------------


@pytest.mark.parametrize("connections", [1, 2, 5, 16])
def test_a_pull_is_spread_over_all_connections(join, connections):
    end = join(connections=connections)
    count = 2 * connections
    assert pulled(end, *[Span(0, SIZE)] * count) == [pattern(SIZE).tobytes()] * count
    assert len(end._lines) == connections
    assert all(line.last for line in end._lines)


@pytest.mark.parametrize("connections", [0, -1, 17, True, 1.5, "2", None])
def test_another_number_of_connections_is_refused(join, connections):
    with pytest.raises(TransportError, match="1 to 16"):
        join(connections=connections)


def test_the_publisher_forgets_connections_that_ended(publisher, join):
    ends = [join() for _ in range(4)]
    assert len(publisher._gate._lines) == 8
    for end in ends[:3]:
        end.close()
    deadline = soon()
    while len(publisher._gate._lines) > 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(publisher._gate._lines) == len(publisher._routes) == 2
    assert len(publisher._gate._sessions) == 1
    assert pulled(ends[3], Span(0, 5))


@contextlib.contextmanager
def raw_connection(publisher, encrypt):
    """A DEALER of its own that has shown a pass, and says what it likes."""
    offer = w.decode_offer(publisher.offer())
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVHWM, 1)
        if encrypt:
            dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
            dealer.curve_serverkey = offer.key.encode()
        dealer.connect(offer.endpoint)
        yield dealer
    finally:
        dealer.close(0)
        context.term()


@pytest.mark.parametrize("encrypt", [True], indirect=True)
def test_a_peer_that_asks_for_more_and_more_and_reads_nothing_is_dropped(publisher, join):
    other = join()
    with raw_connection(publisher, True) as dealer:
        dealer.send(w.encode(w.Hello(1, issue(SECRET, RANK), bytes(16))))
        assert dealer.poll(30_000)
        assert isinstance(w.decode_reply(dealer.recv()), w.Hi)
        columns = Span(0, 500, ((1 << 10, 1 << 10),))  # copied together: costs memory
        for number in range(1, 400):
            dealer.send(w.encode(w.Pull(number, 0, [columns] * 4)))
        deadline = soon()
        while len(publisher._gate._lines) > 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(publisher._gate._lines) == 2, "the two of the other member"
        assert pulled(other, Span(0, SIZE)) == [pattern(SIZE).tobytes()]


@pytest.mark.parametrize("nbytes", [w.MAX_HELLO + 1, w.MAX_REQUEST + 1, 50 << 20])
def test_large_messages_from_strangers_do_not_disturb_the_others(publisher, join, encrypt, nbytes):
    other = join()
    with raw_connection(publisher, encrypt) as dealer:
        dealer.send_multipart([bytes(nbytes)] * (1 if encrypt else 2))
        if nbytes <= w.MAX_REQUEST // 2:
            assert dealer.poll(30_000)
            assert refused([w.decode_reply(dealer.recv())], "first message")
        assert pulled(other, Span(0, SIZE)) == [pattern(SIZE).tobytes()]


def test_a_publisher_whose_thread_fails_is_a_lost_peer_and_says_so(publisher, join, caplog):
    end = join()
    publisher._gate.answer = lambda route, frames: 1 / 0
    with pytest.raises(PeerLostError):
        pulled(end, Span(0, 5))
    assert "has failed" in caplog.text
    publisher.close()


# --- memory and addresses ----------------------------------------------------------------------


def test_an_arena_that_is_there_already_is_served(encrypt):
    memory = bytearray(pattern(1000).tobytes())
    with contextlib.closing(
        TcpPublisher(1000, secret=SECRET, rank=RANK, memory=memoryview(memory), encrypt=encrypt)
    ) as publisher:
        with contextlib.closing(TcpSubscriber(publisher.offer(), issue(SECRET, RANK))) as end:
            assert pulled(end, Span(0, 1000)) == [pattern(1000).tobytes()]
            memory[0] ^= 1
            assert pulled(end, Span(0, 1)) == [memory[:1]]


def test_an_arena_of_another_size_is_refused():
    with pytest.raises(TransportError, match="999 bytes instead of 1000"):
        TcpPublisher(1000, secret=SECRET, rank=0, memory=memoryview(bytearray(999)))


def test_an_arena_that_is_too_large_is_refused():
    with pytest.raises(TransportError, match="cannot allocate"):
        TcpPublisher(1 << 60, secret=SECRET, rank=0)


def test_a_secret_of_another_length_is_refused():
    with pytest.raises(TransportError, match="secret"):
        TcpPublisher(1000, secret=b"", rank=0)


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "*", "", "localhost", "[::ffff:0.0.0.0]"])
def test_all_interfaces_and_names_are_refused(host):
    with pytest.raises(TransportError, match="numeric address of one interface"):
        TcpPublisher(1000, secret=SECRET, rank=0, host=host)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_it_listens_at_the_interface_named_only(host):
    with contextlib.closing(TcpPublisher(10, secret=SECRET, rank=0, host=host)) as publisher:
        address, _, port = w.decode_offer(publisher.offer()).endpoint[6:].rpartition(":")
        assert address == host
        other = "127.0.0.2" if host == "127.0.0.1" else "127.0.0.1"
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((other, int(port)), timeout=10)


def test_ipv6(encrypt):
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with contextlib.closing(
        TcpPublisher(10, secret=SECRET, rank=0, host="[::1]", encrypt=encrypt)
    ) as publisher:
        assert "[::1]" in w.decode_offer(publisher.offer()).endpoint
        with contextlib.closing(TcpSubscriber(publisher.offer(), issue(SECRET, 0))) as end:
            assert pulled(end, Span(0, 10)) == [bytes(10)]


def test_an_address_of_another_host_gives_the_interface_it_is_reached_from(monkeypatch):
    from parallelkit.weights import tcp_server

    monkeypatch.setattr(tcp_server, "interface_towards", lambda host: "127.0.0.3")
    # 203.0.113.1 is of a block for documentation, which no host has.
    with contextlib.closing(
        TcpPublisher(10, secret=SECRET, rank=0, host="203.0.113.1")
    ) as publisher:
        assert w.decode_offer(publisher.offer()).endpoint.startswith("tcp://127.0.0.3:")


def test_the_interface_towards_loopback_is_loopback():
    assert interface_towards("127.0.0.1") == "127.0.0.1"


# --- reach -------------------------------------------------------------------------------------

HERE = HostIdentity(boot_id="a", uid=1, pid=2, net_namespace=7)
ELSEWHERE = attrs.evolve(HERE, boot_id="b")
CONTAINER = attrs.evolve(HERE, net_namespace=8)


@pytest.mark.parametrize(
    ("host", "other", "reach", "reason"),
    [
        ("127.0.0.1", None, True, "loopback"),
        ("127.0.0.1", HERE, True, "every process of this host"),
        ("127.0.0.1", attrs.evolve(HERE, uid=9), True, "every process of this host"),
        ("127.0.0.1", ELSEWHERE, False, "on different hosts; pass publish_weights(endpoint="),
        ("[::1]", ELSEWHERE, False, "on different hosts; pass publish_weights(endpoint="),
        ("127.0.0.1", CONTAINER, False, "different network namespaces; pass"),
        ("10.0.0.5", None, True, "listens on 10.0.0.5"),
        ("10.0.0.5", ELSEWHERE, True, "reaches every host that the ticket does"),
        ("[fd00::1]", CONTAINER, True, "listens on [fd00::1]"),
    ],
)
def test_reach(host, other, reach, reason):
    found = candidate(TransportRequest(publisher=HERE, subscriber=other, host=host))
    assert (found.name, found.reach) == ("tcp", reach)
    assert reason in found.reason


def test_weights_on_a_device_are_staged():
    assert "cuda" in candidate(TransportRequest(publisher=HERE, device="cuda")).reason


def test_shared_memory_is_cheaper():
    from parallelkit.weights import shm

    request = TransportRequest(publisher=HERE, subscriber=HERE)
    assert shm.candidate(request).cost < candidate(request).cost
