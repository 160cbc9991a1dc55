"""Whole updates between two processes with a GPU; more of it on two GPUs. By `pytest -m gpu`."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ranks,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
PATIENCE_SECONDS = 120.0
VIRTUAL = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}

where = pytest.mark.parametrize(
    "gpu",
    [
        "0",
        pytest.param(
            "1", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
        ),
    ],
    ids=["same", "other"],
)


class Process:
    """A running `updating.py`."""

    def __init__(self, seed: int, env: dict[str, str]) -> None:
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("updating.py")), str(seed)],
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, do: str, **order: Any) -> None:
        """Give an order, and do not wait."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **order}) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        """The next answer."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE_SECONDS)
        assert ready, "no answer"
        line = self.process.stdout.readline()
        assert line, f"the process ended, with {self.process.wait(30)}"
        return json.loads(line)

    def ask(self, do: str, **order: Any) -> Any:
        """Give an order and wait for the answer."""
        self.tell(do, **order)
        return self.hear()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def end(self) -> None:
        """Let it end by itself, else kill it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()


Start = Callable[..., tuple[Process, Process, Any]]


def started(gpu: str, here: dict[str, str]) -> tuple[Process, Process]:
    """A publisher to be, on GPU 0, and a follower to be; `here`: variables for the former."""
    owner = Process(1, {"CUDA_VISIBLE_DEVICES": "0"} | here)
    reader = Process(2, {"CUDA_VISIBLE_DEVICES": gpu})
    for one in (owner, reader):
        assert one.hear()["ready"]
    return owner, reader


@pytest.fixture(scope="module")
def kept() -> Iterator[dict[str, tuple[Process, Process]]]:
    """Pairs that are used again, by the GPU of the reader: it takes seconds to start one."""
    gpus = [str(i) for i in range(min(torch.cuda.device_count(), 2))]
    pairs = {gpu: started(gpu, {}) for gpu in gpus}
    yield pairs
    for pair in pairs.values():
        for one in pair:
            one.end()


@pytest.fixture
def start(kept: dict[str, tuple[Process, Process]]) -> Iterator[Start]:
    """A publisher and a follower, and how that is connected; `fresh` ones may be killed."""
    running: list[Process] = []

    def pair(
        gpu: str = "0", *, here: dict[str, str] | None = None, fresh: bool = False, **options: Any
    ) -> tuple[Process, Process, Any]:
        if fresh or here:
            owner, reader = started(gpu, here or {})
            running.extend((owner, reader))
        else:
            owner, reader = kept[gpu]
            for one in (reader, owner):
                one.ask("close")
        owner.ask("change")
        published = owner.ask("publish", options=options)
        assert "ticket" in published, published
        print(published["explain"])
        joined = reader.ask("subscribe", ticket=published["ticket"])
        print(joined)
        return owner, reader, joined

    yield pair
    for one in running:
        one.end()


def update(owner: Process, reader: Process) -> tuple[Any, Any]:
    """One update: what both say."""
    reader.tell("step")
    return owner.ask("update"), reader.hear()


def equal(owner: Process, reader: Process) -> bool:
    return bool(owner.ask("state")["hash"] == reader.ask("state")["hash"])


@where
@pytest.mark.parametrize("verify", ["off", "digest", "readback", "sample"])
@pytest.mark.parametrize("commit", ["auto", "in_place", "staged"])
def test_every_byte_arrives(start: Start, gpu: str, verify: str, commit: str) -> None:
    owner, reader, joined = start(gpu, commit=commit, verify=verify)
    in_place = commit == "in_place" or (commit == "auto" and gpu == "0")
    assert joined == {"transport": "cuda_ipc", "in_place": in_place}
    for version in (1, 2, 3):
        report, step = update(owner, reader)
        print(report)
        assert step == {"version": version}
        assert report["members"][0]["transport"] == "cuda_ipc"
        assert equal(owner, reader)
        owner.ask("change")
    assert not equal(owner, reader)


@where
def test_nan_travels_and_moved_weights_are_found(start: Start, gpu: str) -> None:
    owner, reader, _ = start(gpu)
    owner.ask("nan")
    for _ in range(3):
        report, _ = update(owner, reader)
        assert report["members"][0]["state"] == "committed", report
        assert equal(owner, reader)
        owner.ask("change")
        owner.ask("move")
    reader.ask("move")
    update(owner, reader)
    assert equal(owner, reader)
    owner.ask("finite")


def test_nan_is_refused_where_it_is_to_be(start: Start) -> None:
    owner, reader, _ = start(check_finite=True)
    update(owner, reader)
    owner.ask("nan")
    assert owner.ask("update")["error"] == "NonFiniteError"
    owner.ask("finite")


@where
def test_changed_bytes_in_place_are_pulled_again_and_then_quarantined(
    start: Start, gpu: str
) -> None:
    owner, reader, _ = start(gpu, commit="in_place")
    reader.ask("corrupt", times=1)
    report, _ = update(owner, reader)
    assert report["members"][0]["repeated"] == 1, report
    assert equal(owner, reader)
    owner.ask("change")
    reader.ask("corrupt", times=2)
    report, step = update(owner, reader)
    assert report["error"] == "PartialCommitError", report
    assert step["error"] == "QuarantinedError", step
    assert "came changed twice" in step["says"]
    assert reader.ask("state")["state"] == "quarantined"
    report, _ = update(owner, reader)
    assert report["members"][0]["state"] == "committed", report
    assert equal(owner, reader)


@where
def test_changed_bytes_staged_change_nothing(start: Start, gpu: str) -> None:
    owner, reader, _ = start(gpu, commit="staged")
    update(owner, reader)
    before = reader.ask("state")["hash"]
    owner.ask("change")
    reader.ask("corrupt", times=1)
    report, _ = update(owner, reader)
    assert report["error"] == "UpdateAbortedError", report
    assert reader.ask("state")["hash"] == before
    update(owner, reader)
    assert equal(owner, reader)


@pytest.mark.parametrize("commit", ["in_place", "staged"])
def test_a_reader_that_is_killed_while_it_reads(start: Start, commit: str) -> None:
    owner, reader, _ = start(fresh=True, commit=commit, timeout=10.0)
    update(owner, reader)
    reader.ask("hang")
    reader.tell("step")
    owner.tell("update")
    assert reader.hear() == {"hangs": True}
    reader.kill()
    began = time.monotonic()
    report = owner.hear()
    print(report)
    assert report["error"] in ("UpdateAbortedError", "PartialCommitError")
    assert time.monotonic() - began < 15
    # the publisher goes on, with another member
    again = Process(3, {"CUDA_VISIBLE_DEVICES": "0"})
    try:
        assert again.hear()["ready"]
        again.ask("subscribe", ticket=owner.ask("ticket")["ticket"])
        update(owner, again)
        assert equal(owner, again)
    finally:
        again.end()


@pytest.mark.parametrize("commit", ["in_place", "staged"])
def test_an_owner_that_is_killed_before_the_decision(start: Start, commit: str) -> None:
    owner, reader, _ = start(fresh=True, commit=commit, timeout=10.0)
    update(owner, reader)
    before = reader.ask("state")["hash"]
    reader.tell("step")
    time.sleep(0.5)
    owner.kill()
    began = time.monotonic()
    step = reader.hear()
    print(step)
    assert step["error"] in ("PeerLostError", "UpdateTimeoutError")
    assert time.monotonic() - began < 15
    after = reader.ask("state")
    assert after["hash"] == before, "the mapped memory was not needed, and the weights stay"


def test_an_owner_that_is_killed_while_it_is_read(start: Start) -> None:
    """What is mapped stays so: the pull ends, and the reader hears of the death in time."""
    owner, reader, _ = start(fresh=True, commit="staged", timeout=10.0)
    update(owner, reader)
    before = reader.ask("state")["hash"]
    owner.ask("change")
    reader.ask("slow")
    reader.tell("step")
    owner.tell("update")
    assert reader.hear() == {"slow": True}
    owner.kill()
    began = time.monotonic()
    step = reader.hear()
    print(step)
    assert "error" in step
    assert time.monotonic() - began < 15
    after = reader.ask("state")
    assert after["hash"] == before
    assert after["state"] in ("current", "quarantined")


@where
@pytest.mark.parametrize("commit", ["in_place", "staged"])
def test_many_updates_take_no_more_memory(start: Start, gpu: str, commit: str) -> None:
    owner, reader, _ = start(gpu, commit=commit)
    for _ in range(3):
        update(owner, reader)
    first = [one.ask("state") for one in (owner, reader)]
    for _ in range(47):
        owner.ask("change")
        report, step = update(owner, reader)
        assert step.get("version"), (report, step)
    last = [one.ask("state") for one in (owner, reader)]
    for before, after in zip(first, last, strict=True):
        print(before, after)
        assert after["allocated"] - before["allocated"] < 1 << 20
        assert abs(after["used"] - before["used"]) < 256 << 20  # of both processes together
        assert after["files"] <= before["files"] + 1
    assert last[0]["hash"] != first[0]["hash"]


def test_expandable_segments_go_through_the_host(start: Start) -> None:
    owner, reader, joined = start(here=VIRTUAL)
    assert joined == {"transport": "shm", "in_place": False}
    for _ in range(2):
        report, _ = update(owner, reader)
        assert report["members"][0]["transport"] == "shm"
        assert equal(owner, reader)
        owner.ask("change")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_module_on_a_gpu_over_transports_of_the_host(start: Start, transport: str) -> None:
    owner, reader, joined = start(transport=transport, verify="readback")
    assert joined == {"transport": transport, "in_place": False}
    update(owner, reader)
    assert equal(owner, reader)
