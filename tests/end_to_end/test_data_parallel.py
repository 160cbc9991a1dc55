"""Two trainer ranks under torchrun, followers in processes of their own, all with Torch."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PIPE = subprocess.PIPE

pytestmark = pytest.mark.ranks


@contextlib.contextmanager
def torchrun(scenario: str, followers: int):
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = [str(HERE / "trainer.py"), scenario, str(followers)]
    with subprocess.Popen(
        [sys.executable, *command, *script], stdout=PIPE, stderr=PIPE, text=True
    ) as trainer:
        try:
            yield trainer
        finally:
            trainer.terminate()


def tickets(trainer: subprocess.Popen[str], count: int) -> list[str]:
    assert trainer.stdout is not None
    found: list[str] = []
    while len(found) < count:
        line = trainer.stdout.readline()
        assert line, trainer.stderr.read() if trainer.stderr else ""
        found += [e["ticket"] for e in events(line) if "ticket" in e]
    return found


def events(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def follow(ticket: str) -> subprocess.Popen[str]:
    follower = subprocess.Popen(
        [sys.executable, str(HERE / "follower.py")], stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True
    )
    assert follower.stdin is not None
    follower.stdin.write(ticket + "\n")
    follower.stdin.flush()
    return follower


def test_two_ranks_publish_and_two_followers_hold_the_same_numbers():
    with torchrun("train", 2) as trainer:
        running = [follow(ticket) for ticket in tickets(trainer, 2)]
        output, errors = trainer.communicate(timeout=120)
        seen = [follower.communicate(timeout=60) for follower in running]
    assert trainer.returncode == 0, errors
    by_rank = {
        rank: {
            e["version"]: e["digest"]
            for e in events(output)
            if e.get("rank") == rank and "version" in e
        }
        for rank in (0, 1)
    }
    assert list(by_rank[0]) == [1, 2, 3, 4]
    assert by_rank[0] == by_rank[1], "every rank gets the report, and holds the same weights"
    for text, trouble in seen:
        versions = {e["version"]: e["digest"] for e in events(text) if "version" in e}
        assert versions == by_rank[0], trouble
        assert events(text)[-1] == {"error": "PeerLostError"}
    assert "is rank 0's; this is rank 1" in output
    assert "Warning" not in errors


def test_every_rank_gets_the_error_of_rank_0_and_training_goes_on():
    with torchrun("idle", 1) as trainer:
        # This member joins and never steps.
        code = (
            "import sys, time; sys.path.insert(0, sys.argv[1])\n"
            "from trainer import model_of; import parallelkit as pk\n"
            "s = pk.subscribe_weights(model_of(4), sys.stdin.readline()); time.sleep(60)"
        )
        idle = subprocess.Popen([sys.executable, "-c", code, str(HERE)], stdin=PIPE, text=True)
        assert idle.stdin is not None
        idle.stdin.write(tickets(trainer, 1)[0] + "\n")
        idle.stdin.flush()
        output, errors = trainer.communicate(timeout=120)
        idle.kill()
        idle.communicate()
    assert trainer.returncode == 0, errors
    for rank in (0, 1):
        found = [e["error"] for e in events(output) if e.get("rank") == rank and "error" in e]
        assert found == ["UpdateAbortedError"] * 4, output


def test_ranks_with_different_models_are_refused_with_a_table():
    with torchrun("mismatch", 0) as trainer:
        output, errors = trainer.communicate(timeout=120)
    assert trainer.returncode == 0, errors
    found = [e for e in events(output) if "error" in e]
    assert [e["error"] for e in found] == ["RankMismatchError"] * 2
    assert all("rank 1:" in e["message"] for e in found)


def test_one_ranks_bad_argument_is_every_ranks_error():
    with torchrun("argument", 0) as trainer:
        output, errors = trainer.communicate(timeout=120)
    assert trainer.returncode == 0, errors
    found = {e["rank"]: (e["error"], e["message"]) for e in events(output) if "error" in e}
    assert found[1][0] == "WeightTransferError"
    assert found[0][0] == "RankMismatchError"
    assert "rank 1: failed: WeightTransferError: verify is 'bad'" in found[0][1]
