"""One trainer rank of the demo: `python -m parallelkit_mindspore.demo.trainer SETTINGS`.

An ordinary training script; what it takes from parallelkit are the lines with `pk.`, `context.`
and `publisher.`. Steps are compiled; in PyNative they take several times as long.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import mindspore as ms
from mindspore import nn

import parallelkit as pk
from parallelkit.demo.config import Settings
from parallelkit.demo.digest import digest
from parallelkit.demo.events import Finished, Started, Step, say
from parallelkit.demo.lead import Lead, endless
from parallelkit.demo.process import Parent
from parallelkit_mindspore.demo.evaluate import cross_entropy, evaluate, likeliest, width
from parallelkit_mindspore.demo.model import CausalLM
from parallelkit_mindspore.demo.text import dataset, held_out, load_corpus

_WEIGHT_DECAY = 0.1
_CLIP = 1.0


def main(argument: str) -> None:
    """Train, and bring the follower up to date every few steps."""
    settings = Settings.from_json(argument)
    parent = Parent()
    corpus = load_corpus()
    batch = held_out(corpus, settings.block, settings.held_out)
    ms.set_seed(settings.seed)
    longest = width(settings)
    net = CausalLM(settings.model_config(len(corpus.vocabulary)), longest)

    with pk.init_process_group("mindspore", device="cpu", timeout=settings.timeout) as group:
        context = pk.parallel_context(data=-1, reduce="mean")
        model = context.parallelize(net)
        optimizer = optimise(model, settings)
        execution = pk.execution_mode("graph")
        ready = execution.compile(model)
        loader = context.shard(
            dataset(corpus.training, settings.block, settings.block // 2),
            batch_size=settings.batch,
            mode="drop",
            shuffle=True,
            seed=settings.seed,
        )
        batches = endless(loader)
        chief = group.rank == 0
        if chief:
            explanation = f"{context.explain()}\n{execution.explain()}"
            say(Started(count(net), len(corpus.training), explanation))
        with pk.publish_weights(model, timeout=settings.timeout) as publisher:
            lead = Lead(settings, parent, publisher) if chief else None
            publisher.wait(members=1)
            for step in range(settings.steps + 1):
                if step in settings.update_steps:
                    if lead is not None:
                        lead.before(step)
                    report = publisher.update()
                    if lead is not None:
                        logits, loss = evaluate(ready, batch)
                        text = partial(likeliest, ready, corpus.vocabulary, width=longest)
                        lead.after(
                            step, report, logits, loss, digest=digest(logits), likeliest=text
                        )
                if step == settings.steps:
                    break
                own = context.train_step(ready, *next(batches), loss=cross_entropy)
                context.clip_grad_norm_(model, _CLIP)
                context.apply_gradients(ready, optimizer)
                mean = group.all_reduce(own, "mean")
                if chief:
                    say(Step(step + 1, float(mean)))
        if chief:
            say(Finished())


def optimise(net: Any, settings: Settings) -> Any:
    """Make AdamW, with decay for matrices only, and its rate at each step."""
    parameters = net.trainable_params()
    matrices = [p for p in parameters if p.ndim >= 2]
    vectors = [p for p in parameters if p.ndim < 2]
    rates = [settings.rate * settings.rate_factor(step) for step in range(settings.steps)]
    return nn.AdamWeightDecay(
        [
            {"params": matrices, "weight_decay": _WEIGHT_DECAY},
            {"params": vectors, "weight_decay": 0.0},
            {"order_params": parameters},
        ],
        learning_rate=rates,
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
    )


def count(net: Any) -> int:
    """Return the number of parameters, a tied one once."""
    return sum(p.size for p in net.trainable_params())


if __name__ == "__main__":
    main(sys.argv[1])
