"""A group outside any world: real processes, one that is missing, one that dies."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from parallelkit_vllm.stateless import stateless_init_process_group

from parallelkit.errors import (
    GroupClosedError,
    GroupError,
    PortInUseError,
    RendezvousTimeoutError,
    UnsupportedFeatureError,
)

JOB = Path(__file__).parent / "stateless_rank.py"
#: For a process to import torch on a machine that has much else to do.
SECONDS = 240.0
LOOPBACK = "0100007F"


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start(what, port, ranks, size, timeout=60.0):
    return {
        rank: subprocess.Popen(
            [sys.executable, str(JOB), what, *map(str, (rank, size, port, timeout))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in ranks
    }


def collect(processes, dead=()):
    """What each rank said; all but those in `dead` must end well."""
    told = {}
    try:
        for rank, process in processes.items():
            output, errors = process.communicate(timeout=SECONDS)
            if rank in dead:
                assert process.returncode == 9, errors[-2000:]
            else:
                assert process.returncode == 0, errors[-2000:]
                told[rank] = json.loads(output.splitlines()[-1])
                assert told[rank]["environment"], "the environment is as it was"
    finally:
        for process in processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return told


def run(what, port, size=2, *, timeout=60.0, dead=()):
    return collect(start(what, port, range(size), size, timeout), dead)


@pytest.mark.ranks
def test_every_rank_gets_what_one_gives(port):
    told = run("moves", port, 3)
    for rank in range(3):
        assert all(told[rank]["good"].values()), told[rank]["good"]
        assert len(told[rank]["good"]) == 3 * 8 + 4
        assert set(told[rank]["listens"]) == {LOOPBACK}, "neither other interfaces nor IPv6"
        assert not told[rank]["default group"]
    assert len(told[0]["listens"]) == 1, "gloo's; the rendezvous and its store are gone"


@pytest.mark.ranks
def test_ranks_that_differ_hear_it_and_the_group_goes_on(port):
    told = run("differs", port, 3)
    for rank in range(3):
        for what, said in (
            ("shape", "rank(s) 1: broadcast of float32[4] from rank 0"),
            ("dtype", "rank(s) 1, 2: broadcast of int32[3] from rank 0"),
            ("source", "rank(s) 1: broadcast of float32[3] from rank 1"),
        ):
            kind, text, _ = told[rank][what]
            assert kind == "CollectiveError"
            assert "nothing was sent" in text
            assert said in text
        if rank != 1:
            assert "rank(s) 1: refuses: there is no 'model.norm.wieght'" in told[rank]["refused"][1]
        assert told[rank]["after"] is None
        assert told[rank]["left open"] == []


@pytest.mark.ranks
def test_a_rank_that_dies_is_named_at_once(port):
    told = run("dies", port, 3, dead=[2])
    for rank in (0, 1):
        kind, text, _ = told[rank]["first"]
        assert kind == "CollectiveError"
        assert text.endswith("rank(s) 2 are gone")
        assert "called on a broken group; earlier: rank" in told[rank]["second"][1]
        assert "rank(s) 2 are gone" in told[rank]["broken"]
        assert told[rank]["seconds"] < 30.0


@pytest.mark.ranks
def test_a_rank_that_dies_before_the_bytes_is_named(port):
    told = run("dies_in_the_middle", port, 2, dead=[1])
    kind, text, _ = told[0]["first"]
    assert kind == "CollectiveError"
    assert "broadcast of float32[8388608] from rank 0 failed" in text
    assert "rank(s) 1 are gone" in text
    assert "broken group" in told[0]["second"][1]


@pytest.mark.ranks
def test_a_rank_that_does_not_call_is_named_in_time(port):
    told = run("stays_away", port, 2, timeout=4.0)
    kind, text, missing = told[0]["first"]
    assert (kind, missing) == ("CollectiveTimeoutError", [1])
    assert "rank(s) 1 did not take part within 4 s" in text
    assert "came too late" in told[1]["first"][1]


@pytest.mark.ranks
def test_a_rank_that_closed_is_named(port):
    told = run("closes", port)
    assert "rank(s) 1 have closed the group" in told[0]["first"][1]
    assert told[1]["first"][0] == "GroupClosedError"


@pytest.mark.ranks
def test_those_who_do_not_come_are_named(port):
    told = collect(start("moves", port, [0, 2], 4, 10.0))
    for rank in (0, 2):
        kind, text, missing = told[rank]["no group"]
        assert (kind, missing) == ("RendezvousTimeoutError", [1, 3])
        assert f"at 127.0.0.1:{port}" in text
        assert told[rank]["seconds"] < 15.0


def test_a_trainer_that_does_not_come_is_named(port):
    with pytest.raises(RendezvousTimeoutError, match=rf"rank 0 at 127.0.0.1:{port} within") as e:
        stateless_init_process_group("127.0.0.1", port, 1, 2, "cpu", timeout=0.3)
    assert e.value.missing == (0,)


def test_a_busy_port_is_an_error_at_once(port):
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(PortInUseError, match=rf"127.0.0.1:{port}.*master_port"):
            stateless_init_process_group("127.0.0.1", port, 0, 2, "cpu", timeout=60.0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"master_address": ""}, "master_address is ''"),
        ({"master_address": None}, "master_address is None"),
        ({"master_address": "no.such.host.invalid"}, "has no IPv4 address"),
        ({"master_address": "0.0.0.0"}, "every interface"),
        ({"master_address": "192.0.2.1"}, "no address of this host"),
        ({"master_port": 0}, "from 1 to 65535"),
        ({"master_port": "29500"}, "from 1 to 65535"),
        ({"rank": 2}, "from 0 to world_size - 1 = 1"),
        ({"rank": -1}, "from 0 to"),
        ({"rank": True}, "rank is True"),
        ({"world_size": 0}, "world_size is 0"),
        ({"world_size": 2.0}, "world_size is 2.0"),
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": float("inf")}, "timeout is inf"),
        ({"timeout": None}, "timeout is None"),
        ({"device": "nonsense"}, "device is 'nonsense'"),
        ({"device": None}, "device is None"),
    ],
)
def test_what_cannot_be_is_refused(port, change, said):
    given = {
        "master_address": "127.0.0.1",
        "master_port": port,
        "rank": 0,
        "world_size": 2,
        "device": "cpu",
        "timeout": 5.0,
    }
    with pytest.raises(GroupError, match=said):
        stateless_init_process_group(**given | change)


@pytest.mark.parametrize("device", [torch.device("cuda", 0), "cuda", 0])
def test_other_devices_are_refused_by_name(port, device):
    with pytest.raises(UnsupportedFeatureError, match=r"on cuda.*publisher\.attach"):
        stateless_init_process_group("127.0.0.1", port, 0, 2, device)


@pytest.fixture
def alone(port):
    with stateless_init_process_group("127.0.0.1", port, 0, 1, torch.device("cpu")) as group:
        yield group


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (([1.0], 0), "takes a torch.Tensor, not a list"),
        ((torch.zeros(2), 1), "src is 1; it is a rank from 0 to 0"),
        ((torch.zeros(2), None), "src is None"),
        ((torch.zeros(2), 0, object()), "stream is a object; a group on the CPU has no streams"),
        ((torch.zeros(2, device="meta"), 0), r"on meta.*give tensor\.cpu\(\)"),
        ((torch.zeros(2).to_sparse(), 0), "sparse_coo"),
        ((torch.empty(2, dtype=torch.float8_e8m0fnu), 0), "float8_e8m0fnu; allowed are"),
    ],
)
def test_a_call_that_cannot_be_is_refused(alone, arguments, said):
    with pytest.raises(GroupError, match=said):
        alone.broadcast(*arguments)


def test_a_world_of_one_needs_nobody(alone):
    x = torch.ones(3)
    alone.broadcast(x, 0, torch.cpu.current_stream())
    assert x.tolist() == [1.0] * 3
    alone.close()
    assert alone.closed
    with pytest.raises(GroupClosedError, match="rank 0 has closed this group"):
        alone.broadcast(x, 0)
    with pytest.raises(GroupClosedError):
        alone.refuse("x")
