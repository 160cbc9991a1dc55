"""The demo's inference process: `python -m parallelkit_torch.demo.follower SETTINGS`.

It holds the same model with other weights, reads a ticket from standard input, and follows.
"""

from __future__ import annotations

import contextlib
import sys

import torch

import parallelkit as pk
from parallelkit.demo.config import Settings
from parallelkit.demo.digest import digest
from parallelkit.demo.events import Followed, say
from parallelkit.demo.process import Parent
from parallelkit.errors import PeerLostError
from parallelkit_torch.demo.evaluate import evaluate, generate
from parallelkit_torch.demo.model import CausalLM
from parallelkit_torch.demo.process import begin_process
from parallelkit_torch.demo.text import held_out, load_corpus

#: For the steps between two updates; a publisher that is gone is noticed at once.
_PATIENCE_SECONDS = 600.0


def main(argument: str) -> None:
    """Take part in every update, and show what each version writes."""
    settings = Settings.from_json(argument)
    begin_process()
    parent = Parent()
    corpus = load_corpus()
    batch = held_out(corpus, settings.block, settings.held_out)
    torch.manual_seed(settings.seed + 1)  # anything but the trainer's
    model = CausalLM(settings.model_config(len(corpus.vocabulary)))
    ticket = parent.line(_PATIENCE_SECONDS, "ticket")

    updates = len(settings.update_steps)
    with pk.subscribe_weights(model, ticket, timeout=settings.timeout) as subscriber:
        for number in range(1, updates + 1):
            version = subscriber.step(timeout=_PATIENCE_SECONDS)
            with subscriber.use() as current:
                logits, _ = evaluate(current, batch)
                sample = generate(
                    current,
                    corpus.vocabulary,
                    length=settings.sample,
                    block=settings.block,
                    seed=settings.seed,
                )
            last = logits if number == updates else b""
            say(Followed(version=version, sample=sample, digest=digest(logits), logits=last))
        with contextlib.suppress(PeerLostError):  # stay until the trainer has left
            subscriber.step(timeout=_PATIENCE_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1])
