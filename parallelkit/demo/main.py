"""Run the demo: start its processes, show what they say, compare both ends, write the report."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import attrs

from parallelkit.demo.checkpoint import save_random_checkpoint
from parallelkit.demo.children import Children, DemoProcessError
from parallelkit.demo.config import POSITIONS, DemoSettingsError, Settings, choose_engine
from parallelkit.demo.display import Display
from parallelkit.demo.events import (
    EngineReady,
    Finished,
    Started,
    Starting,
    Step,
    TicketReady,
    Updated,
)
from parallelkit.demo.record import Run, Version
from parallelkit.demo.text import load_text, vocabulary_of
from parallelkit.spawn import rank_environ
from parallelkit.specs import DemoSpec

EXIT_GOOD: Final = 0
EXIT_FAILED: Final = 1

_FOLLOWER: Final = "follower"
_CHIEF: Final = "trainer rank 0"
#: Longer than the processes' own deadlines, whose errors say more.
_SILENCE_SECONDS: Final = 180.0
_THREADS: Final = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def run(spec: DemoSpec, package: str, settings: Settings | None = None) -> int:
    """Run `parallelkit demo`; returns the exit code.

    Args:
        spec: as the user asked.
        package: of the framework's side: it has modules `trainer` and `follower` that are run
            with the settings as JSON, such as `"parallelkit_torch.demo"`.
        settings: other sizes than the demo's own, for tests; of `spec` then only the output and
            the engine's Python count.

    Returns:
        0 if at every version the follower computed what the trainer did, logits bit for bit or
        an engine's likeliest tokens, and the report was written; 1 if a process failed or they
        differ.

    Raises:
        DemoSettingsError: a setting that cannot be run, a report that cannot be written, or no
            plotting library.
    """
    return execute(spec, package, settings)[0]


def execute(spec: DemoSpec, package: str, settings: Settings | None = None) -> tuple[int, Run]:
    """Do what `run` does; returns the exit code and what happened."""
    if settings is not None:
        spec = attrs.evolve(spec, engine=settings.engine)
    engine, python = choose_engine(spec)
    settings = settings or Settings(
        seed=spec.seed, steps=spec.steps, every=spec.every, ranks=spec.ranks, engine=engine
    )
    output = _checked_output(spec.output)
    record = Run(settings=settings)
    began = time.monotonic()
    with Display(settings) as display:
        follower = "a vLLM engine" if engine == "vllm" else "a follower"
        display.line(
            f"{settings.ranks} trainer rank(s) and {follower}, {settings.steps} steps, "
            f"an update every {settings.every}"
        )
        try:
            with Children(_SILENCE_SECONDS) as children:
                _Run(record, display, children, package, python).follow()
        except DemoProcessError as error:
            display.line(f"parallelkit demo failed: {error}", "bold red")
            return EXIT_FAILED, record
        record.seconds = time.monotonic() - began
    from parallelkit.demo.report import write_report

    write_report(record, output)
    display.line(record.verdict, "bold green" if record.equal else "bold red")
    display.line(f"{record.seconds:.0f} s; report: {output}")
    return (EXIT_GOOD if record.equal else EXIT_FAILED), record


@attrs.frozen(eq=False)
class _Run:
    """The processes of a run, and what is done with what they say."""

    record: Run
    display: Display
    children: Children
    package: str
    engine_python: str

    def follow(self) -> None:
        """Start everything, and take in events until all processes ended."""
        settings = self.record.settings
        if settings.engine == "vllm":
            self._start_engine()  # trainers are started once it is ready: its start is long
        else:
            self._start_trainers()
            self._start(_FOLLOWER, _command(self.package, "follower", settings.to_json()))
        for event in self.children.events():
            version = self.record.add(event)
            match event:
                case Started():
                    self.display.started(event)
                case Starting():
                    self.display.starting(event)
                case TicketReady():
                    self.children.tell(_FOLLOWER, event.ticket)
                case EngineReady():
                    self.display.line(f"engine: {event.name} at {event.url}")
                    self._start_trainers()
                    self.children.tell(_CHIEF, json.dumps([event.url, event.token]))
                case Step():
                    self.display.step(event)
                case Updated() if settings.engine == "vllm":
                    self.display.paused(event)
                case Finished() if settings.engine == "vllm":
                    self.children.tell(_FOLLOWER, "leave")
            if version is not None:
                self._completed(version)

    def _completed(self, version: Version) -> None:
        self.display.version(version)
        if self.record.settings.engine == "vllm":
            self.children.tell(_CHIEF, str(version.number))

    def _start_trainers(self) -> None:
        """Start the ranks, each with one thread."""
        settings = self.record.settings
        argv = _command(self.package, "trainer", settings.to_json())
        for rank in range(settings.ranks):
            env = rank_environ(rank, settings.ranks, self.children.folder)
            self.children.start(f"trainer rank {rank}", argv, env | _THREADS)

    def _start_engine(self) -> None:
        """Start the engine, with other weights than the trainer's."""
        settings = self.record.settings
        vocabulary = vocabulary_of(load_text())
        checkpoint = self.children.folder / "start"
        save_random_checkpoint(
            checkpoint,
            settings.model_config(len(vocabulary)),
            seed=settings.seed,
            dtype="float32",
            positions=POSITIONS,
        )
        argument = {
            "settings": settings.to_json(),
            "characters": vocabulary.characters,
            "checkpoint": str(checkpoint),
        }
        command = _command("parallelkit_vllm.demo", "engine", json.dumps(argument))
        self._start(_FOLLOWER, [self.engine_python, *command[1:]])

    def _start(self, name: str, argv: Sequence[str]) -> None:
        env = rank_environ(0, 1, self.children.folder)
        self.children.start(name, argv, env | _THREADS)


def _command(package: str, module: str, argument: str) -> list[str]:
    # -P: a random.py or torch.py in the current folder is none of ours
    return [sys.executable, "-P", "-m", f"{package}.{module}", argument]


def _checked_output(output: str) -> Path:
    """Return where the report goes, before anything is started for nothing."""
    if importlib.util.find_spec("plotly") is None:
        raise DemoSettingsError("the report needs plotly: pip install 'parallelkit[report]'")
    path = Path(output).resolve()
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise DemoSettingsError(f"output is {output!r}: no file can be written at {path}")
    return path
