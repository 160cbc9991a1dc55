"""The two places where a process's own environment is touched; everything else is given a mapping.

Reading what a launcher said is `parallelkit.launch`, which is pure.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Local launchers of MPI jobs, whose one process on a host is an ancestor of all its ranks.
_LAUNCHERS = frozenset(
    {"hydra_pmi_proxy", "mpiexec", "mpiexec.hydra", "mpirun", "mpispawn", "orted", "prted"}
    | {"prterun", "pmi_proxy"}
)


@contextmanager
def scoped_environ(**changes: str | None) -> Iterator[None]:
    """Set (a string) or unset (None) variables of `os.environ`, and restore them at the end.

    Only the variables named are restored, to what each was at the start, whatever happened to
    them in between and however the block ends. The environment belongs to the process: other
    threads see the changes too.

    Args:
        changes: variable name to its value for the duration of the block.

    Raises:
        TypeError: a value is neither a string nor None; nothing is changed.

    Example:
        >>> import os
        >>> with scoped_environ(PARALLELKIT_EXAMPLE="1"):
        ...     os.environ["PARALLELKIT_EXAMPLE"]
        '1'
        >>> "PARALLELKIT_EXAMPLE" in os.environ
        False
    """
    for name, value in changes.items():
        if value is not None and not isinstance(value, str):
            raise TypeError(f"{name}={value!r}: an environment variable is a string, or None")
    before = {name: os.environ.get(name) for name in changes}
    try:
        _apply(changes)
        yield
    finally:
        _apply(before)


def _apply(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def launcher_identity(proc: str = "/proc", pid: int | None = None) -> str | None:
    """Name the MPI launcher process that this process descends from, equally on all its ranks.

    For launchers that put nothing into the environment which names the run (MPICH's and Intel
    MPI's Hydra); see `LaunchInfo.from_environ(run_identity=...)`. Pid and start time together
    name one process of a host for as long as the host is up.

    Args:
        proc: the proc file system.
        pid: where to start; this process by default.

    Returns:
        Launcher name, pid and start time, or None where no ancestor is a known launcher or
        `proc` cannot be read.
    """
    current = os.getpid() if pid is None else pid
    while current > 1:
        try:
            stat = Path(proc, str(current), "stat").read_text()
        except OSError:
            return None
        # pid (name) state parent ...; the name may hold spaces and parentheses
        name = stat[stat.index("(") + 1 : stat.rindex(")")]
        fields = stat[stat.rindex(")") + 2 :].split()
        if name in _LAUNCHERS:
            return f"{name}-{current}-{fields[19]}"
        current = int(fields[1])
    return None
