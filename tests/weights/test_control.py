"""The control channel: where it listens, whom it lets in, and that strangers do no harm."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import socket
import struct
import threading
import time
from pathlib import Path

import attrs
import pytest
import zmq

from parallelkit.errors import PeerLostError, ProtocolError, TicketError, TransportError
from parallelkit.weights import messages as m
from parallelkit.weights.client import ControlClient
from parallelkit.weights.control import (
    ControlServer,
    Desk,
    Inbox,
    Lost,
    Received,
)
from parallelkit.weights.endpoint import parse_endpoint
from parallelkit.weights.ticket import Ticket

KEY = b"s" * 16


def open_fds():
    """Number and target of each."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists them is gone by then
            found.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
    return found


def soon(look, seconds=5.0):
    """Wait until something is true."""
    deadline = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def _nothing_is_left():
    before, threads = open_fds(), set(threading.enumerate())
    yield
    if open_fds() != before:
        gc.collect()
    deadline = time.monotonic() + 5.0
    while open_fds() - before and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not open_fds() - before  # what an earlier test left to the collector may have gone
    assert set(threading.enumerate()) == threads


class Reception(Desk):
    """Lets anyone in who says hello, and answers with what it was asked."""

    def __init__(self):
        self.routes = {}
        self.gone = []
        self.heard = []

    def receive(self, route, message):
        self.heard.append(message)
        if isinstance(message, m.Hello):
            if message.member == 666:
                raise TicketError("member 666 is not wanted")
            if message.member == 667:
                raise RuntimeError("a driver is broken")
            self.routes[route] = message.member
            return [(route, m.Joined(version=message.member))]
        if route not in self.routes:
            raise ProtocolError("no hello came first")
        return [(route, m.Abort(version=1, epoch=1, reason="x" * len(message.message)))]

    def known(self, route):
        return route in self.routes

    def lost(self, route):
        self.gone.append(self.routes.pop(route, None))


class Office:
    """A server with its desk, and the ticket to it."""

    def __init__(self, endpoint=None, timeout=5.0):
        self.server = ControlServer(endpoint, timeout)
        self.desk = Reception()
        self.server.start(self.desk)
        self.ticket = Ticket(self.server.endpoint, self.server.server_key, bytes(32))
        self.port = int(self.server.endpoint.rpartition(":")[2])

    def join(self, member=0, timeout=5.0, ticket=None):
        client = ControlClient(ticket or self.ticket, timeout)
        try:
            client.send(hello(member))
            assert client.receive(time.monotonic() + timeout) == m.Joined(version=member)
        except BaseException:
            client.close()
            raise
        return contextlib.closing(client)

    def works(self):
        with self.join(77):
            pass

    def close(self):
        self.server.close()


@pytest.fixture
def office():
    with contextlib.closing(Office()) as office:
        yield office


def hello(member=0, **fields):
    given = {
        "protocol": 1,
        "token": bytes(32),
        "member": member,
        "boot_id": "b",
        "uid": 0,
        "pid": 1,
        "pid_namespace": 0,
        "net_namespace": 0,
        "ipc_namespace": 0,
        "host": "h",
        "library": "1",
        "accelerator": None,
    }
    return m.Hello(**given | fields)


def answer(client, seconds=5.0):
    return client.receive(time.monotonic() + seconds)


# --- endpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, ("127.0.0.1", 0)),
        ("127.0.0.1", ("127.0.0.1", 0)),
        ("127.0.0.1:", ("127.0.0.1", 0)),
        ("127.0.0.1:*", ("127.0.0.1", 0)),
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("127.0.0.1:5600", ("127.0.0.1", 5600)),
        ("127.0.0.1:65535", ("127.0.0.1", 65535)),
        ("tcp://127.0.0.1:5600", ("127.0.0.1", 5600)),
        ("tcp://10.0.0.5", ("10.0.0.5", 0)),
        ("localhost:5600", ("127.0.0.1", 5600)),
        ("::1", ("[::1]", 0)),
        ("[::1]", ("[::1]", 0)),
        ("[::1]:5600", ("[::1]", 5600)),
        ("tcp://[fd00::2]:*", ("[fd00::2]", 0)),
        ("[::ffff:10.0.0.5]:1", ("[::ffff:a00:5]", 1)),
    ],
)
def test_endpoints(text, expected):
    assert parse_endpoint(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("0.0.0.0", "0.0.0.0:5600", "tcp://0.0.0.0:5600", "0", "0:5600", "0x0:5600"),
        *("*", "*:5600", "tcp://*:*", "", ":", ":5600", "tcp://", "tcp://:5600"),
        *("::", "[::]", "[::]:5600", "tcp://[::]:*", "[0:0:0:0:0:0:0:0]:1"),
        *("::ffff:0.0.0.0", "[::ffff:0:0]:5600"),
    ],
)
def test_all_interfaces_are_refused(text):
    with pytest.raises(TransportError, match=r"all interfaces.*give the address of one interface"):
        parse_endpoint(text)


