"""Rank the plugins that answered the probe. Pure: values in, a record out.

The order of preference: what the caller asked for, what the launcher implies, a framework that
the script imported already, score. Among candidates for one framework a third party comes before
a first party, so that a vendor's plugin needs no setting. Whoever is left with an equal is an
error, never a matter of registration order.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from parallelkit.errors import (
    AmbiguousBackendError,
    DeviceError,
    NoBackendError,
    PluginLoadError,
    UnknownBackendError,
    UnsupportedFeatureError,
)
from parallelkit.records import PluginInfo
from parallelkit.selected import KNOWN, Absent, Probed, Ranked, Selection
from parallelkit.specs import Candidate, ProbeRequest

log = logging.getLogger("parallelkit")


def rank(
    probed: Sequence[Probed],
    request: ProbeRequest,
    *,
    absent: Sequence[Absent] = (),
    imported: Collection[str] = (),
    installed: Collection[str] = (),
) -> Selection:
    """Choose among `probed`. Pure.

    Args:
        absent: plugins without an answer; they are named in errors and in the ranking.
        imported: frameworks that are in `sys.modules`.
        installed: frameworks that could be imported, for the hint on which plugin to install.

    Raises:
        NoBackendError, UnknownBackendError, AmbiguousBackendError, PluginLoadError,
        UnsupportedFeatureError, DeviceError: each message says what there is instead.
    """
    probed = sorted(probed, key=lambda p: (p.candidate.name, p.plugin.dist, p.plugin.name))
    reasons: dict[str, str] = {}  # plugin name -> why it is not the winner
    pool = list(probed)
    why = []
    if request.framework != "auto":
        pool = _asked(pool, request, absent)
        why.append(f"framework {request.framework!r} was asked for")
        _note(reasons, probed, pool, f"framework {request.framework!r} was asked for")
    usable = [p for p in pool if p.candidate.score > 0]
    _note(reasons, pool, usable, "score 0: it cannot be used here")
    if not usable:
        raise _nothing(pool, absent, request, installed)
    pool = _able(usable, request, reasons)
    pool, rule = _prefer(pool, request, imported, reasons)
    if rule:
        why.append(rule)
    winner = pool[0]
    if len(pool) > 1:
        raise _tie(pool, request)
    device, backend = _device_and_backend(winner.candidate, request)
    return Selection(
        request=request,
        winner=winner.plugin,
        candidate=winner.candidate,
        device=device,
        backend=backend,
        ranking=_ranking(probed, absent, winner, reasons),
        why="; ".join(why) or "the only one that can be used here",
    )


# --- steps of the ranking ----------------------------------------------------------------------


def _asked(probed: list[Probed], request: ProbeRequest, absent: Sequence[Absent]) -> list[Probed]:
    """Keep those that the requested name means: a framework, else a candidate, else a plugin."""
    name = request.framework
    tests: tuple[Callable[[Probed], str], ...] = (
        lambda p: p.candidate.framework,
        lambda p: p.candidate.name,
        lambda p: p.plugin.name,
    )
    for test in tests:
        found = [p for p in probed if test(p) == name]
        if found:
            return found
    for lost in absent:
        if lost.plugin.name == name and lost.plugin.state == "blocked":
            raise NoBackendError(f"plugin {lost.plugin.label} was asked for but {lost.reason}")
    for lost in absent:
        if lost.plugin.name == name and lost.error is not None:
            raise PluginLoadError(
                f"plugin {lost.plugin.label} was asked for but failed: {lost.reason}"
            ) from lost.error
    known = sorted({p.candidate.framework for p in probed} | {p.candidate.name for p in probed})
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    package = f"; `pip install {KNOWN[name]}` brings it" if name in KNOWN else ""
    raise UnknownBackendError(
        f"no plugin provides {name!r}: {hint}known are {', '.join(known) or 'none'}{package}"
    )


def _able(pool: list[Probed], request: ProbeRequest, reasons: dict[str, str]) -> list[Probed]:
    """Keep those that have the device, the backend and the features asked for."""
    able = list(pool)
    for p in pool:
        try:
            _device_and_backend(p.candidate, request)
        except (DeviceError, UnknownBackendError) as error:
            reasons[p.plugin.name] = str(error)
            able.remove(p)
    if not able:
        _device_and_backend(pool[0].candidate, request)  # raises what there is
    fit = [p for p in able if request.features <= p.candidate.features]
    for p in able:
        if p not in fit:
            lacks = ", ".join(sorted(request.features - p.candidate.features))
            reasons[p.plugin.name] = f"it lacks {lacks}"
    if not fit:
        require(able[0].candidate, able[0].plugin, request.features)
    return fit


def _prefer(
    pool: list[Probed],
    request: ProbeRequest,
    imported: Collection[str],
    reasons: dict[str, str],
) -> tuple[list[Probed], str]:
    """Apply launcher, imports, third party and score, in that order; say which decided."""
    why: list[str] = []

    def narrow(keep: list[Probed], rule: str) -> None:
        nonlocal pool
        if keep and len(keep) < len(pool):
            _note(reasons, pool, keep, rule)
            why.append(rule)
            pool = keep

    implied = request.launch.framework
    if implied:
        keep = [p for p in pool if p.candidate.framework == implied]
        narrow(keep, f"the launcher {request.launch.launcher} implies {implied}")
    loaded = {p.candidate.framework for p in pool if p.candidate.framework in imported}
    if len(loaded) == 1:
        keep = [p for p in pool if p.candidate.framework in loaded]
        narrow(keep, f"{next(iter(loaded))} is imported already")
    outside = {p.candidate.framework for p in pool if not p.plugin.first_party}
    keep = [p for p in pool if not (p.plugin.first_party and p.candidate.framework in outside)]
    if len(keep) < len(pool):
        names = ", ".join(sorted(outside))
        log.info("a third party's plugin for %s comes before parallelkit's own", names)
    narrow(keep, "a third party comes before a first party for the same framework")
    best = max(p.candidate.score for p in pool)
    lower = [p for p in pool if p.candidate.score < best]
    narrow([p for p in pool if p not in lower], f"score {best:g} is the highest")
    for p in lower:
        about = f"; {p.candidate.reason}" if p.candidate.reason else ""
        reasons[p.plugin.name] = f"score {p.candidate.score:g} is below {best:g}{about}"
    return pool, "; ".join(why)


def _device_and_backend(candidate: Candidate, request: ProbeRequest) -> tuple[str, str]:
    """Resolve `auto`; raise what there is when the request cannot be met."""
    backends = dict(candidate.backends)
    have = ", ".join(f"{backends.get(d, '(none)')} on {d}" for d in candidate.devices) or "nothing"
    if request.backend != "auto":
        fitting = [d for d in candidate.devices if backends.get(d) == request.backend]
        if not fitting:
            raise UnknownBackendError(
                f"backend {request.backend!r} cannot be used here by {candidate.name}; "
                f"it has {have}"
            )
    else:
        fitting = list(candidate.devices)
    device = request.device
    if device == "auto":
        if not fitting:
            raise DeviceError(f"{candidate.name} has no device here")
        device = fitting[0]
    kind = device.partition(":")[0]
    if kind not in candidate.devices:
        raise DeviceError(
            f"device {device!r} does not exist here for {candidate.name}; it has {have}"
        )
    if kind not in fitting:
        raise UnknownBackendError(
            f"backend {request.backend!r} does not run on {device!r} by {candidate.name}; "
            f"it has {have}"
        )
    return device, backends.get(kind, "")


def require(
    candidate: Candidate,
    plugin: PluginInfo,
    features: Collection[str],
    *,
    advice: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise `UnsupportedFeatureError` for the first feature that is lacking, with what there is.

    Args:
        advice: what to do where a feature is lacking, by feature.
    """
    for feature in sorted(set(features) - candidate.features):
        kind = feature.partition(".")[0]
        same = sorted(f.partition(".")[2] for f in candidate.features if f.startswith(kind + "."))
        raise UnsupportedFeatureError(
            f"{candidate.name} (plugin {plugin.label}) does not support "
            f"{feature.partition('.')[2]!r} ({feature}); "
            f"of {kind} it supports {', '.join(same) or 'nothing'}"
            + (f" ({candidate.reason})" if candidate.reason else "")
            + (f". {advice[feature]}" if feature in advice else "")
        )


