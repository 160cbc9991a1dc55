"""Starting ranks: what they get, when they are ended, that none stays."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from parallelkit.errors import LaunchError
from parallelkit.launch import LaunchInfo
from parallelkit.spawn import rank_environ, spawn_ranks

pytestmark = pytest.mark.ranks


def ranks(code: str, n: int = 2, *, timeout: float = 30, **options):
    return spawn_ranks([sys.executable, "-c", code], n, timeout=timeout, **options)


def alive(pid: int) -> bool:
    """Tell whether a process runs; one that only waits to be reaped by init does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def gone(pid: int, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def test_each_rank_has_its_place():
    code = """
import os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
print(*[os.environ[n] for n in names], os.environ.get("MASTER_PORT"))
print("to stderr", file=sys.stderr)
"""
    results = ranks(code, 3)
    assert [r.rank for r in results] == [0, 1, 2]
    for r in results:
        assert (r.returncode, r.timed_out) == (0, False)
        assert r.stdout.split() == [str(r.rank), "3", str(r.rank), "3", "127.0.0.1", "None"]
        assert r.stderr.strip() == "to stderr"


def test_the_launch_is_read_back(tmp_path):
    info = LaunchInfo.from_environ(rank_environ(1, 2, tmp_path))
    assert (info.rank, info.world_size, info.local_rank) == (1, 2, 1)
    assert info.master_port is None
    assert info.rendezvous_file == str(tmp_path / "rendezvous")


def test_the_rendezvous_file_is_private_and_gone_afterwards():
    code = """
import os
path = os.environ["PARALLELKIT_RENDEZVOUS_FILE"]
print(path, oct(os.stat(os.path.dirname(path)).st_mode & 0o777))
open(path, "w").write("x")
"""
    results = ranks(code)
    (path, mode), *rest = {tuple(r.stdout.split()) for r in results}
    assert not rest
    assert mode == "0o700"
    assert not Path(path).parent.exists()


def test_variables_of_an_outer_launcher_are_not_passed_on(monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "7")
    monkeypatch.setenv("MASTER_PORT", "1234")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("UNRELATED", "kept")
    code = """
import os
print(*[os.environ.get(n) for n in ("SLURM_PROCID", "MASTER_PORT", "TORCHELASTIC_RUN_ID")])
print(os.environ["UNRELATED"], os.environ["MINE"])
"""
    (result,) = ranks(code, 1, env={"MINE": "set"})
    assert result.stdout.split() == ["None", "None", "None", "kept", "set"]


def test_much_output_does_not_block():
    (result,) = ranks("print('x' * 5_000_000)", 1)
    assert len(result.stdout) == 5_000_001


def test_bytes_that_are_no_text():
    (result,) = ranks("import sys; sys.stdout.buffer.write(b'\\xff\\xfe')", 1)
    assert result.stdout


def test_the_deadline():
    started = time.monotonic()
    code = """
import os, time
print(os.getpid(), flush=True)
if os.environ["RANK"] == "1":
    time.sleep(600)
"""
    results = ranks(code, timeout=1.5)
    assert time.monotonic() - started < 10
    assert [r.timed_out for r in results] == [False, True]
    assert results[1].returncode == -signal.SIGKILL
    assert gone(int(results[1].stdout))


def test_one_failure_ends_the_others_after_a_grace():
    started = time.monotonic()
    code = """
import os, sys, time
if os.environ["RANK"] == "0":
    sys.exit("I fail")
time.sleep(600)
"""
    results = ranks(code, timeout=60, grace=0.5)
    assert time.monotonic() - started < 20
    assert results[0].returncode == 1
    assert "I fail" in results[0].stderr
    assert results[1].returncode == -signal.SIGKILL
    assert not results[1].timed_out


def test_a_signal_is_a_result():
    code = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    (result,) = ranks(code, 1)
    assert result.returncode == -signal.SIGSEGV


@pytest.mark.parametrize("how", ["exits", "hangs"])
def test_grandchildren_are_ended_too(how):
    code = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
if {how == "hangs"}:
    time.sleep(600)
"""
    (result,) = ranks(code, 1, timeout=2)
    assert gone(int(result.stdout))


def test_an_exception_in_the_parent_leaves_nobody(monkeypatch, tmp_path):
    pids = tmp_path / "pids"

    def interrupted(seconds: float) -> None:
        deadline = real() + 20
        while len(pids.read_text().split() if pids.exists() else []) < 2 and real() < deadline:
            pause(0.01)
        raise KeyboardInterrupt

    real, pause = time.monotonic, time.sleep
    monkeypatch.setattr("parallelkit.spawn.time.sleep", interrupted)
    code = f"""
import os, time
with open({str(pids)!r}, "a") as f:
    print(os.getpid(), file=f, flush=True)
time.sleep(600)
"""
    with pytest.raises(KeyboardInterrupt):
        ranks(code)
    monkeypatch.undo()
    found = [int(p) for p in pids.read_text().split()]
    assert len(found) == 2
    assert all(gone(pid) for pid in found)


def test_a_command_that_cannot_be_started():
    with pytest.raises(LaunchError, match="no-such-program"):
        spawn_ranks(["/no-such-program"], 2, timeout=5)


@pytest.mark.parametrize(("n", "timeout"), [(0, 5), (-1, 5), (2, 0), (2, -1), (2, float("nan"))])
def test_arguments_are_checked(n, timeout):
    with pytest.raises(LaunchError, match="positive"):
        spawn_ranks(["true"], n, timeout=timeout)


def test_own_environment_is_left_alone():
    before = dict(os.environ)
    ranks("pass", 1)
    assert dict(os.environ) == before
