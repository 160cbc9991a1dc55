"""A weight update over shared memory, against one memcpy and a pickled state_dict over a pipe.

Trainer and follower are two processes. An update is `publisher.update()`, start to return, with
every byte of the model changed before it; memcpy is one `np.copyto` of as many bytes between warm
buffers, timed in the same rounds; pickle is dumps (protocol 5), a pipe, loads, load_state_dict.
"""

from __future__ import annotations

import itertools
import mmap
import os
import pickle
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np
from common import Goal, Row, Run, Timing, finish, parser, ratios, show, time_calls, wait_idle
from follower import Follower
from model_layouts import KINDS, MODELS, Layout, make_layout

from parallelkit import publish_weights
from parallelkit.weights import TransferReport
from parallelkit.weights.segments import Segment

SIZES: Final = {"4MB": 4 * 10**6, "10MB": 10**7, "100MB": 10**8, "1GB": 10**9}
#: verify, aliased; the model moves into the segment for the aliased ones, so they come last.
VARIANTS: Final = (("off", False), ("digest", False), ("off", True), ("digest", True))
GOAL_SIZE: Final = "1GB"
TIMEOUT: Final = 300.0
COLUMNS: Final = (
    *("size", "kind", "tensors", "verify", "aliased", "update ms", "low ms", "high ms", "GB/s"),
    *("of memcpy", "times pickle", "phases"),
)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--target", choices=sorted(MODELS), default="torch")
    made.add_argument("--sizes", nargs="+", choices=SIZES, default=["10MB", "100MB", "1GB"])
    made.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    made.add_argument(
        "--max-tensors", type=int, default=10**9, help="leave out models with more tensors"
    )
    made.add_argument("--updates", type=int, default=9, help="timed updates of each variant")
    args = made.parse_args()
    if args.quick:
        args.sizes, args.kinds, args.updates = ["4MB"], ["few", "small"], 3
    run = Run("shm", args)
    rows: list[Row] = []
    peers: list[Row] = []
    for size, kind in itertools.product(args.sizes, args.kinds):
        layout = make_layout(kind, SIZES[size])
        if len(layout.shapes) > args.max_tensors:
            print(f"{size} {kind}: left out, {len(layout.shapes)} tensors", flush=True)
            continue
        busy = wait_idle(args.wait_idle) if args.wait_idle else None
        found, peer = measure(size, layout, args)
        rows += found
        peers.append(peer | {"cores busy before": busy})
        print(f"{size} {kind}: " + ", ".join(f"{k} {show(v)}" for k, v in peer.items()), flush=True)
    fits = [fit(rows, verify, aliased) for verify, aliased in VARIANTS]
    result = run.result(
        rows, goals(rows), target=args.target, updates=args.updates, peers=peers, fits=fits
    )
    finish(result, COLUMNS, args.output)
    for line in fits:
        print(line["text"])


def measure(size: str, layout: Layout, args: Any) -> tuple[list[Row], Row]:
    """All variants and peers for one model, with one follower process."""
    warmups, repeats = (1, args.updates) if args.quick else (2, args.updates)
    model = MODELS[args.target](layout)
    copy = memcpy(layout.nbytes)
    reading, writing = os.pipe()
    rows: list[Row] = []
    label = {"size": size, "kind": layout.kind, "tensors": len(layout.shapes)}
    with Connection(writing, readable=False) as pipe:
        try:
            follower = Follower(args.target, layout.kind, SIZES[size], reading)
        finally:
            os.close(reading)
        with follower:
            two = time_copy(layout.nbytes, threads=2)
            floors = [time_copy(layout.nbytes, n, from_segment=True) for n in (1, 2)]
            pickled = Timing.of(
                time_calls(lambda: send_pickled(model, pipe, follower), warmups=1, repeats=3)
            )
            for verify, aliased in VARIANTS:
                updates, copies, reports = time_updates(
                    model, follower, copy, verify, aliased, warmups, repeats
                )
                found = label | {"verify": verify, "aliased": aliased, "nbytes": layout.nbytes}
                rows.append(found | columns(layout, updates, copies, pickled, reports))
    copies_all = [row["memcpy ms"] for row in rows]
    peer = label | {
        "MB": layout.nbytes / 1e6,
        "memcpy GB/s": layout.nbytes / statistics.median(copies_all) / 1e6,
        "memcpy two threads GB/s": layout.nbytes / two.median / 1e9,
        "segment, one thread GB/s": layout.nbytes / floors[0].median / 1e9,
        "segment, two threads GB/s": layout.nbytes / floors[1].median / 1e9,
        "pickle ms": pickled.median * 1e3,
        "pickle GB/s": layout.nbytes / pickled.median / 1e9,
    }
    return rows, peer


def time_updates(
    model: Any,
    follower: Follower,
    copy: Callable[[], None],
    verify: str,
    aliased: bool,
    warmups: int,
    repeats: int,
) -> tuple[list[float], list[float], list[TransferReport]]:
    """Seconds of updates, of a memcpy in the same round, and what the updates reported."""
    updates, copies, reports = [], [], []
    with publish_weights(
        model.target, transport="shm", verify=verify, aliased=aliased, timeout=TIMEOUT
    ) as publisher:
        rounds = warmups + repeats
        follower.ask("follow", ticket=publisher.new_ticket(), updates=rounds, timeout=TIMEOUT)
        for turn in range(rounds):
            assert follower.answer() == "waiting"
            took = time_calls(copy, warmups=0, repeats=1)[0]
            model.train()
            start = time.perf_counter()
            report = publisher.update()
            seconds = time.perf_counter() - start
            if turn >= warmups:
                updates.append(seconds)
                copies.append(took)
                reports.append(report)
        assert follower.answer() == "followed"
        follower.ask("leave")
        follower.ask("digest")
        assert follower.answer() == model.digest(), "the follower holds other bytes"
    return updates, copies, reports


