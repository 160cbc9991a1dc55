"""Where rank 0 listens, told to the other ranks by a small file.

Only rank 0 chooses a port, and it holds the socket before it tells anyone. The file is written by
rename, readable by its owner only, and removed once every rank has arrived. A file that an
earlier run left behind misleads nobody: it names its run, and the store behind the port must know
the file's nonce.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

import msgspec

from parallelkit.errors import GroupError

_MAX_BYTES = 4096


class Announcement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file says.

    Attributes:
        run: identity of the run: job, restart, how many groups were opened before.
        nonce: random; the store at `host:port` holds it too.
        host, port: where rank 0 listens.
    """

    run: str
    nonce: str
    host: str
    port: int


def announce(
    path: str, run: str, host: str, port: int, *, nonce: str | None = None
) -> Announcement:
    """Write the file, replacing whatever an earlier run of this user left there.

    Args:
        nonce: what visitors must know; by default a new one.

    Raises:
        GroupError: the folder cannot be written, or the file is another user's.
    """
    said = Announcement(run=run, nonce=nonce or secrets.token_hex(16), host=host, port=port)
    temporary = f"{path}.{os.getpid()}.{secrets.token_hex(4)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        descriptor = os.open(temporary, flags, 0o600)
        try:
            os.write(descriptor, msgspec.json.encode(said))
        finally:
            os.close(descriptor)
        os.rename(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise GroupError(
            f"rank 0 cannot write the rendezvous file {path}: {error.strerror}; set "
            "PARALLELKIT_RENDEZVOUS_FILE to a path that every rank can reach, or master_port "
            "(MASTER_PORT) to a free port"
        ) from error
    return said


def read(path: str) -> Announcement | None:
    """Read the file, or None while there is none that could be ours.

    Raises:
        GroupError: the file belongs to another user or others may write it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise GroupError(f"the rendezvous file {path} cannot be read: {error.strerror}") from error
    try:
        facts = os.fstat(descriptor)
        mode = stat.S_IMODE(facts.st_mode)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or mode & 0o077:
            raise GroupError(
                f"the rendezvous file {path} is not a file of this user's that only its owner "
                f"can touch (owner {facts.st_uid}, mode {mode:o}); remove it, or set "
                "PARALLELKIT_RENDEZVOUS_FILE to another path"
            )
        data = os.read(descriptor, _MAX_BYTES)
    finally:
        os.close(descriptor)
    try:
        return msgspec.json.decode(data, type=Announcement)
    except msgspec.DecodeError:
        return None  # another version's; rank 0 will replace it


def withdraw(path: str, said: Announcement) -> None:
    """Remove the file if it still says what this process wrote; harmless when repeated."""
    with contextlib.suppress(OSError, GroupError):
        if read(path) == said:
            Path(path).unlink()