@pytest.mark.parametrize(
    "port",
    ["65536", "99999", "-1", "+5", " 5", "5 ", "1_0", "x", "5600/x", "0x10", "٥", "9" * 5000],
)
def test_bad_ports(port):
    with pytest.raises(TransportError, match=r"cannot be used \(port\)|Exceeds the limit"):
        parse_endpoint(f"127.0.0.1:{port}")


@pytest.mark.parametrize(
    "text",
    [
        *("ipc:///tmp/socket", "inproc://x", "tcp://tcp://127.0.0.1:1", "127.0.0.1:1:2"),
        *("a\0b:1", "." * 300, "x" * 70 + ":1"),
    ],
)
def test_junk(text, monkeypatch):
    real = socket.getaddrinfo

    def numeric_only(host, *args, **kwargs):
        return real(host, *args, flags=socket.AI_NUMERICHOST, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", numeric_only)
    with pytest.raises(TransportError, match="cannot be used"):
        parse_endpoint(text)


def test_a_host_without_address(monkeypatch):
    def unknown(*args, **kwargs):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(TransportError, match=r"'nowhere\.example:1'.*not known"):
        parse_endpoint("nowhere.example:1")


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (["::1", "127.0.0.1"], ("127.0.0.1", 7)),
        (["fd00::9"], ("[fd00::9]", 7)),
        (["10.1.2.3", "10.1.2.4"], ("10.1.2.3", 7)),
    ],
)
def test_a_host_name_is_its_first_address_by_preference_ipv4(monkeypatch, addresses, expected):
    infos = [
        (socket.AF_INET6 if ":" in a else socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, 0))
        for a in addresses
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: infos)
    assert parse_endpoint("trainer.example:7") == expected


def test_a_host_name_of_all_interfaces_is_refused(monkeypatch):
    info = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("0.0.0.0", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: info)
    with pytest.raises(TransportError, match="all interfaces"):
        parse_endpoint("trainer.example:7")


# --- where it listens --------------------------------------------------------------------------


def listeners(port):
    """Local addresses of the listening TCP sockets at a port, as /proc shows them."""
    found = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                local, state = line.split()[1], line.split()[3]
                address, at = local.split(":")
                if state == "0A" and int(at, 16) == port:
                    found.append(bytes.fromhex(address))
    return found


@pytest.mark.parametrize("endpoint", [None, "127.0.0.1", "tcp://127.0.0.1:*", "localhost:0"])
def test_it_listens_at_loopback_only(endpoint):
    with contextlib.closing(Office(endpoint)) as office:
        assert office.server.endpoint == f"tcp://127.0.0.1:{office.port}"
        assert listeners(office.port) == [struct.pack("<I", 0x7F000001)]
        office.works()


def test_it_listens_at_the_address_that_is_named():
    with contextlib.closing(Office("127.0.0.3:0")) as office:
        assert listeners(office.port) == [struct.pack("<I", 0x7F000003)]
        office.works()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", office.port), 5.0)


def has_ipv6():
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6 loopback")
def test_it_listens_at_an_ipv6_address_and_clients_find_it():
    with contextlib.closing(Office("[::1]:0")) as office:
        assert office.server.endpoint == f"tcp://[::1]:{office.port}"
        assert len(listeners(office.port)) == 1
        office.works()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", office.port), 5.0)


