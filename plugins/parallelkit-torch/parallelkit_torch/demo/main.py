"""Run the demo: start its processes, show what they say, compare both ends, write the report."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Final

from parallelkit.spawn import rank_environ
from parallelkit.specs import DemoSpec
from parallelkit_torch.demo.children import Children, DemoProcessError
from parallelkit_torch.demo.config import DemoSettingsError, Settings
from parallelkit_torch.demo.display import Display
from parallelkit_torch.demo.events import Started, Step, TicketReady
from parallelkit_torch.demo.record import Run

EXIT_GOOD: Final = 0
EXIT_FAILED: Final = 1

_FOLLOWER: Final = "follower"
#: Longer than the processes' own deadlines, whose errors say more.
_SILENCE_SECONDS: Final = 180.0


def run(spec: DemoSpec, settings: Settings | None = None) -> int:
    """Run `parallelkit demo`; returns the exit code.

    Args:
        spec: as the user asked.
        settings: other sizes than the demo's own, for tests; of `spec` then only `output` counts.

    Returns:
        0 if the follower's logits equalled the trainer's bit for bit at every version and the
        report was written; 1 if a process failed or they differ.

    Raises:
        DemoSettingsError: a setting that cannot be run, a report that cannot be written, or no
            plotting library.
    """
    return execute(spec, settings)[0]


def execute(spec: DemoSpec, settings: Settings | None = None) -> tuple[int, Run]:
    """Do what `run` does; returns the exit code and what happened."""
    settings = settings or Settings(
        seed=spec.seed, steps=spec.steps, every=spec.every, ranks=spec.ranks
    )
    output = _checked_output(spec.output)
    record = Run(settings=settings)
    began = time.monotonic()
    with Display(settings) as display:
        display.line(
            f"{settings.ranks} trainer rank(s) and a follower, {settings.steps} steps, "
            f"an update every {settings.every}"
        )
        try:
            _follow(record, display)
        except DemoProcessError as error:
            display.line(f"parallelkit demo failed: {error}", "bold red")
            return EXIT_FAILED, record
        record.seconds = time.monotonic() - began
    from parallelkit_torch.demo.report import write_report

    write_report(record, output)
    display.line(record.verdict, "bold green" if record.equal else "bold red")
    display.line(f"{record.seconds:.0f} s; report: {output}")
    return (EXIT_GOOD if record.equal else EXIT_FAILED), record


def _follow(record: Run, display: Display) -> None:
    """Start everything, and take in events until all processes ended."""
    with Children(_SILENCE_SECONDS) as children:
        start(children, record.settings)
        for event in children.events():
            version = record.add(event)
            if isinstance(event, Started):
                display.started(event)
            elif isinstance(event, TicketReady):
                children.tell(_FOLLOWER, event.ticket)
            elif isinstance(event, Step):
                display.step(event)
            if version is not None:
                display.version(version)


def start(children: Children, settings: Settings) -> None:
    """Start the ranks and the follower, each with one thread."""
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    argument = settings.to_json()
    for rank in range(settings.ranks):
        env = rank_environ(rank, settings.ranks, children.folder) | threads
        children.start(f"trainer rank {rank}", _command("trainer", argument), env)
    env = rank_environ(0, 1, children.folder) | threads
    children.start(_FOLLOWER, _command("follower", argument), env)


def _command(module: str, argument: str) -> list[str]:
    # -P: a random.py or torch.py in the current folder is none of ours
    return [sys.executable, "-P", "-m", f"parallelkit_torch.demo.{module}", argument]


def _checked_output(output: str) -> Path:
    """Return where the report goes, before anything is started for nothing."""
    if importlib.util.find_spec("plotly") is None:
        raise DemoSettingsError("the report needs plotly: pip install 'parallelkit-torch[report]'")
    path = Path(output).resolve()
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise DemoSettingsError(f"output is {output!r}: no file can be written at {path}")
    return path
