"""The same passes by torch's own operations: for where Triton is not, and for the CPU."""

from __future__ import annotations

from typing import Final

import torch

from parallelkit_torch.cuda import digest
from parallelkit_torch.cuda.memory import bytes_at
from parallelkit_torch.cuda.table import Table

#: Bytes digested at once; bounds what is allocated on the way to a few times this.
_PIECE: Final = 1 << 26


def copy_pairs(pairs: Table, device: torch.device) -> None:
    """Copy each pair; in the order of the current stream."""
    for source, target, nbytes in zip(
        pairs.source.tolist(), pairs.target.tolist(), pairs.nbytes.tolist(), strict=True
    ):
        if nbytes:
            into = bytes_at(target, nbytes, device)
            into.copy_(bytes_at(source, nbytes, device), non_blocking=True)


def digest_pairs(pairs: Table, sums: torch.Tensor, *, target: bool) -> None:
    """Add the sums of what is at the pairs' sources, or targets, to those of their blocks."""
    if pairs.block is None or pairs.word is None:
        return
    addresses = pairs.target if target else pairs.source
    for address, nbytes, block, word in zip(
        addresses.tolist(),
        pairs.nbytes.tolist(),
        pairs.block.tolist(),
        pairs.word.tolist(),
        strict=True,
    ):
        for start in range(0, nbytes, _PIECE):
            piece = bytes_at(address + start, min(_PIECE, nbytes - start), sums.device)
            sums[block] += _sum(piece, word + start // digest.WORD_BYTES)


def _sum(octets: torch.Tensor, first: int) -> torch.Tensor:
    words = -(-len(octets) // digest.WORD_BYTES)
    if octets.data_ptr() % digest.WORD_BYTES or len(octets) % digest.WORD_BYTES:
        padded = octets.new_zeros(words * digest.WORD_BYTES)
        padded[: len(octets)] = octets
        octets = padded
    step = _signed(digest.STEP)
    keys = torch.arange(words, dtype=torch.int64, device=octets.device)
    values = keys.mul_(step).add_(_signed((first + 1) * digest.STEP)).add_(octets.view(torch.int64))
    for factor in (digest.FIRST, digest.SECOND):
        values.mul_(_signed(factor))
        values.bitwise_xor_((values >> 32).bitwise_and_(0xFFFFFFFF))
    return values.sum()


def _signed(value: int) -> int:
    """The int64 of the same bits: torch has few operations on uint64."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
