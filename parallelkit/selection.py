"""Choose one plugin: probe them all, rank the answers, keep the record."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

from parallelkit import hooks
from parallelkit.loader import PluginManager, default_manager
from parallelkit.ranking import rank, require
from parallelkit.records import HookFailure, PluginInfo
from parallelkit.selected import KNOWN, Absent, Probed, Ranked, Selection
from parallelkit.specs import ProbeRequest

__all__ = ["Absent", "Probed", "Ranked", "Selection", "rank", "require", "select"]


def select(request: ProbeRequest, *, manager: PluginManager | None = None) -> Selection:
    """Probe all plugins and choose one; the record is kept for `explain()`. Not collective.

    Raises:
        NoBackendError, UnknownBackendError, AmbiguousBackendError, PluginLoadError,
        UnsupportedFeatureError, DeviceError: each message says what there is instead.
    """
    manager = manager or default_manager()
    found = manager.load()
    answers, failures = hooks.probe(request, manager=manager)
    probed = [Probed(a.plugin, a.value) for a in answers]
    selection = rank(
        probed,
        request,
        absent=_absent(found.plugins, failures),
        imported=[p.candidate.framework for p in probed if p.candidate.framework in sys.modules],
        installed=[name for name in KNOWN if find_spec(name) is not None],
    )
    manager.selections[request.framework] = selection
    return selection


def _absent(plugins: Sequence[PluginInfo], failures: Sequence[HookFailure]) -> list[Absent]:
    lost = [Absent(f.plugin, f.reason, f.error) for f in failures]
    return lost + [Absent(p, p.reason, p.error) for p in plugins if p.state != "loaded"]
