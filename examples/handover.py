"""Give a network's first weights to another process, of whichever framework, by parallelkit."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import parallelkit as pk

SECONDS = 120.0


def give(model: Any, file: Path, group: pk.ProcessGroup) -> None:
    """Write a ticket to `file`, wait for who has it, and give it the weights. Collective."""
    with pk.publish_weights(model, timeout=SECONDS) as publisher:
        if group.rank == 0:
            write_privately(file, publisher.ticket)
        publisher.wait(timeout=SECONDS)
        report = publisher.update()
    if group.rank == 0:
        print(f"gave {report}", flush=True)


def take(net: Any, file: Path) -> None:
    """Wait for a ticket in `file`, and set the weights of `net` to what is given."""
    deadline = time.monotonic() + SECONDS
    while not file.exists():
        if time.monotonic() > deadline:
            raise SystemExit(f"--take {file}: nobody wrote a ticket there for {SECONDS:g} s")
        time.sleep(0.1)
    with pk.subscribe_weights(net, file.read_text(), timeout=SECONDS) as follower:
        follower.step(timeout=SECONDS)
    print(f"took the weights from {file}", flush=True)


def write_privately(file: Path, text: str) -> None:
    """Write a secret, whole or not at all: only its owner may read it."""
    part = file.with_name(f"{file.name}.part")
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(text)
    part.replace(file)
