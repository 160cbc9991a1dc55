"""What is said of an update that was committed."""

from __future__ import annotations

from parallelkit.errors import PartialCommitError
from parallelkit.weights.report import TransferReport


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
