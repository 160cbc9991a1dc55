"""The demo's engine: `python -m parallelkit_vllm.demo.engine ARGUMENT`, by a Python with vLLM.

It starts vLLM's server and generates all the time, while a trainer attached to it trains. A text
belongs to a version if the server was at that one before and after it; a text that an update came
into was begun with one version and ended with another, and is counted, not shown.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from parallelkit.demo.config import GREEDY, POSITIONS, PROMPT, TEMPERATURE, Settings
from parallelkit.demo.events import EngineReady, Followed, Starting, say
from parallelkit.demo.process import Parent
from parallelkit.demo.text import Vocabulary
from parallelkit_vllm.demo.reading import Reader
from parallelkit_vllm.demo.server import DemoServer
from parallelkit_vllm.versions import installed

#: For the steps between the last text and the trainer's end.
_PATIENCE_SECONDS = 600.0


class _Family(Parent):
    """Takes vLLM's processes along: all are in the group that was made for this process."""

    def end(self) -> None:
        os.killpg(0, signal.SIGKILL)


def main(argument: str) -> None:
    """Serve, read until the last version was seen, and wait for the trainer's end."""
    given = json.loads(argument)
    settings = Settings.from_json(given["settings"])
    parent = _Family()
    with DemoServer(given["checkpoint"], POSITIONS) as server:
        server.wait(lambda seconds: say(Starting(seconds)))
        found = installed()
        name = f"vLLM {found[1]}" if found else "vLLM"
        say(EngineReady(server.url, server.token, name))
        follow(server, settings, Vocabulary(given["characters"]))
        parent.line(_PATIENCE_SECONDS, "word that the trainer has left")


def follow(server: DemoServer, settings: Settings, vocabulary: Vocabulary) -> None:
    """Generate until every version was seen; say what each one writes."""
    prompt = vocabulary.encode(PROMPT)
    reader = Reader(server.url)
    seen = 0
    while seen < len(settings.update_steps):
        now = server.version
        likeliest = reader.complete(prompt, GREEDY, temperature=0.0)
        sample = reader.complete(
            prompt, settings.sample, temperature=TEMPERATURE, seed=settings.seed
        )
        if now == seen or server.version != now:
            continue
        seen = now
        say(
            Followed(
                version=now,
                sample=PROMPT + vocabulary.decode(sample.tokens),
                likeliest=likeliest,
                written=reader.written,
                gap=reader.gap,
            )
        )
        reader.reset()


if __name__ == "__main__":
    main(sys.argv[1])
