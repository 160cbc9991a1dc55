"""GPU memory shared by two real processes. Run by `pytest -m gpu`; more of it on two GPUs."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from parallelkit_torch.cuda.copier import Copier
from parallelkit_torch.cuda.driver import Driver, shown
from parallelkit_torch.cuda.errors import IpcError
from parallelkit_torch.cuda.ipc import Exports, Imports
from parallelkit_torch.cuda.probe import Survey, reach, survey
from parallelkit_torch.cuda.sheet import Sheet
from parallelkit_torch.cuda.table import build_table

from parallelkit.specs import HostIdentity

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ranks,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

SIZES = [3, 1000, 70_000, 8, 1_500_000, 12_000_000, 5]
PATIENCE_SECONDS = 120.0


class Peer:
    """A running `peer.py`."""

    def __init__(self, env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("peer.py"))],
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **order: Any) -> Any:
        """Give an order and wait for the answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE_SECONDS)
        assert ready, f"no answer to {order['do']}"
        line = self.process.stdout.readline()
        assert line, f"the peer ended at {order['do']}"
        return json.loads(line)

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


@pytest.fixture
def peer() -> Iterator[Callable[..., Peer]]:
    """Start peers, with variables in their environment."""
    started: list[Peer] = []

    def start(**env: str) -> Peer:
        started.append(Peer(env))
        return started[-1]

    yield start
    for one in started:
        one.end()


@pytest.fixture(scope="module")
def owner() -> Iterator[Peer]:
    """A peer that sees GPU 0 alone, for all tests that leave it as it was."""
    started = Peer({"CUDA_VISIBLE_DEVICES": "0"})
    yield started
    started.end()


@pytest.fixture(params=[0, pytest.param(1, marks=two)], ids=["same", "other"])
def imports(request: pytest.FixtureRequest) -> Iterator[Imports]:
    """Imports of a reader on the owner's GPU, then on another one."""
    with Imports(Driver.load(), request.param) as made:
        yield made


def device_of(imports: Imports) -> torch.device:
    return torch.device("cuda", imports._device)


def pulled(
    imports: Imports, answer: Any, fused: bool | None = None
) -> tuple[list[int], list[int], list[torch.Tensor]]:
    """Copy what a peer exported: digests as read and as they are here, and the copies."""
    sheet = Sheet.decode(bytes.fromhex(answer["sheet"]))
    sources = imports.open(sheet)
    device = device_of(imports)
    copies = [torch.full((int(n),), 0xEE, dtype=torch.uint8, device=device) for n in sheet.nbytes]
    table = build_table(
        sources, [c.data_ptr() for c in copies], sheet.nbytes, block=np.arange(len(copies))
    )
    copier = Copier(table, device, fused=fused)
    copier.copy_and_read_back(4)
    found = copier.digests()
    imports.release(sheet)
    assert found.copied is not None
    assert found.target is not None
    return found.copied.tolist(), found.target.tolist(), copies


@pytest.mark.parametrize("fused", [True, False])
def test_what_a_peer_exports_arrives(owner: Peer, imports: Imports, fused: bool) -> None:
    answer = owner.ask(do="export", sizes=SIZES)
    assert answer["allocations"] < len(SIZES)
    copied, placed, _ = pulled(imports, answer, fused)
    assert copied == placed == answer["digests"]
    owner.ask(do="change", tensor=4)
    again, _, _ = pulled(imports, answer, fused)
    assert [i for i, (a, b) in enumerate(zip(again, copied, strict=True)) if a != b] == [4]


