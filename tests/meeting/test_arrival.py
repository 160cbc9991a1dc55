"""Ranks finding each other: ports, files, deadlines, strangers, and who is missing."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from parallelkit import portfile
from parallelkit.errors import GroupError, PortInUseError, RendezvousTimeoutError
from parallelkit.meeting import Star, meet, own_address
from parallelkit.meeting.arrival import Hello
from parallelkit.meeting.frames import BANNER
from parallelkit.plugin import LaunchInfo

from .conftest import free_port, leave, make_spec, together


def by_file(path: Path) -> LaunchInfo:
    return LaunchInfo(rendezvous_file=str(path))


def all_met(found: list[Any]) -> bool:
    met = all(isinstance(star, Star) for star in found)
    leave(*found)
    return met


def sockets() -> int:
    return sum(fd.is_socket() for fd in Path("/proc/self/fd").iterdir())


def test_a_world_of_one_opens_no_socket() -> None:
    before = sockets()
    star = meet(make_spec())
    assert star.exchange("x", b"y") == [b"y"]
    assert star.send_bytes("x", b"abc", 0, 10) == b"abc"
    assert sockets() == before
    star.leave()


def test_ranks_without_a_port_agree_on_one(tmp_path: Path) -> None:
    path = tmp_path / "rendezvous"
    found = together(*(make_spec(r, 4, launch=by_file(path)) for r in range(4)), delays={0: 0.3})
    assert len({star.where for star in found}) == 1
    assert [star.rank for star in found] == [0, 1, 2, 3]
    assert os.listdir(tmp_path) == [], "the file goes once everyone is here"
    assert all_met(found)


def test_after_all_left_nothing_is_open() -> None:
    before = sockets()
    port = free_port()
    assert all_met(together(*(make_spec(r, 3, master_port=port) for r in range(3))))
    assert sockets() == before


def test_port_in_use_is_said_at_once(busy: int) -> None:
    began = time.monotonic()
    with pytest.raises(PortInUseError, match=rf"127\.0\.0\.1:{busy}.*MASTER_PORT"):
        meet(make_spec(0, 2, master_port=busy))
    assert time.monotonic() - began < 2


def test_rank_zero_missing(tmp_path: Path) -> None:
    port = free_port()
    with pytest.raises(RendezvousTimeoutError, match=rf"rank 0 at 127\.0\.0\.1:{port}") as caught:
        meet(make_spec(1, 2, master_port=port, timeout=0.8))
    assert caught.value.missing == (0,)
    path = tmp_path / "file"
    with pytest.raises(RendezvousTimeoutError, match="nobody said where it listens") as caught:
        meet(make_spec(1, 2, timeout=0.4, launch=by_file(path)))
    assert caught.value.missing == (0,)


def test_others_missing_are_named_on_every_rank() -> None:
    port = free_port()
    errors = together(*(make_spec(r, 4, master_port=port, timeout=1.5) for r in (0, 2)))
    for error in errors:
        assert isinstance(error, RendezvousTimeoutError)
        assert error.missing == (1, 3)
        assert "missing rank(s) 1, 3" in str(error)


def test_many_missing_ranks_make_a_short_message() -> None:
    with pytest.raises(RendezvousTimeoutError) as caught:
        meet(make_spec(0, 65536, master_port=free_port(), timeout=0.3))
    assert len(caught.value.missing) == 65535
    assert "15, 16 and 65519 more" in str(caught.value)
    assert len(str(caught.value)) < 400


def test_late_rank_is_waited_for() -> None:
    port = free_port()
    assert all_met(together(*(make_spec(r, 2, master_port=port) for r in range(2)), delays={1: 1}))


def test_two_processes_with_one_rank() -> None:
    port = free_port()
    errors = together(*(make_spec(r, 3, master_port=port, timeout=1.5) for r in (0, 1, 1)))
    assert any("another process is rank 1 already" in str(e) for e in errors[1:])
    assert errors[0].missing == (2,)


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2)])
def test_world_sizes_that_differ(sizes: tuple[int, int]) -> None:
    port = free_port()
    errors = together(*(make_spec(r, n, master_port=port) for r, n in enumerate(sizes)))
    for error in errors:
        assert isinstance(error, GroupError)
        assert f"rank 0 has {sizes[0]}, rank 1 has {sizes[1]}" in str(error)


def test_two_runs_on_one_port() -> None:
    port = free_port()
    specs = [make_spec(0, 2, master_port=port, launch=LaunchInfo(job_id="a"), timeout=2.5)]
    specs.append(make_spec(1, 2, master_port=port, launch=LaunchInfo(job_id="b"), timeout=1))
    found = together(*specs)
    assert found[0].missing == (1,)
    assert "another job's rank 0 answers there" in str(found[1])


def test_restarts_are_kept_apart() -> None:
    port = free_port()
    specs = [
        make_spec(r, 2, master_port=port, timeout=1, launch=LaunchInfo(restart_count=r))
        for r in range(2)
    ]
    assert not any(isinstance(star, Star) for star in together(*specs))


def test_old_files_mislead_nobody(tmp_path: Path, busy: int) -> None:
    path = tmp_path / "rendezvous"
    portfile.announce(str(path), "-/0/0", "127.0.0.1", free_port())  # nobody listens there
    specs = [make_spec(r, 2, launch=by_file(path)) for r in range(2)]
    assert all_met(together(*specs, delays={0: 0.5}))
    assert not path.exists()
    portfile.announce(str(path), "-/0/0", "127.0.0.1", busy)  # somebody else does
    with pytest.raises(RendezvousTimeoutError, match="does not answer as a meeting"):
        meet(make_spec(1, 2, launch=by_file(path), timeout=0.5))


def test_wrong_nonce_is_another_run(tmp_path: Path) -> None:
    path, other = tmp_path / "a", tmp_path / "b"
    errors: list[Any] = []

    def guess() -> None:
        while (said := portfile.read(str(path))) is None:
            time.sleep(0.01)
        portfile.announce(str(other), said.run, said.host, said.port)
        errors.extend(together(make_spec(1, 2, launch=by_file(other), timeout=0.6)))

    thread = threading.Thread(target=guess)
    thread.start()
    with pytest.raises(RendezvousTimeoutError):
        meet(make_spec(0, 2, launch=by_file(path), timeout=1.5))
    thread.join()
    assert "another job's rank 0" in str(errors[0])


def test_no_port_and_no_file() -> None:
    for rank in (0, 1):
        with pytest.raises(GroupError, match=r"MASTER_PORT.*PARALLELKIT_RENDEZVOUS_FILE"):
            meet(make_spec(rank, 2))


def test_unknown_host() -> None:
    with pytest.raises(GroupError, match=r"'no-such-host\.invalid'"):
        meet(make_spec(0, 2, master_addr="no-such-host.invalid", master_port=1))
    with pytest.raises(RendezvousTimeoutError, match="no-such-host"):
        meet(make_spec(1, 2, master_addr="no-such-host.invalid", master_port=1, timeout=0.3))


def test_address_of_another_host() -> None:
    with pytest.raises(GroupError, match=r"192\.0\.2\.1.*no address of this host.*MASTER_ADDR"):
        meet(make_spec(0, 2, master_addr="192.0.2.1", master_port=free_port()))


def test_own_address() -> None:
    assert own_address("localhost") == "127.0.0.1"
    with pytest.raises(OSError):
        own_address("no-such-host.invalid")


def hello(run: str = "-/0/0", nonce: str = "", rank: int = 1, world: int = 2) -> bytes:
    body = msgspec.msgpack.encode(Hello(run, nonce, rank, world))
    return struct.pack("<BQ", 1, len(body)) + body


HOSTILE = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": b"\0" * 4096,
    "unknown kind": struct.pack("<BQ", 200, 4) + b"abcd",
    "huge": struct.pack("<BQ", 1, 1 << 62),
    "half": hello()[:-3],
    "not msgpack": struct.pack("<BQ", 1, 4) + b"\xc1\xc1\xc1\xc1",
    "not ours": struct.pack("<BQ", 1, 2) + msgspec.msgpack.encode([]) + b"\x90",
    "pickle": struct.pack("<BQ", 1, 6) + b"\x80\x04K\x01.x",
    "wrong type": struct.pack("<BQ", 6, 3) + b"abc",
    "rank 0": hello(rank=0),
    "rank -1": hello(rank=-1),
    "rank 99": hello(rank=99),
    "another run": hello(run="other"),
    "unknown field": struct.pack("<BQ", 1, 7) + msgspec.msgpack.encode({"evil": 1}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_hurt_nobody(name: str) -> None:
    port = free_port()
    kept: list[socket.socket] = []

    def attack() -> None:
        end = time.monotonic() + 10
        while time.monotonic() < end:
            try:
                sock = socket.create_connection(("127.0.0.1", port), 1)
            except OSError:
                time.sleep(0.01)
                continue
            kept.append(sock)
            sock.sendall(HOSTILE[name])
            return

    threads = [threading.Thread(target=attack) for _ in range(3)]
    for thread in threads:
        thread.start()
    specs = [make_spec(r, 2, master_port=port) for r in range(2)]
    found = together(*specs, delays={1: 0.3})
    for thread in threads:
        thread.join()
    for sock in kept:
        sock.close()
    assert all_met(found), found


def test_a_rank_that_dies_before_the_word_may_come_again() -> None:
    port = free_port()

    def come_and_go() -> None:
        while True:
            try:
                sock = socket.create_connection(("127.0.0.1", port), 1)
                break
            except OSError:
                time.sleep(0.01)
        assert sock.recv(len(BANNER)) == BANNER
        sock.sendall(hello(rank=1, world=3))
        time.sleep(0.1)
        sock.close()

    thread = threading.Thread(target=come_and_go)
    thread.start()
    specs = [make_spec(r, 3, master_port=port) for r in range(3)]
    found = together(*specs, delays={1: 0.5, 2: 0.5})
    thread.join()
    assert all_met(found), found


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-OpenSSH_9.6\r\n", BANNER[:3], b"pk-meet0"])
def test_foreign_service(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        kept = []

        def serve() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                client.sendall(answer)
                kept.append(client)

        heard = b""
        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(RendezvousTimeoutError, match="does not answer as a meeting"):
            meet(make_spec(1, 2, master_port=port, timeout=0.8))
        kept[0].settimeout(1)
        with contextlib.suppress(ConnectionResetError):
            heard = kept[0].recv(100)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    for client in kept:
        client.close()
    assert heard == b"", "nothing is said to a stranger"
