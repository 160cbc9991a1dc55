"""What rank 0 of a trainer says to the process that started it, and waits for."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from parallelkit.demo import lead as module
from parallelkit.demo.config import Settings
from parallelkit.demo.events import Likeliest, TicketReady, Updated
from parallelkit.demo.lead import Lead
from parallelkit.demo.process import DemoInputError
from parallelkit.weights.report import TransferReport

REPORT = TransferReport(
    version=7,
    nbytes=1,
    tensors=1,
    transport="shm",
    verify="digest",
    verified="every byte",
    phases={},
    started_at=0.0,
)


class Parent:
    def __init__(self, *lines: str) -> None:
        self.lines = list(lines)

    def line(self, seconds: float, what: str) -> str:
        assert 0 < seconds <= 60
        if not self.lines:
            raise DemoInputError(f"no {what}")
        return self.lines.pop(0)


class Publisher:
    ticket = "a ticket"

    def __init__(self) -> None:
        self.attached: list[Any] = []

    def attach(self, *args: Any, **options: Any) -> None:
        self.attached.append((args, options))


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    events: list[Any] = []
    monkeypatch.setattr(module, "say", events.append)
    return events


def make(engine: str, *lines: str) -> tuple[Lead, Publisher, Parent]:
    publisher, parent = Publisher(), Parent(*lines)
    settings = Settings(steps=4, engine=engine)
    return Lead(settings, parent, publisher), publisher, parent  # type: ignore[arg-type]


def test_a_module_joins_by_a_ticket_and_is_not_waited_for(said: list[Any]) -> None:
    lead, publisher, _ = make("module")
    lead.before(0)
    lead.before(2)
    assert said == [TicketReady("a ticket")]
    assert publisher.attached == []


def test_an_engine_is_attached_and_every_version_seen(said: list[Any]) -> None:
    lead, publisher, parent = make("vllm", '["http://127.0.0.1:1", "secret"]', "1")
    assert publisher.attached == [(("http://127.0.0.1:1",), {"token": "secret", "name": "engine"})]
    assert said == []
    lead.before(0)
    assert parent.lines == ["1"]
    lead.before(2)
    assert parent.lines == []
    with pytest.raises(DemoInputError, match="the last version was seen"):
        lead.before(4)


TEXT = Likeliest([1, 2], [-1.0, -0.5], [0.5, 0.25])


@pytest.mark.parametrize(("engine", "text"), [("module", None), ("vllm", TEXT)])
def test_the_last_version_comes_with_its_logits(
    said: list[Any], engine: str, text: Likeliest | None
) -> None:
    lead, _, _ = make(engine, '["http://127.0.0.1:1", "secret"]')
    said.clear()
    for step in (2, 4):
        lead.after(step, REPORT, b"logits", 1.5, digest="d", likeliest=lambda: TEXT)
    assert said == [
        Updated(step, 7, REPORT.to_dict(), 1.5, "d", logits, text)
        for step, logits in ((2, b""), (4, b"logits"))
    ]


LISTEN = """if True:
    from parallelkit.demo.process import Parent
    parent = Parent()
    print(parent.line(30.0, "first"), flush=True)
    print(parent.line(30.0, "second"), flush=True)
    try:
        parent.line(0.05, "third")
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    parent.line(60.0, "end")
"""


@pytest.mark.ranks
def test_a_process_hears_its_parent_and_ends_with_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LISTEN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(b"one\ntw")
        child.stdin.flush()
        assert child.stdout.readline() == b"one\n"
        child.stdin.write(b"o\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"two\n"
        assert child.stdout.readline() == b"DemoInputError no third within 0.05 s\n"
        child.stdin.close()
        assert child.wait(20) == 1