def columns(
    layout: Layout,
    updates: list[float],
    copies: list[float],
    pickled: Timing,
    reports: list[TransferReport],
) -> Row:
    """Figures of one variant; phases are medians in milliseconds."""
    update = Timing.of(updates)
    share = ratios(copies, updates)
    phases = {
        name: statistics.median(report.phases[name] for report in reports) * 1e3
        for name in reports[0].phases
    }
    members = [report.members[0] for report in reports]
    phases["(prepare)"] = statistics.median(m.prepare_seconds for m in members) * 1e3
    phases["(pause)"] = statistics.median(m.pause_seconds for m in members) * 1e3
    return {
        "update ms": update.median * 1e3,
        "low ms": update.low * 1e3,
        "high ms": update.high * 1e3,
        "GB/s": layout.nbytes / update.median / 1e9,
        "memcpy ms": statistics.median(copies) * 1e3,
        "of memcpy": share.median,
        "of memcpy low": share.low,
        "of memcpy high": share.high,
        "times pickle": pickled.median / update.median,
        "phases ms": phases,
        "phases": " ".join(f"{name} {show(ms)}" for name, ms in phases.items()),
    }


def memcpy(nbytes: int) -> Callable[[], None]:
    """Copy `nbytes` between two warm buffers of numpy's, in one call."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    return lambda: np.copyto(target, source)


def time_copy(nbytes: int, threads: int, *, from_segment: bool = False) -> Timing:
    """A copy on several threads; with `from_segment` between pages as an update has them.

    That is the limit of an aliased update without digests: from a shared segment into private
    memory, both in pages of 4 KiB, in parts of 8 MiB, nothing else done.
    """
    if from_segment:
        segment = Segment.create(nbytes)
        source = np.frombuffer(segment.arena, np.uint8)
        private = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        target = np.frombuffer(private, np.uint8)
        source[:] = 1
        segment.close()  # the array keeps the memory
    else:
        source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    step = 8 << 20
    cuts = [i * nbytes // threads // 4096 * 4096 for i in range(threads)] + [nbytes]

    def part(start: int, stop: int) -> None:
        for i in range(start, stop, step):
            end = min(i + step, stop)
            np.copyto(target[i:end], source[i:end])

    with ThreadPoolExecutor(threads) as pool:
        return Timing.of(
            time_calls(lambda: list(pool.map(part, cuts[:-1], cuts[1:])), warmups=2, repeats=7)
        )


def send_pickled(model: Any, pipe: Connection, follower: Follower) -> None:
    """What one would do without parallelkit; returns when the follower has loaded it."""
    follower.ask("unpickle")
    pipe.send_bytes(pickle.dumps(model.state(), protocol=5))
    assert follower.answer() == "loaded"


def fit(rows: Sequence[Row], verify: str, aliased: bool) -> Row:
    """Fit seconds = fixed + tensors * overhead + bytes / bandwidth, relative errors squared.

    Terms that would be negative are left out.
    """
    chosen = [row for row in rows if (row["verify"], row["aliased"]) == (verify, aliased)]
    terms = np.array([[1.0, row["tensors"], row["nbytes"]] for row in chosen])
    seconds = np.array([row["update ms"] / 1e3 for row in chosen])
    best, error = np.zeros(3), np.inf
    for use in itertools.product((False, True), repeat=3):
        mask = np.array(use)
        if not mask.any() or mask.sum() > len(chosen):
            continue
        answer = np.zeros(3)
        answer[mask] = np.linalg.lstsq(
            terms[:, mask] / seconds[:, None], np.ones(len(chosen)), rcond=None
        )[0]
        wrong = float(np.square(terms @ answer / seconds - 1).sum())
        if (answer >= 0).all() and wrong < error:
            best, error = answer, wrong
    worst = float(np.abs(terms @ best / seconds - 1).max())
    bandwidth = float(1 / best[2] / 1e9) if best[2] else None
    return {
        "verify": verify,
        "aliased": aliased,
        "fixed ms": float(best[0]) * 1e3,
        "overhead µs": float(best[1]) * 1e6,
        "bandwidth GB/s": bandwidth,
        "worst error": worst,
        "text": f"verify={verify}, aliased={aliased}: {best[0] * 1e3:.2f} ms + tensors * "
        f"{best[1] * 1e6:.2f} µs + bytes / {show(bandwidth)} GB/s (worst error {worst:.0%})",
    }


def goals(rows: Sequence[Row]) -> list[Goal]:
    """The goals at 1 GB, for each kind of model that was measured."""
    found = []
    for row in rows:
        if row["size"] == GOAL_SIZE and row["aliased"]:
            name = f"{row['size']} {row['kind']}, verify={row['verify']}, aliased"
            share = 0.8 if row["verify"] == "off" else 0.4
            found.append(Goal(f"{name}: of one memcpy", share, row["of memcpy"]))
            found.append(Goal(f"{name}: times the pickle", 20.0, row["times pickle"]))
    return found


if __name__ == "__main__":
    main()
