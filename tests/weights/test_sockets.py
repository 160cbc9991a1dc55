"""What a publisher and a subscriber open: only what they need, at the named interface only."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
import struct
from pathlib import Path
from typing import NamedTuple

import pytest

from parallelkit.testing.peer import sample_model
from parallelkit.weights import publish_weights, subscribe_weights

LISTENING = "0A"


class Bound(NamedTuple):
    """A socket of this process, as the kernel's tables show it."""

    kind: str
    address: str
    port: int
    listens: bool


def inodes():
    """Of this process's sockets."""
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(fd)
            if target.startswith("socket:["):
                found.add(target[8:-1])
    return found


def address_of(text):
    """The table's hexadecimal words, in the machine's byte order, as an address."""
    words = [int(text[i : i + 8], 16) for i in range(0, len(text), 8)]
    return str(ipaddress.ip_address(struct.pack(f"={len(words)}I", *words)))


def internet_sockets(of):
    """TCP, UDP, UDP-Lite, raw and ICMP sockets of this process with the inodes `of`."""
    found = {}
    for kind in ("tcp", "tcp6", "udp", "udp6", "udplite", "udplite6", "raw", "raw6", "icmp"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/self/net/{kind}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[9] in of:
                    host, port = fields[1].split(":")
                    listens = kind.startswith("tcp") and fields[3] == LISTENING
                    found[fields[9]] = Bound(kind, address_of(host), int(port, 16), listens)
    return found


def unix_sockets(of):
    """Names of the Unix sockets with the inodes `of`, by inode; "" for those without."""
    found = {}
    for line in Path("/proc/self/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[6] in of:
            found[fields[6]] = fields[7] if len(fields) > 7 else ""
    return found


@pytest.fixture
def opened():
    """Call it for the inodes of sockets that were opened since."""
    before = inodes()
    return lambda: inodes() - before


def endpoints():
    yield None, "127.0.0.1"
    yield "127.0.0.1:0", "127.0.0.1"
    yield "127.0.0.7:0", "127.0.0.7"
    yield "tcp://127.255.0.9:*", "127.255.0.9"
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        yield "[::1]:0", "::1"


@pytest.mark.parametrize(("endpoint", "address"), list(endpoints()))
def test_every_listening_socket_is_at_the_named_address(opened, endpoint, address):
    with publish_weights(sample_model(1.0), endpoint=endpoint, timeout=10.0) as publisher:
        sockets = list(internet_sockets(opened()).values())
        assert [s for s in sockets if s.listens], "there is at least the control channel"
        assert {s.address for s in sockets} == {address}
        assert {s.kind for s in sockets} == {"tcp6" if ":" in address else "tcp"}
        with subscribe_weights(sample_model(), publisher.ticket, timeout=10.0):
            everyone = list(internet_sockets(opened()).values())
            assert len(everyone) > len(sockets)
            listening = [s for s in everyone if s.listens]
            assert listening == [s for s in sockets if s.listens], "a subscriber listens nowhere"
            assert {ipaddress.ip_address(s.address).is_loopback for s in everyone} == {True}


def test_nothing_listens_anywhere_else(opened):
    with publish_weights(sample_model(1.0), endpoint="127.0.0.7:0", timeout=10.0):
        ports = {s.port for s in internet_sockets(opened()).values() if s.listens}
        for port in ports:
            for other in ("127.0.0.1", "127.0.0.8"):
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection((other, port), 5.0)
            socket.create_connection(("127.0.0.7", port), 5.0).close()


def test_unix_sockets_are_abstract_and_have_names_that_nobody_guesses(opened):
    with contextlib.ExitStack() as stack:
        names = set()
        for _ in range(3):
            stack.enter_context(publish_weights(sample_model(1.0), timeout=10.0))
            named = {name for name in unix_sockets(opened()).values() if name}
            assert all(name.startswith("@parallelkit-") for name in named)
            assert all(len(name) >= len("@parallelkit-") + 32 for name in named)
            assert len(named) == len(names) + 1, "one each"
            names = named


def test_everything_is_closed_with_its_owner(opened):
    publisher = publish_weights(sample_model(1.0), timeout=10.0)
    subscriber = subscribe_weights(sample_model(), publisher.ticket, timeout=10.0)
    assert internet_sockets(opened())
    subscriber.close()
    publisher.close()
    assert not internet_sockets(opened())
    assert not unix_sockets(opened())


def memory_files():
    """Descriptors of this process that are memory, by where their links point."""
    found = {}
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(fd)
            if target.startswith(("/memfd:parallelkit", "/dev/shm/parallelkit")):
                found[int(fd.name)] = target
    return found


@pytest.mark.parametrize("named", [False, True])
def test_the_memory_of_a_publisher_is_sealed_or_its_owner_s_alone(named):
    before = set(memory_files())
    with publish_weights(sample_model(1.0), timeout=10.0, named=named) as publisher:
        files = {fd: target for fd, target in memory_files().items() if fd not in before}
        (target,) = set(files.values())
        assert target.startswith("/dev/shm/") == named
        for fd in files:  # the segment's, and its map's
            assert not os.get_inheritable(fd)
            if named:
                assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600
                assert os.fstat(fd).st_uid == os.geteuid()
                continue
            with pytest.raises(PermissionError):
                os.pwrite(fd, b"x", 0)
            with pytest.raises(PermissionError):
                os.ftruncate(fd, 0)
        with subscribe_weights(sample_model(), publisher.ticket, timeout=10.0):
            assert len(set(memory_files()) - before) > len(files)
    assert set(memory_files()) <= before
