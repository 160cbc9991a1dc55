"""Passes over a table: by torch's operations on the CPU, and the kernel in its interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from parallelkit_torch.cuda.copier import Copier
from parallelkit_torch.cuda.digest import digest_of
from parallelkit_torch.cuda.errors import IpcError, TableError
from parallelkit_torch.cuda.memory import bytes_at
from parallelkit_torch.cuda.table import Table, build_table

from parallelkit.errors import StateError

CPU = torch.device("cpu")
OFFSETS, SIZES, BLOCKS = [0, 103, 5000, 9000], [96, 4096, 0, 3001], [0, 1, 1, 0]


@pytest.fixture
def memory() -> tuple[torch.Tensor, torch.Tensor]:
    """Random sources, poisoned targets."""
    values = np.random.default_rng(4).integers(0, 256, 13_000, dtype=np.uint8)
    return torch.from_numpy(values), torch.full((13_000,), 0xEE, dtype=torch.uint8)


def table_of(source: torch.Tensor, target: torch.Tensor, **settings: object) -> Table:
    offsets = np.array(OFFSETS)
    return build_table(source.data_ptr() + offsets, target.data_ptr() + offsets, SIZES, **settings)


def expected(source: torch.Tensor) -> list[int]:
    parts = [source.numpy()[a : a + n].tobytes() for a, n in zip(OFFSETS, SIZES, strict=True)]
    return [digest_of([parts[0], parts[3]]), digest_of([parts[1], parts[2]])]


def test_every_pass_on_the_cpu(memory: tuple[torch.Tensor, torch.Tensor]) -> None:
    source, target = memory
    copier = Copier(table_of(source, target, block=BLOCKS), CPU)
    assert not copier.fused
    want = target.clone()
    for at, size in zip(OFFSETS, SIZES, strict=True):
        want[at : at + size] = source[at : at + size]
    copier.digest_source()
    copier.copy_and_read_back()
    found = copier.digests()
    assert torch.equal(target, want)
    for digests in (found.copied, found.source, found.target):
        assert digests is not None
        assert digests.tolist() == expected(source)


def test_digests_are_of_the_passes_since_the_last_ones(
    memory: tuple[torch.Tensor, torch.Tensor],
) -> None:
    source, target = memory
    copier = Copier(table_of(source, target, block=BLOCKS), CPU)
    copier.copy(digest=True)
    assert copier.digests().copied is not None
    source[9000] += 1
    copier.digest_source()
    copier.digest_target()
    found = copier.digests()
    assert found.copied is None
    assert found.source is not None
    assert found.target is not None
    assert (found.source == found.target).tolist() == [False, True]


def test_a_source_alone_is_digested(memory: tuple[torch.Tensor, torch.Tensor]) -> None:
    source, _ = memory
    table = build_table(source.data_ptr() + np.array(OFFSETS), None, SIZES, block=BLOCKS)
    copier = Copier(table, CPU)
    copier.digest_source()
    found = copier.digests().source
    assert found is not None
    assert found.tolist() == expected(source)


def test_digests_need_blocks(memory: tuple[torch.Tensor, torch.Tensor]) -> None:
    copier = Copier(table_of(*memory), CPU)
    copier.copy()
    for ask in (lambda: copier.copy(digest=True), copier.digest_source, copier.digest_target):
        with pytest.raises(StateError, match="without blocks"):
            ask()


def test_the_kernel_is_not_for_the_cpu(memory: tuple[torch.Tensor, torch.Tensor]) -> None:
    with pytest.raises(TableError, match="needs Triton and a CUDA device"):
        Copier(table_of(*memory), CPU, fused=True)


def test_memory_at_an_address_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = torch.arange(10, dtype=torch.uint8)
    view = bytes_at(owner.data_ptr() + 2, 3, CPU)
    view[0] = 77
    assert owner[2] == 77
    assert view.tolist() == [77, 3, 4]
    monkeypatch.delattr(torch._C, "_construct_storage_from_data_pointer")
    with pytest.raises(IpcError, match="install Triton"):
        bytes_at(owner.data_ptr(), 1, CPU)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_the_kernel_interpreted_on_the_cpu() -> None:
    """Its logic, without a GPU: every width, heads, tails, digests."""
    script = Path(__file__).with_name("interpreted.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.strip() == "equal", done.stderr[-4000:]
