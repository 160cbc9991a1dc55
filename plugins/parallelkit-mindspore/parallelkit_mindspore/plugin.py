"""What this plugin tells parallelkit. It imports no MindSpore to say so.

Nothing is claimed in this release: MindSpore is found and shown, never chosen.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from parallelkit.plugin import Candidate, ProbeRequest, Section, hookimpl

parallelkit_api = 1

NAME = "mindspore"


@hookimpl
def parallelkit_probe(request: ProbeRequest) -> Candidate:
    """Answer with score 0: no feature is claimed yet."""
    installed = "installed" if find_spec(NAME) is not None else "not installed"
    return Candidate(
        name=NAME,
        framework=NAME,
        score=0,
        reason=f"no feature claimed yet in this release; {NAME} is {installed}",
    )


@hookimpl
def parallelkit_diagnostics() -> list[Section]:
    """Report the version by its metadata; importing MindSpore writes environment variables."""
    try:
        found = version(NAME)
    except PackageNotFoundError:
        found = "not installed"
    return [Section(title="MindSpore", facts={"mindspore": found, "features": "none yet"})]
