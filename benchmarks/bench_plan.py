"""Time of a plan: making it, all groups of all axes, every data part, table, JSON and picture.

And of the search of mode auto, over a model of 96 layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common import Goal, Row, Run, Timing, finish, parser, time_calls, wait_idle

from parallelkit.picture import to_svg
from parallelkit.plan import ParallelPlan, plan
from parallelkit.search import search
from parallelkit.shapes import Hardware, ModelShape, Size, Training, Unit

COLUMNS = ("ranks", "what", "ms", "low ms", "high ms")
DEGREES = {"pipeline": 4, "data_shard": 2, "tensor": 8, "expert": 2}
WORLDS = (64, 1_024, 102_400)


def main() -> None:
    args = parser(__doc__).parse_args()
    wait_idle(args.wait_idle)
    run = Run("plan", args)
    rows = [row for world in WORLDS for row in time_world(world, 1 if args.quick else 9)]
    rows += [time_search(world, 1 if args.quick else 5) for world in WORLDS[:2]]
    total = next(row["ms"] for row in rows if row["ranks"] == 1_024 and row["what"] == "all")
    goal = Goal("1,024 ranks, all of it, ms", 50, total, at_least=False)
    finish(run.result(rows, [goal], degrees=DEGREES), COLUMNS, args.output)


def time_world(world: int, repeats: int) -> list[Row]:
    """Time each part alone and all together for one world size."""
    made = plan(world, **DEGREES)  # type: ignore[arg-type]
    parts: dict[str, Callable[[], Any]] = {
        "plan": lambda: plan(world, **DEGREES),  # type: ignore[arg-type]
        "groups of 6 axes": lambda: [made.groups(axis) for axis in made.degrees],
        "data part of every rank": lambda: [made.data_shard_index(r) for r in made.ranks],
        "place of every rank": lambda: [made.coordinates(rank) for rank in made.ranks],
        "table and JSON": lambda: (str(made), made.to_json()),
        "picture": lambda: to_svg(made),
        "all": lambda: everything(world),
    }
    rows = []
    for what, call in parts.items():
        took = Timing.of(time_calls(call, warmups=1, repeats=repeats))
        milliseconds = {"ms": took.median, "low ms": took.low, "high ms": took.high}
        row: Row = {"ranks": world, "what": what}
        rows.append(row | {name: value * 1e3 for name, value in milliseconds.items()})
    return rows


def time_search(world: int, repeats: int) -> Row:
    """Time a search over all degrees and numbers of microbatches."""
    layer = Size(10**9, 10**9)
    units = [
        Unit(name=str(number), trainable=layer, activations=Size(10**8), flops=10**13)
        for number in range(96)
    ]
    model = ModelShape(units=units, divisors=(64, 8))
    hardware, training = Hardware(memory=80 * 10**9), Training(batch=4 * world)
    seconds = time_calls(
        lambda: search(model, world, hardware, training), warmups=0, repeats=repeats
    )
    took = Timing.of(seconds)
    milliseconds = {"ms": took.median, "low ms": took.low, "high ms": took.high}
    row: Row = {"ranks": world, "what": "search"}
    return row | {name: value * 1e3 for name, value in milliseconds.items()}


def everything(world: int) -> ParallelPlan:
    """Do with a plan all that one can."""
    made = plan(world, **DEGREES)  # type: ignore[arg-type]
    for axis in made.degrees:
        made.groups(axis)
    for rank in made.ranks:
        made.data_shard_index(rank)
        made.coordinates(rank)
    str(made)
    made.to_json()
    to_svg(made)
    return made


if __name__ == "__main__":
    main()