# --- words -------------------------------------------------------------------------------------


def _note(
    reasons: dict[str, str], before: Sequence[Probed], after: Sequence[Probed], rule: str
) -> None:
    for p in before:
        if p not in after:
            detail = p.candidate.reason if rule.startswith("score 0") else ""
            reasons[p.plugin.name] = detail or rule


def _ranking(
    probed: Sequence[Probed], absent: Sequence[Absent], winner: Probed, reasons: dict[str, str]
) -> tuple[Ranked, ...]:
    others = [p for p in probed if p is not winner and p.candidate.score > 0]
    others.sort(key=lambda p: -p.candidate.score)
    ordered = [winner, *others]
    lines = [
        Ranked(
            plugin=p.plugin,
            candidate=p.candidate,
            place=place,
            reason=reasons.get(p.plugin.name) or p.candidate.reason or "chosen",
        )
        for place, p in enumerate(ordered, 1)
    ]
    lines += [
        Ranked(plugin=p.plugin, candidate=p.candidate, place=0, reason=reasons[p.plugin.name])
        for p in probed
        if p not in ordered
    ]
    return tuple(lines) + tuple(
        Ranked(plugin=a.plugin, candidate=None, place=0, reason=a.reason) for a in absent
    )


def _tie(pool: Sequence[Probed], request: ProbeRequest) -> AmbiguousBackendError:
    names = [p.candidate.name for p in pool]
    who = " and ".join(f"{p.candidate.name!r} by plugin {p.plugin.label}" for p in pool)
    if len(set(names)) == len(names) and request.framework not in names:
        how = f"choose with framework={names[0]!r} or framework={names[1]!r}"
    else:
        how = "switch one off with PARALLELKIT_DISABLE_PLUGINS=<its name or distribution>"
    return AmbiguousBackendError(
        f"{who} are equally good (score {pool[0].candidate.score:g}); {how}"
    )


def _nothing(
    pool: Sequence[Probed],
    absent: Sequence[Absent],
    request: ProbeRequest,
    installed: Collection[str],
) -> NoBackendError:
    asked = "" if request.framework == "auto" else f" for {request.framework!r}"
    lines = [f"no installed plugin can be used here{asked}"]
    lines += [
        f"  {p.candidate.name} (plugin {p.plugin.label}): {p.candidate.reason or 'score 0'}"
        for p in pool
    ]
    lines += [f"  plugin {a.plugin.label}: {a.reason}" for a in absent]
    if len(lines) == 1:
        lines[0] += ": no plugin was found"
    there = {p.candidate.framework for p in pool} | {a.plugin.name for a in absent}
    wanted = set(KNOWN) if request.framework == "auto" else {request.framework}
    for framework in sorted(wanted - there):
        if framework in installed or not installed:
            found = f"{framework} is installed; " if framework in installed else ""
            lines.append(f"HINT: {found}`pip install {KNOWN[framework]}`")
    lines.append("HINT: `parallelkit doctor` shows all of it")
    return NoBackendError("\n".join(lines))
