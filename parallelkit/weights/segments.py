"""Shared memory that cannot be left behind.

A segment is a sealed anonymous file (`memfd`): it has no name, so nothing remains when its last
holder dies, by whatever signal. Seals fix its size (no bus error by truncation) and forbid any
new writable mapping, so a subscriber that gets the descriptor can only read. Where descriptors
cannot be passed, a named file in `/dev/shm` stands in: mode 0600, its name says which process
made it, and the next publisher's start removes those of dead processes. Only those of its own
PID namespace: `/dev/shm` may be shared with containers whose processes it cannot see.

Layout: one page of header (magic, epoch), then the arena.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Final

import attrs

from parallelkit.errors import TransportError
from parallelkit.weights.identity import host_identity, start_time

HEADER_BYTES: Final = 4096
MAGIC: Final = b"parallelkit:1\0\0\0"
SHM_DIR: Final = Path("/dev/shm")

_EPOCH_AT: Final = 16
_SEALS: Final = (
    fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | 0x10  # F_SEAL_FUTURE_WRITE
)
_NAME: Final = re.compile(r"parallelkit-(\d+)-(\d+)-(\d+)-(\d+)-[0-9a-f]{16}")


class Segment:
    """One mapped segment; `memory` is the whole of it, header first."""

    def __init__(self, fd: int, nbytes: int, *, writable: bool, path: Path | None = None) -> None:
        self.path = path
        self.nbytes = nbytes
        self._fd = fd
        try:
            self._map = mmap.mmap(
                fd,
                HEADER_BYTES + nbytes,
                flags=mmap.MAP_SHARED | mmap.MAP_POPULATE,
                prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0),
            )
        except (OSError, ValueError) as error:
            os.close(fd)
            if path is not None:
                path.unlink(missing_ok=True)
            raise TransportError(
                f"cannot map a shared segment of {nbytes} bytes: {error}; is there enough memory?"
            ) from error
        self._memory = memoryview(self._map)
        self._epoch = self._memory[_EPOCH_AT : _EPOCH_AT + 8].cast("Q")

    @classmethod
    def create(cls, nbytes: int, *, named: bool = False) -> Segment:
        """Make a segment with an arena of `nbytes`, zeroed, epoch 0.

        Raises:
            TransportError: there is not enough memory.
        """
        free = _free_bytes()
        if nbytes > free:
            raise TransportError(
                f"cannot allocate a shared segment of {nbytes} bytes: {free} are free"
            )
        path = None
        if named or not hasattr(os, "memfd_create"):
            me = host_identity()
            path = SHM_DIR / (
                f"parallelkit-{me.uid}-{me.pid}-{start_time(me.pid)}-{me.pid_namespace}-"
                f"{secrets.token_hex(8)}"
            )
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        else:
            fd = os.memfd_create("parallelkit", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, HEADER_BYTES + nbytes)
        except OSError as error:
            os.close(fd)
            if path is not None:
                path.unlink()
            raise TransportError(
                f"cannot allocate a shared segment of {nbytes} bytes: {error}"
            ) from error
        segment = cls(fd, nbytes, writable=True, path=path)
        segment._memory[: len(MAGIC)] = MAGIC
        if path is None:
            segment._seal()
        return segment

    @classmethod
    def attach(cls, fd: int, nbytes: int, *, sealed: bool = True) -> Segment:
        """Map a descriptor that came from a publisher, read only, after checking what it is.

        Takes the descriptor over; it is closed on every path.
        """
        facts = os.fstat(fd)
        problem = None
        if not stat.S_ISREG(facts.st_mode) or facts.st_size != HEADER_BYTES + nbytes:
            problem = f"it has {facts.st_size} bytes instead of {HEADER_BYTES + nbytes}"
        elif facts.st_uid != os.geteuid():
            problem = f"it belongs to user {facts.st_uid}"
        elif sealed and _seals(fd) & _SEALS != _SEALS:
            problem = "it is not sealed"
        if problem:
            os.close(fd)
            raise TransportError(f"the publisher's segment is refused: {problem}")
        segment = cls(fd, nbytes, writable=False)
        if bytes(segment._memory[: len(MAGIC)]) != MAGIC:
            segment.close()
            raise TransportError("the publisher's segment is refused: it has no parallelkit header")
        return segment

    def _seal(self) -> None:
        try:
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:  # Linux before 5.1
            self.close()
            raise TransportError(
                f"this kernel cannot seal shared memory against writing ({error}); pass "
                "publish_weights(named=True)"
            ) from error

    @property
    def fd(self) -> int:
        return self._fd

    @property
    def arena(self) -> memoryview:
        """The bytes after the header; writable at the publisher only."""
        return self._memory[HEADER_BYTES : HEADER_BYTES + self.nbytes]

    @property
    def epoch(self) -> int:
        return int(self._epoch[0])

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._epoch[0] = value

    def close(self) -> None:
        """Unmap and remove. Memory that tensors or arrays still view lives until they go."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            if self.path is not None:
                self.path.unlink(missing_ok=True)
        try:
            self._epoch.release()
            self._memory.release()
            self._map.close()
        except BufferError:  # views are alive (parameters that live here): freed with the last
            pass


@attrs.frozen
class Orphan:
    """A named segment whose process is gone.

    Attributes:
        path: the file; nbytes: its size; reason: how we know.
    """

    path: Path
    nbytes: int
    reason: str


def list_orphans(directory: Path = SHM_DIR) -> list[Orphan]:
    """Find named segments of this user whose process is gone; removes nothing."""
    found, namespace = [], host_identity().pid_namespace
    for path in sorted(directory.glob("parallelkit-*")):
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        uid, pid, started, where = (int(g) for g in match.groups())
        try:
            facts = path.lstat()
        except OSError:
            continue
        if (uid, where) != (os.geteuid(), namespace):
            continue
        if facts.st_uid != uid or not stat.S_ISREG(facts.st_mode):
            continue
        if start_time(pid) != started:
            found.append(Orphan(path, facts.st_size, f"process {pid}, which made it, is gone"))
    return found


def sweep_orphans(directory: Path = SHM_DIR) -> list[Orphan]:
    """Remove what `list_orphans` finds and return it."""
    gone = list_orphans(directory)
    for orphan in gone:
        orphan.path.unlink(missing_ok=True)
    return gone


def _seals(fd: int) -> int:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # a filesystem without seals
        return 0


def _free_bytes() -> int:
    """Memory that can be had; an allocation beyond it would wake the kernel's killer instead."""
    kilobytes = dict.fromkeys(("MemAvailable", "SwapFree"), 0)
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in kilobytes:
                kilobytes[name] = int(value.split()[0])
    except OSError:
        return 1 << 62
    return 1024 * sum(kilobytes.values())
