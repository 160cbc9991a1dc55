"""What a run was: its numbers, versions and samples, and whether both ends agreed."""

from __future__ import annotations

import math
from typing import Final

import attrs
import numpy as np

from parallelkit.demo.config import GREEDY, Settings
from parallelkit.demo.events import Event, Followed, Likeliest, Started, Step, Updated
from parallelkit.weights.report import TransferReport, report_from_dict

#: Two tokens whose logits are as close as this are equally likely to two implementations in
#: float32, and log-probabilities as close as this are equal; theirs differ by some 1e-5. From one
#: version to the next they move by a hundred times as much.
TOLERANCE: Final = 1e-3


@attrs.frozen(kw_only=True)
class Comparison:
    """An engine's likeliest tokens beside the trainer's.

    Attributes:
        same: how many are equal, from the first on; the texts part after them.
        tie: whether the trainer found two tokens equally likely there.
        difference: the largest between log-probabilities of equal tokens.
    """

    same: int
    tie: bool
    difference: float

    @property
    def equal(self) -> bool:
        """Whether both computed the same: all tokens, or those before a tie; nothing after it is
        compared."""
        return (self.same == GREEDY or self.tie) and self.difference <= TOLERANCE


def compare(mine: Likeliest | None, theirs: Likeliest | None) -> Comparison:
    """Compare the trainer's likeliest tokens with an engine's.

    Texts of other lengths are no comparison, and not equal.
    """
    if mine is None or theirs is None:
        return Comparison(same=0, tie=False, difference=math.inf)
    lengths = {len(found) for found in (mine.tokens, mine.logprobs, mine.margins)}
    lengths |= {len(theirs.tokens), len(theirs.logprobs)}
    if lengths != {GREEDY}:
        return Comparison(same=0, tie=False, difference=math.inf)
    pairs = zip(mine.tokens, theirs.tokens, strict=True)
    same = next((place for place, (one, other) in enumerate(pairs) if one != other), GREEDY)
    off = np.subtract(mine.logprobs[:same], theirs.logprobs[:same])
    return Comparison(
        same=same,
        tie=same < GREEDY and mine.margins[same] <= TOLERANCE,
        difference=float(np.abs(off).max(initial=0.0)),
    )


@attrs.frozen(kw_only=True)
class Version:
    """One version, as both ends saw it."""

    updated: Updated
    followed: Followed

    @property
    def number(self) -> int:
        return self.updated.version

    @property
    def step(self) -> int:
        return self.updated.step

    @property
    def report(self) -> TransferReport:
        return report_from_dict(self.updated.report)

    @property
    def generated(self) -> bool:
        """Whether an engine followed, whose tokens are compared and not its logits."""
        return not (self.updated.likeliest is None and self.followed.likeliest is None)

    @property
    def texts(self) -> Comparison:
        """The comparison with an engine."""
        return compare(self.updated.likeliest, self.followed.likeliest)

    @property
    def equal(self) -> bool:
        """Whether both ends computed the same.

        A module's logits by digest and, where sent, by bytes; an engine's likeliest tokens, and
        their log-probabilities.
        """
        mine, theirs = self.updated, self.followed
        if self.generated:
            return self.texts.equal
        return mine.digest == theirs.digest and mine.logits == theirs.logits

    @property
    def comparison(self) -> str:
        """What was compared, and what came of it, in a few words."""
        if not self.generated:
            return "logits equal bit for bit" if self.equal else "LOGITS DIFFER"
        found = self.texts
        if not found.equal:
            return "TOKENS DIFFER"
        rest = ", then two equally likely ones" if found.tie else ""
        return (
            f"{found.same} likeliest tokens equal the trainer's{rest}, their log-probabilities "
            f"to {found.difference:.1g}"
        )

    @property
    def difference(self) -> float | None:
        """The largest absolute difference of two logits, where they were sent."""
        mine = np.frombuffer(self.updated.logits, np.float32)
        theirs = np.frombuffer(self.followed.logits, np.float32)
        if not mine.size or mine.size != theirs.size:
            return None
        return float(np.abs(mine - theirs).max())


@attrs.define(kw_only=True, eq=False)
class Run:
    """A run as it goes on; `add` takes events in any order of the two ends.

    Attributes:
        started: facts of the trainer, once known.
        losses: of each step so far, the mean over ranks, in nats per character.
        versions: those that both ends reported, by number.
        seconds: of the whole run, set at its end.
    """

    settings: Settings
    started: Started | None = None
    losses: list[float] = attrs.field(factory=list)
    versions: list[Version] = attrs.field(factory=list)
    seconds: float = 0.0
    _updated: dict[int, Updated] = attrs.field(factory=dict)
    _followed: dict[int, Followed] = attrs.field(factory=dict)

    def add(self, event: Event) -> Version | None:
        """Take in an event; returns the version that it completes, if any."""
        match event:
            case Started():
                self.started = event
            case Step():
                self.losses.append(event.loss)
            case Updated():
                self._updated[event.version] = event
            case Followed():
                self._followed[event.version] = event
        number = next(iter(self._updated.keys() & self._followed.keys()), None)
        if number is None:
            return None
        version = Version(updated=self._updated.pop(number), followed=self._followed.pop(number))
        self.versions.append(version)
        return version

    @property
    def complete(self) -> bool:
        """Whether every version that was due arrived at both ends."""
        return [v.step for v in self.versions] == self.settings.update_steps

    @property
    def equal(self) -> bool:
        """Whether the run is complete and at every version both ends computed the same."""
        return self.complete and all(version.equal for version in self.versions)

    @property
    def verdict(self) -> str:
        """One sentence about the comparison."""
        if not self.complete:
            due = len(self.settings.update_steps)
            return f"incomplete: {len(self.versions)} of {due} versions arrived at both ends"
        engine = self.settings.engine == "vllm"
        if self.equal and engine:
            return "the engine's likeliest tokens are the trainer's at every version"
        if self.equal:
            return "the follower's logits equal the trainer's bit for bit at every version"
        wrong = ", ".join(str(version.number) for version in self.versions if not version.equal)
        if engine:
            return f"the engine's tokens are not the trainer's at version {wrong}"
        difference = self.versions[-1].difference
        size = "" if difference is None else f"; largest difference at the last: {difference:.3g}"
        return f"the follower's logits differ from the trainer's at version {wrong}{size}"
