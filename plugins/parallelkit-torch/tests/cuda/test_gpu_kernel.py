"""The kernel on a GPU: bytes against torch's, digests against numpy's. Run by `pytest -m gpu`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from parallelkit_torch.cuda.copier import Copier
from parallelkit_torch.cuda.digest import digest_of
from parallelkit_torch.cuda.table import build_table

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

BYTES = 40 << 20


def layout(seed: int) -> tuple[np.ndarray[Any, Any], ...]:
    """Offsets of sources and targets, and sizes: any alignment, none overlapping."""
    rng = np.random.default_rng(seed)
    sizes = rng.choice([0, 1, 7, 8, 17, 100, 4096, 65536, 70001, 1 << 20, 3_000_001], 40)
    gaps = rng.choice([0, 0, 0, 1, 2, 3, 4, 8, 16], (2, 40))
    rounded = (sizes + 15) // 16 * 16 + 16
    starts = np.cumsum(rounded) - rounded
    return starts + gaps[0], starts + gaps[1], sizes


@pytest.fixture
def memory() -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.randint(0, 256, (BYTES,), dtype=torch.uint8, device="cuda:0")
    return source, torch.full_like(source, 0xEE)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("fused", [True, False])
def test_any_layout(memory: tuple[torch.Tensor, torch.Tensor], seed: int, fused: bool) -> None:
    source, target = memory
    sources, targets, sizes = layout(seed)
    blocks = np.arange(40) % 7
    want = target.clone()
    for at, to, size in zip(sources, targets, sizes, strict=True):
        want[to : to + size] = source[at : at + size]
    host = source.cpu().numpy()
    parts = [host[a : a + n].tobytes() for a, n in zip(sources, sizes, strict=True)]
    expected = [digest_of(parts[block::7]) for block in range(7)]
    for digested in (False, True):
        target.fill_(0xEE)
        table = build_table(
            source.data_ptr() + sources,
            target.data_ptr() + targets,
            sizes,
            block=blocks if digested else None,
        )
        copier = Copier(table, source.device, fused=fused)
        if not digested:
            copier.copy()
            assert torch.equal(target, want)
            continue
        copier.digest_source()
        copier.copy_and_read_back(1 + seed)
        found = copier.digests()
        assert torch.equal(target, want)
        for digests in (found.copied, found.source, found.target):
            assert digests is not None
            assert digests.tolist() == expected


def test_a_bit_that_changes_is_found_in_its_block(
    memory: tuple[torch.Tensor, torch.Tensor],
) -> None:
    source, target = memory
    starts = np.arange(16) * (BYTES // 16)
    table = build_table(
        source.data_ptr() + starts,
        target.data_ptr() + starts,
        np.full(16, BYTES // 16),
        block=np.arange(16),
    )
    copier = Copier(table, source.device)
    copier.digest_source()
    source[5 * (BYTES // 16) + 77] ^= 1
    copier.copy(digest=True)
    target[9 * (BYTES // 16) + 123456] ^= 128
    copier.digest_target()
    found = copier.digests()
    assert found.copied is not None
    assert found.source is not None
    assert found.target is not None
    assert np.flatnonzero(found.copied != found.source).tolist() == [5]
    assert np.flatnonzero(found.copied != found.target).tolist() == [9]


def test_digests_are_the_same_every_time(memory: tuple[torch.Tensor, torch.Tensor]) -> None:
    source, target = memory
    table = build_table([source.data_ptr()], [target.data_ptr()], [BYTES], block=[0])
    copier = Copier(table, source.device)
    seen = set()
    for turn in range(20):
        copier.copy_and_read_back(1 + turn)
        found = copier.digests()
        assert found.copied is not None
        assert found.target is not None
        seen |= {*found.copied.tolist(), *found.target.tolist()}
    assert seen == {digest_of([source.cpu().numpy().tobytes()])}
