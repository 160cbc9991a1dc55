"""A torch trainer in its own process: the engine's tokens are those of what the trainer saves."""

from __future__ import annotations

import pytest
import tiny_qwen as tiny

import parallelkit as pk

SECONDS = 120.0


@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_it_follows_a_torch_trainer(start_trainer, make_engine, checkpoint, fresh, tmp_path, kind):
    trainer = start_trainer("torch_trainer.py", kind)
    llm = make_engine(checkpoint(0, tied=kind == "tied"))
    ticket = trainer.ask("publish")["ticket"]
    seen = []
    with pk.subscribe_weights(llm, ticket, timeout=SECONDS) as member:
        member.serve()
        for version in (1, 2):
            folder = tmp_path / f"saved-{version}"
            report = trainer.ask("update", folder=str(folder))["report"]
            assert report["version"] == member.step(SECONDS) == version
            seen.append(tiny.greedy(llm))
            assert seen[-1] == fresh(folder)
    assert seen[0] != seen[1], "training changed nothing that shows"
