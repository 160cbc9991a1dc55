"""Train the character model in one framework; write losses and the first gradients.

    python train.py torch|mindspore OUTPUT.npz CONFIGURATION...

on one rank or more. A configuration is `reduce-mode-dtype-steps`, such as `mean-eager-float32-100`.
Each starts from the same weights, written through parallelkit's weight sink, and gets the same
windows in the same order from `context.shard`, eight a step over all ranks.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import Any

import numpy as np
from text import corpus, weight

import parallelkit as pk
from parallelkit import hooks

WINDOWS_A_STEP = 8
LR, MOMENTUM = 0.05, 0.9


def main(framework: str, output: str, *configurations: str) -> None:
    used = importlib.import_module(f"{framework}_side")
    found: dict[str, Any] = {}
    with pk.init_process_group(framework, device="cpu", timeout=120) as group:
        for configuration in configurations:
            losses, gradients = train(used, group, configuration)
            found[f"{configuration}/losses"] = np.array(losses)
            found |= {f"{configuration}/gradient/{n}": g for n, g in gradients.items()}
        if group.rank == 0:
            np.savez(output, **found)


def train(used: Any, group: Any, configuration: str) -> tuple[list[float], dict[str, Any]]:
    """Return the mean loss over ranks at each step, and the gradients of the first."""
    reduce, mode, dtype, steps = configuration.split("-")
    windows, config = corpus()
    adapter = used.adapter
    context = pk.parallel_context(data=group.world_size, reduce=reduce)
    model = used.model(config, dtype)
    fill(model)
    model = context.parallelize(model)
    optimizer = adapter.momentum(model, LR, MOMENTUM)
    execution = pk.execution_mode(mode, **(adapter.graph_options if mode == "graph" else {}))
    ready = execution.compile(model)
    loader = context.shard(
        used.dataset(windows),
        batch_size=WINDOWS_A_STEP // group.world_size,
        mode="drop",
        drop_last=True,
        shuffle=True,
        seed=0,
    )
    losses: list[float] = []
    gradients: dict[str, Any] = {}
    with execution if mode == "graph" else contextlib.nullcontext():
        for inputs, targets in endless(loader):
            loss = context.train_step(ready, inputs, targets, loss=used.cross_entropy)
            gradients = gradients or adapter.gradients(context, model)
            context.apply_gradients(ready, optimizer)
            losses.append(float(adapter.array(group.all_reduce(loss, "mean"))))
            if len(losses) == int(steps):
                break
    assert execution.recompiles == 0, execution.explain()
    context.reset()
    return losses, gradients


def fill(model: Any) -> None:
    """Write the initial weights through the model's weight sink."""
    sink = hooks.weight_sink(model)
    assert sink is not None
    sink.begin()
    for index, spec in enumerate(sink.needs().unique):
        data = memoryview(weight(spec.name, spec.shape, spec.dtype)).cast("B")
        live = sink.destination(index)
        if live is None:
            sink.write(index, data)
        else:
            live[:] = data
    sink.finish()


def endless(loader: Any) -> Any:
    """Epoch after epoch."""
    epoch = 0
    while True:
        loader.set_epoch(epoch)
        yield from loader
        epoch += 1


if __name__ == "__main__":
    main(*sys.argv[1:])
