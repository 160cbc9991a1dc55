"""Who and where this process is, as far as it decides which memory a peer can reach."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from parallelkit.specs import HostIdentity


def host_identity() -> HostIdentity:
    """Read this process's identity from `/proc`; unknown parts are 0 or the host name."""
    return HostIdentity(
        boot_id=_read("/proc/sys/kernel/random/boot_id") or socket.gethostname(),
        uid=os.geteuid(),
        pid=os.getpid(),
        pid_namespace=_namespace("pid"),
        net_namespace=_namespace("net"),
        ipc_namespace=_namespace("ipc"),
    )


def start_time(pid: int) -> int | None:
    """Clock ticks after boot at which a process started, or None if there is none.

    With the pid it names a process for good: pids are used again, this pair is not.
    """
    stat = _read(f"/proc/{pid}/stat")
    if not stat:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _namespace(kind: str) -> int:
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except OSError:
        return 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
