"""The version counter: it moves at commit, never back."""

from __future__ import annotations

from typing import Final

from parallelkit.errors import VersionError

#: The wire carries versions below this.
MAX_VERSION: Final = 2**62


def next_version(current: int, asked: int | None) -> int:
    """The version an update will have.

    Raises:
        VersionError: `asked` is not an integer above `current`.
    """
    if asked is None and current + 1 < MAX_VERSION:
        return current + 1
    if isinstance(asked, bool) or not isinstance(asked, int) or not current < asked < MAX_VERSION:
        raise VersionError(
            f"version is {asked!r}; the last committed version is {current} and versions only move "
            "forward"
        )
    return asked
