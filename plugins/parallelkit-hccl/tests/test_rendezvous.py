"""The root info over the encrypted channel: who gets it, who does not, and who hears why."""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import pytest
import zmq
from parallelkit_hccl.errors import HcclArgumentError, HcclTimeoutError, RootInfoError
from parallelkit_hccl.rendezvous import RootInfoServer, RootInfoTicket

from parallelkit.errors import ProtocolError, TicketError, TransportError
from parallelkit.weights.ticket import Ticket

INFO = random.Random(5).randbytes(4108)
LONG, SHORT = 60.0, 0.3


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as made:
        yield made


def arrived(server: RootInfoServer) -> None:
    """Wait until a request is there to be read, so that no slow machine decides a test."""
    assert server._router.poll(1000 * LONG)


def ask(pool: ThreadPoolExecutor, ticket: str, rank: int, of: int = 3) -> Future[bytes]:
    return pool.submit(RootInfoTicket(ticket, rank, of), None, LONG)


def test_everyone_gets_it(pool):
    with RootInfoServer(3) as server:
        asked = [ask(pool, server.ticket, rank) for rank in (1, 2)]
        assert server(INFO, LONG) == INFO
        assert [a.result(LONG) for a in asked] == [INFO, INFO]


def test_nobody_gets_it_before_all_have_asked(pool):
    with RootInfoServer(3) as server:
        first = ask(pool, server.ticket, 2)
        arrived(server)
        with pytest.raises(HcclTimeoutError, match=r"of 3 ranks, \[1\] did not come") as caught:
            server(INFO, SHORT)
        assert caught.value.missing == (1,)
        with pytest.raises(HcclTimeoutError, match=r"\[1\] did not come") as caught:
            first.result(LONG)
        assert caught.value.missing == (1,)


def test_the_shortest_patience_counts(pool):
    with RootInfoServer(3) as server:
        asked = pool.submit(RootInfoTicket(server.ticket, 1, 3), None, 3.0)
        arrived(server)
        with pytest.raises(HcclTimeoutError, match=r"\[2\] did not come"):
            server(INFO, LONG)
        with pytest.raises(HcclTimeoutError) as caught:
            asked.result(LONG)
        assert caught.value.missing == (2,)


def test_rank_0_is_gone():
    server = RootInfoServer(2)
    server.close()
    server.close()
    with pytest.raises(HcclTimeoutError, match="rank 0 at tcp://127.0.0.1") as caught:
        RootInfoTicket(server.ticket, 1, 2)(None, SHORT)
    assert caught.value.missing == (0,)


def test_a_rank_that_comes_twice(pool):
    with RootInfoServer(3) as server:
        first, again = ask(pool, server.ticket, 1), ask(pool, server.ticket, 1)
        done = pool.submit(server, INFO, LONG)
        refused = next(f for f in iter(lambda: (first, again), None) for f in f if f.done())
        with pytest.raises(TransportError, match="member 0 of this ticket has joined already"):
            refused.result(LONG)
        last = ask(pool, server.ticket, 2)
        assert done.result(LONG) == INFO
        kept = again if refused is first else first
        assert (kept.result(LONG), last.result(LONG)) == (INFO, INFO)


def test_a_rank_that_was_told_of_another_world(pool):
    with RootInfoServer(2) as server:
        wrong = ask(pool, server.ticket, 1, of=4)
        done = pool.submit(server, INFO, LONG)
        with pytest.raises(TransportError, match="rank 1 was told of 4 ranks; rank 0 of 2"):
            wrong.result(LONG)
        right = ask(pool, server.ticket, 1, of=2)  # the refusal used nothing up
        assert (done.result(LONG), right.result(LONG)) == (INFO, INFO)


def test_a_foreign_token(pool):
    with RootInfoServer(2) as server:
        real = Ticket.decode(server.ticket)
        forged = Ticket(real.endpoint, real.server_key, bytes(32), 1).encode()
        wrong = ask(pool, forged, 1, of=2)
        done = pool.submit(server, INFO, LONG)
        with pytest.raises(TransportError, match="issued no such ticket"):
            wrong.result(LONG)
        right = ask(pool, server.ticket, 1, of=2)
        assert (done.result(LONG), right.result(LONG)) == (INFO, INFO)


