"""Where a loader is in its epoch, as plain data that any rank can save for all."""

from __future__ import annotations

from typing import Any, Final, Literal, final

import attrs
import msgspec

from parallelkit.data import MODES, position_after
from parallelkit.errors import DataStateError

FORMAT: Final = "parallelkit.loader/1"

#: What positions count: items of a data set in our order, or in that of the caller's sampler,
#: whole batches of the caller's batch sampler, items of a stream.
Kind = Literal["items", "sampler", "batches", "stream"]


_LIMIT: Final = 2**63


class _Wire(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    kind: Kind
    length: int | None
    mode: str
    shuffle: bool
    seed: int
    epoch: int
    consumed: int
    finished: bool
    order: str | None


@final
@attrs.frozen(kw_only=True)
class LoaderState:
    """How much of which epoch all ranks have been given, in positions of the global order.

    Nothing in it depends on the rank, the number of ranks, workers or the batch size, so one
    rank's state serves all, and a run may go on with others.

    Attributes:
        kind: what positions count.
        length: positions in the order; None for a stream, whose end is not known.
        mode, shuffle, seed, epoch: as of `shard_indices`.
        consumed: positions given to the loops of all ranks.
        finished: whether the epoch is over.
        order: a digest of the order that the caller's sampler gave; None where it is ours or
            was not needed yet.
    """

    kind: Kind
    length: int | None
    mode: str
    shuffle: bool
    seed: int
    epoch: int = 0
    consumed: int = 0
    finished: bool = False
    order: str | None = None

    def plain(self) -> dict[str, Any]:
        """Return a dict of str, int, bool and None, for JSON, msgpack or `torch.save`."""
        return {"format": FORMAT, **attrs.asdict(self)}

    @classmethod
    def from_plain(cls, value: object) -> LoaderState:
        """Read what `plain` gave.

        Raises:
            DataStateError: it is no such state, or is damaged; says what is wrong.
        """
        try:
            wire = msgspec.convert(value, _Wire)
        except msgspec.ValidationError as error:
            raise DataStateError(
                f"the state of a loader cannot be read: {error}. Give what state_dict() returned"
            ) from None
        wrong = _wrong(wire)
        if wrong:
            raise DataStateError(f"the state of a loader is damaged: {wrong}")
        values = msgspec.structs.asdict(wire)
        del values["format"]
        return cls(**values)

    def after(
        self, batches: int, *, count: int, batch_size: int, drop_last: bool, ended: bool
    ) -> LoaderState:
        """Return the state once each part of a pass that began here has given `batches`.

        Args:
            batches, count, batch_size, drop_last: as of `position_after`.
            ended: whether the pass has said that it is over.
        """
        if self.length is None:
            consumed = self.consumed + batches * batch_size * count
            return attrs.evolve(self, consumed=consumed, finished=ended)
        consumed = self.length
        if not ended:
            consumed = position_after(
                batches,
                length=self.length,
                count=count,
                mode=self.mode,
                start=self.consumed,
                batch_size=batch_size,
                drop_last=drop_last,
            )
        return attrs.evolve(self, consumed=consumed, finished=consumed == self.length)

    def check_fits(self, loader: LoaderState) -> None:
        """Compare this saved state with that of the loader that is to go on from it.

        Raises:
            DataStateError: they are about other data or settings; has a line for each
                difference.
        """
        differences = [
            f"{name}: saved {getattr(self, name)!r}, here {getattr(loader, name)!r}"
            for name in ("kind", "length", "mode", "shuffle", "seed")
            if getattr(self, name) != getattr(loader, name)
        ]
        if differences:
            raise DataStateError(
                "the state belongs to another loader: "
                + "; ".join(differences)
                + ". Make the loader as it was, or begin a new epoch without the state",
                differences=differences,
            )


def _wrong(wire: _Wire) -> str | None:
    """Say what a state of the right types cannot be."""
    if wire.format != FORMAT:
        return f"format is {wire.format!r}; this version reads {FORMAT!r}"
    if wire.mode not in MODES:
        return f"mode is {wire.mode!r}; it is one of {', '.join(map(repr, MODES))}"
    if (wire.length is None) != (wire.kind == "stream"):
        return f"length is {wire.length!r} for the kind {wire.kind!r}"
    if wire.length is not None and wire.length < 0:
        return f"length is {wire.length}"
    for name in ("seed", "epoch", "consumed"):
        if not -_LIMIT <= getattr(wire, name) < _LIMIT:
            return f"{name} is {getattr(wire, name)}, which has more than 64 bits"
    if wire.consumed < 0 or (wire.length is not None and wire.consumed > wire.length):
        return f"consumed is {wire.consumed} of {wire.length}"
    return None
