"""The last committed version, given to members that join after it, without the trainer's thread.

The publisher's arenas keep it in one of two slots while the next version is written to the other.
The control thread runs a round for one member at a time with the messages of an update. An update
that begins meanwhile comes first: rounds that are not decided are dropped, and their members take
part in it instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from parallelkit.weights import messages as m
from parallelkit.weights.lanes import Want
from parallelkit.weights.truth import Truth, misplaced

#: Kinds of members that digests are kept for besides those that are here, the latest ones.
REMEMBERED: Final = 8


@attrs.frozen(kw_only=True, eq=False)
class Kept:
    """A committed version that is still in the arenas.

    Attributes:
        version: its number; epoch: of the arenas now; slot: where it is in them.
        truths: the source's digests by what members want; others have to wait for an update.
        readback: whether members hash live memory.
        timeout: seconds for a member's part.
    """

    version: int
    epoch: int
    slot: int
    truths: Mapping[Want, Truth]
    readback: bool
    timeout: float

    def mine(self, message: Any) -> bool:
        """Whether a message is of a round with this version."""
        epoch, version = getattr(message, "epoch", None), getattr(message, "version", None)
        return (version, epoch) == (self.version, self.epoch)

    def begin(self) -> m.Begin:
        """What opens a round."""
        return m.Begin(version=self.version, epoch=self.epoch, slot=self.slot, timeout=self.timeout)

    def answer(self, want: Want, message: m.ToPublisher, *, in_place: bool) -> Step:
        """What follows from a message in the round of a member that commits in place, or not."""
        at = {"version": self.version, "epoch": self.epoch}
        if isinstance(message, m.Ready):
            return Step(m.Transfer(version=self.version, epoch=self.epoch, offers=[]))
        if isinstance(message, m.Prepared):
            wrong = "" if in_place else self.truths[want].problem(message.digests)[0]
            if wrong:
                reason = f"it {wrong}; the next update brings it"
                return Step(m.Abort(**at, reason=m.clip(reason, 1000)), over=True)
            wire = self.truths[want].wire if in_place else b""
            return Step(m.Commit(**at, digests=wire), decided=True)
        if isinstance(message, m.Committed):
            wrong = ""
            if self.readback and not message.staged:
                wrong = misplaced(self.truths[want], message.readback)
            return Step(over=True, done=not wrong, failure=wrong)
        if isinstance(message, m.Failed):
            return Step(over=True, failure=f"{message.error}: {message.message}")
        return Step()


@attrs.frozen
class Step:
    """What the publisher does next in a round.

    Attributes:
        send: a message to the member.
        decided: the member may put the version in place from now on.
        over: the round has ended; done: the member has the version; failure: why it has not.
    """

    send: Any = None
    decided: bool = False
    over: bool = False
    done: bool = False
    failure: str = ""
