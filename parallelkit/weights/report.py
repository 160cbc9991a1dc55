"""What an update did: for people a table, for programs JSON and a Chrome trace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, Literal

import attrs

MemberState = Literal["committed", "staged", "old", "quarantined", "lost"]
EngineState = Literal["committed", "quarantined", "lost"]

_VERIFIED: Final = {
    "digest": "verified: every byte, at the source and as received",
    "readback": "verified: every byte, at the source, as received and in live memory",
    "sample": "verified: a sixteenth of the bytes, chosen anew each version",
    "off": "not verified (verify='off')",
}


@attrs.frozen(kw_only=True)
class MemberReport:
    """One member's part.

    Attributes:
        name: as in errors.
        state: `committed` (live), `staged` (owned by the subscriber, live at its next `step()` or
            `use()`), `old`, `quarantined` or `lost`.
        version: the version its acknowledgement named; the old one where there was none.
        prepare_seconds: fetching and hashing, by its own clock.
        pause_seconds: how long its live memory was being written; 0 when staged.
        reason: of a quarantine or loss.
        transport: how its bytes came: `shm`, `tcp`, or `shm+tcp` from several ranks.
        encrypted: whether they were encrypted on a network; None where they came by none.
        sources: pairs of a publisher rank and the bytes that it got from there.
        repeated: buckets that it had to fetch a second time, in place.
        live_tensors: tensors of which live memory was hashed, after they were placed.
        staged_tensors: tensors of which the bytes were hashed as received only, with
            `verify="sample"` a sixteenth of them. They are copied
            from there, or a loader made something else of them that cannot be read back.
    """

    name: str
    state: MemberState
    version: int
    prepare_seconds: float = 0.0
    pause_seconds: float = 0.0
    reason: str = ""
    transport: str = ""
    encrypted: bool | None = None
    sources: tuple[tuple[int, int], ...] = ()
    repeated: int = 0
    live_tensors: int = 0
    staged_tensors: int = 0

    @property
    def verified(self) -> str:
        """What was hashed: `live memory`, `staged bytes`, both (of how many), or `nothing`."""
        if self.live_tensors and self.staged_tensors:
            total = self.live_tensors + self.staged_tensors
            return f"live memory; staged bytes for {self.staged_tensors} of {total} tensors"
        if self.live_tensors:
            return "live memory"
        return "staged bytes" if self.staged_tensors else "nothing"

    @property
    def nbytes(self) -> int:
        """Bytes that it got: those of what it keeps, each once."""
        return sum(nbytes for _, nbytes in self.sources)


@attrs.frozen(kw_only=True)
class EngineReport:
    """One attached engine's part; its workers are among the members.

    Attributes:
        name: as in errors.
        state: `committed`, `quarantined` (it refuses to generate) or `lost`.
        version: the version it was brought to last.
        pause_seconds: for how long it generated nothing, as its client measured it.
        cache: what became of keys and values of the old weights: `reset` or `kept`.
        weight_version: what the engine itself says that it serves.
        reason: of a quarantine or loss.
        notes: anything the reader should know.
    """

    name: str
    state: EngineState
    version: int
    pause_seconds: float = 0.0
    cache: str = ""
    weight_version: str = ""
    reason: str = ""
    notes: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class TransferReport:
    """One committed update, as the publisher saw it.

    Attributes:
        version: the version committed.
        nbytes: bytes of the unique tensors; tensors: how many names, aliases included.
        transport, verify: as used.
        verified: what the digests covered for every member, in words; each member says its own.
        phases: seconds by phase at the publisher, in order; they follow each other, and `seconds`
            is their sum. `look` at the model; `ask`: attached
            engines whether they can follow; `begin` is sent; `stage`: copying into the arena
            and hashing; `meet`: waiting for the other ranks of the publisher; `ready`: waiting
            for members to call `step()`; `digest`: hashing the source, where `stage` did not;
            `verify`: waiting for members to fetch (unless in place) and hash, and comparing;
            `commit`: waiting for them to put it in place. `stage`, `meet` and `digest` are there
            only where they took place.
        started_at: Unix time of the start, in seconds.
        members: every member that took part; engines: every attached engine that did.
        changed_ratio: share of the bytes in buckets whose digest differs from the last committed
            version's; None without full digests or a version before.
        notes: anything the reader should know.
    """

    version: int
    nbytes: int
    tensors: int
    transport: str
    verify: str
    verified: str
    phases: dict[str, float]
    started_at: float
    members: tuple[MemberReport, ...] = ()
    engines: tuple[EngineReport, ...] = ()
    changed_ratio: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def moved_bytes(self) -> int:
        """Bytes that went to members, of all together: what they keep, and nothing else."""
        return sum(member.nbytes for member in self.members)

    @property
    def seconds(self) -> float:
        """Wall time of the whole update at the publisher."""
        return sum(self.phases.values())

    @property
    def gigabytes_per_second(self) -> float:
        """Payload over wall time, 10^9 bytes a second, to each member; 0 if there was none."""
        return self.nbytes / self.seconds / 1e9 if self.members and self.seconds > 0 else 0.0

    @property
    def pause_seconds(self) -> float:
        """The longest time that a member's live memory was being written, or an engine stood."""
        return max((part.pause_seconds for part in self.everyone), default=0.0)

    @property
    def everyone(self) -> list[EngineReport | MemberReport]:
        """Engines, then members."""
        return [*self.engines, *self.members]

    @property
    def quarantined(self) -> tuple[str, ...]:
        """Engines and members that are not at `version`: quarantined, or lost after the decision.

        The workers of such an engine are named too.
        """
        return tuple(part.name for part in self.everyone if part.state in ("quarantined", "lost"))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, derived ones included."""
        return attrs.asdict(self) | {
            "members": [
                attrs.asdict(m)
                | {"sources": [list(pair) for pair in m.sources], "verified": m.verified}
                for m in self.members
            ],
            "engines": [attrs.asdict(e) | {"notes": list(e.notes)} for e in self.engines],
            "moved_bytes": self.moved_bytes,
            "notes": list(self.notes),
            "seconds": self.seconds,
            "gigabytes_per_second": self.gigabytes_per_second,
            "pause_seconds": self.pause_seconds,
            "quarantined": list(self.quarantined),
        }

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict())

    def to_chrome_trace(self) -> str:
        """JSON for chrome://tracing or Perfetto: the phases, and each member's parts.

        Each update begins at 0. Of a member only durations are known, by its own clock; they are
        drawn as if they ended with the phases `verify` and `commit`.
        """
        events, clock = [], 0.0
        ends = {}
        for name, seconds in self.phases.items():
            events.append(_event(name, clock, seconds, 0))
            clock += seconds
            ends[name] = clock
        for thread, member in enumerate(self.members, 1):
            verified = ends.get("verify", clock)
            start = max(verified - member.prepare_seconds, 0.0)
            events.append(_event(f"prepare {member.name}", start, member.prepare_seconds, thread))
            start = max(clock - member.pause_seconds, 0.0)
            events.append(_event(f"pause {member.name}", start, member.pause_seconds, thread))
        for thread, engine in enumerate(self.engines, len(self.members) + 1):
            start = max(clock - engine.pause_seconds, 0.0)
            events.append(_event(f"pause {engine.name}", start, engine.pause_seconds, thread))
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})

    def __str__(self) -> str:
        changed = "" if self.changed_ratio is None else f", {self.changed_ratio:.0%} changed"
        how = f" ({self.gigabytes_per_second:.2f} GB/s) by {self.transport}" if self.members else ""
        lines = [
            f"version {self.version}: {self.nbytes / 1e6:.1f} MB in {self.tensors} "
            f"tensors, {self.seconds * 1e3:.1f} ms{how}{changed}; {self.verified}",
            "  " + "  ".join(f"{name} {s * 1e3:.1f} ms" for name, s in self.phases.items()),
        ]
        lines += [
            f"  {member.name}: {member.state}, version {member.version}, "
            f"verified: {member.verified}, "
            f"pause {member.pause_seconds * 1e3:.1f} ms{_where_from(member)}"
            + (f" ({member.reason})" if member.reason else "")
            for member in self.members
        ]
        lines += [_engine_line(engine) for engine in self.engines]
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])


def verified_by_all(verify: str, in_place: bool, members: Sequence[MemberReport]) -> str:
    """Say what holds of every byte of every member that has the version.

    Args:
        verify: as used; in_place: whether every member committed in place.
        members: all that took part.
    """
    if not members:
        return "nothing was sent"
    said, live = _VERIFIED[verify], not any(member.staged_tensors for member in members)
    if verify == "readback" and not live:
        return f"{_VERIFIED['digest']}; live memory where a member says so"
    if verify in ("digest", "readback") and in_place and live:
        return said.replace("received", "placed")
    return said


def report_from_dict(data: dict[str, Any]) -> TransferReport:
    """Rebuild a report from `to_dict`, as trainer ranks other than 0 receive it."""
    names = {a.name for a in attrs.fields(TransferReport)}
    fields = {name: value for name, value in data.items() if name in names}
    fields["members"] = tuple(_member_from_dict(member) for member in fields["members"])
    fields["engines"] = tuple(
        EngineReport(**engine | {"notes": tuple(engine["notes"])})
        for engine in fields.get("engines", ())
    )
    fields["notes"] = tuple(fields["notes"])
    return TransferReport(**fields)


def _member_from_dict(data: dict[str, Any]) -> MemberReport:
    fields = {a.name: data[a.name] for a in attrs.fields(MemberReport)}
    fields["sources"] = tuple(tuple(pair) for pair in fields["sources"])
    return MemberReport(**fields)


def _engine_line(engine: EngineReport) -> str:
    said = [f"pause {engine.pause_seconds * 1e3:.1f} ms"] if engine.state == "committed" else []
    said += [f"cache {engine.cache}"] if engine.cache else []
    notes = [engine.reason] if engine.reason else []
    tail = f" ({'; '.join([*notes, *engine.notes])})" if notes or engine.notes else ""
    return f"  {engine.name}: {', '.join([engine.state, f'version {engine.version}', *said])}{tail}"


def _where_from(member: MemberReport) -> str:
    """`, 12.5 MB by tcp from ranks 0-3, encrypted`: said unless everything is rank 0's memory."""
    ranks = [rank for rank, _ in member.sources]
    seen = {None: "", True: ", encrypted", False: ", in the clear"}[member.encrypted]
    if not ranks or ranks == [0]:
        return f", by {member.transport}{seen}" if member.transport not in ("", "shm") else ""
    apart = len(ranks) != ranks[-1] - ranks[0] + 1
    listed = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    text = listed if apart else f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])
    return (
        f", {member.nbytes / 1e6:.1f} MB by {member.transport} from "
        f"rank{'s' if len(ranks) > 1 else ''} {text}{seen}"
    )


def _event(name: str, start: float, seconds: float, thread: int) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "X",
        "ts": start * 1e6,
        "dur": seconds * 1e6,
        "pid": 0,
        "tid": thread,
    }