def test_a_port_that_is_taken_is_an_error_at_once():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        outcome = []

        def bind():
            try:
                ControlServer(f"127.0.0.1:{port}", 5.0)
            except TransportError as error:
                outcome.append(str(error))

        thread = threading.Thread(target=bind, daemon=True)
        thread.start()
        thread.join(5.0)
        assert outcome, "it hangs"
    assert f"cannot listen at 127.0.0.1:{port}" in outcome[0]
    assert "already in use" in outcome[0]
    assert "endpoint='address:port'" in outcome[0]


def test_an_address_that_is_not_of_this_host():
    with pytest.raises(TransportError, match=r"cannot listen at 192\.0\.2\.77:any free port"):
        ControlServer("192.0.2.77", 5.0)


def test_a_server_that_never_started_closes():
    server = ControlServer(None, 5.0)
    server.close()
    server.close()


def test_two_servers_have_keys_and_ports_of_their_own():
    with contextlib.closing(Office()) as a, contextlib.closing(Office()) as b:
        assert a.port != b.port
        assert a.server.server_key != b.server.server_key
        assert len(a.server.server_key) == 40


# --- talking -----------------------------------------------------------------------------------


def test_messages_go_both_ways(office):
    with office.join(3) as client:
        client.send(m.Refused(error="E", message="four"))
        assert answer(client) == m.Abort(version=1, epoch=1, reason="xxxx")
        (route,) = office.desk.routes
        office.server.send(route, m.Begin(version=2, epoch=9, slot=0, timeout=1.5))
        assert answer(client) == m.Begin(version=2, epoch=9, slot=0, timeout=1.5)
        assert answer(client, 0.02) is None
        assert answer(client, -1.0) is None


def test_many_messages_keep_their_order(office):
    with office.join() as client:
        (route,) = office.desk.routes
        for version in range(500):
            office.server.send(route, m.Joined(version=version))
        assert [answer(client).version for _ in range(500)] == list(range(500))


def test_a_refusal_names_the_error(office):
    with contextlib.closing(ControlClient(office.ticket, 5.0)) as client:
        client.send(hello(666))
        refused = answer(client)
        assert refused == m.Refused(error="TicketError", message="member 666 is not wanted")


def test_an_error_of_a_plugin_refuses_one_and_serves_the_others(office):
    with contextlib.closing(ControlClient(office.ticket, 5.0)) as client:
        client.send(hello(667))
        assert answer(client) == m.Refused(
            error="TransportError",
            message="the publisher failed: RuntimeError: a driver is broken",
        )
    office.works()


def test_a_client_that_goes_is_noticed_at_once(office):
    with office.join(5):
        assert office.desk.gone == []
    soon(lambda: office.desk.gone == [5], 2.0)


def test_each_client_is_noticed_as_itself(office):
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(office.join(i)) for i in range(6)]
        for i in (4, 0, 2):
            clients[i].close()
            soon(lambda i=i: i in office.desk.gone, 2.0)
        assert sorted(office.desk.gone) == [0, 2, 4]
        assert sorted(office.desk.routes.values()) == [1, 3, 5]


def test_a_server_that_goes_is_noticed_at_once_after_its_last_message(office):
    with office.join() as client:
        (route,) = office.desk.routes
        office.server.send(route, m.Close(reason="bye"))
        office.server.close()
        assert answer(client) == m.Close(reason="bye")
        started = time.monotonic()
        with pytest.raises(PeerLostError, match="is gone: the connection ended") as caught:
            answer(client)
        assert time.monotonic() - started < 2.0
        assert caught.value.peers == (f"publisher at {office.server.endpoint}",)
        with pytest.raises(PeerLostError):
            client.send(hello())


@pytest.mark.parametrize("endpoint", [None, "tcp://127.0.0.1:99999", "tcp://127.0.0.1:0"])
def test_nobody_listens_there(office, endpoint):
    office.server.close()
    ticket = attrs.evolve(office.ticket, endpoint=endpoint or office.ticket.endpoint)
    with contextlib.closing(ControlClient(ticket, 5.0)) as client:
        started = time.monotonic()
        with pytest.raises(PeerLostError, match="does not listen there"):
            answer(client)
        assert time.monotonic() - started < 2.0


