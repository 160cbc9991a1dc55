"""After a collective failed: find out from the store who was there and who was not.

Each rank that sees a failure posts it, then looks for a moment at what the others posted. A rank
that posted nothing did not take part, or is gone. Nothing of this runs while all is well.
"""

from __future__ import annotations

import re
import time
from functools import partial
from typing import Literal, NamedTuple

import attrs
from torch._C._distributed_c10d import Store

from parallelkit.errors import CollectiveError, CollectiveTimeoutError
from parallelkit_torch.letting_go import run_aside

_GRACE_SECONDS = 1.0
_LOOK_SECONDS = 0.02
Kind = Literal["timeout", "lost"]


class _Post(NamedTuple):
    """What one rank says of its failed call: how it ended, after how many seconds."""

    kind: str
    seconds: float


@attrs.define
class _Findings:
    """What the store said; filled by a thread, since a dead store may answer never."""

    posted: dict[int, _Post] = attrs.field(factory=dict)
    complete: bool = False


def explain(
    error: Exception,
    *,
    what: str,
    timeout: float,
    elapsed: float,
    store: Store | None,
    rank: int,
    world_size: int,
) -> CollectiveError:
    """Turn the backend's error into ours, naming ranks as far as they can be known.

    Takes about a second when somebody is missing.

    Args:
        error: what the backend raised.
        what: the call, for the message.
        timeout: seconds that the call had; elapsed: seconds that it took.
        store: keys shared by the ranks of the group; None where there is none.
        rank, world_size: this process's place in the group.
    """
    kind: Kind = "timeout" if "timed out" in str(error).lower() else "lost"
    mine = _Post(kind, elapsed)
    findings = _ask(store, mine, rank, world_size)
    head, cause = f"rank {rank}: {what} failed", brief(error)
    if findings is None:
        if kind == "timeout":
            return CollectiveTimeoutError(f"{head}: it did not end within {timeout:g} s ({cause})")
        return CollectiveError(
            f"{head}: a peer is gone, and so is the store that could tell which; look at the log "
            f"of rank 0 first ({cause})"
        )
    gave_up = [r for r, post in sorted(findings.items()) if post.kind == "timeout"]
    missing = [r for r in range(world_size) if r != rank and _absent(findings.get(r), elapsed)]
    if kind == "lost" and gave_up and elapsed < findings[gave_up[0]].seconds / 2:
        return CollectiveError(
            f"{head}: this rank came too late, rank(s) {_list(gave_up)} had given up ({cause})"
        )
    if kind == "timeout" or (gave_up and missing):
        who = f"rank(s) {_list(missing)} did not take part" if missing else "it did not end"
        return CollectiveTimeoutError(
            f"{head}: {who} within {timeout:g} s. Every rank must make the same calls in the "
            f"same order ({cause})",
            missing=missing,
        )
    who = f"rank(s) {_list(missing)} are gone" if missing else "a connection between ranks broke"
    return CollectiveError(f"{head}: {who} ({cause})", gone=missing)


def _absent(post: _Post | None, elapsed: float) -> bool:
    """Whether a rank was not waiting with us: it said nothing, or had just arrived."""
    return post is None or (post.kind == "lost" and elapsed > 1 and post.seconds < elapsed / 2)


def _ask(store: Store | None, mine: _Post, rank: int, world: int) -> dict[int, _Post] | None:
    """Post what happened here and collect what the others posted; None if the store is gone.

    A thread does it: a store whose host is stopped would block without a deadline. Rank 0, which
    often holds the store, waits for those who are still looking, so that its end takes nothing
    from them.
    """
    if store is None:
        return None
    findings = _Findings()
    work = partial(_collect, findings, store, mine, rank, world)
    run_aside(work, "parallelkit-faults", 2 * _GRACE_SECONDS)
    return findings.posted if findings.complete else None


def _collect(findings: _Findings, store: Store, mine: _Post, rank: int, world: int) -> None:
    try:
        store.set(f"fault/{rank}", f"{mine.kind} {mine.seconds}")
        others = [r for r in range(world) if r != rank]
        _look(findings, store, others)
        findings.complete = True
        store.set(f"fault/{rank}/read", "")
        if rank == 0:
            _await_readers(store, list(findings.posted))
    except RuntimeError:  # the store is gone; if its host had posted, only since it gave up first
        findings.complete = findings.complete or 0 in findings.posted


def _look(findings: _Findings, store: Store, others: list[int]) -> None:
    """Collect what others post, until all have or the time of grace is over."""
    end = time.monotonic() + _GRACE_SECONDS
    while True:
        for other in others:
            if other not in findings.posted and store.check([f"fault/{other}"]):
                kind, _, seconds = store.get(f"fault/{other}").decode().partition(" ")
                findings.posted[other] = _Post(kind, float(seconds))
        if len(findings.posted) == len(others) or time.monotonic() > end:
            return
        time.sleep(_LOOK_SECONDS)


def _await_readers(store: Store, ranks: list[int]) -> None:
    end = time.monotonic() + _GRACE_SECONDS
    keys = [f"fault/{rank}/read" for rank in ranks]
    while keys and not store.check(keys) and time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)


def brief(error: Exception) -> str:
    """The backend's words, without source locations and farewells."""
    first = str(error).splitlines()[0]
    return re.sub(r"^\[[^\]]*\.cc:\d+\] ", "", first).split(". This is typically")[0]


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
