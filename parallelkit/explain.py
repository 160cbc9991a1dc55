"""Say what was found, what was chosen and why, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from parallelkit import groups
from parallelkit.errors import LaunchError
from parallelkit.loader import PluginManager, default_manager
from parallelkit.records import HookFailure, PluginSet
from parallelkit.selection import Selection


@attrs.frozen(kw_only=True)
class Explanation:
    """A report for people; `str()` gives text, `rich.print()` tables, `as_dict()` JSON.

    Attributes:
        plugins: every plugin found, with state and reason; notes about them.
        failures: exceptions that plugins' hooks raised so far.
        launch: what the launcher said, each field with where it comes from.
        selections: every choice made so far, with its ranking.
        group, context: what is open; empty if nothing is.
    """

    plugins: PluginSet
    failures: tuple[HookFailure, ...]
    launch: str
    selections: tuple[Selection, ...]
    group: str
    context: str

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield "plugins"
        for p in self.plugins.plugins:
            source = f"{p.dist} {p.version}".strip() or "registered here"
            yield f"  {p.name} ({source}): {p.state}{', ' + p.reason if p.reason else ''}"
        if not self.plugins.plugins:
            yield "  none found"
        yield from (f"  note: {note}" for note in self.plugins.notes)
        yield from (f"  plugin {f.plugin.label}: {f.reason}" for f in self.failures)
        yield "launch"
        yield from (f"  {line}" for line in self.launch.splitlines())
        for selection in self.selections:
            yield f"selection for framework {selection.request.framework!r}"
            yield from (f"  {line}" for line in selection.lines())
        yield "group"
        yield f"  {self.group or 'none is open'}"
        if self.context:
            yield "context"
            yield from (f"  {line}" for line in self.context.splitlines())

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.table import Table

        table = Table("plugin", "distribution", "state", "reason", title="plugins")
        for p in self.plugins.plugins:
            table.add_row(p.name, f"{p.dist} {p.version}".strip(), p.state, p.reason)
        yield table
        lines = list(self._lines())
        yield "\n".join(lines[lines.index("launch") :])

    def as_dict(self) -> dict[str, Any]:
        """Export as plain values, for JSON."""
        return {
            "plugins": [p.as_dict() for p in self.plugins.plugins],
            "notes": list(self.plugins.notes),
            "failures": [{"plugin": f.plugin.name, "reason": f.reason} for f in self.failures],
            "launch": self.launch,
            "selections": [s.as_dict() for s in self.selections],
            "group": self.group,
            "context": self.context,
        }


def explain(*, manager: PluginManager | None = None) -> Explanation:
    """Report plugins, launcher, choices so far, and what is open. Not collective, never raises
    for a broken plugin or a contradictory launcher: that is what it is there to show.

    Example:
        >>> print(explain())  # doctest: +SKIP
    """
    held = groups.open_group()
    if manager is None:
        manager = held.manager if held is not None else default_manager()
    plugins = manager.load(strict=False)
    try:
        launch = groups.read_launch().explain()
    except LaunchError as error:
        launch = f"cannot be read: {error}"
    context = held.context if held is not None else None
    return Explanation(
        plugins=plugins,
        failures=tuple(manager.failures),
        launch=launch,
        selections=tuple(manager.selections.values()),
        group=repr(held) if held is not None else "",
        context=context.explain() if context is not None else "",
    )
