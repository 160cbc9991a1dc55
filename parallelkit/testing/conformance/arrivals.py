"""Parts of the arrival suite: what ranks learn when one of them never comes.

A job of its own, since nothing is promised for a second try in the same processes.
"""

from __future__ import annotations

import time
from typing import Final

import parallelkit as pk
from parallelkit.errors import NotInitializedError, RendezvousTimeoutError
from parallelkit.testing.conformance.groups import open_group
from parallelkit.testing.conformance.parts import Case, Parts, main, raises

#: How long the others wait for the last rank, and for how long it stays away.
PATIENCE_SECONDS: Final = 4.0
AWAY_SECONDS: Final = 12.0

PARTS: Final = Parts()


@PARTS.part(ranks=2)
def missing_rank(case: Case) -> None:
    """Those who came name the one who did not, in time, and no group is left."""
    if case.rank == case.last:
        time.sleep(AWAY_SECONDS)
        return
    together(case, case.last)
    began = time.monotonic()
    error = raises(RendezvousTimeoutError, lambda: open_group(case, timeout=PATIENCE_SECONDS))
    assert error.missing == (case.last,), f"missing is {error.missing}: {error}"
    assert time.monotonic() - began < PATIENCE_SECONDS + 30
    raises(NotInitializedError, pk.current_group)


def together(case: Case, ranks: int, seconds: float = 120.0) -> None:
    """Wait until that many ranks are here: they need not start equally fast."""
    (case.folder / f"here.{case.rank}").touch()
    deadline = time.monotonic() + seconds
    while len(list(case.folder.glob("here.*"))) < ranks:
        assert time.monotonic() < deadline, "the ranks did not all start"
        time.sleep(0.01)


if __name__ == "__main__":
    main(PARTS)