@pytest.mark.parametrize(
    "fields",
    [
        {"endpoint": "nonsense"},
        {"endpoint": "udp://127.0.0.1:1"},
        {"endpoint": ""},
        {"server_key": "é" * 40},
        {"server_key": '"' * 40},
    ],
    ids=repr,
)
def test_a_ticket_with_an_unusable_address_or_key(fields):
    ticket = attrs.evolve(Ticket("tcp://127.0.0.1:5600", "k" * 40, bytes(32)), **fields)
    with pytest.raises(TicketError, match="unusable address or key"):
        ControlClient(ticket, 5.0)


def test_clients_that_come_and_go_leave_nothing_behind(office):
    office.works()
    soon(lambda: not office.desk.routes and not office.server._routes)
    before = open_fds()
    for member in range(30):
        with office.join(member):
            pass
    soon(lambda: not office.desk.routes and not office.server._routes)
    soon(lambda: len(open_fds()) <= len(before))


# --- strangers ---------------------------------------------------------------------------------


def stranger(office):
    return socket.create_connection(("127.0.0.1", office.port), 5.0)


def heard_of(peer):
    """All that a raw peer hears until the end of the connection, or for a quarter of a second."""
    heard = b""
    peer.settimeout(0.25)
    with contextlib.suppress(OSError):
        while data := peer.recv(65536):
            heard += data
    return heard


GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3"
ZMTP_NULL = GREETING + b"\0" + b"NULL".ljust(20, b"\0") + b"\0" * 32
ZMTP_PLAIN = GREETING + b"\0" + b"PLAIN".ljust(20, b"\0") + b"\0" * 32
ZMTP_CURVE = GREETING + b"\0" + b"CURVE".ljust(20, b"\0") + b"\0" * 32


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\0",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        random.Random(1).randbytes(100_000),
        b"\xff" * 5000,
        m.encode(hello()),
        GREETING,
        ZMTP_NULL,
        ZMTP_NULL + b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x06DEALER",
        ZMTP_NULL + b"\2" + b"\xff" * 8,
        ZMTP_PLAIN + b"\x04\x0a\x05HELLO\1u\1p",
        ZMTP_CURVE + b"\x04\xc8\x05HELLO" + bytes(194),
        ZMTP_CURVE + b"\6" + b"\x7f" + b"\xff" * 7 + b"x" * 1000,
        ZMTP_CURVE + b"\0\x20" + bytes(32),
    ],
    ids=lambda garbage: repr(garbage[:14]) + f"+{len(garbage)}",
)
def test_raw_bytes_do_no_harm_and_get_nothing(office, garbage):
    with office.join(1) as client:
        heard = len(office.desk.heard)
        with stranger(office) as peer:
            with contextlib.suppress(OSError):
                peer.sendall(garbage)
            assert len(heard_of(peer)) <= 256, "no more than a greeting and an error"
        office.works()
        client.send(m.Refused(error="E", message="1"))
        assert answer(client) == m.Abort(version=1, epoch=1, reason="x")
        assert len(office.desk.heard) == heard + 2, "nothing of it came to the desk"
    soon(lambda: 1 in office.desk.gone)


def test_a_hundred_strangers_that_say_nothing_do_not_keep_others_out(office):
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(stranger(office))
        started = time.monotonic()
        office.works()
        assert time.monotonic() - started < 3.0


def test_strangers_leave_no_descriptor(office):
    office.works()
    soon(lambda: not office.server._routes)
    before = open_fds()
    for _ in range(30):
        with stranger(office) as peer:
            peer.sendall(b"hello\r\n")
    soon(lambda: len(open_fds()) <= len(before))


@contextlib.contextmanager
def dealer(office, server_key=None):
    """A bare ZeroMQ socket, with keys or without."""
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.setsockopt(zmq.LINGER, 0)
    peer.setsockopt(zmq.RECONNECT_IVL, -1)
    if server_key is not None:
        peer.curve_serverkey = server_key
        peer.curve_publickey, peer.curve_secretkey = zmq.curve_keypair()
    peer.connect(office.server.endpoint)
    try:
        yield peer
    finally:
        peer.close(0)
        context.term()


def test_a_client_without_encryption_gets_nothing(office):
    with dealer(office) as peer:
        with contextlib.suppress(zmq.ZMQError):
            peer.send(m.encode(hello()), zmq.DONTWAIT)
        assert not peer.poll(300)
        assert office.desk.heard == []
        office.works()
        assert not peer.poll(50)


