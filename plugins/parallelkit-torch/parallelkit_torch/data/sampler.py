"""Samplers over one part of an order: ours, or one that the caller's sampler gives."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import islice
from typing import Any, Protocol, final

import attrs
import torch
from torch.utils.data import Sampler

from parallelkit.data import derive_seed, shard_indices
from parallelkit.errors import DataShardError, DataStateError
from parallelkit_torch.data.seeds import seeded


class SizedIterable(Protocol):
    """What a sampler has to be."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...


@final
@attrs.frozen(eq=False)
class Order:
    """The order in which a caller's sampler goes through a data set, alike on every rank.

    While the sampler is read, the generators of `random`, NumPy and torch, and one that it holds
    as `generator`, are seeded by seed and epoch; afterwards they are as they were. So samplers
    that draw from those agree on all ranks. A sampler with a generator under another name has
    to be seeded alike by the caller.

    Attributes:
        source: the sampler or batch sampler.
        seed: the user's.
        batches: whether its elements are whole batches.
    """

    source: SizedIterable
    seed: int
    batches: bool

    def __len__(self) -> int:
        return len(self.source)

    def take(self, epoch: int) -> list[Any]:
        """Return all elements of an epoch.

        Raises:
            DataShardError: the sampler gives another number of elements than it says.
        """
        seed = derive_seed(self.seed, epoch)
        held = [part for part in _parts(self.source) if _generator(part) is not None]
        before = [part.generator for part in held]
        try:
            for part in held:
                part.generator = torch.Generator().manual_seed(seed)
            with seeded(seed):
                said = len(self.source)
                elements = list(islice(iter(self.source), said + 1))
        finally:
            for part, generator in zip(held, before, strict=True):
                part.generator = generator
        if len(elements) != said:
            gave = f"{len(elements)}" if len(elements) < said else "more"
            raise DataShardError(
                f"{type(self.source).__qualname__} says it has {said} elements and gives {gave}; "
                "its __len__ must be right for ranks to get equal parts"
            )
        return elements

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to samplers that have a method for it."""
        for part in _parts(self.source):
            if callable(method := getattr(part, "set_epoch", None)):
                method(epoch)


@final
@attrs.frozen(eq=False)
class Pass:
    """One way through an order: which epoch, from which position, and the caller's elements."""

    epoch: int = 0
    start: int = 0
    taken: list[Any] | None = None

    @property
    def digest(self) -> str | None:
        """A digest of the caller's order."""
        if self.taken is None:
            return None
        text = ",".join(map(str, self.taken))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@final
@attrs.define(eq=False)
class ShardSampler(Sampler[Any]):
    """The elements of one part of the order, by `parallelkit.data.shard_indices`.

    Attributes:
        dataset: what is sampled; its length counts where `order` is None.
        index, count, mode, shuffle, seed: as of `shard_indices`.
        order: the caller's order, or None for ours.
        current: what `__iter__` goes through.
    """

    dataset: Sized
    index: int
    count: int
    mode: str
    shuffle: bool
    seed: int
    order: Order | None = None
    current: Pass = Pass()

    @property
    def length(self) -> int:
        """Positions in the order of a whole epoch."""
        return len(self.dataset if self.order is None else self.order)

    def plan(self, epoch: int, start: int, expected: str | None = None) -> Pass:
        """Make a pass; a caller's sampler is read here.

        Raises:
            DataShardError: the sampler gives another number of elements than it says.
            DataStateError: its order is not the one of the digest `expected`.
        """
        if self.order is None:
            return Pass(epoch, start)
        made = Pass(epoch, start, self.order.take(epoch))
        if expected not in (None, made.digest):
            raise DataStateError(
                f"{type(self.order.source).__qualname__} gives another order for epoch {epoch} "
                "than when the state was saved; it has to depend on set_epoch, or on its "
                "`generator` or the global generators, which are seeded here",
                differences=[f"order: saved {expected!r}, here {made.digest!r}"],
            )
        return made

    def part(self, *, shuffle: bool, start: int = 0) -> Sequence[int]:
        """Positions, or with `shuffle` items of our order, that belong to this part."""
        return shard_indices(
            self.length,
            index=self.index,
            count=self.count,
            mode=self.mode,
            shuffle=shuffle,
            seed=self.seed,
            epoch=self.current.epoch,
            start=start,
        )

    def __len__(self) -> int:
        return len(self.part(shuffle=False))

    def __iter__(self) -> Iterator[Any]:
        taken, start = self.current.taken, self.current.start
        if taken is None:
            return iter(self.part(shuffle=self.shuffle, start=start))
        return (taken[at] for at in self.part(shuffle=False, start=start))


def _parts(source: object) -> list[Any]:
    """The sampler, and those that it draws from: a batch sampler has one inside."""
    found: list[Any] = []
    while source is not None and not any(source is seen for seen in found):
        found.append(source)
        source = getattr(source, "sampler", None)
        source = source if isinstance(source, Iterable) else None
    return found


def _generator(part: object) -> object | None:
    """A generator of torch that the sampler holds; None also means the global one, seeded too."""
    held = getattr(part, "generator", None)
    return held if isinstance(held, torch.Generator) else None
