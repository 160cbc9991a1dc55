"""A publisher and a subscriber on two hosts, as far as the network goes: two network namespaces.

Each namespace belongs to a process that sleeps; a pair of virtual Ethernet devices connects them.
Nothing of it has a name or is seen from outside, and the kernel removes it with the processes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

import attrs
import pytest

from parallelkit.testing.peer import Peer

pytestmark = pytest.mark.ranks

LEFT, RIGHT = "10.211.7.1", "10.211.7.2"
TOOLS = ("ip", "unshare", "nsenter")

#: Subscribes with the ticket on standard input and prints the error.
REFUSED = """
import sys
from parallelkit.testing.peer import sample_model
from parallelkit.weights import subscribe_weights
try:
    with subscribe_weights(sample_model(), sys.stdin.readline(), timeout=20.0):
        print("joined")
except Exception as error:
    print(type(error).__name__, error)
"""


@attrs.frozen
class Host:
    """A network namespace, held by a process; `enter` starts a command in it."""

    pid: int
    address: str

    @property
    def enter(self) -> tuple[str, ...]:
        return ("nsenter", f"--net=/proc/{self.pid}/ns/net")


@contextlib.contextmanager
def namespace(address: str) -> Iterator[Host]:
    """A process in a network namespace of its own; it ends with standard input."""
    outside = os.readlink("/proc/self/ns/net")
    with subprocess.Popen(
        ["unshare", "--net", "cat"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as holder:
        try:
            deadline = time.monotonic() + 20
            while holder.poll() is None and time.monotonic() < deadline:
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{holder.pid}/ns/net") != outside:
                        break
                time.sleep(0.01)
            else:
                holder.kill()
                assert holder.stderr is not None
                pytest.skip(f"no network namespace can be made: {holder.stderr.read().strip()}")
            yield Host(holder.pid, address)
        finally:
            holder.kill()


def ip(host: Host, *words: str) -> None:
    result = subprocess.run(
        [*host.enter, "ip", *words], capture_output=True, text=True, timeout=30, check=False
    )
    if result.returncode:
        pytest.skip(f"'ip {' '.join(words)}' fails in a namespace: {result.stderr.strip()}")


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing or os.geteuid():
        pytest.skip(f"needs root and {', '.join(TOOLS)}; missing: {missing or 'root'}")
    with namespace(LEFT) as left, namespace(RIGHT) as right:
        words = ("link", "add", "pk0", "type", "veth", "peer", "name", "pk0", "netns")
        ip(left, *words, str(right.pid))
        for host in (left, right):
            ip(host, "link", "set", "lo", "up")
            ip(host, "address", "add", f"{host.address}/30", "dev", "pk0")
            ip(host, "link", "set", "pk0", "up")
        yield left, right


def test_the_other_host_is_updated_by_tcp(hosts: tuple[Host, Host]) -> None:
    left, right = hosts
    options = {"endpoint": f"{left.address}:0", "timeout": 30.0}
    with Peer("publish", prefix=left.enter, tickets=2, publish=options) as publisher:
        tickets = [publisher.event("ticket")["ticket"] for _ in range(2)]
        with (
            Peer("subscribe", prefix=right.enter) as far,
            Peer("subscribe", prefix=left.enter) as near,
        ):
            for peer, ticket in zip((far, near), tickets, strict=True):
                peer.send(ticket)
                peer.event("joined", 60)
            publisher.event("ready", 60)
            for value in (2.0, 3.0):
                publisher.send(str(value))
                report = publisher.event("report", 60)["report"]
                for peer in (far, near):
                    step = peer.event("step", 60)
                    assert (step["error"], step["values"]) == (None, [value])
            ways = sorted(member["transport"] for member in report["members"])
            assert ways == ["shm", "tcp"], "each member by the way that reaches it at least cost"
            assert report["moved_bytes"] == 2 * report["nbytes"]


def test_shared_memory_is_refused_with_the_reason(hosts: tuple[Host, Host]) -> None:
    left, right = hosts
    options = {"endpoint": f"{left.address}:0", "transport": "shm", "timeout": 30.0}
    with Peer("publish", prefix=left.enter, publish=options) as publisher:
        result = subprocess.run(
            [*right.enter, sys.executable, "-c", REFUSED],
            input=publisher.event("ticket")["ticket"] + "\n",
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert "shm: the two ends are in different network namespaces" in result.stdout, result.stderr


def test_loopback_does_not_reach_the_other_host(hosts: tuple[Host, Host]) -> None:
    left, right = hosts
    with Peer("publish", prefix=left.enter, publish={"timeout": 30.0}) as publisher:
        result = subprocess.run(
            [*right.enter, sys.executable, "-c", REFUSED],
            input=publisher.event("ticket")["ticket"] + "\n",
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert result.stdout.startswith("PeerLostError"), result.stdout + result.stderr
    assert "does not listen there" in result.stdout
