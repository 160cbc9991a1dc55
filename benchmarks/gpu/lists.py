"""Lists of tensors that models have: shapes only."""

from __future__ import annotations

from collections.abc import Iterator

Shape = tuple[int, ...]


def dense() -> Iterator[Shape]:
    """Qwen2.5-7B's: 339 tensors, 15.23 GB in bfloat16."""
    hidden, inner, heads, vocabulary = 3584, 18944, 512, 152064
    yield vocabulary, hidden
    for _ in range(28):
        for rows in (hidden, heads, heads):  # q, k, v: weight and bias
            yield rows, hidden
            yield (rows,)
        yield hidden, hidden
        yield inner, hidden
        yield inner, hidden
        yield hidden, inner
        yield (hidden,)
        yield (hidden,)
    yield (hidden,)
    yield vocabulary, hidden


def experts() -> Iterator[Shape]:
    """The experts of a mixture like Qwen3-30B-A3B's: 18,432 tensors, 58 GB in bfloat16."""
    for _ in range(48 * 128 * 3):
        yield 768, 2048


LISTS = {"dense": dense, "experts": experts}
