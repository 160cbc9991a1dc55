"""A publisher in a process of its own, told what to do by lines of JSON; it imports no framework.

    python trainer.py

Each line of input is a table: `{"do": "publish", "file": path, "aliases": {...}, "options": {...}}`
publishes the tensors of a safetensors file and answers with a ticket for `"members"`;
`{"do": "update", "file": path}` publishes other values as the next version; `{"do": "ticket"}`,
`{"do": "members"}` and `{"do": "close"}` speak for themselves. Errors come back by class and text.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tiny_qwen import Source, read_file

import parallelkit as pk
from parallelkit.errors import ParallelKitError
from parallelkit.weights.publisher import WeightPublisher


class Trainer:
    def __init__(self) -> None:
        self.publisher: WeightPublisher | None = None
        self.source: Source | None = None

    def publish(self, told: dict[str, Any]) -> dict[str, Any]:
        self.close(told)
        self.source = Source(read_file(Path(told["file"])), told.get("aliases"))
        options = {"timeout": 60.0, **told.get("options", {})}
        self.publisher = pk.publish_weights(self.source, **options)
        return self.ticket(told)

    def ticket(self, told: dict[str, Any]) -> dict[str, Any]:
        assert self.publisher is not None
        return {"ticket": self.publisher.new_ticket(members=told.get("members", 1))}

    def update(self, told: dict[str, Any]) -> dict[str, Any]:
        assert self.publisher is not None
        assert self.source is not None
        if told.get("file"):
            self.source.put(read_file(Path(told["file"])))
        return {"report": self.publisher.update().to_dict()}

    def members(self, told: dict[str, Any]) -> dict[str, Any]:
        assert self.publisher is not None
        present = [m for m in self.publisher.members if m.present]
        return {"members": [[m.name, m.state, m.version] for m in present]}

    def close(self, told: dict[str, Any]) -> dict[str, Any]:
        if self.publisher is not None:
            self.publisher.close()
        self.publisher = self.source = None
        return {}


def main() -> None:
    trainer = Trainer()
    for line in sys.stdin:
        told = json.loads(line)
        try:
            answer = getattr(trainer, told["do"])(told)
        except ParallelKitError as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps(answer), flush=True)
    trainer.close({})


if __name__ == "__main__":
    main()
