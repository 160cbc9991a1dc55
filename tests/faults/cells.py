"""The fault matrix as data: what may go wrong where, and the endings that the protocol promises.

A scene has a publisher and two members, all at version 1 with every element 1.0. The fault comes
during the update to version 2, or before it (`open`: while a member joins; `idle`: when nothing is
under way). An ending says what became of each. Promises are those of `docs/weights.md`: before the
decision all members stay old; after it a member is at the new version, or quarantined and named;
one that is prepared and hears no decision is quarantined.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, Final

import attrs

FAULTS: Final = {
    "kill": "the process is killed (SIGKILL)",
    "stall": "the process is stopped (SIGSTOP), and wakes after everybody else went on",
    "corrupt": "bytes change: on the control channel, in the segment, or in memory",
    "disconnect": "all its connections are cut",
    "memory": "there is no memory to be had",
    "loader": "an exception in the code that reads or places the model",
}
PHASES: Final = ("open", "begin", "transfer", "verify", "commit", "idle")
SIDES: Final = ("publisher", "subscriber")
TRANSPORTS: Final = ("shm", "tcp")

#: What a publisher may have done, and how a member may be left.
PUBLISHER_WORDS: Final = {
    "commits": "`update()` returned; the members that are new, and they alone, are in its report",
    "names": "`PartialCommitError`: committed, and whoever is not at the new version is named",
    "aborts": "`update()` raised, the version did not move",
    "goes on": "no update was under way; it serves on, and lists who is lost",
    "refuses": "`publish_weights` raised and left nothing open; called again, it works",
    "gone": "killed",
}
MEMBER_WORDS: Final = {
    "new": "at version 2, every element 2.0",
    "old": "at the version it had, every element 1.0",
    "quarantined": "serves nothing, `use()` raises",
    "out": "`subscribe_weights` raised; the target is untouched",
    "gone": "killed",
}


@attrs.frozen
class Ending:
    """What became of the three. `one` is the faulty member, or the first of a faulty publisher."""

    publisher: str
    one: str
    other: str

    def __str__(self) -> str:
        return f"{self.publisher}: {self.one}, {self.other}"


@attrs.frozen(kw_only=True)
class Cell:
    """One combination.

    Attributes:
        how: what is done.
        endings: those allowed; none where the combination cannot be.
        why_not: the reason, where it cannot be.
        causes: error classes, one of which the publisher hears or raises, where it aborts.
        unheard: the members notice nothing, since nothing was sent to them.
        heals: a quarantine that ends at the member's next look, by placing the staged bytes again.
    """

    fault: str
    phase: str
    side: str
    transport: str
    how: str = ""
    endings: tuple[Ending, ...] = ()
    why_not: str = ""
    causes: tuple[str, ...] = ()
    unheard: bool = False
    heals: bool = False

    def __str__(self) -> str:
        return f"{self.side}-{self.fault}-{self.phase}-{self.transport}"


def _ends(*texts: str) -> tuple[Ending, ...]:
    found = []
    for text in texts:
        publisher, _, members = text.partition(": ")
        one, other = members.split()
        found.append(Ending(publisher, one, other))
    return tuple(found)


_LOST = ("PeerLostError",)
_SLOW = ("UpdateTimeoutError", "PeerLostError")
_CHANGED = ("CorruptionError",)
_MEMORY = ("MemoryError",)
_LOADER = ("LoaderError",)

Row = dict[str, Any]
Key = tuple[str, str, str]


def _can(how: str, *endings: str, **facts: Any) -> Row:
    return {"how": how, "endings": _ends(*endings), **facts}


def _cannot(reason: str) -> Row:
    return {"why_not": reason}


_PUBLISHER: Final[dict[tuple[str, str], Row]] = {
    # --- while a member joins
    ("kill", "open"): _can("at a member's hello", "gone: out old"),
    ("stall", "open"): _can("at a member's hello", "goes on: out old"),
    ("corrupt", "open"): _can("bytes on its connections, at a hello", "goes on: out old"),
    ("disconnect", "open"): _can("at a member's hello", "goes on: out old"),
    ("memory", "open"): _can("it gets no memory for its arena", "refuses: out out"),
    ("loader", "open"): _can("the source gives no manifest", "refuses: out out"),
    # --- begin was sent
    ("kill", "begin"): _can("after begin was sent", "gone: old old"),
    ("stall", "begin"): _can("after begin was sent", "aborts: old old", causes=_SLOW),
    ("corrupt", "begin"): _can("bytes on its connections", "aborts: old old", causes=_LOST),
    ("disconnect", "begin"): _can("after begin was sent", "aborts: old old", causes=_LOST),
    ("memory", "begin"): _cannot("begin takes no memory of the model's size"),
    ("loader", "begin"): _can(
        "the source refuses the update", "aborts: old old", causes=_LOADER, unheard=True
    ),
    # --- bytes are in the arena, and nobody was told
    ("kill", "transfer"): _can("when its bytes are staged", "gone: old old"),
    ("stall", "transfer"): _can("when its bytes are staged", "aborts: old old", causes=_SLOW),
    ("corrupt", "transfer"): _can("a byte of its arena", "aborts: old old", causes=_CHANGED),
    ("disconnect", "transfer"): _can("when its bytes are staged", "aborts: old old", causes=_LOST),
    ("memory", "transfer"): _can("while it reads the model", "aborts: old old", causes=_MEMORY),
    ("loader", "transfer"): _can("while it reads the model", "aborts: old old", causes=_LOADER),
    # --- all members are prepared and compared, and nobody was told
    ("kill", "verify"): _can("before the decision", "gone: quarantined quarantined"),
    ("stall", "verify"): _can(
        "before the decision",
        "names: quarantined quarantined",
        "aborts: quarantined quarantined",
        causes=_SLOW,
    ),
    ("corrupt", "verify"): _can(
        'a byte of its arena, after the digests were compared; `verify="readback"`',
        "names: quarantined quarantined",
    ),
    ("disconnect", "verify"): _can(
        "before the decision",
        "names: quarantined quarantined",
        "aborts: quarantined quarantined",
        causes=_LOST,
    ),
    ("memory", "verify"): _cannot("digests are compared, nothing is staged"),
    ("loader", "verify"): _cannot("the model was read before, and is not read again"),
    # --- one of two members was told the decision
    ("kill", "commit"): _can(
        "one of two members was told the decision",
        "gone: new quarantined",
        "gone: quarantined quarantined",
    ),
    ("stall", "commit"): _can(
        "one of two members was told the decision",
        "names: new quarantined",
        "names: quarantined quarantined",
    ),
    ("corrupt", "commit"): _can(
        'a byte of its arena, after one of two members was told; `verify="readback"`',
        "names: new quarantined",
        "names: quarantined quarantined",
    ),
    ("disconnect", "commit"): _can(
        "one of two members was told the decision",
        "names: new quarantined",
        "names: quarantined quarantined",
    ),
    ("memory", "commit"): _cannot("its members place what they hold, nothing is staged"),
    ("loader", "commit"): _cannot("the model was read before, and is not read again"),
    # --- nothing is under way
    ("kill", "idle"): _can("between updates", "gone: old old"),
    ("stall", "idle"): _can("between updates", "goes on: old old"),
    ("corrupt", "idle"): _can(
        "a byte of its arena; the next update stages anew", "commits: new new"
    ),
    ("disconnect", "idle"): _can("between updates", "goes on: old old"),
    ("memory", "idle"): _cannot("between updates nothing is staged"),
    ("loader", "idle"): _cannot("the model is read within `update()` alone"),
}

_SUBSCRIBER: Final[dict[tuple[str, str], Row]] = {
    # --- it was welcomed, and has not opened
    ("kill", "open"): _can("when it was welcomed", "commits: gone new"),
    ("stall", "open"): _can(
        "when it was welcomed; an update passes meanwhile", "commits: out new", "commits: old new"
    ),
    ("corrupt", "open"): _can("bytes on its connection", "commits: out new"),
    ("disconnect", "open"): _can("when it was welcomed", "commits: out new"),
    ("memory", "open"): _can("the arena cannot be mapped", "commits: out new"),
    ("loader", "open"): _can("the target cannot say what it needs", "commits: out new"),
    # --- begin was heard
    ("kill", "begin"): _can("at begin", "aborts: gone old", causes=_LOST),
    ("stall", "begin"): _can("at begin", "aborts: old old", causes=_SLOW),
    ("corrupt", "begin"): _can("bytes on its connection", "aborts: old old", causes=_LOST),
    ("disconnect", "begin"): _can("at begin", "aborts: old old", causes=_LOST),
    ("memory", "begin"): _cannot("begin takes no memory of the model's size"),
    ("loader", "begin"): _can("the target is not what it was", "aborts: old old", causes=_LOADER),
    # --- the bytes were fetched and hashed, and that was not said
    ("kill", "transfer"): _can("when the bytes are fetched", "aborts: gone old", causes=_LOST),
    ("stall", "transfer"): _can("when the bytes are fetched", "aborts: old old", causes=_SLOW),
    ("corrupt", "transfer"): _can("a byte as received", "aborts: old old", causes=_CHANGED),
    ("disconnect", "transfer"): _can(
        "when the bytes are fetched; it cannot know whether it was heard",
        "aborts: old old",
        "aborts: quarantined old",
        causes=_LOST,
    ),
    ("memory", "transfer"): _cannot("the arena is mapped; fetching takes no memory"),
    ("loader", "transfer"): _cannot("fetching touches no target"),
    # --- it said prepared
    ("kill", "verify"): _can(
        "when it said prepared", "names: gone new", "aborts: gone old", causes=_LOST
    ),
    ("stall", "verify"): _can(
        "when it said prepared", "names: quarantined new", "aborts: quarantined old", causes=_SLOW
    ),
    ("corrupt", "verify"): _cannot(
        "what was verified lies in the publisher's segment, which its members cannot write"
    ),
    ("disconnect", "verify"): _can(
        "when it said prepared",
        "names: quarantined new",
        "names: new new",
        "aborts: quarantined old",
        causes=_LOST,
    ),
    ("memory", "verify"): _cannot("it waits for the decision, and takes no memory"),
    ("loader", "verify"): _cannot("it waits for the decision, and touches no target"),
    # --- it heard the decision
    ("kill", "commit"): _can("when it heard the decision", "names: gone new"),
    ("stall", "commit"): _can("when it heard the decision", "names: quarantined new"),
    ("corrupt", "commit"): _can(
        'a byte of live memory while placing; `verify="readback"`', "names: quarantined new"
    ),
    ("disconnect", "commit"): _can(
        "when it heard the decision; its acknowledgement is lost",
        "names: new new",
        "names: quarantined new",
    ),
    ("memory", "commit"): _cannot("the bytes are there since it said prepared; see `loader`"),
    ("loader", "commit"): _can("after one of the tensors was placed", "names: quarantined new"),
    # --- nothing is under way
    ("kill", "idle"): _can("between updates", "commits: gone new"),
    ("stall", "idle"): _can("between updates; an update begins", "aborts: old old", causes=_SLOW),
    ("corrupt", "idle"): _can(
        "a byte of its live memory; the next update places anew", "commits: new new"
    ),
    ("disconnect", "idle"): _can("between updates", "commits: old new"),
    ("memory", "idle"): _can(
        "`serve()` finds no staging memory, and raises; it follows by `step()`", "commits: new new"
    ),
    ("loader", "idle"): _can(
        "a version that `serve()` staged goes live, and one tensor was placed",
        "commits: quarantined new",
        heals=True,
    ),
}

#: Where `tcp` is another case than `shm`: members hold copies of their own.
_TCP: Final[dict[Key, Row]] = {
    ("publisher", "corrupt", "verify"): _can(
        "a byte of its arena; the members hold their copies", "commits: new new"
    ),
    ("publisher", "corrupt", "commit"): _can(
        "a byte of its arena; the members hold their copies", "commits: new new"
    ),
    ("subscriber", "memory", "open"): _cannot("joining takes no memory of the model's size"),
    ("subscriber", "memory", "transfer"): _can(
        "there is none for the bytes that arrive", "aborts: old old", causes=_MEMORY
    ),
    ("subscriber", "corrupt", "verify"): _can(
        'a byte of what it received, after it was hashed; `verify="readback"`',
        "names: quarantined new",
    ),
}


def _cells() -> list[Cell]:
    rows = {"publisher": _PUBLISHER, "subscriber": _SUBSCRIBER}
    return [
        Cell(
            fault=fault,
            phase=phase,
            side=side,
            transport=transport,
            **(
                _TCP.get((side, fault, phase), rows[side][fault, phase])
                if transport == "tcp"
                else rows[side][fault, phase]
            ),
        )
        for transport in TRANSPORTS
        for side in SIDES
        for phase in PHASES
        for fault in FAULTS
    ]


CELLS: Final = _cells()


def sample(cells: list[Cell], seed: int = 5, least: int = 2) -> set[Cell]:
    """Choose few cells, with every fault and every phase of each side among them `least` times."""
    order = [cell for cell in cells if cell.endings]
    random.Random(seed).shuffle(order)
    seen: Counter[object] = Counter()
    chosen: set[Cell] = set()

    def worth(cell: Cell) -> tuple[int, int]:
        return (sum(seen[stratum] < least for stratum in _strata(cell)), -seen[cell.fault])

    while order:
        best = max(order, key=worth)
        if not worth(best)[0]:
            break
        order.remove(best)
        chosen.add(best)
        seen.update(_strata(best))
    return chosen


def _strata(cell: Cell) -> tuple[object, object]:
    return (cell.fault, (cell.phase, cell.side))


def render() -> str:
    """Return the matrix as Markdown, as it stands in `docs/faults.md`."""
    lines = [
        "| side | phase | fault | what happens | over `shm` | over `tcp` |",
        "|---|---|---|---|---|---|",
    ]
    by_key = {(c.side, c.phase, c.fault, c.transport): c for c in CELLS}
    for side in SIDES:
        for phase in PHASES:
            for fault in FAULTS:
                shm, tcp = (by_key[side, phase, fault, t] for t in TRANSPORTS)
                how = shm.how or tcp.how or shm.why_not
                if tcp.how and shm.how and tcp.how != shm.how:
                    how = f"{shm.how}. Over `tcp`: {tcp.how}"
                lines.append(
                    f"| {side} | {phase} | {fault} | {how} | {_shown(shm, how)} | "
                    f"{'the same' if _same(shm, tcp) else _shown(tcp, how)} |"
                )
    return "\n".join(lines)


def _same(shm: Cell, tcp: Cell) -> bool:
    return attrs.evolve(tcp, transport="shm") == shm


def _shown(cell: Cell, how: str) -> str:
    if cell.endings:
        return " / ".join(str(ending) for ending in cell.endings)
    return "cannot be" if cell.why_not == how else f"cannot be: {cell.why_not}"
