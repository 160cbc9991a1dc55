"""What the terminal shows: a live bar where there is a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console, Group
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from parallelkit.demo.config import PROMPT, Settings
from parallelkit.demo.events import Started, Starting, Step, Updated
from parallelkit.demo.record import Version
from parallelkit.weights.report import report_from_dict

#: Steps between two plain lines.
_LINE_EVERY = 10


class Display:
    """Shows a run as it goes on. A context manager."""

    def __init__(self, settings: Settings, console: Console | None = None) -> None:
        self._settings = settings
        self._console = console or Console(highlight=False)
        self._began = time.monotonic()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=settings.steps, loss="-")

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def line(self, text: str, style: str = "") -> None:
        """Show a line as it is; no markup."""
        self._console.print(Text(text, style=style), soft_wrap=True)

    def started(self, event: Started) -> None:
        """Show what the trainer is."""
        self._progress.update(self._task, description="training")
        self.line(
            f"trainer: {event.parameters / 1e6:.2f} million parameters, "
            f"{event.characters:,} characters of text"
        )
        for line in event.explanation.splitlines():
            self.line(f"  {line}", "dim")

    def starting(self, event: Starting) -> None:
        """Show that the engine is not ready yet."""
        self._progress.update(self._task, description="the engine starts")
        if not self._console.is_terminal:
            self.line(f"the engine starts, {event.seconds:.0f} s")

    def paused(self, event: Updated) -> None:
        """Show for how long an update stopped an engine; what it writes then comes later."""
        pauses = [
            f"{engine.state}, paused {engine.pause_seconds * 1e3:.1f} ms"
            for engine in report_from_dict(event.report).engines
        ]
        self.line(f"version {event.version} after {event.step} steps: {'; '.join(pauses)}", "cyan")

    def step(self, event: Step) -> None:
        """Show progress."""
        self._progress.update(self._task, completed=event.step, loss=f"{event.loss:.3f}")
        if not self._console.is_terminal and event.step % _LINE_EVERY == 0:
            seconds = time.monotonic() - self._began
            self.line(
                f"step {event.step:>4}/{self._settings.steps}  loss {event.loss:.3f}  "
                f"{seconds:.0f} s"
            )

    def version(self, version: Version) -> None:
        """Show a version: the transfer, the comparison, and what the follower writes with it."""
        title = (
            f"version {version.number} after {version.step} steps: "
            f"validation loss {version.updated.validation:.3f}, {version.comparison}"
        )
        style = "green" if version.equal else "bold red"
        continued = version.followed.sample.removeprefix(PROMPT)
        about = str(version.report)
        if version.generated:
            followed = version.followed
            about += (
                f"\n  {followed.written:,} tokens since the version before, never more than "
                f"{followed.gap * 1e3:.0f} ms between two"
            )
        self.line("")
        if self._console.is_terminal:
            sample = Text.assemble((PROMPT, "bold"), continued)
            body = Group(sample, Text(f"\n{about}", style="dim"))
            self._console.print(Panel(body, title=Text(title, style=style), title_align="left"))
            return
        self.line(title, style)
        self.line(about, "dim")
        for row in f"{PROMPT}{continued}".splitlines():
            self.line(f"  | {row}")
        self.line("")
