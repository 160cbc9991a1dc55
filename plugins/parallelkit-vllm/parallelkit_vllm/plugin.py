"""What this plugin tells parallelkit. It imports no vLLM to say so."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from parallelkit.plugin import Candidate, ExecutionSpec, ProbeRequest, Section, hookimpl
from parallelkit_vllm.errors import EngineVersionError
from parallelkit_vllm.versions import RANGE, check_version, installed

if TYPE_CHECKING:
    from parallelkit.protocols import EngineClient, ExecutionMode, WeightSink

parallelkit_api = 1

NAME = "vllm"

FEATURES = frozenset({"execution.eager", "execution.graph", "weights.sink", "weights.engine"})


@hookimpl
def parallelkit_probe(request: ProbeRequest) -> Candidate:
    """Answer with score 0: vLLM is a target of weights, and trains nothing."""
    usable, why = _usable()
    return Candidate(
        name=NAME,
        framework=NAME,
        features=FEATURES if usable else frozenset(),
        score=0,
        reason=f"{why}; it takes weights, and opens no process group" if usable else why,
    )


@hookimpl
def parallelkit_set_execution_mode(spec: ExecutionSpec) -> ExecutionMode | None:
    if spec.framework != NAME:
        return None
    from parallelkit_vllm.execution import set_execution_mode

    return set_execution_mode(spec)


@hookimpl
def parallelkit_weight_sink(target: Any, loader: Callable[..., Any] | None) -> WeightSink | None:
    kind = getattr(sys.modules.get("vllm.entrypoints.llm"), "LLM", None)
    if kind is None or not isinstance(target, kind):
        return None
    from parallelkit_vllm.local import local_sink

    return local_sink(target, loader)


@hookimpl
def parallelkit_engine_client(target: Any, options: Mapping[str, object]) -> EngineClient | None:
    from parallelkit_vllm.clients.choose import engine_client

    return engine_client(target, options)


@hookimpl
def parallelkit_diagnostics() -> list[Section]:
    """Report the version by its metadata; importing vLLM takes seconds."""
    found = installed()
    usable, why = _usable()
    names = [e.name for e in entry_points(group="vllm.general_plugins")]
    return [
        Section(
            title="vLLM",
            facts={
                "vllm": f"{found[1]} ({found[0]})" if found else "not installed",
                "usable": "yes" if usable else why,
                "engine": 'weight_transfer_config={"backend": "parallelkit"}'
                if "parallelkit" in names
                else "not known to vLLM: its entry point is not installed",
            },
        )
    ]


def _usable() -> tuple[bool, str]:
    if find_spec(NAME) is None:
        return False, f"vLLM is not installed; versions {RANGE} work: pip install vllm"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            text = check_version()
        except EngineVersionError as error:
            return False, str(error)
    return True, str(caught[0].message) if caught else f"vLLM {text} is installed"
