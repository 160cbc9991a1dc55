"""Weights from one framework to another, in processes of their own, over shared memory."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import pytest

from parallelkit.weights.segments import SHM_DIR

SCRIPT = Path(__file__).parent / "frameworks.py"
SECONDS = 120.0

pytestmark = pytest.mark.ranks


class Side:
    """A running trainer or follower."""

    def __init__(self, *args: str, folder: Path) -> None:
        self.args = args
        self.errors = folder / f"{'-'.join(args)}-{id(self)}.txt"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(SCRIPT), *args],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=folder,
                env={**os.environ, "GLOG_v": "3", "OMP_NUM_THREADS": "1"},
            )
        self._lines: SimpleQueue[str] = SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def next(self) -> dict[str, Any]:
        """The next line that it says."""
        try:
            line = self._lines.get(timeout=SECONDS)
        except Empty:
            line = ""
        assert line, f"{self.args} said nothing more:\n{self.errors.read_text()[-4000:]}"
        found: dict[str, Any] = json.loads(line)
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self._lines.put(line)
        self._lines.put("")


class Sides:
    """All that were started; killed at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._all: list[Side] = []

    def start(self, *args: str) -> Side:
        side = Side(*args, folder=self._folder)
        self._all.append(side)
        return side

    def close(self) -> None:
        for side in self._all:
            side.end()


@pytest.fixture
def sides(tmp_path: Path) -> Iterator[Sides]:
    before = set(SHM_DIR.iterdir())
    made = Sides(tmp_path)
    yield made
    made.close()
    assert {p for p in set(SHM_DIR.iterdir()) - before if p.name.startswith("parallelkit")} == set()


def run(trainer: Side, followers: list[Side], commands: list[str]) -> list[dict[str, str]]:
    """Train and update; every follower must hold the trainer's bytes and compute with them."""
    digests = []
    for command in commands:
        trainer.send(command)
        said = trainer.next()
        assert "version" in said, said
        digests.append(said["digests"])
        for follower in followers:
            heard = follower.next()
            assert heard.get("version") == said["version"], heard
            assert heard["digests"] == said["digests"]
            for output in heard["outputs"]:
                assert output == pytest.approx(said["outputs"][0], rel=1e-4, abs=1e-5)
    return digests


def join(trainer: Side, followers: list[Side]) -> None:
    for follower in followers:
        follower.send(trainer.next()["ticket"])


def changed(digests: list[dict[str, str]]) -> set[str]:
    """Names of the tensors that were others at every version."""
    return {name for name in digests[0] if len({d[name] for d in digests}) == len(digests)}


TRAINED = {
    *("embed.weight", "head.weight", "norm.weight", "norm.bias", "body.weight"),
    *("batch.weight", "batch.bias", "batch.running_mean", "batch.running_var", "low"),
}


def test_torch_and_mindspore_follow_mindspore_in_both_modes_until_one_is_killed(
    sides: Sides,
) -> None:
    trainer = sides.start("publish", "mindspore", "2")
    followers = [sides.start("follow", framework) for framework in ("torch", "mindspore")]
    join(trainer, followers)
    digests = run(trainer, followers, ["eager 2", "eager 1", "graph 2", "graph 1", "eager 1"])
    assert changed(digests) >= TRAINED
    assert digests[0]["frozen"] == digests[-1]["frozen"]

    followers[1].end()
    trainer.send("graph 1")
    said = trainer.next()  # its death may have been noticed before the update began
    if "error" in said:
        assert said["error"] in ("UpdateAbortedError", "PartialCommitError"), said
        assert "follower" in said["message"] or "member" in said["message"]
        heard = followers[0].next()
        assert heard.get("error") == "UpdateAbortedError" or "version" in heard
    else:
        assert followers[0].next()["digests"] == said["digests"]
    trainer.end()
    last = followers[0].next()
    assert last["error"] in ("PeerLostError", "UpdateAbortedError"), last


def test_mindspore_follows_torch_by_steps_and_from_a_serving_thread(sides: Sides) -> None:
    trainer = sides.start("publish", "torch", "2")
    followers = [sides.start(role, "mindspore") for role in ("follow", "serve")]
    join(trainer, followers)
    digests = run(trainer, followers, ["eager 2", "graph 2", "eager 1", "graph 1"])
    assert changed(digests) >= TRAINED
    assert trainer.process.stdin is not None
    trainer.process.stdin.close()
    for follower in followers:
        assert follower.next()["error"] == "PeerLostError"
        assert follower.process.wait(60) == 0
        assert "Warning" not in follower.errors.read_text()
    assert trainer.process.wait(60) == 0
