"""Every cell of the fault matrix that can be, played with real processes.

Each scene ends as the table allows, everybody who lives was told, nobody holds more than before,
and one more update brings all, replaced processes included, to the same version.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from parallelkit import hooks
from parallelkit.loader import PluginManager
from parallelkit.specs import TransportRequest
from parallelkit.weights.identity import host_identity

from .cells import (
    CELLS,
    FAULTS,
    MEMBER_WORDS,
    PHASES,
    PUBLISHER_WORDS,
    SIDES,
    TRANSPORTS,
    Cell,
    render,
    sample,
)
from .peers import SLACK_SECONDS, Seen

TABLE = Path(__file__).parents[2] / "docs" / "faults.md"
START, END = "<!-- matrix -->", "<!-- end of the matrix -->"


def to_be_had() -> set[str]:
    """The core's transports that reach another process of this host."""
    me = host_identity()
    request = TransportRequest(publisher=me, subscriber=me, device="cpu", requested="auto")
    core = PluginManager(environ={}, scan=False)
    return {candidate.name for candidate in hooks.transports(request, manager=core)}


def playable() -> list[object]:
    """All cells that can be; those not in the sample are left to the full run."""
    found: list[object] = []
    for transport in sorted(to_be_had() & set(TRANSPORTS)):
        cells = [cell for cell in CELLS if cell.transport == transport]
        short = sample(cells)
        found += [
            pytest.param(cell, id=str(cell), marks=() if cell in short else pytest.mark.slow)
            for cell in cells
            if cell.endings
        ]
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("cell", playable())
def test_a_fault_ends_as_promised(cell: Cell, played: dict[Cell, Seen]) -> None:
    seen = played[cell]
    heard = "\n".join(f"{who} heard {what[:600]}" for who, what in seen.heard.items())
    assert seen.problems == [], heard
    allowed = ", or ".join(map(str, cell.endings))
    assert seen.ending in cell.endings, f"{seen.ending}; allowed: {allowed}\n{heard}"


def test_every_combination_is_declared_once() -> None:
    keys = [(c.side, c.phase, c.fault, c.transport) for c in CELLS]
    assert len(set(keys)) == len(keys) == len(SIDES) * len(PHASES) * len(FAULTS) * len(TRANSPORTS)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_cell_has_endings_or_a_reason(cell: Cell) -> None:
    assert bool(cell.endings) != bool(cell.why_not)
    assert bool(cell.endings) == bool(cell.how)
    for ending in cell.endings:
        assert ending.publisher in PUBLISHER_WORDS
        assert {ending.one, ending.other} <= set(MEMBER_WORDS)
        assert bool(cell.causes) or ending.publisher != "aborts"


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_no_ending_breaks_the_promise(cell: Cell) -> None:
    for ending in cell.endings:
        members = {ending.one, ending.other}
        if ending.publisher in ("aborts", "goes on", "refuses"):
            assert "new" not in members, "nobody is ahead of the publisher"
        if ending.publisher in ("commits", "names") and cell.phase not in ("open", "idle"):
            assert "old" not in members, "nobody serves the old version after the decision"
        if ending.publisher == "gone":
            assert cell.phase in ("verify", "commit") or members <= {"old", "out"}
        if cell.side == "subscriber":
            assert ending.other in ("old", "new"), "the healthy member is whole"


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("seed", range(20))
def test_a_sample_has_every_fault_phase_and_side(transport: str, seed: int) -> None:
    cells = [cell for cell in CELLS if cell.transport == transport]
    chosen = sample(cells, seed)
    for fault in FAULTS:
        assert sum(cell.fault == fault for cell in chosen) >= 2
    for phase in PHASES:
        for side in SIDES:
            assert sum((cell.phase, cell.side) == (phase, side) for cell in chosen) >= 2


def test_the_table_in_the_docs_is_the_declared_one(request: pytest.FixtureRequest) -> None:
    text = TABLE.read_text()
    before, _, rest = text.partition(START)
    written, _, after = rest.partition(END)
    if request.config.getoption("--write-tables"):
        TABLE.write_text(f"{before}{START}\n{render()}\n{END}{after}")
        return
    assert written.strip() == render(), "python -m pytest tests/faults --full --write-tables"


def test_what_a_death_costs_is_not_a_deadline() -> None:
    from .peers import LONG_SECONDS, SHORT_SECONDS

    assert SHORT_SECONDS < SLACK_SECONDS < LONG_SECONDS
