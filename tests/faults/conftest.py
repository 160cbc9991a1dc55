"""Plays the cells that were collected, several at a time, and prints the matrix at the end."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Final

import pytest

from .cells import Cell
from .peers import Scene, Seen

#: Scenes at a time: they mostly wait, and starting their processes is what costs.
SCENES_AT_A_TIME: Final = 5

_played: Final = pytest.StashKey[dict[Cell, Seen]]()


@pytest.fixture(scope="module")
def played(request: pytest.FixtureRequest) -> dict[Cell, Seen]:
    """What became of each cell that this run selected; all are played before the first is read."""
    cells = [
        item.callspec.params["cell"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and "played" in item.fixturenames
        and not item.get_closest_marker("skip")
    ]
    with ThreadPoolExecutor(SCENES_AT_A_TIME) as pool:
        seen = dict(zip(cells, pool.map(lambda cell: Scene(cell).play(), cells), strict=True))
    request.config.stash[_played] = seen
    return seen


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    seen = config.stash.get(_played, {})
    if not seen:
        return
    terminalreporter.section("fault matrix")
    for cell, found in seen.items():
        mark = "ok" if found.ending in cell.endings and not found.problems else "WRONG"
        terminalreporter.line(f"{cell!s:38} {found.ending!s:38} {found.seconds:5.1f} s  {mark}")
