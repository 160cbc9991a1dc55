"""Import time of parallelkit, against pluggy, attrs and torch in the same run.

Each sample is a fresh interpreter with bytecode cached. Wall: `python -c "import X"` less the
median of an empty program. Booked: what `-X importtime` books on X, modules below it included.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from functools import partial

from common import Goal, Row, Run, Timing, finish, interleaved, parser, ratios, wait_idle

CHEAP = ("parallelkit", "pluggy", "attrs")
HEAVY = "torch"
FRAMEWORKS = ("torch", "mindspore", "vllm", "numpy", "zmq", "rich")
COLUMNS = ("module", "wall ms", "low ms", "high ms", "booked ms", "of torch", "samples")


def main() -> None:
    args = parser(__doc__).parse_args()
    wait_idle(args.wait_idle)
    run = Run("import", args)
    loaded = loaded_by("parallelkit")
    assert not loaded, f"import parallelkit loaded {', '.join(loaded)}"
    few, many = (1, 1) if args.quick else (7, 30)
    walls = interleaved(
        {name: partial(wall_seconds, name) for name in ("", *CHEAP)}, warmups=2, repeats=many
    )
    heavy = interleaved(
        {name: partial(wall_seconds, name) for name in (HEAVY, "parallelkit")},
        warmups=0 if args.quick else 1,
        repeats=few,
    )
    walls[HEAVY] = heavy[HEAVY]
    booked = {name: Timing.of([booked_seconds(name) for _ in range(many)]) for name in CHEAP}
    if not args.quick:
        booked[HEAVY] = Timing.of([booked_seconds(HEAVY) for _ in range(few)])
    empty = Timing.of(walls[""])
    rows = [row("(nothing)", empty, 0.0, None, None)]
    whole = Timing.of(walls[HEAVY]).median - empty.median
    for name in (*CHEAP, HEAVY):
        wall = Timing.of(walls[name])
        share = (wall.median - empty.median) / whole
        rows.append(row(name, wall, empty.median, booked.get(name), share))
    goals = [Goal("frameworks loaded by import parallelkit", 0, len(loaded), at_least=False)]
    processes = ratios(heavy["parallelkit"], heavy[HEAVY])
    result = run.result(
        rows, goals, checked_absent=FRAMEWORKS, process_of_torch_process=processes.median
    )
    finish(result, COLUMNS, args.output)


def row(name: str, wall: Timing, base: float, booked: Timing | None, share: float | None) -> Row:
    return {
        "module": name,
        "wall ms": (wall.median - base) * 1e3,
        "low ms": (wall.low - base) * 1e3,
        "high ms": (wall.high - base) * 1e3,
        "least ms": (wall.least - base) * 1e3,
        "booked ms": booked.median * 1e3 if booked else None,
        "least booked ms": booked.least * 1e3 if booked else None,
        "of torch": share,
        "samples": wall.samples,
    }


def wall_seconds(name: str) -> float:
    """Seconds of an interpreter that imports `name` (or nothing) and ends."""
    start = time.perf_counter()
    interpreter("-c", f"import {name}" if name else "pass")
    return time.perf_counter() - start


def booked_seconds(name: str) -> float:
    """Seconds that the interpreter books on the import of `name`."""
    done = interpreter("-X", "importtime", "-c", f"import {name}")
    for line in reversed(done.stderr.splitlines()):
        match = re.fullmatch(r"import time:\s*\d+ \|\s*(\d+) \| (\S+)", line)
        if match and match.group(2) == name:
            return int(match.group(1)) / 1e6
    raise RuntimeError(f"-X importtime does not mention {name}")


def loaded_by(name: str) -> list[str]:
    """Which heavy modules a bare import of `name` loads."""
    code = f"import sys, {name}; print(*(m for m in {FRAMEWORKS!r} if m in sys.modules))"
    return interpreter("-c", code).stdout.split()


def interpreter(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a fresh interpreter that may cache bytecode, as an installed program does."""
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.run(
        [sys.executable, *words], check=True, capture_output=True, text=True, env=environ
    )


if __name__ == "__main__":
    main()
