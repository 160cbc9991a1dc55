"""What of HCCL is on this machine, told from file names alone: nothing is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import attrs

from parallelkit_hccl.library import ACL_PATH, HCCL_PATH


@attrs.frozen
class Found:
    """What is here.

    Attributes:
        hccl, acl: paths of the libraries; None where there are none.
        devices: the NPUs' device files.
    """

    hccl: str | None
    acl: str | None
    devices: tuple[str, ...]

    @property
    def lacking(self) -> str:
        """What is missing for HCCL to work, as a sentence; empty where nothing is."""
        if self.hccl is None:
            return f"{HCCL_PATH[1]} was not found; source CANN's set_env.sh or set {HCCL_PATH[0]}"
        if self.acl is None:
            return f"{ACL_PATH[1]} was not found; source CANN's set_env.sh or set {ACL_PATH[0]}"
        if not self.devices:
            return "there is no Ascend NPU: no /dev/davinci*"
        return ""


def look(
    environ: Mapping[str, str] | None = None,
    exists: Callable[[str], bool] = os.path.isfile,
    devices: Callable[[], tuple[str, ...]] | None = None,
) -> Found:
    """Look in the variables' paths, `LD_LIBRARY_PATH` and CANN's own folder."""
    environ = os.environ if environ is None else environ
    return Found(
        _find(HCCL_PATH, environ, exists),
        _find(ACL_PATH, environ, exists),
        (devices or _device_files)(),
    )


def _find(
    place: tuple[str, str], environ: Mapping[str, str], exists: Callable[[str], bool]
) -> str | None:
    variable, name = place
    if given := environ.get(variable):
        return given if exists(given) else None
    paths = (f"{folder}/{name}" for folder in _folders(environ))
    return next((path for path in paths if exists(path)), None)


def _folders(environ: Mapping[str, str]) -> Iterator[str]:
    yield from filter(None, environ.get("LD_LIBRARY_PATH", "").split(":"))
    for variable in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        if home := environ.get(variable):
            yield f"{home}/lib64"


def _device_files() -> tuple[str, ...]:
    return tuple(sorted(str(path) for path in Path("/dev").glob("davinci[0-9]*")))