def test_small_allocations_of_their_own_are_told_apart(
    peer: Callable[..., Peer], imports: Imports
) -> None:
    """CUDA puts small ones into one block: the handle must lead to the right place in it."""
    owner = peer(CUDA_VISIBLE_DEVICES="0", PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    answer = owner.ask(do="export", sizes=[100, 200, 300, 4096, 50_000])
    assert answer["allocations"] == 5
    copied, placed, _ = pulled(imports, answer)
    assert copied == placed == answer["digests"]


def test_opened_twice_is_mapped_once_and_given_back(owner: Peer, imports: Imports) -> None:
    answer = owner.ask(do="export", sizes=SIZES)
    sheet = Sheet.decode(bytes.fromhex(answer["sheet"]))
    first = imports.open(sheet)
    assert imports.open(sheet).tolist() == first.tolist()
    assert len(imports) == answer["allocations"]
    imports.release(sheet)
    imports.release(sheet)
    assert len(imports) == 0
    free = []
    for _ in range(50):
        imports.open(sheet)
        imports.release(sheet)
        free.append(torch.cuda.mem_get_info(device_of(imports))[0])
    assert free[0] - free[-1] < 1 << 20


def test_an_owner_that_is_killed(peer: Callable[..., Peer], owner: Peer, imports: Imports) -> None:
    other, owner = owner, peer(CUDA_VISIBLE_DEVICES="0")
    answer = owner.ask(do="export", sizes=SIZES)
    sheet = Sheet.decode(bytes.fromhex(answer["sheet"]))
    imports.open(sheet)
    owner.process.kill()
    owner.process.wait(30)
    imports.release(sheet)
    with pytest.raises(IpcError, match="cannot be mapped"):
        imports.open(sheet)
    assert len(imports) == 0
    # this process goes on with others as if nothing had been
    again = other.ask(do="export", sizes=SIZES)
    copied, placed, _ = pulled(imports, again)
    assert copied == placed == again["digests"]


def test_a_handle_of_nothing_is_refused(owner: Peer, imports: Imports) -> None:
    answer = owner.ask(do="export", sizes=SIZES)
    data = bytearray(bytes.fromhex(answer["sheet"]))
    data[32:96] = bytes(range(1, 65))
    with pytest.raises(IpcError, match="cuIpcOpenMemHandle_v2 failed"):
        imports.open(Sheet.decode(bytes(data)))
    copied, placed, _ = pulled(imports, answer)
    assert copied == placed == answer["digests"]


def test_both_see_devices_by_other_numbers(peer: Callable[..., Peer]) -> None:
    """The owner names its GPU by UUID, and on two GPUs its device 0 is the reader's device 1."""
    driver = Driver.load()
    last = driver.count() - 1
    owner = peer(CUDA_VISIBLE_DEVICES=shown(driver.uuid(last)))
    answer = owner.ask(do="export", sizes=SIZES)
    assert Sheet.decode(bytes.fromhex(answer["sheet"])).handles[0].gpu == driver.uuid(last)
    for device in range(driver.count()):
        with Imports(driver, device) as imports:
            copied, placed, _ = pulled(imports, answer)
            assert copied == placed == answer["digests"]


@two
def test_an_owner_on_a_gpu_that_the_reader_does_not_see(
    peer: Callable[..., Peer], owner: Peer
) -> None:
    reader = peer(CUDA_VISIBLE_DEVICES="1")
    answer = owner.ask(do="export", sizes=SIZES)
    assert reader.ask(do="open", sheet=answer["sheet"])["digests"] == answer["digests"]
    judged = reach(*(as_survey(one.ask(do="survey")) for one in (reader, owner)))
    assert judged.possible, judged.reasons
    assert "does not see" in judged.remarks[0]


def test_two_peers_exchange_without_us(peer: Callable[..., Peer], owner: Peer) -> None:
    last = str(torch.cuda.device_count() - 1)
    reader = peer(CUDA_VISIBLE_DEVICES="0" if last == "0" else f"{last},0")
    answer = owner.ask(do="export", sizes=SIZES)
    assert reader.ask(do="open", sheet=answer["sheet"])["digests"] == answer["digests"]
    surveys = [as_survey(one.ask(do="survey")) for one in (reader, owner)]
    judged = reach(*surveys)
    assert judged.possible, judged.reasons
    assert judged.same_device == (last == "0")


def test_expandable_segments_are_refused_beforehand(peer: Callable[..., Peer]) -> None:
    owner = peer(CUDA_VISIBLE_DEVICES="0", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    found = owner.ask(do="export", sizes=SIZES)
    assert found["error"] == "IpcError"
    assert "expandable_segments" in found["says"]
    obstacles = as_survey(owner.ask(do="survey")).obstacles
    assert len(obstacles) == 1
    assert "expandable_segments" in obstacles[0]


def test_the_survey_here_and_the_export_of_this_process() -> None:
    tensor = torch.zeros(8, device="cuda:0")
    here = survey("cuda:0", [tensor, tensor[:0]])
    assert not here.obstacles
    assert here.device in here.reads
    assert "one process" in reach(here, here).reasons[0]
    driver = Driver.load()
    with Exports(driver) as exports, Imports(driver, 0) as imports:
        with pytest.raises(IpcError, match="two processes"):
            imports.open(exports.tensors([tensor]))


def test_strided_tensors_are_exported_as_they_lie() -> None:
    whole = torch.zeros(64, 64, device="cuda:0")
    with Exports(Driver.load()) as exports:
        sheet = exports.tensors([whole[8:16, 4:8], whole])
        assert len(sheet.handles) == 1
        assert (sheet.offset[0] - sheet.offset[1]) == (8 * 64 + 4) * 4
        assert sheet.nbytes.tolist() == [(7 * 64 + 4) * 4, 64 * 64 * 4]


def as_survey(plain: Any) -> Survey:
    host = HostIdentity(**{**plain["host"], "accelerator": None})  # which crosses as a dict
    lists = {name: tuple(plain[name]) for name in ("reads", "sees", "obstacles")}
    return attrs.evolve(Survey(**{**plain, "host": host, **lists}))
