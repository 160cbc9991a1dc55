"""The picture of a plan: every cell in its place, wide plans summarised, the documents' current."""

from __future__ import annotations

import math
import re
import shlex
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelkit.cli.main import main
from parallelkit.picture import MOST_CELLS, to_svg
from parallelkit.plan import AXES, ParallelPlan, plan

SVG = "{http://www.w3.org/2000/svg}"
DOCS = Path(__file__).resolve().parents[1] / "docs"
SHOWN = re.compile(r"!\[.*\]\([./]*pictures/(\S+)\)")
COMMAND = re.compile(r"^parallelkit (plan .*--svg docs/pictures/(\S+))$", re.MULTILINE)


def cells(picture: str) -> dict[int, ET.Element]:
    """Rank to its cell, in drawing order."""
    found = {}
    for shape in ET.fromstring(picture).iter(f"{SVG}rect"):
        if shape.get("class") == "rank":
            match = re.match(r"rank (\d+)", shape.findtext(f"{SVG}title") or "")
            assert match
            assert int(match[1]) not in found
            found[int(match[1])] = shape
    return found


def box(shape: ET.Element) -> tuple[float, float, float, float]:
    """Left, top, right, bottom."""
    x, y, width, height = (float(shape.get(key, "")) for key in ("x", "y", "width", "height"))
    return x, y, x + width, y + height


degrees = st.fixed_dictionaries({axis: st.integers(1, 9) for axis in AXES})


@given(degrees, st.sampled_from([0, 3]))
@settings(max_examples=60, deadline=None)
def test_every_plan_has_a_picture(given: dict[str, int], offset: int) -> None:
    made = plan(math.prod(given.values()), **given, offset=offset)  # type: ignore[arg-type]
    picture = to_svg(made)
    drawn = cells(picture)
    assert len(drawn) <= MOST_CELLS
    assert (len(drawn) == made.world_size) == (made.world_size <= MOST_CELLS)
    assert {made.ranks[0], made.ranks[-1]} <= set(drawn)
    root = ET.fromstring(picture)
    width, height = float(root.get("width", "")), float(root.get("height", ""))
    for shape in root.iter(f"{SVG}rect"):
        left, top, right, bottom = box(shape)
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height
    check_boxes(root)
    check_colours(made, drawn)


def check_boxes(root: ET.Element) -> None:
    """No two shapes cut across each other: one lies in the other, or beside it."""
    shapes = [
        box(shape) for shape in root.iter(f"{SVG}rect") if shape.get("class") in ("box", "rank")
    ]
    for number, (left, top, right, bottom) in enumerate(shapes):
        for other in shapes[number + 1 :]:
            beside = other[0] >= right or other[2] <= left or other[1] >= bottom or other[3] <= top
            inside = (
                left <= other[0] and other[2] <= right and top <= other[1] and other[3] <= bottom
            )
            assert beside or inside


def check_colours(made: ParallelPlan, drawn: dict[int, ET.Element]) -> None:
    """The same colour for the same part, and others for the neighbours."""
    colours: dict[int, str | None] = {}
    for rank, cell in drawn.items():
        part = made.data_shard_index(rank)
        assert colours.setdefault(part, cell.get("fill")) == cell.get("fill")
    if made.data_shard_count <= 24:
        assert len(set(colours.values())) == len(colours)


def test_cells_say_where_they_are() -> None:
    made = plan(16, pipeline=2, data=2, data_shard=2, tensor=2, expert=2)
    root = ET.fromstring(to_svg(made))
    tips = [cell.findtext(f"{SVG}title") for cell in cells(to_svg(made)).values()]
    assert tips[6] == "rank 6: pipeline 0, data 1, data_shard 1, tensor 0, expert 1; data part 3"
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts[0] == made.title == root.findtext(f"{SVG}title")
    for name in ("pipeline 1", "data 0", "data_shard 1", "data part 3", "e1", "15"):
        assert name in texts
    stages = [shape for shape in root.iter(f"{SVG}rect") if shape.get("class") == "box"]
    assert len(stages) == 2 + 2 * 2 + 2 * 2 * 2


def test_a_wide_plan_says_what_it_leaves_out() -> None:
    picture = to_svg(plan(1024, pipeline=4, data_shard=4, tensor=8))
    texts = [text.text for text in ET.fromstring(picture).iter(f"{SVG}text")]
    assert "summarised: 96 of 1,024 ranks are drawn" in texts
    assert {"pipeline 0", "pipeline 3", "data 7", "2", "5", "... 25 more"} <= set(texts)
    assert "pipeline 1" not in texts


def test_a_very_wide_plan_stays_small() -> None:
    assert len(to_svg(plan(102_400, data_shard=100, tensor=8))) < 60_000


@pytest.mark.parametrize("made", [plan(1), plan(1, offset=7), plan(2), plan(97), plan(98)])
def test_corners(made: ParallelPlan) -> None:
    drawn = cells(to_svg(made))
    assert made.ranks[0] in drawn
    assert len(drawn) in (made.world_size, MOST_CELLS - 1, MOST_CELLS)


def test_the_pictures_of_the_documents_are_current(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "docs" / "pictures").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    texts = [page.read_text() for page in sorted(DOCS.rglob("*.md"))]
    commands = [found for text in texts for found in COMMAND.findall(text)]
    pictures = {p.name for p in (DOCS / "pictures").glob("*.svg")}
    assert {name for _, name in commands} == pictures
    assert pictures == {name for text in texts for name in SHOWN.findall(text)}
    for command, name in commands:
        assert main(shlex.split(command)) == 0
        made = (tmp_path / "docs" / "pictures" / name).read_text()
        assert made == (DOCS / "pictures" / name).read_text(), f"run parallelkit {command}"
