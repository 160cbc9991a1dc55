"""Folders of checkpoints: written beside, renamed when complete, the old one kept until then.

For a checkpoint `step-100` these names in its parent folder are ours:

- `.step-100.saving-<8 hex digits>`: being written; left behind by a save that crashed.
- `.step-100.replaced`: the old one, for the moment between the two renames of an overwrite.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import time
from pathlib import Path
from typing import Final, final

from parallelkit.errors import CheckpointError

#: Files by which a folder is known as a checkpoint.
MARKS: Final = ("parallelkit.json", ".metadata")
#: How long a rank looks for a folder that rank 0 has made, as on NFS, in seconds.
_APPEARS: Final = 10.0


def target_of(path: object) -> Path:
    """The absolute path of a checkpoint.

    Raises:
        CheckpointError: `path` is not a path of this host, or names no folder.
    """
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(f"path is a {type(path).__qualname__}; it is a string or a Path")
    text = os.fspath(path)
    if not isinstance(text, str) or "://" in text or "\0" in text:
        raise CheckpointError(
            f"path is {text!r:.200}; checkpoints are written to a folder of a file system that "
            "all ranks share"
        )
    target = Path(os.path.abspath(text))
    if not text or not target.name:
        raise CheckpointError(f"path is {text!r}; give a folder of its own for the checkpoint")
    return target


def existing(target: Path) -> Path:
    """The folder to read a checkpoint from.

    That is `target`, or where an overwrite was interrupted between its two renames, the old one.

    Raises:
        CheckpointError: there is none.
    """
    for folder in (target, _replaced(target)):
        if folder.is_dir():
            return folder
    what = "is no folder" if target.exists() else "does not exist"
    raise CheckpointError(f"the checkpoint {target} {what}")


def wait_for(folder: Path) -> None:
    """Wait until a folder that rank 0 has made can be seen from here.

    Raises:
        CheckpointError: it cannot, after ten seconds.
    """
    deadline = time.monotonic() + _APPEARS
    while not folder.is_dir():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{folder}, made by rank 0, cannot be seen from here: a checkpoint's path must be "
                "on a file system that all ranks share"
            )
        time.sleep(0.05)


@final
class Saving:
    """A folder being written; rank 0 has one for each save.

    Attributes:
        folder: what is written into; `target` once `finish` was called.
    """

    def __init__(self, target: Path, *, overwrite: bool) -> None:
        """Tidy up what crashed saves left, and make an empty folder.

        Raises:
            CheckpointError: `target` exists and is not to be overwritten, another process is
                saving there, or the folder cannot be made.
        """
        self._target = target
        self.folder = target.with_name(f".{target.name}.saving-{secrets.token_hex(4)}")
        self._lock: int | None = None
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _restore(target)
            check_free(target, overwrite=overwrite)
            _tidy(target)
            self.folder.mkdir()
            self._lock = _locked(self.folder)
        except OSError as error:
            raise CheckpointError(f"the checkpoint {target} cannot be written: {error}") from error

    def finish(self, *, overwrite: bool) -> None:
        """Put the folder in its place. Each rename is atomic.

        Between the two renames of an overwrite the old checkpoint has another name, under which
        `existing` finds it; the next save puts it back.

        Raises:
            CheckpointError: it cannot be renamed, or something appeared at the target meanwhile.
        """
        try:
            _sync(self.folder)
            _restore(self._target)
            check_free(self._target, overwrite=overwrite)
            old = _replaced(self._target)
            if self._target.exists():
                self._target.rename(old)
            try:
                self.folder.rename(self._target)
            except OSError:
                _restore(self._target)
                raise
            _sync(self._target.parent)
            shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint {self._target} was written to {self.folder} but cannot be put "
                f"in its place: {error}"
            ) from error

    def close(self) -> None:
        """Remove the folder, unless it is in its place, and let go of it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def write(path: Path, data: bytes) -> None:
    """Write a file so that it lasts."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def check_free(target: Path, *, overwrite: bool) -> None:
    """Raise `CheckpointError` if something is at `target` that must not be replaced."""
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise CheckpointError(
            f"{target} exists; give overwrite=True to replace it, or another path"
        )
    # Only what looks like a checkpoint is replaced: a wrong path should not cost a home folder.
    if target.is_symlink() or not target.is_dir():
        raise CheckpointError(f"{target} is no folder, so overwrite=True does not replace it")
    if any(target.iterdir()) and not any((target / name).exists() for name in MARKS):
        raise CheckpointError(
            f"{target} is a folder without a checkpoint, so overwrite=True does not replace it"
        )


def _replaced(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


def _restore(target: Path) -> None:
    """Undo or complete an overwrite that was interrupted, so that only `target` is there."""
    old = _replaced(target)
    if old.is_dir():
        if target.exists():
            shutil.rmtree(old)
        else:
            old.rename(target)


def _tidy(target: Path) -> None:
    """Remove what crashed saves left.

    Raises:
        CheckpointError: another process is saving there now.
    """
    start = f".{target.name}.saving-"
    for left in [p for p in target.parent.iterdir() if p.name.startswith(start)]:
        lock = _locked(left)
        if lock is None:
            raise CheckpointError(f"another process is saving {target} now, into {left}")
        shutil.rmtree(left)
        os.close(lock)


def _locked(folder: Path) -> int | None:
    """An open descriptor that holds the folder's lock; None if another process has it.

    The lock goes with its process, however that ends. Where a file system has no locks, none is
    held and none is found.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        pass
    return descriptor


def _sync(folder: Path) -> None:
    """Make the names in a folder last; some file systems cannot, and need not."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
