"""`parallelkit doctor`: what is installed, found, chosen, why not the rest; and does it work."""

from __future__ import annotations

import argparse
import platform
import sys
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from parallelkit import groups, hooks
from parallelkit.cli.output import console, facts, print_json, quiet_plugins, table
from parallelkit.cli.plugins import plugin_table
from parallelkit.errors import LaunchError, ParallelKitError
from parallelkit.explain import Explanation, explain
from parallelkit.launch import LaunchInfo
from parallelkit.loader import PluginManager, default_manager
from parallelkit.selection import select
from parallelkit.spawn import spawn_ranks
from parallelkit.specs import ProbeRequest, TransportRequest

PACKAGES = (
    "parallelkit",
    "parallelkit-torch",
    "parallelkit-mindspore",
    "parallelkit-vllm",
    "parallelkit-hccl",
    "attrs",
    "msgspec",
    "numpy",
    "pluggy",
    "pyzmq",
    "rich",
    "xxhash",
    "torch",
    "mindspore",
    "vllm",
)
RANKS = 2


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 if nothing can be chosen, a section is not well, or the test fails."""
    with quiet_plugins():
        report = gather(args.framework)
        if not args.no_self_test and not report["choice_error"]:
            report["self_test"] = _watched_self_test(args)
    ok = not report["choice_error"] and report["self_test"].get("ok", True)
    report["ok"] = ok
    if args.json:
        print_json({k: v for k, v in report.items() if k != "explanation"} | _explained(report))
    else:
        _print(report)
    return 0 if ok else 1


def gather(framework: str = "auto") -> dict[str, Any]:
    """Collect everything but the self-test; a failing part is a fact of the report."""
    manager = default_manager()
    manager.load(strict=False)
    error = ""
    try:
        launch = groups.read_launch()
    except LaunchError as problem:
        error, launch = str(problem), LaunchInfo()
    try:
        select(ProbeRequest(framework=framework, launch=launch), manager=manager)
    except ParallelKitError as problem:
        error = error or str(problem)
    answers, _ = hooks.diagnostics(manager=manager)
    return {
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in PACKAGES},
        "explanation": explain(manager=manager),
        "choice_error": error,
        "sections": [
            {"plugin": a.plugin.name, "title": s.title, "facts": dict(s.facts), "ok": s.ok}
            for a in answers
            for s in a.value
        ],
        "transports": _transports(manager),
        "orphans": _orphans(),
        "self_test": {},
    }


def self_test(timeout: float, framework: str = "auto") -> dict[str, Any]:
    """Start two ranks that open a group, talk, and close; say what happened on each."""
    argv = [sys.executable, "-m", "parallelkit.selftest", framework]
    results = spawn_ranks(argv, RANKS, timeout=timeout)
    ok = all(r.returncode == 0 and not r.timed_out for r in results)
    return {
        "ok": ok,
        "ranks": [
            {
                "rank": r.rank,
                "returncode": r.returncode,
                "timed_out": r.timed_out,
                "said": (r.stdout.strip().splitlines() or [""])[-1],
                "error": "" if ok else r.stderr.strip()[-2000:],
            }
            for r in results
        ],
    }


def _watched_self_test(args: argparse.Namespace) -> dict[str, Any]:
    if args.json:
        return self_test(args.timeout, args.framework)
    with console().status(f"self-test: {RANKS} ranks"):
        return self_test(args.timeout, args.framework)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _transports(manager: PluginManager) -> list[dict[str, Any]]:
    """List what `publish_weights(transport=)` takes, cheapest first; as seen without a device."""
    from parallelkit.weights.identity import host_identity

    found = hooks.transports(TransportRequest(publisher=host_identity()), manager=manager)
    return [
        {"name": c.name, "reach": c.reach, "reason": c.reason}
        for c in sorted(found, key=lambda c: (not c.reach, c.cost, c.name))
    ]


def _orphans() -> list[dict[str, str]]:
    """List shared-memory files that a killed publisher left behind."""
    if find_spec("parallelkit.weights.segments") is None:
        return []
    from parallelkit.weights.segments import list_orphans

    return [{"path": str(o.path), "reason": o.reason} for o in list_orphans()]


def _explained(report: dict[str, Any]) -> dict[str, Any]:
    explanation: Explanation = report["explanation"]
    return explanation.as_dict()


def _print(report: dict[str, Any]) -> None:
    out = console()
    explanation: Explanation = report["explanation"]
    versions = {"python": report["python"], "platform": report["platform"]} | report["versions"]
    out.print(facts("installed", versions))
    out.print(plugin_table(explanation.plugins))
    for note in explanation.plugins.notes:
        out.print(f"note: {note}", markup=False)
    for failure in explanation.failures:
        out.print(f"plugin {failure.plugin.label}: {failure.reason}", markup=False)
    out.print(explanation.launch, markup=False)
    for selection in explanation.selections:
        out.print("chosen: " + "\n".join(selection.lines()), markup=False)
    if report["choice_error"]:
        out.print(f"nothing can be chosen: {report['choice_error']}", markup=False)
    for section in report["sections"]:
        title = section["title"] if section["ok"] else f"{section['title']} (not well)"
        out.print(facts(title, section["facts"]))
    transports = [
        (t["name"], "yes" if t["reach"] else "no", t["reason"]) for t in report["transports"]
    ]
    out.print(table("transports of weights", ("transport", "usable", "reason"), transports))
    if report["orphans"]:
        rows = [(o["path"], o["reason"]) for o in report["orphans"]]
        out.print(table("orphaned shared memory (safe to delete)", ("file", "why"), rows))
    _print_self_test(out, report["self_test"])


def _print_self_test(out: Any, test: dict[str, Any]) -> None:
    if not test:
        out.print("self-test: not run")
        return
    out.print(f"self-test: {'passed' if test['ok'] else 'FAILED'}")
    for rank in test["ranks"]:
        how = "timed out" if rank["timed_out"] else f"exit code {rank['returncode']}"
        out.print(f"  rank {rank['rank']}: {how}: {rank['said']}", markup=False)
        if rank["error"]:
            out.print(rank["error"], markup=False)
