"""The demo's report: one HTML file that needs nothing else, drawn by plotly."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any, Final

import plotly.graph_objects as go
import plotly.io

from parallelkit.demo.config import PROMPT
from parallelkit.demo.page import PAGE
from parallelkit.demo.record import Run, Version

_INK: Final = "#1f2933"
_GRID: Final = "#e6e9ed"
_LINE: Final = "#2563eb"
_POINT: Final = "#d9480f"
#: One colour a phase, in the order of the phases.
_PHASES: Final = ("#94a3b8", "#2563eb", "#0d9488", "#7c3aed", "#d9480f", "#eab308", "#475569")

#: What a pause is, and what both ends compare.
_PAUSE: Final = {
    "module": "how long the follower's live weights were being written",
    "vllm": "how long the engine generated nothing, measured where it runs",
}
_COMPARED: Final = {"module": "logits", "vllm": "tokens"}

#: Above this many versions their names would run into each other.
_MOST_MARKS: Final = 25


def write_report(run: Run, path: Path) -> None:
    """Write the report of a run to `path`."""
    path.write_text(render(run), encoding="utf-8")


def render(run: Run) -> str:
    """Return the report as HTML text; everything that a process said is escaped."""
    settings = run.settings
    return PAGE.substitute(
        verdict=html.escape(run.verdict[0].upper() + run.verdict[1:]),
        verdict_class="good" if run.equal else "bad",
        tiles="".join(_tile(name, value) for name, value in _facts(run)),
        loss=_div(loss_figure(run), "loss", with_library=True),
        phases=_div(phases_figure(run.versions), "phases", with_library=False),
        pauses=_div(pauses_figure(run.versions), "pauses", with_library=False),
        pause=_PAUSE[settings.engine],
        compared=_COMPARED[settings.engine],
        rows="".join(_row(version) for version in run.versions),
        samples="".join(_sample(version) for version in run.versions),
        settings=html.escape(
            f"seed {settings.seed}, {settings.ranks} rank(s), {settings.batch} windows of "
            f"{settings.block} characters a rank and step, {settings.layers} layers of width "
            f"{settings.hidden}, highest learning rate {settings.rate:g}; the follower is "
            + ("a vLLM engine" if settings.engine == "vllm" else "the same model")
        ),
    )


def loss_figure(run: Run) -> Any:
    """Draw the training loss by step, the validation loss and a mark at each version."""
    figure = go.Figure()
    figure.add_scatter(
        x=list(range(1, len(run.losses) + 1)),
        y=run.losses,
        name="training, mean over ranks",
        line={"color": _LINE, "width": 1.5},
        hovertemplate="step %{x}: %{y:.3f}<extra></extra>",
    )
    figure.add_scatter(
        x=[version.step for version in run.versions],
        y=[version.updated.validation for version in run.versions],
        name="held-out text, at each version",
        mode="markers",
        marker={"color": _POINT, "size": 9, "line": {"color": "white", "width": 1.5}},
        text=[f"version {version.number}" for version in run.versions],
        hovertemplate="%{text}, step %{x}: %{y:.3f}<extra></extra>",
    )
    for version in run.versions:
        figure.add_vline(
            x=version.step,
            line={"color": "#9aa5b1", "width": 1, "dash": "dot"},
            annotation_text=f"v{version.number}" if len(run.versions) <= _MOST_MARKS else "",
            annotation_position="top",
            annotation_font={"size": 11, "color": "#64748b"},
        )
    return _styled(figure, "optimiser step", "loss, nats per character")


def phases_figure(versions: list[Version]) -> Any:
    """Draw the milliseconds of each phase, stacked, for each version."""
    figure = go.Figure()
    reports = [version.report for version in versions]
    names = list(dict.fromkeys(name for report in reports for name in report.phases))
    for place, name in enumerate(names):
        figure.add_bar(
            x=[f"v{report.version}" for report in reports],
            y=[report.phases.get(name, 0.0) * 1e3 for report in reports],
            name=name,
            marker={"color": _PHASES[place % len(_PHASES)]},
            hovertemplate=f"%{{x}} {name}: %{{y:.2f}} ms<extra></extra>",
        )
    figure.update_layout(barmode="stack", bargap=0.45)
    return _styled(figure, "version", "milliseconds")


def pauses_figure(versions: list[Version]) -> Any:
    """Draw for how long each update stopped the follower.

    Of an engine also the longest time between two tokens, as who reads them saw it, since the
    version before.
    """
    figure = go.Figure()
    names = [f"v{version.number}" for version in versions]
    figure.add_bar(
        x=names,
        y=[version.report.pause_seconds * 1e3 for version in versions],
        name="pause",
        marker={"color": _POINT},
        hovertemplate="%{x} paused %{y:.2f} ms<extra></extra>",
    )
    if any(version.generated for version in versions):
        figure.add_scatter(
            x=names,
            y=[version.followed.gap * 1e3 for version in versions],
            name="longest time between two tokens",
            mode="markers",
            marker={"color": _LINE, "size": 9, "line": {"color": "white", "width": 1.5}},
            hovertemplate="%{x}: %{y:.0f} ms<extra></extra>",
        )
    figure.update_layout(bargap=0.6, showlegend=True)
    return _styled(figure, "version", "milliseconds")


def _styled(figure: Any, x: str, y: str) -> Any:
    figure.update_layout(
        template="none",
        height=380,
        margin={"l": 64, "r": 16, "t": 28, "b": 96},
        font={"family": "system-ui, sans-serif", "size": 13, "color": _INK},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        legend={
            "orientation": "h",
            "x": 0,
            "yref": "container",
            "y": 0,
            "yanchor": "bottom",
            "traceorder": "normal",
        },
        hoverlabel={"bgcolor": "white"},
    )
    figure.update_xaxes(title=x, gridcolor=_GRID, zeroline=False, showgrid=False)
    figure.update_yaxes(title=y, gridcolor=_GRID, zeroline=False, rangemode="tozero")
    return figure


def _div(figure: Any, name: str, *, with_library: bool) -> str:
    text: str = plotly.io.to_html(
        figure,
        include_plotlyjs=with_library,
        full_html=False,
        div_id=name,
        config={"displayModeBar": False, "displaylogo": False, "responsive": True},
    )
    return text


def _facts(run: Run) -> list[tuple[str, str]]:
    started, versions = run.started, run.versions
    facts = [("run time", f"{run.seconds:.0f} s"), ("optimiser steps", str(len(run.losses)))]
    if started is not None:
        facts.append(("parameters", f"{started.parameters / 1e6:.2f} M"))
        facts.append(("characters of text", f"{started.characters:,}"))
    if versions:
        first, last = versions[0].updated.validation, versions[-1].updated.validation
        seconds = sorted(version.report.seconds for version in versions)
        facts.append(("held-out loss", f"{first:.2f} → {last:.2f}"))
        facts.append(("median update", f"{seconds[len(seconds) // 2] * 1e3:.1f} ms"))
        pauses = sorted(version.report.pause_seconds for version in versions)
        facts.append(("median pause", f"{pauses[len(pauses) // 2] * 1e3:.1f} ms"))
    return facts


def _tile(name: str, value: str) -> str:
    return f"<div><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>\n"


def _row(version: Version) -> str:
    report = version.report
    changed = "" if report.changed_ratio is None else f"{report.changed_ratio:.0%}"
    cells = (
        f"v{version.number}",
        f"{version.step}",
        f"{version.updated.validation:.3f}",
        f"{report.nbytes / 1e6:.2f} MB",
        report.transport,
        f"{report.seconds * 1e3:.1f} ms",
        f"{report.pause_seconds * 1e3:.2f} ms",
        changed,
        "equal" if version.equal else "differ",
    )
    return f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>\n"


def _sample(version: Version) -> str:
    text = version.followed.sample.removeprefix(PROMPT)
    return (
        f"<article><h3>Version {version.number}"
        f"<span>step {version.step}, held-out loss {version.updated.validation:.2f}</span></h3>"
        f"<pre><b>{html.escape(PROMPT)}</b>{html.escape(text)}</pre></article>\n"
    )
