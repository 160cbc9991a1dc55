"""`parallelkit plugins`: every plugin found, loaded or not, and why."""

from __future__ import annotations

import argparse

from parallelkit.cli.output import console, print_json, quiet_plugins, table
from parallelkit.loader import default_manager
from parallelkit.records import PluginSet


def run(args: argparse.Namespace) -> int:
    """Print the table or JSON; a broken plugin does not change the exit code."""
    with quiet_plugins():
        found = default_manager().load(strict=False)
    if args.json:
        print_json({"plugins": [p.as_dict() for p in found.plugins], "notes": list(found.notes)})
        return 0
    out = console()
    out.print(plugin_table(found))
    for note in found.notes:
        out.print(f"note: {note}", markup=False)
    return 0


def plugin_table(found: PluginSet) -> object:
    """Return the rich table of plugins."""
    rows = [
        (p.name, f"{p.dist} {p.version}".strip(), p.state, p.reason or "") for p in found.plugins
    ]
    return table("plugins", ("plugin", "distribution", "state", "reason"), rows)
