"""Ranks meeting, in threads of one process: ports, files, deadlines, and who is missing."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from parallelkit_torch import arrival, rendezvous
from parallelkit_torch.rendezvous import Meeting, meet

from parallelkit import portfile
from parallelkit.errors import GroupError, PortInUseError, RendezvousTimeoutError
from parallelkit.meeting.address import listen
from parallelkit.plugin import GroupSpec, LaunchInfo

Make = Callable[..., GroupSpec]


def together(*specs: GroupSpec, delays: dict[int, float] | None = None) -> list[Any]:
    """Let each spec meet in a thread of its own; return meetings or errors."""
    results: list[Any] = [None] * len(specs)

    def run(at: int, spec: GroupSpec) -> None:
        time.sleep((delays or {}).get(at, 0))
        try:
            # the store knows each group of a process by number; threads share the process
            results[at] = meet(spec)
        except GroupError as error:
            results[at] = error

    opened = rendezvous._opened
    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(specs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    rendezvous._opened = opened
    return results


def by_file(path: Path) -> LaunchInfo:
    return LaunchInfo(rendezvous_file=str(path))


@pytest.fixture(autouse=True)
def _counting_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_opened", 0)


@pytest.fixture
def busy() -> Any:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_world_of_one_opens_no_socket(spec: Make) -> None:
    def sockets() -> int:
        found = Path("/proc/self/fd").iterdir()
        return sum(fd.is_socket() for fd in found)

    before = sockets()
    meeting = meet(spec())
    assert isinstance(meeting, Meeting)
    meeting.store.set("a", "b")
    assert sockets() == before


def test_ranks_without_a_port_agree_on_one(spec: Make, tmp_path: Path) -> None:
    path = tmp_path / "rendezvous"
    specs = [spec(r, 3, launch=by_file(path)) for r in range(3)]
    meetings = together(*specs, delays={0: 0.3})
    assert len({m.where for m in meetings}) == 1
    meetings[0].store.set("key", "value")
    assert meetings[2].store.get("key") == b"value"
    assert not path.exists(), "the file goes once everyone is here"
    assert os.listdir(tmp_path) == []


def test_port_in_use_is_said_at_once(spec: Make, busy: int) -> None:
    began = time.monotonic()
    with pytest.raises(PortInUseError, match=rf"127\.0\.0\.1:{busy}.*MASTER_PORT"):
        meet(spec(0, 2, master_port=busy))
    assert time.monotonic() - began < 1


def test_rank_zero_missing(spec: Make) -> None:
    port = free_port()
    began = time.monotonic()
    with pytest.raises(RendezvousTimeoutError, match=rf"rank 0 at 127\.0\.0\.1:{port}") as caught:
        meet(spec(1, 2, master_port=port, timeout=1.5))
    assert caught.value.missing == (0,)
    assert 1.4 < time.monotonic() - began < 2.5


def test_rank_zero_missing_with_a_file(spec: Make, tmp_path: Path) -> None:
    path = tmp_path / "rendezvous"
    with pytest.raises(RendezvousTimeoutError, match="no file of this run") as caught:
        meet(spec(1, 2, timeout=0.5, launch=by_file(path)))
    assert caught.value.missing == (0,)


def test_others_missing_are_named_on_every_rank(spec: Make) -> None:
    port = free_port()
    began = time.monotonic()
    errors = together(*(spec(r, 4, master_port=port, timeout=2) for r in (0, 2)))
    assert time.monotonic() - began < 3.5
    for error in errors:
        assert isinstance(error, RendezvousTimeoutError)
        assert error.missing == (1, 3)
        assert "missing rank(s) 1, 3" in str(error)


def test_late_rank_is_waited_for(spec: Make) -> None:
    port = free_port()
    specs = [spec(r, 2, master_port=port) for r in range(2)]
    assert all(isinstance(m, Meeting) for m in together(*specs, delays={1: 1.0}))


def test_two_processes_with_one_rank(spec: Make) -> None:
    port = free_port()
    specs = [spec(r, 3, master_port=port, timeout=2) for r in (0, 1, 1)]
    errors = together(*specs)
    assert any("another process is rank 1 already" in str(e) for e in errors[1:])
    assert errors[0].missing == (2,)


def test_world_sizes_that_differ(spec: Make) -> None:
    port = free_port()
    errors = together(spec(0, 2, master_port=port), spec(1, 3, master_port=port))
    for error in errors:
        assert "disagree about the world size" in str(error)


def test_old_files_mislead_nobody(spec: Make, tmp_path: Path, busy: int) -> None:
    path = tmp_path / "rendezvous"
    portfile.announce(str(path), "-/0/0", "127.0.0.1", busy)  # dead, or something else listens
    specs = [spec(r, 2, launch=by_file(path), timeout=8) for r in range(2)]
    assert all(isinstance(m, Meeting) for m in together(*specs, delays={0: 0.5}))
    assert not path.exists()


def test_another_runs_store_is_not_ours(spec: Make, tmp_path: Path) -> None:
    path = tmp_path / "rendezvous"
    other = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    portfile.announce(str(path), "-/0/0", "127.0.0.1", other.port)
    with pytest.raises(RendezvousTimeoutError, match="another job's store answers"):
        meet(spec(1, 2, launch=by_file(path), timeout=0.6))
    portfile.announce(str(path), "job/0/0", "127.0.0.1", other.port)
    with pytest.raises(RendezvousTimeoutError, match="no file of this run"):
        meet(spec(1, 2, launch=by_file(path), timeout=0.4))


def test_agent_store_is_joined_and_restarts_are_kept_apart(spec: Make) -> None:
    agent = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    for restart in (0, 1):
        launch = LaunchInfo(agent_store=True, job_id="job", restart_count=restart)
        specs = [spec(r, 2, master_port=agent.port, launch=launch) for r in range(2)]
        meetings = together(*specs)
        assert all(isinstance(m, Meeting) for m in meetings), meetings
        assert not meetings[0].store.check(["key"])
        meetings[0].store.set("key", "value")
    assert agent.num_keys() > 4


def test_no_port_and_no_file(spec: Make) -> None:
    for rank in (0, 1):
        with pytest.raises(GroupError, match=r"MASTER_PORT.*PARALLELKIT_RENDEZVOUS_FILE"):
            meet(spec(rank, 2))


def test_unknown_host(spec: Make) -> None:
    with pytest.raises(GroupError, match=r"'no-such-host\.invalid'"):
        meet(spec(0, 2, master_addr="no-such-host.invalid", master_port=1))
    with pytest.raises(RendezvousTimeoutError, match="no-such-host"):
        meet(spec(1, 2, master_addr="no-such-host.invalid", master_port=1, timeout=0.3))


def test_only_the_named_address_is_bound(spec: Make) -> None:
    listener, host = listen(spec(0, 2, master_addr="localhost", master_port=free_port()))
    with listener:
        assert listener.getsockname()[0] == host == "127.0.0.1"
    # a name that only this host maps to loopback would be of no use to others
    listener, host = listen(spec(0, 2, local_world_size=1, master_port=free_port()))
    with listener:
        assert listener.getsockname()[0] == "0.0.0.0"


def test_address_of_another_host(spec: Make) -> None:
    began = time.monotonic()
    with pytest.raises(GroupError, match=r"192\.0\.2\.1.*no address of this host.*MASTER_ADDR"):
        meet(spec(0, 2, master_addr="192.0.2.1", master_port=free_port(), timeout=5))
    assert time.monotonic() - began < 1


def test_many_missing_ranks_cost_no_more_time_than_few(spec: Make) -> None:
    began = time.monotonic()
    with pytest.raises(RendezvousTimeoutError) as caught:
        meet(spec(0, 65536, master_port=free_port(), timeout=1))
    assert time.monotonic() - began < 3
    assert len(caught.value.missing) == 65535
    assert "65535 of 65536" in str(caught.value)
    assert "15, 16 and 65519 more" in str(caught.value)
    assert len(str(caught.value)) < 400


def test_ranks_beyond_a_chunk_are_counted(spec: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival, "_CHUNK", 2)
    port = free_port()
    assert all(
        isinstance(m, Meeting) for m in together(*(spec(r, 6, master_port=port) for r in range(6)))
    )
    port = free_port()
    errors = together(*(spec(r, 6, master_port=port, timeout=1.5) for r in (0, 1, 2, 4)))
    assert [error.missing for error in errors] == [(3, 5)] * 4


FOREIGN = """
import socket, sys, threading
import parallelkit as pk

