"""The shm transport: a descriptor for a key, once, to the same user; all else is refused."""

from __future__ import annotations

import array
import contextlib
import errno
import gc
import os
import re
import secrets
import socket
import threading
import time

import attrs
import msgspec
import numpy as np
import pytest

from parallelkit.errors import ProtocolError, TransportError
from parallelkit.specs import HostIdentity, TransportRequest
from parallelkit.weights import passes, shm
from parallelkit.weights.regions import Span
from parallelkit.weights.segments import HEADER_BYTES, SHM_DIR, Segment
from parallelkit.weights.shm import ShmPublisher, ShmSubscriber, candidate

SIZE = 5000
SECRET = bytes(range(32))
pack, unpack = msgspec.msgpack.encode, msgspec.msgpack.decode


def make(nbytes=SIZE, **options):
    return ShmPublisher(nbytes, secret=SECRET, **options)


def key():
    """A fresh pass for the publishers here."""
    return passes.issue(SECRET, 0)


def open_fds():
    return {fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}


@pytest.fixture(autouse=True)
def _nothing_is_left():
    fds, threads, names = open_fds(), set(threading.enumerate()), set(SHM_DIR.iterdir())
    yield
    if open_fds() != fds:
        gc.collect()  # views that outlive their segment hold its descriptor
    assert open_fds() == fds
    assert set(threading.enumerate()) == threads
    assert {p for p in set(SHM_DIR.iterdir()) - names if p.name.startswith("parallelkit")} == set()


@pytest.fixture(params=[False, True], ids=["anonymous", "named"])
def publisher(request):
    with contextlib.closing(make(named=request.param)) as publisher:
        yield publisher


@pytest.fixture
def anonymous():
    with contextlib.closing(make()) as publisher:
        yield publisher


@pytest.fixture
def named():
    with contextlib.closing(make(named=True)) as publisher:
        yield publisher


@pytest.fixture
def join():
    with contextlib.ExitStack() as stack:

        def join(publisher, pass_=None):
            end = ShmSubscriber(publisher.offer(), key() if pass_ is None else pass_)
            return stack.enter_context(contextlib.closing(end))

        yield join


def changed(offer, **fields):
    return pack(unpack(offer) | fields)


# --- what works --------------------------------------------------------------------------------


def test_several_subscribers_see_the_arena_and_the_epoch(publisher, join):
    ends = [join(publisher) for _ in range(3)]
    assert publisher.name == ends[0].name == "shm"
    assert publisher.epoch == 0
    publisher.buffer[:5] = b"hello"
    assert publisher.bump() == publisher.epoch == 1
    for end in ends:
        assert bytes(end.memory[:6]) == b"hello\0"
        assert end.epoch(deadline=0) == 1
        assert end.memory.readonly
        assert len(end.memory) == SIZE


def test_subscribers_keep_their_mapping_when_the_publisher_closes(publisher, join):
    end = join(publisher)
    publisher.buffer[0] = 7
    publisher.close()
    publisher.close()
    assert end.memory[0] == 7


def test_views_that_are_kept_stay_valid(publisher, join):
    end = join(publisher)
    view = np.frombuffer(end.memory, np.uint8)
    publisher.buffer[0] = 9
    end.close()
    publisher.close()
    assert view[0] == 9


def test_the_descriptor_that_was_passed_does_not_reach_programs_that_are_started(publisher, join):
    end = join(publisher)
    assert not os.get_inheritable(end._segment.fd)
    assert not os.get_inheritable(publisher._segment.fd)


def test_a_named_offer_has_a_path_and_an_anonymous_one_a_socket(named, anonymous):
    by_name, by_key = unpack(named.offer()), unpack(anonymous.offer())
    assert by_name["path"].startswith("/dev/shm/parallelkit-")
    assert by_name["socket"] == ""
    assert by_key["path"] == ""
    assert len(by_key["socket"]) > 40


def test_an_offer_holds_no_secret_and_stays_the_same(publisher):
    assert publisher.offer() == publisher.offer()
    assert set(unpack(publisher.offer())) == {"nbytes", "socket", "path"}


def test_a_publisher_s_start_removes_what_the_dead_left():
    uid, namespace = os.geteuid(), os.stat("/proc/self/ns/pid").st_ino
    left = SHM_DIR / f"parallelkit-{uid}-{2**22 + 7}-5-{namespace}-{secrets.token_hex(8)}"
    left.write_bytes(b"x")
    with contextlib.closing(make()):
        assert not left.exists()


# --- pulls -------------------------------------------------------------------------------------


