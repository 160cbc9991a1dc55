"""The digest on the CPU: its definition written out, and the accidents that it must see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from parallelkit_torch.cuda.digest import FIRST, SECOND, STEP, digest_of, sum_of

Array = np.ndarray[Any, Any]
MODULUS = 1 << 64


def mix(value: int) -> int:
    for factor in (FIRST, SECOND):
        value = value * factor % MODULUS
        value ^= value >> 32
    return value


def by_definition(data: bytes) -> int:
    padded = data + bytes(-len(data) % 8)
    words = [int.from_bytes(padded[i : i + 8], "little") for i in range(0, len(padded), 8)]
    total = sum(mix((w + (i + 1) * STEP) % MODULUS) for i, w in enumerate(words)) % MODULUS
    return mix(total ^ mix((len(data) + STEP) % MODULUS))


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 64, 1001, 300_000])
def test_it_is_what_its_definition_says(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).tobytes()
    assert digest_of([data]) == by_definition(data)


def test_sums_of_chunks_add_up() -> None:
    data = np.random.default_rng(3).integers(0, 256, 1000, dtype=np.uint8).tobytes()
    parts = sum_of(data[:400]) + sum_of(data[400:808], 50) + sum_of(data[808:], 101)
    assert parts % MODULUS == sum_of(data)


def test_zeros_of_different_lengths_differ() -> None:
    assert len({digest_of([bytes(n)]) for n in range(200)}) == 200


def _negate(values: Array) -> Array:
    return -values


def _swap(values: Array) -> Array:
    half = len(values) // 2
    return np.concatenate([values[half:], values[:half]])


def _flip_two(bit: int, distance: int) -> Callable[[Array], Array]:
    def change(values: Array) -> Array:
        words = values.view(np.uint64).copy()
        words[[100, 100 + distance]] ^= np.uint64(1 << bit)
        return words.view(values.dtype)

    return change


CHANGES: dict[str, Callable[[Array], Array]] = {
    "negated": _negate,
    "halves exchanged": _swap,
    "one element later": lambda v: np.roll(v, 1),
    "zeroed at the end": lambda v: np.where(np.arange(len(v)) < len(v) - 1, v, 0).astype(v.dtype),
    "reversed": lambda v: v[::-1].copy(),
    "sorted": lambda v: np.sort(v),
    "doubled": lambda v: v * v.dtype.type(2),
    "a run repeated": lambda v: np.concatenate([v[:512], v[:512], v[1024:]]),
    "big endian": lambda v: v.byteswap(),
    **{
        f"bit {bit} of two words {distance} apart": _flip_two(bit, distance)
        for bit in (0, 31, 32, 62, 63)
        for distance in (1, 2048)
    },
}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_many_words_are_seen(change: str, dtype: type) -> None:
    for seed in range(20):
        values = np.random.default_rng(seed).standard_normal(1 << 14).astype(dtype)
        changed = CHANGES[change](values)
        assert changed.nbytes == values.nbytes
        assert changed.tobytes() != values.tobytes()
        assert digest_of([changed.tobytes()]) != digest_of([values.tobytes()])


def test_pairs_of_top_bits_seldom_cancel() -> None:
    """The weakest kind of change: count how often two words' differences sum to nothing."""
    words = np.random.default_rng(5).integers(0, 1 << 63, (1 << 16, 2), dtype=np.uint64)
    keys = np.array([STEP, 2 * STEP % MODULUS], np.uint64)
    top = np.uint64(1 << 63)

    def mixed(values: Array) -> Array:
        for factor in (FIRST, SECOND):
            values = values * np.uint64(factor)
            values = values ^ (values >> np.uint64(32))
        return values

    difference = mixed(words + keys + top) - mixed(words + keys)
    sums = difference.sum(axis=1, dtype=np.uint64)
    assert not (sums == 0).any()
    # what one such word adds takes far more values than were drawn here
    assert len(np.unique(difference[:, 0])) > 0.99 * len(words)


def test_every_bit_of_a_word_changes_half_of_the_digest() -> None:
    data = bytearray(np.random.default_rng(6).integers(0, 256, 64, dtype=np.uint8).tobytes())
    before, flips = digest_of([bytes(data)]), []
    for bit in range(512):
        data[bit // 8] ^= 1 << bit % 8
        flips.append((digest_of([bytes(data)]) ^ before).bit_count())
        data[bit // 8] ^= 1 << bit % 8
    assert min(flips) > 10
    assert 28 < sum(flips) / len(flips) < 36
