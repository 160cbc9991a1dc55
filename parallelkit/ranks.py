"""Compare across ranks what all must share, right after a group opened.

A silent difference between ranks becomes a hang in some later collective; here it is a table.
"""

from __future__ import annotations

import hashlib
from typing import Any

from parallelkit.errors import RankMismatchError
from parallelkit.protocols import Plain, ProcessGroup
from parallelkit.records import PluginInfo, PluginSet
from parallelkit.selection import Selection

#: Above this many ranks only rank 0's digest travels, so that start-up does not grow with ranks.
FULL_TABLE = 64


def compare_plugins(group: ProcessGroup, plugins: PluginSet, selection: Selection) -> None:
    """Raise `RankMismatchError` unless every rank loaded the same plugins and chose the same.

    Collective over `group`: one `broadcast_object` from each rank, or, beyond `FULL_TABLE`
    ranks, one from rank 0 only. Nothing is sent in a world of one.
    """
    if group.world_size == 1:
        return
    mine = _facts(plugins, selection)
    if group.world_size > FULL_TABLE:
        theirs = group.broadcast_object([_digest(mine), mine], 0)
        if isinstance(theirs, list) and theirs[0] != _digest(mine):
            raise _mismatch({0: theirs[1], group.rank: mine})
        return
    table = {src: group.broadcast_object(mine, src) for src in range(group.world_size)}
    if any(row != mine for row in table.values()):
        raise _mismatch(table)


def _facts(plugins: PluginSet, selection: Selection) -> dict[str, Plain]:
    loaded: list[Plain] = list(map(_loaded, plugins.loaded))
    chosen = selection.winner
    return {
        "winner": f"{selection.candidate.name} by {chosen.name} ({chosen.dist} {chosen.version})",
        "backend": selection.backend,
        "plugins": loaded,
    }


def _loaded(plugin: PluginInfo) -> Plain:
    return f"{plugin.name} ({f'{plugin.dist} {plugin.version}' if plugin.dist else 'registered'})"


def _digest(facts: dict[str, Plain]) -> str:
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def _mismatch(table: dict[int, Any]) -> RankMismatchError:
    """Describe by rank only what is not the same everywhere."""
    rows = sorted(table.items())
    lines = ["ranks differ in what must be the same everywhere; install the same on every host"]
    lines += [
        f"  rank {rank}: {name} {row[name]!r}"
        for name in ("winner", "backend")
        if len({row[name] for _, row in rows}) > 1
        for rank, row in rows
    ]
    common = set.intersection(*(set(row["plugins"]) for _, row in rows))
    if any(set(row["plugins"]) != common for _, row in rows):
        lines += [
            f"  rank {rank}: besides the common plugins, "
            f"{', '.join(p for p in row['plugins'] if p not in common) or 'none'}"
            for rank, row in rows
        ]
    return RankMismatchError("\n".join(lines))
