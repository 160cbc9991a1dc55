"""What a run was: its numbers, versions and samples, and whether both ends agreed."""

from __future__ import annotations

import attrs
import numpy as np

from parallelkit.weights.report import TransferReport, report_from_dict
from parallelkit_torch.demo.config import Settings
from parallelkit_torch.demo.events import Event, Followed, Started, Step, Updated


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
    def equal(self) -> bool:
        """Whether both ends computed the same logits, by digest and, where sent, by bytes."""
        mine, theirs = self.updated, self.followed
        return mine.digest == theirs.digest and mine.logits == theirs.logits

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
        """Whether the run is complete and every version's logits are equal bit for bit."""
        return self.complete and all(version.equal for version in self.versions)

    @property
    def verdict(self) -> str:
        """One sentence about the comparison."""
        if not self.complete:
            due = len(self.settings.update_steps)
            return f"incomplete: {len(self.versions)} of {due} versions arrived at both ends"
        if self.equal:
            return "the follower's logits equal the trainer's bit for bit at every version"
        wrong = [str(version.number) for version in self.versions if not version.equal]
        difference = self.versions[-1].difference
        size = "" if difference is None else f"; largest difference at the last: {difference:.3g}"
        return (
            f"the follower's logits differ from the trainer's at version {', '.join(wrong)}{size}"
        )
