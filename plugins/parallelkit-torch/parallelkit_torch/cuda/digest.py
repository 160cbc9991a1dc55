"""The digest of weights on a GPU, and the same on the CPU: the reference that it must equal.

A digest is of a *block*: a run of bytes, thought of as little-endian words of 8 bytes, the last one
padded with zeros. With `i` the index of a word `w` in its block and all arithmetic modulo 2^64,

    key(i)   = (i + 1) * STEP
    mix(x)   = fold(fold(x * FIRST) * SECOND)        fold(x) = x xor (x >> 32)
    sum      = sum over i of mix(w_i + key(i))
    digest   = mix(sum xor mix(bytes of the block + STEP))

A sum does not mind in which order parts are added, so chunks are digested in parallel by whoever
comes to them, and the result is the same to the bit.

What it is good for. For each `i`, `mix` is a bijection of the word: a change within one word is
always seen. Anything else that changes two words or more goes unseen with a probability of about
2^-64, as long as the change knows nothing of the mixing; words exchanged, moved or repeated count
as changes, since each is mixed with its place. The weakest kind known: two words of which only the
same top bit (or, for whatever reason, only a difference that the first product leaves in the top
bit) is flipped, in pairs: about 2^-32 a pair. There is no secret in it: it finds accidents, not
forgeries.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np

STEP: Final = 0x9E3779B97F4A7C15
FIRST: Final = 0xBF58476D1CE4E5B9
SECOND: Final = 0x94D049BB133111EB
WORD_BYTES: Final = 8

Words = np.ndarray[Any, np.dtype[np.uint64]]

_MASK: Final = (1 << 64) - 1
#: Words at once: what is computed on the way stays in the cache.
_PIECE: Final = 1 << 15
_STEPS: Final = np.arange(_PIECE, dtype=np.uint64) * np.uint64(STEP)
_HALF: Final = np.uint64(32)


def mixed(values: Words) -> Words:
    """Mix each of some words."""
    for factor in (FIRST, SECOND):
        values = values * np.uint64(factor)
        values ^= values >> _HALF
    return values


def sum_of(data: memoryview | bytes, first: int = 0) -> int:
    """The sum of the mixed words of `data`, of which the first has index `first` in its block.

    Args:
        data: contiguous bytes; where their number is no multiple of 8, they end the pair.
        first: index of the first word.
    """
    octets = np.frombuffer(data, np.uint8)
    whole = len(octets) // WORD_BYTES * WORD_BYTES
    total = _sum(octets[:whole].view("<u8"), first)
    if whole < len(octets):
        last = np.zeros(WORD_BYTES, np.uint8)
        last[: len(octets) - whole] = octets[whole:]
        total += _sum(last.view("<u8"), first + whole // WORD_BYTES)
    return total & _MASK


def salts_of(nbytes: np.ndarray[Any, Any]) -> Words:
    """What `finish` needs of blocks of these sizes, in bytes; the same for every version."""
    return mixed(nbytes.astype(np.uint64) + np.array([STEP], np.uint64))


def finish(sums: Words, salts: Words) -> Words:
    """Digests of blocks, from the sums of their words and `salts_of` their sizes."""
    return mixed(sums ^ salts)


def digest_of(parts: Iterable[memoryview | bytes]) -> int:
    """The digest of a block made of parts, each of which begins a new word.

    Example:
        >>> hex(digest_of([b"weights"]))
        '0xfefca00a02cf7b78'
    """
    first = total = nbytes = 0
    for part in parts:
        size = memoryview(part).nbytes
        total += sum_of(part, first)
        first += -(-size // WORD_BYTES)
        nbytes += size
    made = finish(np.array([total & _MASK], np.uint64), salts_of(np.array([nbytes])))
    return int(made[0])


def _sum(words: Words, first: int) -> int:
    total = 0
    for start in range(0, len(words), _PIECE):
        piece = words[start : start + _PIECE]
        key = np.array([((first + start + 1) * STEP) & _MASK], np.uint64)
        total += int(mixed(piece + (_STEPS[: len(piece)] + key)).sum(dtype=np.uint64))
    return total & _MASK
