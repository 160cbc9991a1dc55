"""Plays one cell of the fault matrix with real processes, and looks at what became of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import attrs

from parallelkit.testing.peer import Peer
from parallelkit.weights.segments import SHM_DIR

from .cells import Cell, Ending

#: The publisher's and the members' timeout where silence has to be noticed, and elsewhere.
SHORT_SECONDS: Final = 3.0
LONG_SECONDS: Final = 60.0
#: What a shared machine may add; a death that is noticed within it was not waited for.
SLACK_SECONDS: Final = 30.0
#: How long a process may take to start.
START_SECONDS: Final = 120.0
#: A member waits this much longer than the publisher.
GRACE_SECONDS: Final = 1.0
#: Elements of the model's body; 16 MB where an allocation has to fail.
ELEMENTS: Final = 1 << 14
LARGE_ELEMENTS: Final = 1 << 22

_PUBLISHER_POINTS: Final = {
    "open": "open",
    "begin": "begin",
    "transfer": "stage",
    "verify": "verify",
    "commit": "commit",
}
_SUBSCRIBER_POINTS: Final = {
    "open": "open",
    "begin": "begin",
    "transfer": "transfer",
    "verify": "prepared",
    "commit": "commit",
}
#: Act and point where they are not the fault's usual act at the phase's usual point.
_SPECIAL: Final = {
    ("publisher", "corrupt", "transfer"): ("arena", "stage"),
    ("publisher", "corrupt", "verify"): ("arena", "verify"),
    ("publisher", "corrupt", "commit"): ("arena", "commit"),
    ("publisher", "corrupt", "idle"): ("arena", ""),
    ("publisher", "memory", "open"): ("limit", "publish"),
    ("publisher", "memory", "transfer"): ("memory", "read"),
    ("publisher", "loader", "open"): ("raise", "manifest"),
    ("publisher", "loader", "begin"): ("raise", "source"),
    ("publisher", "loader", "transfer"): ("raise", "read"),
    ("subscriber", "corrupt", "transfer"): ("received", "pull"),
    ("subscriber", "corrupt", "verify"): ("staged", "prepared"),
    ("subscriber", "corrupt", "commit"): ("live", "finish"),
    ("subscriber", "corrupt", "idle"): ("live", ""),
    ("subscriber", "memory", "open"): ("limit", "open"),
    ("subscriber", "memory", "transfer"): ("memory", "pull"),
    ("subscriber", "memory", "idle"): ("serve", ""),
    ("subscriber", "loader", "open"): ("raise", "needs"),
    ("subscriber", "loader", "begin"): ("raise", "check"),
    ("subscriber", "loader", "commit"): ("raise", "write"),
    ("subscriber", "loader", "idle"): ("raise", "write"),
}
_ACTS: Final = {"kill": "kill", "stall": "stop", "corrupt": "garble", "disconnect": "disconnect"}

Event = dict[str, Any]


@attrs.frozen
class Resources:
    """What a process holds, by kind."""

    descriptors: dict[str, int]
    threads: int
    segments: int
    children: int


@attrs.define
class Seen:
    """What a scene showed: how it ended, after how many seconds all knew, and what was wrong."""

    ending: Ending | None = None
    seconds: float = 0.0
    problems: list[str] = attrs.field(factory=list)
    heard: dict[str, str] = attrs.field(factory=dict)


def injection(cell: Cell) -> dict[str, Any]:
    """The settings of the faulty peer's `Fault`."""
    points = _PUBLISHER_POINTS if cell.side == "publisher" else _SUBSCRIBER_POINTS
    usual = (_ACTS.get(cell.fault, ""), points.get(cell.phase, ""))
    act, point = _SPECIAL.get((cell.side, cell.fault, cell.phase), usual)
    return {"act": act, "point": point, "version": 0 if unpublished(cell) else 1}


def unpublished(cell: Cell) -> bool:
    """Whether `publish_weights` itself is to fail."""
    return cell.side == "publisher" and cell.phase == "open" and cell.fault in ("memory", "loader")