def test_a_client_with_another_server_key_gets_nothing(office):
    with dealer(office, zmq.curve_keypair()[0]) as peer:
        with contextlib.suppress(zmq.ZMQError):
            peer.send(m.encode(hello()), zmq.DONTWAIT)
        assert not peer.poll(300)
        assert office.desk.heard == []
        office.works()


def test_a_ticket_with_another_server_key_says_so_at_once(office):
    other = attrs.evolve(office.ticket, server_key=zmq.curve_keypair()[0].decode())
    with contextlib.closing(ControlClient(other, 5.0)) as client:
        with contextlib.suppress(PeerLostError):
            client.send(hello())
        started = time.monotonic()
        with pytest.raises(TicketError, match="refused the encrypted handshake"):
            answer(client)
        assert time.monotonic() - started < 3.0
    assert office.desk.heard == []
    office.works()


@pytest.mark.parametrize(
    "frames",
    [
        [b"x" * (m.MAX_HELLO + 1)],
        [m.encode(m.Refused(error="E", message="x" * m.MAX_HELLO))],
        [m.encode(m.Refused(error="E", message="x"))],
        [b""],
        [b"\xc1"],
        [m.encode(hello()), b""],
        [b"", m.encode(hello())],
        [b"x"] * 50,
        [m.encode(m.Joined(version=1))],
    ],
    ids=lambda frames: f"{len(frames)}x{len(frames[0])}-{frames[0][:6]!r}",
)
def test_a_peer_that_has_the_key_and_says_nonsense_is_refused(office, frames):
    with dealer(office, office.server.server_key.encode()) as peer:
        peer.send_multipart(frames)
        assert peer.poll(5000)
        refused = m.decode_at_subscriber(peer.recv())
        assert isinstance(refused, m.Refused)
        assert refused.error == "ProtocolError"
        assert not office.desk.routes
        peer.send(m.encode(hello(4)))
        assert peer.poll(5000)
        assert m.decode_at_subscriber(peer.recv()) == m.Joined(version=4)
    soon(lambda: office.desk.gone == [4])
    office.works()


def test_an_oversize_first_message_is_not_even_parsed(office):
    with contextlib.closing(ControlClient(office.ticket, 5.0)) as client:
        client.send(m.Refused(error="E", message="x" * 5000))
        refused = answer(client)
        assert isinstance(refused, m.Refused)
        assert "a first message of 50" in refused.message
    assert office.desk.heard == []


def test_large_messages_are_for_those_who_have_joined(office):
    with office.join() as client:
        client.send(m.Refused(error="E", message="x" * 60_000))
        assert answer(client) == m.Abort(version=1, epoch=1, reason="x" * 60_000)


def test_a_message_beyond_the_largest_ends_the_connection(office):
    with dealer(office, office.server.server_key.encode()) as peer:
        peer.send(m.encode(hello(6)))
        assert peer.poll(5000)
        peer.recv()
        peer.send(bytes(m.MAX_TO_PUBLISHER + 1))
        soon(lambda: office.desk.gone == [6])
    office.works()


def test_a_publisher_that_talks_nonsense_is_a_protocol_error(office):
    with office.join() as client:
        (route,) = office.desk.routes
        office.server.send(route, m.Leave(session=KEY))
        with pytest.raises(ProtocolError, match="no control message"):
            answer(client)


def test_a_message_to_nobody_is_a_loss(office):
    office.server.send(b"nobody", m.Joined(version=1))
    soon(lambda: office.desk.gone == [None])
    office.works()


# --- inbox -------------------------------------------------------------------------------------


def test_the_inbox_keeps_order_waits_and_forgets():
    inbox = Inbox()
    assert inbox.get(time.monotonic() - 1) is None
    started = time.monotonic()
    assert inbox.get(time.monotonic() + 0.05) is None
    assert 0.03 < time.monotonic() - started < 2.0
    items = [Received(b"a", m.Leave(session=KEY)), Lost(b"a"), Lost(b"b")]
    for item in items:
        inbox.put(item)
    assert inbox.get(time.monotonic() - 1) == items[0]
    assert inbox.get(time.monotonic() + 1) == items[1]
    inbox.clear()
    inbox.clear()
    assert inbox.get(time.monotonic() - 1) is None