def test_an_expired_ticket(pool):
    with RootInfoServer(2, expires=1e-6) as server:
        late = ask(pool, server.ticket, 1, of=2)
        arrived(server)
        with pytest.raises(HcclTimeoutError):
            server(INFO, SHORT)
        with pytest.raises(TransportError, match="expired"):
            late.result(LONG)


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\x00\xff rubbish"],
        [msgspec.msgpack.encode({"type": "other"})],
        [msgspec.msgpack.encode({"type": "root-info", "token": bytes(32), "rank": 1})],
        [
            msgspec.msgpack.encode(
                {
                    "type": "root-info",
                    "token": bytes(31),
                    "rank": 1,
                    "world_size": 2,
                    "seconds": 1.0,
                }
            )
        ],
        [b"two", b"frames"],
    ],
)
def test_hostile_requests_are_refused_and_the_others_served(pool, frames):
    with RootInfoServer(2) as server:
        real = Ticket.decode(server.ticket)
        done = pool.submit(server, INFO, LONG)
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
            dealer.curve_serverkey = real.server_key.encode()
            dealer.connect(real.endpoint)
            dealer.send_multipart(frames)
            assert dealer.poll(1000 * LONG)
            answer = msgspec.msgpack.decode(dealer.recv())
        assert answer["reason"].startswith("rank 0 refused")
        assert answer["root_info"] is None
        right = ask(pool, server.ticket, 1, of=2)
        assert (done.result(LONG), right.result(LONG)) == (INFO, INFO)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"rubbish", ProtocolError),
        (msgspec.msgpack.encode({"type": "answer", "code": "x"}), ProtocolError),
        (msgspec.msgpack.encode({"type": "answer", "root_info": bytes(4107)}), RootInfoError),
        (msgspec.msgpack.encode({"type": "answer", "root_info": bytes(9000)}), RootInfoError),
        (msgspec.msgpack.encode({"type": "answer"}), TransportError),
    ],
)
def test_hostile_answers_are_refused(pool, answer, kind):
    public, secret = zmq.curve_keypair()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.curve_server, router.curve_secretkey = True, secret
        router.bind("tcp://127.0.0.1:*")
        where = router.getsockopt_string(zmq.LAST_ENDPOINT)
        asked = ask(pool, Ticket(where, public.decode(), bytes(32), 1).encode(), 1, of=2)
        assert router.poll(1000 * LONG)
        route, _ = router.recv_multipart()
        router.send_multipart([route, answer])
        with pytest.raises(kind):
            asked.result(LONG)


def test_arguments():
    for world_size in (1, 0, "2", True, None):
        with pytest.raises(HcclArgumentError, match="world_size is"):
            RootInfoServer(world_size)
    for expires in (0, -1, "300"):
        with pytest.raises(TicketError, match="expires is"):
            RootInfoServer(2, expires=expires)
    for endpoint in ("0.0.0.0:0", "no such host.:1", "192.0.2.1:0"):
        with pytest.raises(TransportError, match=r"0\.0\.0\.0|no such host|192\.0\.2\.1"):
            RootInfoServer(2, endpoint=endpoint)
    with RootInfoServer(2) as server:
        for rank in (0, 2, -1):
            with pytest.raises(HcclArgumentError, match="rank is"):
                RootInfoTicket(server.ticket, rank, 2)
        with pytest.raises(TicketError, match="not a parallelkit ticket"):
            RootInfoTicket("pk9.x", 1, 2)
        with pytest.raises(RootInfoError, match="for rank 0"):
            server(None, SHORT)
        with pytest.raises(RootInfoError, match="4107 bytes"):
            server(bytes(4107), SHORT)
        taken = Ticket.decode(server.ticket).endpoint
        with pytest.raises(TransportError, match="cannot listen at"):
            RootInfoServer(2, endpoint=taken)


def test_no_thread_is_started():
    before = threading.active_count()
    with RootInfoServer(2):
        assert threading.active_count() == before
