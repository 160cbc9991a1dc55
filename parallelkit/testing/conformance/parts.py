"""Run the parts of one suite in one process of a job, and write down how each went.

A job is a module with a list of parts, run on every rank as

    python -m parallelkit.testing.conformance.groups --adapter package.module:name --folder DIR

Parts run in order, on all ranks alike, and share a `Case`. The first that fails ends the job on
its rank, since the ranks are out of step from there on.
"""

from __future__ import annotations

import argparse
import json
import os
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import attrs
import numpy as np

from parallelkit import hooks
from parallelkit.protocols import ProcessGroup, WeightSink, WeightSource
from parallelkit.selection import select
from parallelkit.specs import ProbeRequest
from parallelkit.testing.conformance.adapter import Adapter, load

E = TypeVar("E", bound=Exception)


@attrs.define(eq=False)
class Case:
    """What the parts of a job share.

    Attributes:
        adapter, features: the backend, and what its plugin claims.
        reference: how other processes load the adapter, from the folder `home`.
        folder: a folder that all ranks share.
        rank, world: this process's place, as the launcher says.
    """

    adapter: Adapter
    reference: str
    home: Path
    features: frozenset[str]
    folder: Path
    rank: int
    world: int
    _group: ProcessGroup | None = None

    @property
    def group(self) -> ProcessGroup:
        """The group that a part opened before."""
        if self._group is None:
            raise AssertionError("no part opened a group")
        return self._group

    @group.setter
    def group(self, group: ProcessGroup) -> None:
        self._group = group

    @property
    def last(self) -> int:
        return self.world - 1

    def tensor(self, values: Any, dtype: str = "float32") -> Any:
        """A tensor of an array, a list or a number."""
        return self.adapter.tensor(np.asarray(values), dtype)


@attrs.frozen(kw_only=True)
class Part:
    """One part of a suite.

    Attributes:
        name: unique in its suite.
        run: the checks; they raise what is wrong.
        needs: features that the plugin must claim, else the part is skipped.
        ranks: fewest ranks that it makes sense with.
    """

    name: str
    run: Callable[[Case], None]
    needs: frozenset[str] = frozenset()
    ranks: int = 1

    def lacking(self, features: frozenset[str], world: int) -> str:
        """Why the part is skipped; empty if it is not."""
        if missing := sorted(self.needs - features):
            return f"the plugin does not claim {', '.join(missing)}"
        if world < self.ranks:
            return f"needs {self.ranks} ranks, {world} were started"
        return ""


@attrs.frozen(kw_only=True)
class Outcome:
    """How one part went on one rank: `"passed"`, `"skipped"` or `"failed"`, and why."""

    part: str
    state: str
    why: str = ""


class Parts:
    """The parts of a suite, in the order they were declared in. See `groups` for a list of them."""

    def __init__(self) -> None:
        self.all: list[Part] = []

    def part(
        self, *, needs: Sequence[str] = (), ranks: int = 1
    ) -> Callable[[Callable[[Case], None]], Callable[[Case], None]]:
        """Declare the decorated function as the next part, under its own name."""

        def declare(function: Callable[[Case], None]) -> Callable[[Case], None]:
            self.all.append(
                Part(name=function.__name__, run=function, needs=frozenset(needs), ranks=ranks)
            )
            return function

        return declare

    @property
    def names(self) -> list[str]:
        return [part.name for part in self.all]


def outcomes_file(folder: Path, rank: int) -> Path:
    """Where a rank writes its outcomes."""
    return folder / f"outcomes.{rank}.json"


def main(parts: Parts, argv: Sequence[str] | None = None) -> NoReturn:
    """Run all parts; the exit code is 0 unless one failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--adapter", required=True)
    parser.add_argument("--folder", required=True, type=Path)
    given = parser.parse_args(argv)
    folder = given.folder.resolve()
    rank = int(os.environ.get("RANK", "0"))
    outcomes: list[Outcome] = []
    try:
        adapter = load(given.adapter)
        case = Case(
            adapter=adapter,
            reference=given.adapter,
            home=Path.cwd(),
            features=features_of(adapter),
            folder=folder,
            rank=rank,
            world=int(os.environ.get("WORLD_SIZE", "1")),
        )
        os.chdir(folder)  # some compilers leave files where they are
        failed = run(parts, case, outcomes)
    finally:
        text = json.dumps([attrs.asdict(outcome) for outcome in outcomes])
        outcomes_file(folder, rank).write_text(text)
    raise SystemExit(1 if failed else 0)


def run(parts: Parts, case: Case, outcomes: list[Outcome]) -> bool:
    """Run the parts into `outcomes` up to the first that fails; returns whether one did."""
    for part in parts.all:
        if why := part.lacking(case.features, case.world):
            outcomes.append(Outcome(part=part.name, state="skipped", why=why))
            continue
        try:
            part.run(case)
        except Exception:
            outcomes.append(
                Outcome(part=part.name, state="failed", why=traceback.format_exc(limit=-12))
            )
            if case._group is not None:
                with suppress(Exception):
                    case.group.close()
            return True
        outcomes.append(Outcome(part=part.name, state="passed"))
    return False


def source_of(case: Case, model: Any) -> WeightSource:
    """The weight source that the plugins make of a model."""
    source = hooks.weight_source(model, manager=case.adapter.manager)
    if source is None:
        raise AssertionError(f"no plugin makes a weight source of a {type(model).__qualname__}")
    return source


def sink_of(case: Case, model: Any) -> WeightSink:
    """The weight sink that the plugins make of a model."""
    sink = hooks.weight_sink(model, manager=case.adapter.manager)
    if sink is None:
        raise AssertionError(f"no plugin makes a weight sink of a {type(model).__qualname__}")
    return sink


def features_of(adapter: Adapter) -> frozenset[str]:
    """The capability strings that the adapter's plugin claims here."""
    request = ProbeRequest(framework=adapter.framework, device="cpu")
    return select(request, manager=adapter.manager).candidate.features


def raises(kind: type[E], call: Callable[[], object], *said: str) -> E:
    """Check that `call()` raises `kind` with all of the texts in its message; returns the error."""
    try:
        call()
    except kind as error:
        lacking = [text for text in said if text not in str(error)]
        if lacking:
            raise AssertionError(f"{error!r} does not say {', '.join(lacking)}") from error
        return error
    raise AssertionError(f"no {kind.__name__}")


def close(found: Any, expected: Any, tolerance: float, what: str = "") -> None:
    """Check two numbers or arrays: absolute and relative `tolerance` together."""
    np.testing.assert_allclose(
        np.asarray(found, np.float64),
        np.asarray(expected, np.float64),
        rtol=tolerance,
        atol=tolerance,
        err_msg=what,
    )


def all_close(found: Any, expected: Any, tolerance: float, factor: float = 1.0) -> None:
    """Check arrays by name, those expected times `factor`."""
    assert sorted(found) == sorted(expected), f"{sorted(found)}, not {sorted(expected)}"
    for name, values in expected.items():
        close(found[name], factor * values, tolerance, name)
