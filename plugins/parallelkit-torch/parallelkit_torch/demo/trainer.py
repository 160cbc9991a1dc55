"""One trainer rank of the demo: `python -m parallelkit_torch.demo.trainer SETTINGS`.

An ordinary training script; what it takes from parallelkit are the lines with `pk.`, `context.`
and `publisher.`.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import parallelkit as pk
from parallelkit.demo.config import Settings
from parallelkit.demo.digest import digest
from parallelkit.demo.events import Finished, Started, Step, say
from parallelkit.demo.lead import Lead, endless
from parallelkit.demo.process import Parent
from parallelkit_torch.demo.evaluate import evaluate, likeliest
from parallelkit_torch.demo.model import CausalLM
from parallelkit_torch.demo.process import begin_process
from parallelkit_torch.demo.text import Windows, held_out, load_corpus

_WEIGHT_DECAY = 0.1
_CLIP = 1.0


def main(argument: str) -> None:
    """Train, and bring the follower up to date every few steps."""
    settings = Settings.from_json(argument)
    begin_process()
    parent = Parent()
    corpus = load_corpus()
    windows = Windows(corpus.training, settings.block, stride=settings.block // 2)
    batch = held_out(corpus, settings.block, settings.held_out)
    torch.manual_seed(settings.seed)
    net = CausalLM(settings.model_config(len(corpus.vocabulary)))
    optimiser, schedule = optimise(net, settings)

    with pk.init_process_group("torch", device="cpu", timeout=settings.timeout) as group:
        context = pk.parallel_context(data=-1, reduce="mean")
        model = context.parallelize(net)
        loader = context.shard(
            windows, batch_size=settings.batch, mode="drop", shuffle=True, seed=settings.seed
        )
        batches = endless(loader)
        chief = group.rank == 0
        if chief:
            say(Started(count(net), len(corpus.training), context.explain()))
        with pk.publish_weights(model, timeout=settings.timeout) as publisher:
            lead = Lead(settings, parent, publisher) if chief else None
            publisher.wait(members=1)
            for step in range(settings.steps + 1):
                if step in settings.update_steps:
                    if lead is not None:
                        lead.before(step)
                    report = publisher.update()
                    if lead is not None:
                        logits, loss = evaluate(net, batch)
                        text = partial(likeliest, net, corpus.vocabulary)
                        lead.after(
                            step, report, logits, loss, digest=digest(logits), likeliest=text
                        )
                if step == settings.steps:
                    break
                own = train_step(model, next(batches), optimiser, schedule)
                mean = group.all_reduce(own, "mean")
                if chief:
                    say(Step(step + 1, float(mean)))
        if chief:
            say(Finished())


def train_step(
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    optimiser: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> Tensor:
    """Take one step on this rank's batch; returns its loss, detached."""
    inputs, targets = batch
    loss: Tensor = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    torch.autograd.backward(loss)
    nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
    optimiser.step()
    schedule.step()
    optimiser.zero_grad()
    return loss.detach()


def optimise(
    net: nn.Module, settings: Settings
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Make AdamW, with decay for matrices only, and its schedule."""
    matrices = [p for p in net.parameters() if p.ndim >= 2]
    vectors = [p for p in net.parameters() if p.ndim < 2]
    optimiser = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": _WEIGHT_DECAY},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=settings.rate,
        betas=(0.9, 0.95),
    )
    return optimiser, torch.optim.lr_scheduler.LambdaLR(optimiser, settings.rate_factor)


def count(net: nn.Module) -> int:
    """Return the number of parameters, a tied one once."""
    return sum(p.numel() for p in net.parameters())


if __name__ == "__main__":
    main(sys.argv[1])