def test_spans_are_packed_whatever_their_steps(publisher, join):
    end = join(publisher)
    publisher.buffer[:] = (np.arange(SIZE) % 251).astype(np.uint8).data
    arena = np.arange(SIZE) % 251
    spans = [Span(0, SIZE), Span(7, 3, ((4, 10),)), Span(5, 2, ((2, 100), (3, 9))), Span(9, 0)]
    into = [np.zeros(span.nbytes, np.uint8) for span in spans]
    end.pull(spans, into, epoch=0, deadline=time.monotonic() + 5)
    assert into[0].tolist() == arena.tolist()
    assert into[1].tolist() == [arena[7 + 10 * i + k] for i in range(4) for k in range(3)]
    expected = [arena[5 + 100 * i + 9 * j + k] for i in (0, 1) for j in range(3) for k in (0, 1)]
    assert into[2].tolist() == expected


def test_a_pull_of_another_epoch_is_refused(publisher, join):
    end = join(publisher)
    publisher.bump()
    with pytest.raises(TransportError, match="epoch"):
        end.pull([Span(0, 1)], [np.zeros(1, np.uint8)], epoch=0, deadline=time.monotonic() + 5)


# --- passes ------------------------------------------------------------------------------------


def test_a_pass_works_once(anonymous, join):
    once = key()
    join(anonymous, once)
    for _ in range(2):
        with pytest.raises(TransportError, match="refused to hand over"):
            join(anonymous, once)
    join(anonymous)


@pytest.mark.parametrize("wrong", [b"", b"k", bytes(32), b"k" * passes.PASS_BYTES, b"k" * 4000])
def test_a_wrong_pass_is_refused_and_uses_nothing_up(anonymous, join, wrong):
    right = key()
    tried = [wrong, right[:-1], right[:-1] + bytes([right[-1] ^ 1]), right + b"x"]
    tried += [passes.issue(SECRET, 1), passes.issue(bytes(32), 0)]
    for bad in tried:
        with pytest.raises(TransportError, match="refused to hand over"):
            join(anonymous, bad)
    join(anonymous, right)


def test_of_two_that_use_one_pass_at_once_one_wins(anonymous):
    offer, once, start = anonymous.offer(), key(), threading.Barrier(8)
    ends, refused = [], []

    def use():
        start.wait()
        try:
            ends.append(ShmSubscriber(offer, once))
        except TransportError as error:
            refused.append(error)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for end in ends:
        end.close()
    assert (len(ends), len(refused)) == (1, 7)


def test_another_user_gets_nothing_and_uses_no_pass_up(anonymous, join, monkeypatch):
    once, mine = key(), os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.raises(TransportError):
        join(anonymous, once)
    monkeypatch.undo()
    join(anonymous, once)


def test_a_secret_of_another_length_is_refused():
    with pytest.raises(TransportError, match="secret of 32 bytes"):
        ShmPublisher(SIZE, secret=b"short")


# --- offers that are malformed -----------------------------------------------------------------


@pytest.mark.parametrize(
    "offer",
    [
        b"",
        b"\xc1",
        b"junk",
        pack(None),
        pack([]),
        pack({}),
        pack({"socket": "s"}),
        pack({"nbytes": "5000", "socket": "s"}),
        pack({"nbytes": 5000.5, "socket": "s"}),
        pack({"nbytes": 5000, "socket": b"s"}),
        pack({"nbytes": 5000, "socket": "s", "key": b"k"}),
        pack({"nbytes": 5000, "path": None}),
        pack({"nbytes": 5000, "path": "/dev/shm/parallelkit-x", "mode": 1}),
        pack({"nbytes": 0, "socket": "s"}),
        pack({"nbytes": -1, "socket": "s"}),
        pack({"nbytes": 5000}) + b"\0",
        b"\x91" * 100_000,
        b"\x81\xa1x" + b"\x91" * 100_000,
    ],
    ids=lambda offer: repr(offer[:40]),
)
def test_malformed_offers(offer):
    with pytest.raises(ProtocolError, match="the shm offer is"):
        ShmSubscriber(offer, key())


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "/dev/shm",
        "/dev/shm/",
        "/dev/shm/other",
        "/dev/shm/../etc/parallelkit-x",
        "/dev/shm/parallelkit-x/../../etc/passwd",
        "/dev/shm/sub/parallelkit-x",
        "/tmp/parallelkit-x",
        "parallelkit-x",
        "dev/shm/parallelkit-x",
        "/dev/shm/./../shm/parallelkit-x",
        "\0",
        "/proc/self/mem",
    ],
)
def test_paths_outside_are_refused(path):
    with pytest.raises(ProtocolError, match="which is no segment of parallelkit"):
        ShmSubscriber(pack({"nbytes": SIZE, "path": path}), b"")


