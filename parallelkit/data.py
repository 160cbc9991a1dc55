"""Which items of a data set a rank loads, and with which seeds: functions of integers.

`index` and `count` are a rank's data coordinate, `ParallelPlan.data_shard_index(rank)` and
`data_shard_count`, never the global rank: ranks that share a data coordinate load the same items.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator, Sequence
from typing import Any, SupportsIndex, final, overload

from parallelkit.errors import DataShardError

#: What happens to the items that do not divide evenly; `shard_indices` says it.
MODES = ("pad", "drop", "uneven")


def shard_indices(
    length: int,
    *,
    index: int,
    count: int,
    mode: str = "pad",
    shuffle: bool = False,
    seed: int = 0,
    epoch: int = 0,
    start: int = 0,
) -> Sequence[int]:
    """Return the items of shard `index` of `count`: every `count`-th of the order, from `index`.

    What holds for every length, count, seed and epoch:

    | mode | together the shards hold | lengths of the shards | shards overlap |
    |---|---|---|---|
    | `"pad"` | every item | equal | only by the fewest repeats that make them equal |
    | `"drop"` | the first `length // count * count` of the order | equal | never |
    | `"uneven"` | every item | differ by at most 1, the first ones longer | never |

    Repeats of `"pad"` start over at the front of the order, as often as needed where there are
    fewer items than shards. Without `shuffle` the order is 0, 1, 2, ... and nothing of the size
    of the data set is made. With it, the order depends on length, seed and epoch only, so all
    ranks agree, on any version of NumPy and any machine; making it takes 16 bytes an item for a
    moment.

    With `start`, only what comes from that position of the order on is dealt, as if it were the
    whole: that is how a run goes on in mid-epoch, also with another number of shards than the
    one that took the first `start` items. `position_after` says which position that is. The
    table holds for the rest, except that `"drop"` may then leave every shard empty.

    Args:
        length: number of items in the data set.
        index: which shard, 0 to `count - 1`.
        count: number of shards.
        mode: `"pad"`, `"drop"` or `"uneven"`.
        shuffle: whether the order is a permutation.
        seed, epoch: any integers; each pair gives another permutation.
        start: positions of the order that are done, 0 to `length`.

    Raises:
        DataShardError: an argument is out of range, or `"drop"` would leave every shard empty.

    Example:
        >>> [list(shard_indices(5, index=i, count=2)) for i in (0, 1)]
        [[0, 2, 4], [1, 3, 0]]
        >>> [list(shard_indices(5, index=i, count=2, mode="uneven")) for i in (0, 1)]
        [[0, 2, 4], [1, 3]]
        >>> [list(shard_indices(5, index=i, count=3, start=2)) for i in (0, 1, 2)]
        [[2], [3], [4]]
    """
    length = _integer("length", length, low=0)
    index, count = check_place(index, count, mode)
    seed, epoch = _integer("seed", seed), _integer("epoch", epoch)
    start = _start(start, length)
    if mode == "drop" and length < count and not start:
        raise DataShardError(
            f"mode 'drop' would leave all {count} shards empty: the data set has {length} items, "
            f"fewer than shards; use 'pad' to repeat items or 'uneven' to allow empty shards"
        )
    end = length if mode == "uneven" else start + _rounds(length - start, count, mode) * count
    positions = range(start + index, end, count)
    if not shuffle:
        return positions if not positions or positions[-1] < length else _Shard(positions, length)
    return _Shard(positions, length, _permutation(length, seed, epoch)) if positions else positions


def position_after(
    batches: int,
    *,
    length: int,
    count: int,
    mode: str = "pad",
    start: int = 0,
    batch_size: int = 1,
    drop_last: bool = False,
) -> int:
    """Return how far in the order all shards are once each has given `batches` batches.

    It is the `start` for `shard_indices` with which every shard gives what is left. The answer is
    the same on every shard, so any one of them can save it for all.

    Args:
        batches: batches given by each shard since `start`; a shard of `"uneven"` that has one
            less than the first counts no more than it gave.
        length, count, mode, start: as given to `shard_indices`.
        batch_size: items in a batch.
        drop_last: whether a last batch of fewer items is left out.

    Returns:
        A position, 0 to `length`. It is `length` when no shard has a batch left, also where
        `"drop"` or `drop_last` left items out: an epoch that is over stays over.

    Raises:
        DataShardError: an argument is out of range.

    Example:
        >>> position_after(1, length=10, count=2, batch_size=3)
        6
        >>> position_after(2, length=10, count=2, batch_size=3)
        10
    """
    batches = _integer("batches", batches, low=0)
    length = _integer("length", length, low=0)
    _, count = check_place(0, count, mode)
    batch_size = _integer("batch_size", batch_size, low=1)
    start = _start(start, length)
    longest = _rounds(length - start, count, mode)
    total = longest // batch_size if drop_last else -(-longest // batch_size)
    return length if batches >= total else start + batches * batch_size * count


def check_place(index: int, count: int, mode: str) -> tuple[int, int]:
    """Return `index` and `count` as integers.

    Raises:
        DataShardError: one of the three is out of range.
    """
    count = _integer("count", count, low=1)
    index = _integer("index", index, low=0)
    if index >= count:
        raise DataShardError(f"index is {index}; with {count} shards it is 0 to {count - 1}")
    if mode not in MODES:
        raise DataShardError(f"mode is {mode!r}; it is one of {', '.join(map(repr, MODES))}")
    return index, count


def derive_seed(base: int, *coordinates: int) -> int:
    """Return a 64-bit seed for a place: other coordinates, another seed; the same, the same.

    Pass what must differ, such as data coordinate, loader worker and epoch, and leave out what
    must agree, such as the tensor coordinate. A hash of all digits, so large and negative
    integers are fine and neighbours are unrelated; the same on every machine and version.

    Args:
        base: the user's seed.
        coordinates: any number of integers, in an order that has a meaning.

    Returns:
        0 to 2**64 - 1. For 32-bit generators take it modulo 2**32.

    Raises:
        DataShardError: something is not an integer.

    Example:
        >>> derive_seed(0, 1, 2)
        16372296690997713808
    """
    values = [_integer("seed", base)]
    values += [_integer("coordinate of a seed", value) for value in coordinates]
    text = ",".join(map(hex, values))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@final
class _Shard(Sequence[int]):
    """Items at positions of an order, which starts over at its end."""

    __slots__ = ("_items", "_length", "_positions")

    def __init__(self, positions: range, length: int, order: Any = None) -> None:
        self._positions = positions
        self._length = length
        # A copy of this shard's items only; the whole order can go.
        self._items = None if order is None else order[_wrapped(positions, length)]

    def __len__(self) -> int:
        return len(self._positions)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...
    def __getitem__(self, at: int | slice) -> int | Sequence[int]:
        if isinstance(at, slice):
            return [self[position] for position in range(len(self))[at]]
        if self._items is not None:
            return int(self._items[at])
        return self._positions[at] % self._length

    def __iter__(self) -> Iterator[int]:
        if self._items is not None:
            for start in range(0, len(self), 65536):  # Python integers are large: few at a time
                yield from self._items[start : start + 65536].tolist()
            return
        for position in self._positions:
            yield position % self._length

    def __repr__(self) -> str:
        head = ", ".join(map(str, self[:6]))
        return f"<shard of {len(self)} items: {head}{', ...' if len(self) > 6 else ''}>"


def _rounds(length: int, count: int, mode: str) -> int:
    """Items of the longest of `count` shards of `length` items."""
    return length // count if mode == "drop" else -(-length // count)


def _start(start: int, length: int) -> int:
    start = _integer("start", start, low=0)
    if start > length:
        raise DataShardError(f"start is {start}; with {length} items it is 0 to {length}")
    return start


def _wrapped(positions: range, length: int) -> Any:
    import numpy as np

    return np.arange(positions.start, positions.stop, positions.step, dtype=np.int64) % length


def _permutation(length: int, seed: int, epoch: int) -> Any:
    """Order items by 64 random bits each.

    NumPy promises stable bit streams but not a stable `Generator.permutation`; ranks with
    different versions of it have to agree.
    """
    import numpy as np

    bits = np.random.PCG64(derive_seed(seed, epoch)).random_raw(length)
    return np.argsort(bits, kind="stable")


def _integer(name: str, value: SupportsIndex, *, low: int | None = None) -> int:
    allowed = "an integer" if low is None else f"an integer of at least {low}"
    try:
        number = operator.index(value)
    except TypeError:
        raise DataShardError(f"{name} is {value!r}; allowed is {allowed}") from None
    if isinstance(value, bool) or (low is not None and number < low):
        raise DataShardError(f"{name} is {value!r}; allowed is {allowed}")
    return number