answer = sys.argv[1].encode()
listener = socket.create_server(("127.0.0.1", 0))
def serve():
    while True:
        client, _ = listener.accept()
        if answer:
            client.sendall(answer)
        kept.append(client)
kept = []
threading.Thread(target=serve, daemon=True).start()
try:
    pk.init_process_group(
        "torch", device="cpu", rank=1, world_size=2, master_addr="127.0.0.1",
        master_port=listener.getsockname()[1], timeout=1.5,
    )
except pk.errors.RendezvousTimeoutError as error:
    assert "does not answer as a store" in str(error), error
    left = [t.name for t in threading.enumerate() if t.name == "parallelkit-store"]
    assert not left, left
    print("said")
"""


@pytest.mark.parametrize("answer", ["", "HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_foreign_service_leaves_nothing_behind(answer: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FOREIGN, answer], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "said\n"), done.stderr


# --- the file ----------------------------------------------------------------------------------


def test_file_is_private_and_removed_only_if_ours(tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    said = portfile.announce(path, "run", "127.0.0.1", 1)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert portfile.read(path) == said
    newer = portfile.announce(path, "run", "127.0.0.1", 2)
    portfile.withdraw(path, said)
    assert portfile.read(path) == newer
    portfile.withdraw(path, newer)
    portfile.withdraw(path, newer)
    assert portfile.read(path) is None
    assert os.listdir(tmp_path) == []


def test_file_that_others_could_have_written(tmp_path: Path) -> None:
    path = tmp_path / "file"
    portfile.announce(str(path), "run", "127.0.0.1", 1)
    path.chmod(0o622)
    with pytest.raises(GroupError, match="mode 622"):
        portfile.read(str(path))
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(GroupError, match="cannot be read"):
        portfile.read(str(path))
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(GroupError, match="not a file"):
        portfile.read(str(path))


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b'{"run": 1}', b"x" * 5000])
def test_hostile_contents(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    path.chmod(0o600)
    assert portfile.read(str(path)) is None


def test_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(GroupError, match="PARALLELKIT_RENDEZVOUS_FILE"):
        portfile.announce(str(tmp_path / "no" / "file"), "run", "127.0.0.1", 1)
