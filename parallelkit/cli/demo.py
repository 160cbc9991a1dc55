"""`parallelkit demo`: the chosen plugin's demonstration."""

from __future__ import annotations

import argparse

import attrs

from parallelkit import hooks
from parallelkit.selection import select
from parallelkit.specs import DemoSpec, ProbeRequest


def run(args: argparse.Namespace) -> int:
    """Choose a framework, hand over, and return the demo's exit code."""
    selection = select(ProbeRequest(framework=args.framework))
    given = {field.name: getattr(args, field.name) for field in attrs.fields(DemoSpec)}
    spec = DemoSpec(**given | {"framework": selection.candidate.framework})
    return hooks.demo(selection.winner, spec)
