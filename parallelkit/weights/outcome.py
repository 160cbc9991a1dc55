"""What is said of an update that was committed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from parallelkit.errors import PartialCommitError
from parallelkit.weights.report import TransferReport
from parallelkit.weights.truth import Truth

#: After this many committed versions in a row without a changed byte, the report warns.
UNCHANGED_ALARM: Final = 3


class WeightsUnchangedWarning(UserWarning):
    """Several versions in a row were committed without one changed byte."""


class Changes:
    """How much changed from version to version, and whether nothing did for too long."""

    def __init__(self) -> None:
        self._unchanged = 0

    def count(self, truths: Iterable[Truth]) -> float | None:
        """Share of bytes in buckets that are not as in the last committed version, if known."""
        changed, total = 0, 0
        for truth in truths:
            if truth.changed is None:
                return None
            changed, total = changed + truth.changed, total + truth.nbytes
        if not total:
            return None
        self._unchanged = 0 if changed else self._unchanged + 1
        return changed / total

    @property
    def alarm(self) -> str:
        """What to warn of when nothing changes for too long, or ""."""
        if self._unchanged < UNCHANGED_ALARM:
            return ""
        return (
            f"{self._unchanged} versions in a row have not one changed byte: is the model that is "
            "published the one that is trained?"
        )


def raise_unless_everywhere(report: TransferReport) -> None:
    """Raise `PartialCommitError` if an engine or a member is not at the report's version."""
    bad = [part for part in report.everyone if part.name in report.quarantined]
    if not bad:
        return
    engines = {part.name for part in report.engines}
    follow = {f"with its engine, {name}" for name in engines}  # said once, by the engine
    details = "; ".join(f"{p.name}: {p.state}, {p.reason}" for p in bad if p.reason not in follow)
    what = "Engines and members" if engines else "Members"
    raise PartialCommitError(
        f"version {report.version} was committed, but not everywhere. {details}. {what} not named "
        "are at the new version; quarantined ones serve nothing and come back by the next update",
        report=report,
    )