class Member:
    """A member in a process of its own; joins again with a new ticket whenever it has to."""

    def __init__(self, **settings: Any) -> None:
        self.peer = Peer("subscribe", rejoin=True, **settings)
        self.name = ""
        self.lost = True
        self.last: Event = {}
        self.killed = False

    def hear(self, *kinds: str, timeout: float) -> Event:
        """Wait for an event of these kinds, and note what it says."""
        event = self.peer.event_of(kinds, timeout)
        if event["event"] == "joined":
            self.name, self.lost = event["name"], False
        elif event["event"] in ("refused", "left") or event.get("error") == "PeerLostError":
            self.lost = True
        if event["event"] != "joined":
            self.last = event
        return event

    def word(self) -> str:
        """How it is left."""
        if self.killed:
            return "gone"
        event = self.last
        if event["event"] == "refused":
            return "out" if event["values"] in ([0.0], [1.0]) else f"mixed {event}"
        state, version, values = event["state"], event["version"], event["values"]
        if state == "quarantined":
            return "quarantined"
        if (state, version, values) == ("current", 2, [2.0]):
            return "new"
        if (state, version, values) in (("current", 1, [1.0]), ("waiting", 0, [1.0])):
            return "old"
        return f"mixed {event}"


class Scene:
    """One cell, being played."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.seen = Seen()
        self.timeout = SHORT_SECONDS if cell.fault == "stall" else LONG_SECONDS
        large = cell.fault == "memory" and cell.phase in ("open", "idle")
        readback = cell.fault == "corrupt" and cell.phase in ("verify", "commit")
        self._elements = LARGE_ELEMENTS if large else ELEMENTS
        self._publish = {
            "timeout": self.timeout,
            "transport": cell.transport,
            "verify": "readback" if readback else "digest",
        }
        self._stack = contextlib.ExitStack()
        self._pids: list[int] = []
        self._started = 0.0
        self._told: Event = {}

    def play(self) -> Seen:
        """Play it to its end, recovery included."""
        try:
            with self._stack:
                self._set_up()
                if unpublished(self.cell):
                    self._fail_to_publish()
                else:
                    self._first_version()
                    self._strike()
                    self._judge()
                self._recover()
        except (TimeoutError, BrokenPipeError, subprocess.TimeoutExpired, KeyError) as error:
            self._problem(f"{type(error).__name__}: {error}")
        names = [p.name for p in SHM_DIR.glob("parallelkit-*")]
        owners = {f"{pid}" for pid in self._pids}
        left = [n for n in names if n.split("-")[2] in owners]
        if left:
            self._problem(f"segments remain: {left}")
        return self.seen

    # --- before

    def _set_up(self) -> None:
        fault = injection(self.cell)
        faulty = self.cell.side == "subscriber"
        serve = faulty and (self.cell.fault, self.cell.phase) == ("loader", "idle")
        self.publisher = self._new_publisher({} if faulty else fault)
        self.one = self._new_member(fault if faulty else {}, serve=serve)
        self.other = self._new_member({})

    def _new_publisher(self, fault: dict[str, Any]) -> Peer:
        peer = Peer(
            "publish",
            rejoin=True,
            tickets=0,
            elements=self._elements,
            publish=self._publish,
            fault=fault,
        )
        self._pids.append(peer.process.pid)
        return self._stack.enter_context(peer)

    def _new_member(self, fault: dict[str, Any], **settings: Any) -> Member:
        member = Member(fault=fault, elements=self._elements, join_timeout=self.timeout, **settings)
        self._pids.append(member.peer.process.pid)
        self._stack.enter_context(member.peer)
        return member

    def _join(self, member: Member) -> None:
        """Let it join; on a slow machine it may need a second ticket, with a short timeout."""
        self._offer(member)
        while member.hear("joined", "refused", timeout=START_SECONDS)["event"] == "refused":
            if self.cell.fault != "stall" or member.last["error"] != "UpdateTimeoutError":
                raise TimeoutError(f"it cannot join: {member.last}")
            self._offer(member)

    def _update(self, value: float) -> Event:
        """Update outside the fault; one that was too slow for a short timeout is repeated."""
        for _ in range(5):
            self.publisher.send(str(value))
            told = self.publisher.event_of(("report", "error"), self.timeout + SLACK_SECONDS)
            if self.cell.fault != "stall" or told.get("cause") != "UpdateTimeoutError":
                break
        return told

    def _offer(self, member: Member) -> None:
        self.publisher.send("ticket")
        member.peer.send(self.publisher.event("ticket")["ticket"])

    def _first_version(self) -> None:
        self.publisher.event("ready", START_SECONDS)
        for member in (self.one, self.other):
            self._join(member)
        told = self._update(1.0)
        if told["event"] == "error":
            raise TimeoutError(f"the first update failed: {told['message']}")
        for member in (self.one, self.other):
            while member.hear("step", timeout=SLACK_SECONDS)["version"] != 1:
                pass
        self._before = {pid: settled(pid) for pid in self._pids}

    # --- the fault

    def _strike(self) -> None:
        self._started = time.monotonic()
        getattr(self, f"_{self.cell.side}_{self.cell.phase}", self._during_update)()
        self.seen.seconds = time.monotonic() - self._started

    def _during_update(self) -> None:
        self.publisher.send("2.0")
        self._outcome()

    def _outcome(self) -> None:
        """Hear what an update came to from all three; who was stopped wakes last."""
        side, fault = self.cell.side, self.cell.fault
        if side == "publisher" and fault == "kill":
            self._await_death(self.publisher)
            self._hear_both()
        elif side == "publisher" and fault == "stall":
            self._hear_both()
            self.publisher.signal(signal.SIGCONT)
            self._hear_publisher()
        else:
            self._hear_publisher()
            self._hear(self.other)
            if side == "publisher" and not self.one.lost:
                self._hear(self.one)
            elif fault == "kill" and not self.one.killed:
                self._await_death(self.one.peer)
                self.one.killed = True
            elif fault == "stall":
                self.one.peer.signal(signal.SIGCONT)
                self._hear(self.one)
            elif not self.one.killed and not self.one.lost:
                self._hear(self.one)

    def _publisher_idle(self) -> None:
        fault = self.cell.fault
        if fault == "corrupt":
            self.publisher.send("fault")
            self.publisher.event("struck")
            self._during_update()
            return
        if fault == "disconnect":
            self.publisher.send("fault")
        else:
            self.publisher.signal(signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        self._hear_both()
        self._wake_publisher()

    def _publisher_open(self) -> None:
        self._leave(self.one)
        self._offer(self.one)
        self._hear(self.one, "refused", "joined")
        self._hear(self.other)
        self._wake_publisher()

    def _wake_publisher(self) -> None:
        if self.cell.fault == "kill":
            self._await_death(self.publisher)
        elif self.cell.fault == "stall":
            self.publisher.signal(signal.SIGCONT)

    def _subscriber_idle(self) -> None:
        fault = self.cell.fault
        if fault == "kill":
            self.one.peer.signal(signal.SIGKILL)
            self._await_death(self.one.peer)
            self.one.killed = True
        elif fault == "stall":
            self.one.peer.signal(signal.SIGSTOP)
        elif fault != "loader":
            self.one.peer.signal(signal.SIGUSR1)
            if (
                fault == "memory"
                and self.one.peer.event_of(("refused", "struck"))["event"] != "refused"
            ):
                self._problem("serve() found memory after all")
            self.one.peer.event("struck")
        if fault == "disconnect":
            self._hear(self.one)
        if fault in ("kill", "disconnect"):
            self._await_members({self.other.name})
        self._during_update()

    def _subscriber_open(self) -> None:
        self._leave(self.one)
        self._offer(self.one)
        fault = self.cell.fault
        if fault == "kill":
            self._await_death(self.one.peer)
            self.one.killed = True
        elif fault == "stall":
            self.one.peer.event("fault")
            time.sleep(0.5)
        else:
            self._hear(self.one, "refused", "joined")
        self.publisher.send("2.0")
        self._hear_publisher()
        self._hear(self.other)
        if fault == "stall":
            time.sleep(1.5 * self.timeout)  # the publisher gives it up meanwhile
            self.one.peer.signal(signal.SIGCONT)
            self._hear(self.one, "refused", "joined")

    def _leave(self, member: Member) -> None:
        member.peer.signal(signal.SIGHUP)
        member.hear("left", timeout=SLACK_SECONDS)
        self._await_members({self.other.name})
        self._started = time.monotonic()

    def _fail_to_publish(self) -> None:
        started = self.publisher.event("refused", START_SECONDS)
        self.seen.heard["publisher"] = f"{started['error']}: {started['message']}"
        cause = {"memory": "TransportError", "loader": "LoaderError"}[self.cell.fault]
        if started["error"] != cause:
            self._problem(f"publish_weights raised {started['error']} instead of {cause}")
        held = resources(self.publisher.process.pid)
        if held.segments or held.descriptors.get("socket") or held.descriptors.get("memfd"):
            self._problem(f"publish_weights failed and left {held}")
        self.seen.ending = Ending("refuses", "out", "out")
        self.publisher.send("again")
        self.publisher.event("ready", SLACK_SECONDS)

    # --- hearing

    def _limit(self) -> float:
        wait = self.timeout + GRACE_SECONDS if self.cell.fault == "stall" else 0.0
        return wait + SLACK_SECONDS

    def _hear(self, member: Member, *kinds: str) -> None:
        if self.cell.unheard:
            member.peer.signal(signal.SIGUSR2)
            kinds = ("state",)
        event = member.hear(*(kinds or ("step",)), timeout=self._limit())
        if event["event"] == "joined":
            member.peer.signal(signal.SIGUSR2)
            member.hear("state", timeout=self._limit())
        who = "one" if member is self.one else "other"
        self.seen.heard[who] = f"{event.get('error')}: {event.get('message', '')}"

    def _hear_both(self) -> None:
        for member in (self.one, self.other):
            self._hear(member)

    def _hear_publisher(self) -> None:
        self._told = self.publisher.event_of(("report", "error"), self._limit())
        told = self._told.get("message") or str(self._told["report"]["notes"])
        self.seen.heard["publisher"] = f"{self._told.get('error')}: {told}"

    def _await_death(self, peer: Peer) -> None:
        code = peer.process.wait(self._limit())
        if code != -signal.SIGKILL:
            self._problem(f"a process ended with {code} instead of being killed")

    def _await_members(self, names: set[str]) -> Event:
        """Wait until the publisher lists these members, and no other, as present."""
        deadline = time.monotonic() + self._limit()
        while True:
            self.publisher.send("members")
            event = self.publisher.event("members", self._limit())
            present = {n for n, s in event["members"].items() if s in ("joined", "quarantined")}
            if present == names:
                return event
            if time.monotonic() > deadline:
                raise TimeoutError(f"the publisher lists {event['members']}, not {names}")
            time.sleep(0.05)

    # --- judging

    def _judge(self) -> None:
        ending = Ending(self._publisher_word(), self.one.word(), self.other.word())
        self.seen.ending = ending
        for problem in (*self._wrong_members(), *self._wrong_publisher(ending)):
            self._problem(problem)

    def _publisher_word(self) -> str:
        if self.publisher.process.poll() is not None:
            return "gone"
        if not self._told:
            self.publisher.send("members")
            version = self.publisher.event("members", self._limit())["version"]
            return "goes on" if version == 1 else f"version {version} without an update"
        error, version = self._told.get("error"), self._told["version"]
        if error is None:
            return "commits" if version == 2 else f"commits version {version}"
        if error == "PartialCommitError":
            return "names" if version == 2 else f"names, at version {version}"
        return "aborts" if version == 1 else f"aborts, at version {version}"

    def _wrong_members(self) -> Iterator[str]:
        for member in (self.one, self.other):
            word, error, use = member.word(), member.last.get("error"), member.last.get("use")
            if word == "quarantined":
                if use != "QuarantinedError" and not self.cell.heals:
                    yield f"quarantined, and use() gives {use}"
                if error is None:
                    yield "quarantined, and step() raised nothing"
            told = error is not None or self.cell.unheard or member.last.get("state") == "waiting"
            if word == "old" and not told:
                yield f"old without being told: {member.last}"
            if word == "new" and (error, use) != (None, None):
                yield f"new, and it says {error}, {use}"
            if word == "out" and error is None:
                yield "out, and subscribe_weights raised nothing"

    def _wrong_publisher(self, ending: Ending) -> Iterator[str]:
        words = {self.one.name: ending.one, self.other.name: ending.other}
        told = self._told
        if ending.publisher == "aborts":
            text = f"{told['error']} {told['cause']} {told['message']}"
            if not any(cause in text for cause in self.cell.causes):
                yield f"aborted for {text}; expected one of {self.cell.causes}"
            if self.cell.side == "subscriber" and self.one.name not in told["message"]:
                yield f"{self.one.name} is not named: {told['message']}"
        if ending.publisher == "names":
            bad = {name for name, word in words.items() if word != "new"}
            if not bad <= set(told["quarantined"]):
                yield f"{bad} are not at the new version, named are {told['quarantined']}"
            if self.cell.side == "subscriber" and self.other.name in told["quarantined"]:
                yield "the healthy member is named"
        if ending.publisher == "commits":
            states = {m["name"]: m["state"] for m in told["report"]["members"]}
            there = {n for n, word in words.items() if word in ("new", "quarantined")}
            if set(states) != there or not set(states.values()) <= {"committed", "staged"}:
                yield f"the report says {states}, the members {words}"

    def _problem(self, text: str) -> None:
        self.seen.problems.append(text)

    # --- afterwards

    def _recover(self) -> None:
        """Replace who is gone; then one more update brings everybody to the same version."""
        if self.publisher.process.poll() is not None:
            self.publisher = self._new_publisher({})
            self.publisher.event("ready", START_SECONDS)
        for who in ("one", "other"):
            if getattr(self, who).killed:
                setattr(self, who, self._new_member({}))
        members = (self.one, self.other)
        deadline = time.monotonic() + START_SECONDS
        for member in members:
            self._settle(member, deadline)
        self._await_members({member.name for member in members})
        told = self._update(3.0)
        if told["event"] == "error":
            self._problem(f"the next update failed: {told['message']}")
            return
        for member in members:
            while member.hear("step", timeout=SLACK_SECONDS)["values"] != [3.0]:
                pass
            last = member.last
            if (last["version"], last["state"], last["use"]) != (told["version"], "current", None):
                self._problem(f"not at version {told['version']}: {last}")
        self._compare_resources()

    def _settle(self, member: Member, deadline: float) -> None:
        """Let a member join that has to; one that woke may not know yet that it was lost."""
        while time.monotonic() < deadline:
            if member.lost:
                self._join(member)
            self.publisher.send("members")
            event = self.publisher.event("members")
            if event["members"].get(member.name) in ("joined", "quarantined"):
                return
            with contextlib.suppress(TimeoutError):
                member.hear("step", "refused", timeout=0.1)

    def _compare_resources(self) -> None:
        if unpublished(self.cell):
            return
        for pid, before in self._before.items():
            deadline = time.monotonic() + 5.0
            while (now := resources(pid)) != before and time.monotonic() < deadline:
                time.sleep(0.05)
            if now.threads and now != before:
                self._problem(f"process {pid} leaks: {before}, then {now}")


def resources(pid: int) -> Resources:
    """What a process holds now; nothing where it is gone."""
    folder = Path(f"/proc/{pid}")
    kinds: Counter[str] = Counter()
    with contextlib.suppress(OSError):
        for fd in (folder / "fd").iterdir():
            with contextlib.suppress(OSError):
                kinds[_kind(os.readlink(fd))] += 1
    threads = segments = children = 0
    with contextlib.suppress(OSError):
        tasks = list((folder / "task").iterdir())
        threads = len(tasks) if kinds else 0
        children = sum(len((task / "children").read_text().split()) for task in tasks)
        segments = (folder / "maps").read_text().count("memfd:parallelkit")
    return Resources(dict(sorted(kinds.items())), threads, segments, children)


def settled(pid: int) -> Resources:
    """What a process holds, once that no longer changes."""
    before = resources(pid)
    while True:
        time.sleep(0.1)
        if (now := resources(pid)) == before:
            return now
        before = now


def _kind(target: str) -> str:
    if target.startswith("/memfd:"):
        return "memfd"
    return target.partition(":")[0] if ":" in target else target
