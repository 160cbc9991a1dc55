"""Run a script on real ranks from a test, and fail the test unless every rank ended well."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from parallelkit.spawn import RankResult, spawn_ranks
from parallelkit.testing.forkserver import ForkServer

#: Seconds that the other ranks may go on when one has failed.
GRACE: Final = 30.0


def run_job(
    script: Path | str,
    args: Sequence[str] = (),
    *,
    ranks: int = 2,
    timeout: float = 120.0,
    ends: Mapping[int, int] | None = None,
    env: Mapping[str, str] | None = None,
    forbidden: Sequence[str] = ("Warning",),
    ignored: Sequence[str] = (),
    server: ForkServer | None = None,
) -> list[RankResult]:
    """Start `script` on `ranks` processes of this host and wait for all of them.

    Warnings are errors in the ranks, and each has one thread for computing.

    Args:
        script, args: what to run, with this interpreter.
        timeout: seconds for everything; then all are killed.
        ends: exit code of each rank that is not to end with 0.
        env: variables besides those that say which rank it is.
        forbidden: texts that no rank may write to its error output.
        ignored: warnings that are none of ours, in the form of Python's option `-W`.
        server: forks the ranks, under its own filters; None: each is a new interpreter.

    Raises:
        AssertionError: a rank ended otherwise; with the end of what it said.
    """
    env = {"OMP_NUM_THREADS": "1", **(env or {})}
    if server is not None:
        results = server.run(script, args, ranks=ranks, timeout=timeout, env=env, grace=GRACE)
    else:
        filters = [part for rule in ("error", *ignored) for part in ("-W", rule)]
        argv = [sys.executable, *filters, str(script), *args]
        results = spawn_ranks(argv, ranks, timeout=timeout, env=env, grace=GRACE)
    wrong = [r for r in results if r.returncode != (ends or {}).get(r.rank, 0)]
    said = [f"rank {r.rank} ended with {r.returncode}:\n{r.stderr[-6000:]}" for r in wrong]
    assert not wrong, "\n".join(said)
    for result in results:
        for text in forbidden:
            assert text not in result.stderr, f"rank {result.rank} said:\n{result.stderr[-6000:]}"
    return results
