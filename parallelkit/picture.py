"""A plan as a picture: SVG, from integers only, for a page, a report or a terminal's browser.

Every axis with more than one part is a level of nesting, slowest outside: boxes for stages,
frames for replicas and shards, cells for ranks. A cell's colour is the part of the data set that
its rank loads. Wide plans are summarised: an axis shows its first parts, how many are left out,
and its last part.
"""

from __future__ import annotations

import colorsys
import math
import xml.etree.ElementTree as ET

import attrs

from parallelkit.plan import AXES, ParallelPlan

#: Above so many ranks some are left out of the picture, until about so many are left.
MOST_CELLS = 96

_CELL = (44.0, 30.0)
_GAP, _PAD, _LABEL, _MARGIN = 6.0, 8.0, 18.0, 16.0
_CHARACTER = 6.9  # width of one at 12 px, on the safe side
_SWATCHES = 8
# Hues that people with colour-blind eyes tell apart next to each other; one more turn, paler.
_HUES = (210, 30, 150, 330, 55, 265, 95, 0)
_STYLE = """
text { font: 12px ui-sans-serif, system-ui, sans-serif; fill: #1f2328 }
.note { fill: #59636e }
.title { font-weight: 600; font-size: 14px }
.cell { fill: #1f2328; text-anchor: middle; font-variant-numeric: tabular-nums }
.small { font-size: 9px }
.more { text-anchor: middle; fill: #59636e }
.box { fill: none; stroke: #8c959f }
.rank { stroke: #59636e; stroke-width: 0.5 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .note, .more { fill: #9198a1 }
  .cell { fill: #1f2328 }
  .box { stroke: #656c76 }
}
"""


@attrs.frozen(kw_only=True)
class _Level:
    """One axis in the picture: its parts in rows of `columns`, each `width` by `height` pixels.

    Attributes:
        shown: coordinates drawn, None where parts are left out.
        stride: ranks from one coordinate to the next.
    """

    axis: str
    degree: int
    shown: tuple[int | None, ...]
    stride: int
    columns: int
    width: float
    height: float

    @property
    def left_out(self) -> int:
        """How many parts are not drawn."""
        return self.degree - sum(at is not None for at in self.shown)

    def places(self) -> list[tuple[float, float, float, float]]:
        """Return x, y, width and height of everything shown; what is left out is thin."""
        thin = None in self.shown and self.columns in (1, len(self.shown))
        found, x, y = [], 0.0, 0.0
        for number, at in enumerate(self.shown, 1):
            narrow = thin and at is None and self.columns > 1
            flat = thin and at is None and self.columns == 1
            width = min(_CELL[0], self.width) if narrow else self.width
            height = min(_CELL[1], self.height) if flat else self.height
            found.append((x, y, width, height))
            x, y = (x + width + _GAP, y) if number % self.columns else (0.0, y + height + _GAP)
        return found

    @property
    def size(self) -> tuple[float, float]:
        """Pixels of all parts together."""
        places = self.places()
        return max(x + w for x, _, w, _ in places), max(y + h for _, y, _, h in places)


def to_svg(plan: ParallelPlan) -> str:
    """Return a plan as an SVG document; it follows a page's light or dark scheme.

    Each cell's tooltip has the rank's coordinates. A plan of more than `MOST_CELLS` ranks is
    summarised.

    Example:
        >>> from parallelkit.plan import plan
        >>> to_svg(plan(4, tensor=2)).count('class="rank"')
        4
    """
    levels = _levels(plan)
    notes = _notes(plan, levels)
    parts = min(plan.data_shard_count, _SWATCHES)
    inner, height = levels[0].size
    legend = 110.0 * min(parts, 4)
    widest = max(len(plan.title) * 1.2, *(len(note) for note in notes)) * _CHARACTER
    top = _MARGIN + _LABEL * (1 + len(notes)) + _GAP
    bottom = top + height + 2 * _GAP
    total = bottom + _LABEL * math.ceil(parts / 4) + _MARGIN
    width = max(inner, widest, legend) + 2 * _MARGIN
    root = ET.Element(
        "svg",
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_n(width)} {_n(total)}",
        width=_n(width),
        height=_n(total),
        role="img",
    )
    ET.SubElement(root, "title").text = plan.title
    ET.SubElement(root, "style").text = _STYLE
    _text(root, _MARGIN, _MARGIN + 12, plan.title, "title")
    for line, note in enumerate(notes, 1):
        _text(root, _MARGIN, _MARGIN + 12 + line * _LABEL, note, "note")
    _draw(root, plan, levels, _MARGIN, top, plan.offset)
    _draw_legend(root, plan, _MARGIN, bottom)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode") + "\n"


def _levels(plan: ParallelPlan) -> list[_Level]:
    """Lay out the axes that have more than one part, from the innermost; outermost first."""
    axes = [axis for axis in AXES if plan.degree(axis) > 1] or ["tensor"]
    caps = _caps({axis: plan.degree(axis) for axis in axes})
    levels: list[_Level] = []
    width, height = _CELL
    stride = 1
    for axis in reversed(axes):
        degree = plan.degree(axis)
        if levels:  # a box around what is inside
            inside = levels[0].size
            width = max(inside[0], (len(axis) + 5) * _CHARACTER) + 2 * _PAD
            height = inside[1] + _LABEL + _PAD
        shown = _shown(degree, caps[axis])
        level = _Level(
            axis=axis,
            degree=degree,
            shown=shown,
            stride=stride,
            columns=_columns(shown, width, height),
            width=width,
            height=height,
        )
        levels.insert(0, level)
        stride *= degree
    return levels