@pytest.mark.parametrize(
    "name", ["parallelkit-absent", "parallelkit-\0", "parallelkit-" + "x" * 300]
)
def test_names_that_cannot_be_opened(name):
    with pytest.raises(TransportError, match="cannot open the publisher's segment"):
        ShmSubscriber(pack({"nbytes": SIZE, "path": f"/dev/shm/{name}"}), b"")


@pytest.mark.parametrize("name", ["", "s", "x" * 107, "x" * 108, "x" * 10_000, "\0", "é" * 20])
def test_sockets_where_nobody_listens(name):
    with pytest.raises(TransportError, match="cannot reach the publisher's shm socket"):
        ShmSubscriber(pack({"nbytes": SIZE, "socket": name}), key())


def test_a_size_that_is_not_the_segment_s(publisher, join):
    for nbytes in (1, SIZE - 1, SIZE + 1, 2**62):
        with pytest.raises(TransportError, match="refused: it has"):
            ShmSubscriber(changed(publisher.offer(), nbytes=nbytes), key())
    join(publisher)


def test_a_closed_publisher(publisher):
    offer = publisher.offer()
    publisher.close()
    with pytest.raises(TransportError, match=r"cannot (reach|open) the publisher's"):
        ShmSubscriber(offer, key())


@contextlib.contextmanager
def in_shm(make):
    path = SHM_DIR / f"parallelkit-test-{secrets.token_hex(8)}"
    make(path)
    try:
        yield pack({"nbytes": SIZE, "path": str(path)})
    finally:
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


@pytest.mark.parametrize(
    "make",
    [
        lambda path: os.mkfifo(path, 0o600),
        lambda path: os.mkdir(path, 0o600),
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to("/etc/passwd"),
        lambda path: path.touch(0o600),
    ],
    ids=["pipe", "folder", "link-to-device", "link-to-file", "empty"],
)
def test_what_is_no_segment_is_refused_at_once(make):
    with in_shm(make) as offer:
        outcome = []
        thread = threading.Thread(target=lambda: outcome.append(_error(offer)), daemon=True)
        thread.start()
        thread.join(5.0)
        assert outcome, "it waits for ever"
        assert isinstance(outcome[0], TransportError)


def _error(offer):
    try:
        ShmSubscriber(offer, key()).close()
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o606, 0o700])
def test_a_segment_that_others_may_open_is_refused(named, mode):
    named._segment.path.chmod(mode)
    with pytest.raises(TransportError, match="its mode is not 0600"):
        ShmSubscriber(named.offer(), key())


# --- a publisher that is not ours --------------------------------------------------------------


