"""The record of a choice: who could have been chosen, who was, and why."""

from __future__ import annotations

from typing import Any, Final

import attrs

from parallelkit.records import PluginInfo
from parallelkit.specs import Candidate, ProbeRequest

#: Frameworks whose plugin has a name that we can tell the user.
KNOWN: Final = {
    "torch": "parallelkit-torch",
    "mindspore": "parallelkit-mindspore",
    "vllm": "parallelkit-vllm",
}


@attrs.frozen
class Probed:
    """A plugin and its answer."""

    plugin: PluginInfo
    candidate: Candidate


@attrs.frozen
class Absent:
    """A plugin that gave no answer, and why."""

    plugin: PluginInfo
    reason: str
    error: BaseException | None = attrs.field(default=None, eq=False)


@attrs.frozen(kw_only=True)
class Ranked:
    """One line of a ranking.

    Attributes:
        place: 1 is the winner; 0: out of the question.
        reason: why here, in one sentence.
    """

    plugin: PluginInfo
    candidate: Candidate | None
    place: int
    reason: str


@attrs.frozen(kw_only=True)
class Selection:
    """What was chosen for one request, and the whole ranking with reasons.

    Attributes:
        request: what was asked.
        winner: the plugin; candidate: its answer.
        device, backend: resolved; the device without an index unless one was asked for.
        ranking: everybody, the winner first.
        why: which rule decided.
    """

    request: ProbeRequest
    winner: PluginInfo
    candidate: Candidate
    device: str
    backend: str
    ranking: tuple[Ranked, ...]
    why: str

    def lines(self) -> list[str]:
        """The ranking as text, one line for each plugin."""
        out = [f"{self.candidate.name} by plugin {self.winner.label}: {self.why}"]
        for line in self.ranking:
            name = line.candidate.name if line.candidate else line.plugin.name
            place = f"{line.place}." if line.place else "-"
            out.append(f"  {place} {name} ({line.plugin.dist or 'registered'}): {line.reason}")
        return out

    def as_dict(self) -> dict[str, Any]:
        """Export as plain values, for JSON."""
        return {
            "winner": self.winner.name,
            "name": self.candidate.name,
            "device": self.device,
            "backend": self.backend,
            "why": self.why,
            "ranking": [
                {
                    "plugin": line.plugin.name,
                    "dist": line.plugin.dist,
                    "name": line.candidate.name if line.candidate else None,
                    "score": line.candidate.score if line.candidate else None,
                    "place": line.place,
                    "reason": line.reason,
                }
                for line in self.ranking
            ],
        }