def _caps(degrees: dict[str, int]) -> dict[str, int]:
    """Say how many parts of each axis to draw, so that cells stay within `MOST_CELLS`.

    Outer axes shrink first, down to their first and last part, unless the cells are very many.
    """
    caps = dict(degrees)
    *outer, inner = caps
    while math.prod(caps.values()) > MOST_CELLS:
        widest = max(outer, key=lambda axis: caps[axis], default=inner)
        if caps[widest] <= 2 or caps[inner] > 24:
            widest = inner
        # to leave out one part alone saves little room
        caps[widest] = max(2, caps[widest] - (2 if caps[widest] == degrees[widest] else 1))
    return caps


def _shown(degree: int, cap: int) -> tuple[int | None, ...]:
    if cap >= degree:
        return tuple(range(degree))
    return (*range(cap - 1), None, degree - 1)


def _columns(shown: tuple[int | None, ...], width: float, height: float) -> int:
    """Choose how many parts to put side by side: up to nine cells, and wider than high."""
    count = len(shown)

    def badness(columns: int) -> float:
        rows = math.ceil(count / columns)
        ratio = columns * width / (rows * height)
        ragged = (rows * columns - count) / count
        return abs(math.log(ratio / 2.2)) + 2 * ragged

    if (width, height) == _CELL and count <= 9:
        return count
    if None in shown and count <= 4:
        return min(1, count, key=badness)
    return min(range(1, count + 1), key=badness)


def _notes(plan: ParallelPlan, levels: list[_Level]) -> list[str]:
    names = [f"{level.axis} {level.degree}" for level in levels if level.degree > 1]
    notes = [
        f"outside in: {', '.join(names)}; a cell is a rank" if names else "a cell is a rank",
        "a cell's colour is the part of the data set that its rank loads",
    ]
    if any(level.left_out for level in levels):
        drawn = math.prod(level.degree - level.left_out for level in levels)
        notes.append(f"summarised: {drawn} of {plan.world_size:,} ranks are drawn")
    if plan.expert > 1:
        notes.append("e0, e1, ...: the group of experts")
    return notes


def _draw(
    root: ET.Element, plan: ParallelPlan, levels: list[_Level], left: float, top: float, rank: int
) -> None:
    """Draw one level and all inside it; `rank` is the first rank there."""
    level, inside = levels[0], levels[1:]
    for at, (across, down, width, height) in zip(level.shown, level.places(), strict=True):
        x, y = left + across, top + down
        if at is None:
            middle = y + height / 2
            _text(root, x + width / 2, middle, f"{level.left_out:,}", "more")
            _text(root, x + width / 2, middle + 12, "more", "more")
        elif inside:
            shape = _rectangle(root, x, y, width, height, "box")
            shape.set("rx", "4")
            _text(root, x + _PAD, y + 13, f"{level.axis} {at}", "note")
            _draw(root, plan, inside, x + _PAD, y + _LABEL, rank + at * level.stride)
        else:
            _draw_cell(root, plan, rank + at * level.stride, x, y)


def _draw_cell(root: ET.Element, plan: ParallelPlan, rank: int, x: float, y: float) -> None:
    place = plan.coordinates(rank)
    said = ", ".join(f"{axis} {place[axis]}" for axis in plan.degrees if plan.degree(axis) > 1)
    part = plan.data_shard_index(rank)
    cell = _rectangle(root, x, y, *_CELL, "rank")
    cell.set("fill", _colour(part))
    tip = ET.SubElement(cell, "title")
    tip.text = f"rank {rank}{': ' * bool(said)}{said}; data part {part}"
    middle = x + _CELL[0] / 2
    if plan.expert > 1:
        _text(root, middle, y + 15, str(rank), "cell")
        _text(root, middle, y + 26, f"e{place['expert']}", "cell small")
    else:
        _text(root, middle, y + 19, str(rank), "cell")


def _draw_legend(root: ET.Element, plan: ParallelPlan, left: float, top: float) -> None:
    count = plan.data_shard_count
    shown = _shown(count, _SWATCHES - 1) if count > _SWATCHES else tuple(range(count))
    for number, part in enumerate(shown):
        row, column = divmod(number, 4)
        x, y = left + 110.0 * column, top + _LABEL * row
        if part is None:
            _text(root, x, y + 11, f"... {count - _SWATCHES + 1:,} more", "note")
            continue
        swatch = _rectangle(root, x, y, 14, 14, "swatch")
        swatch.set("fill", _colour(part))
        _text(root, x + 20, y + 11, f"data part {part}", "note")


def _colour(part: int) -> str:
    """Return a light colour, on which dark text can be read in either scheme."""
    turn, hue = divmod(part, len(_HUES))
    # Later turns differ in hue by the golden angle, in lightness, and then in saturation.
    lightness, saturation = (0.78, 0.86, 0.70)[turn % 3], (0.65, 0.3)[turn // 3 % 2]
    # In hexadecimal, which every viewer reads; some do not know hsl().
    rgb = colorsys.hls_to_rgb((_HUES[hue] + 137.5 * turn) % 360 / 360, lightness, saturation)
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)


def _rectangle(
    root: ET.Element, x: float, y: float, width: float, height: float, name: str
) -> ET.Element:
    place = {"x": _n(x), "y": _n(y), "width": _n(width), "height": _n(height)}
    return ET.SubElement(root, "rect", {"class": name, **place})


def _text(root: ET.Element, x: float, y: float, text: str, name: str) -> None:
    ET.SubElement(root, "text", {"class": name, "x": _n(x), "y": _n(y)}).text = text


def _n(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