@contextlib.contextmanager
def impostor(answer):
    """Listen as a publisher would and answer with something else; gives the offer."""
    name = f"test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("\0" + name)
        listener.listen(1)

        def serve():
            peer, _ = listener.accept()
            with peer:
                peer.recv(passes.PASS_BYTES)
                answer(peer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield pack({"nbytes": SIZE, "socket": name})
        thread.join(5.0)


def pass_fds(*fds):
    def answer(peer):
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        peer.sendmsg([b"1"], ancillary)
        for fd in fds:
            os.close(fd)

    return answer


def a_file(nbytes=HEADER_BYTES + SIZE):
    fd = os.memfd_create("test")
    os.ftruncate(fd, nbytes)
    return fd


@pytest.mark.parametrize("count", [0, 2, 3])
def test_one_descriptor_is_expected(count):
    with impostor(pass_fds(*(a_file() for _ in range(count)))) as offer:
        with pytest.raises(TransportError, match="refused to hand over"):
            ShmSubscriber(offer, key())


def test_a_descriptor_of_something_else_is_refused():
    for fd, message in (
        (a_file(), "not sealed"),
        (a_file(7), "it has 7 bytes"),
        (os.open("/dev/null", os.O_RDONLY), "it has 0 bytes"),
    ):
        with impostor(pass_fds(fd)) as offer:
            with pytest.raises(TransportError, match=message):
                ShmSubscriber(offer, key())


def test_a_listener_that_hangs_up():
    with impostor(lambda peer: None) as offer:
        with pytest.raises(TransportError):
            ShmSubscriber(offer, key())


def test_a_listener_that_says_nothing(monkeypatch):
    monkeypatch.setattr(shm, "_SOCKET_SECONDS", 0.2)
    done = threading.Event()
    with impostor(lambda peer: done.wait(5.0)) as offer:
        started = time.monotonic()
        with pytest.raises(TransportError, match="timed out"):
            ShmSubscriber(offer, key())
        assert time.monotonic() - started < 3.0
        done.set()


# --- peers that hinder the publisher -----------------------------------------------------------


def connect(publisher, *, wait=True):
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.setblocking(wait)
    try:
        peer.connect(publisher._address)
    except OSError:
        peer.close()
        raise
    return peer


def test_a_peer_that_says_nothing_keeps_others_waiting_for_a_second_at_most(anonymous, join):
    with connect(anonymous):
        started = time.monotonic()
        join(anonymous)
        assert time.monotonic() - started < 3.0


def test_one_who_comes_while_the_line_is_full_waits_in_it(anonymous):
    joined = []
    with contextlib.ExitStack() as others:
        with contextlib.suppress(BlockingIOError):
            while True:
                others.enter_context(connect(anonymous, wait=False))
        one = threading.Thread(
            target=lambda: joined.append(ShmSubscriber(anonymous.offer(), key())), daemon=True
        )
        one.start()
        one.join(0.3)
        assert one.is_alive()
    one.join(15.0)
    (subscriber,) = joined
    subscriber.close()


def test_closing_does_not_wait_for_a_peer_that_says_nothing():
    publisher = make()
    with connect(publisher):
        started = time.monotonic()
        publisher.close()
        assert time.monotonic() - started < 3.0


def test_peers_that_hang_up_or_talk_nonsense_do_no_harm(anonymous, join):
    for nonsense in (b"", b"x", b"GET / HTTP/1.1\r\n\r\n", bytes(60_000)):
        for _ in range(5):
            with connect(anonymous) as peer, contextlib.suppress(OSError):
                if nonsense:
                    peer.send(nonsense)
    join(anonymous)


def test_running_out_of_descriptors_for_a_moment_does_no_harm(anonymous, join, monkeypatch):
    accept, failures = socket.socket.accept, iter(range(3))

    def sometimes(self):
        peer = accept(self)
        if next(failures, None) is None:
            return peer
        peer[0].close()
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket.socket, "accept", sometimes)
    for _ in range(4):  # the first is taken by the accept that is under way
        with contextlib.suppress(OSError), connect(anonymous) as peer:
            peer.settimeout(5.0)
            peer.send(b"x")
            peer.recv(1)
    assert next(failures, None) is None
    join(anonymous)


def test_many_that_join_and_leave_leave_nothing(anonymous):
    before = open_fds()
    for _ in range(50):
        ShmSubscriber(anonymous.offer(), key()).close()
    deadline = time.monotonic() + 5.0
    while open_fds() != before and time.monotonic() < deadline:
        time.sleep(0.005)  # the publisher's thread may still hold the last connection
    assert open_fds() == before


# --- who can reach whom ------------------------------------------------------------------------

HERE = HostIdentity(boot_id="a", uid=1000, pid=7, pid_namespace=1, net_namespace=2, ipc_namespace=3)


def there(**fields):
    return attrs.evolve(HERE, pid=8, **fields)


@pytest.mark.parametrize(
    ("peer", "device", "reach", "reason"),
    [
        (None, "cpu", True, "same host and user"),
        (there(), "cpu", True, "same host and user"),
        (there(), "cuda", True, "weights on cuda are staged through host memory"),
        (None, "npu", True, "weights on npu are staged through host memory"),
        (there(boot_id="b"), "cpu", False, "different hosts"),
        (there(boot_id="b"), "cuda", False, "different hosts"),
        (there(boot_id="b", uid=0), "cpu", False, "different hosts"),
        (there(uid=1001), "cpu", False, r"different users \(1000 and 1001\)"),
        (there(uid=0), "cpu", False, r"different users \(1000 and 0\)"),
        (there(net_namespace=9), "cpu", False, "different network namespaces"),
        (there(net_namespace=0), "cpu", False, "different network namespaces"),
        (there(pid_namespace=9), "cpu", True, "same host and user"),
        (there(ipc_namespace=9), "cpu", True, "same host and user"),
    ],
)
def test_candidate(peer, device, reach, reason):
    request = TransportRequest(publisher=HERE, subscriber=peer, device=device)
    answer = candidate(request)
    assert answer.name == "shm"
    assert answer.reach is reach
    assert answer.cost > 0
    assert re.search(reason, answer.reason)


def test_a_segment_that_was_never_handed_over_is_freed_with_the_publisher():
    with contextlib.closing(make(1 << 20)) as publisher:
        assert isinstance(publisher._segment, Segment)
        publisher.offer()
    with pytest.raises(ValueError, match="released"):
        _ = publisher.buffer
