"""Products of axes on real ranks: what is trained equals one process with the whole batch.

Arguments: a JSON list of cases, each with degrees and options of `pk.parallel_context`, and
`model` ("decoder", "tied" or "mlp"), `graph` to run it compiled, and `reduce`, a list, by default
both reductions. All cases run in one job, one context each. A second argument is the device type,
`cpu` by default.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import models
import torch
from parallelkit_torch import names
from torch import nn
from torch.distributed.tensor import DTensor

import parallelkit as pk

#: aot_eager traces forward and backward as a compiler would, without compiling.
# Dynamo looks at inputs that another stage or unit computed.
warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
warnings.filterwarnings("ignore", "`torch.jit.script_method`")  # torch's own, on Python 3.12
GRAPH = {"backend": "aot_eager", "dynamic": False}
ITEMS, LENGTH, VOCAB = 8, 6, 32


def build(kind: str, seed: int) -> nn.Module:
    if kind == "mlp":
        return models.mlp(seed, depth=4)
    return models.decoder(seed, layers=4, kv_heads=4, tied=int(kind == "tied"))


def batch(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    if kind == "mlp":
        x = torch.randn(ITEMS, 6, generator=generator)
        return x.to(device), torch.randint(0, 4, (ITEMS,), generator=generator).to(device)
    tokens = torch.randint(0, VOCAB, (ITEMS, LENGTH + 1), generator=generator).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def mean_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


def sum_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="sum")


def full(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach()


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """This rank's parameters by plain name, a tied one under each."""
    found = {slot.name: slot.tensor for slot in names.slots(model)}
    return {k: v for k, v in found.items() if isinstance(v, nn.Parameter)}


def close(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    try:
        torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-6)
    except AssertionError as error:
        error.add_note(what)
        raise


def compare(model: nn.Module, reference: nn.Module, what: str, *, factor: float = 1.0) -> None:
    theirs = dict(reference.named_parameters(remove_duplicate=False))
    mine = named(model)
    assert mine, what
    assert set(mine) <= set(theirs), (what, sorted(set(mine) - set(theirs)))
    for name, parameter in mine.items():
        assert parameter.grad is not None, (what, name)
        close(full(parameter.grad), theirs[name].grad * factor, f"{what}: {name}")  # type: ignore[operator]


def values(model: nn.Module, reference: nn.Module, what: str) -> None:
    theirs = dict(reference.named_parameters(remove_duplicate=False))
    for name, parameter in named(model).items():
        close(full(parameter), theirs[name].detach(), f"{what}: {name}")


def run(case: dict[str, Any]) -> None:
    case = dict(case)
    kind, graph = case.pop("model", "decoder"), case.pop("graph", False)
    reductions = case.pop("reduce", ["mean", "sum"])
    what = f"{case} {kind}"
    x, y = batch(kind)
    for reduce in reductions:
        context = pk.parallel_context(reduce=reduce, **case)
        plan, part = context.plan, context.plan.data_shard_index(group.rank)
        parts = plan.data_shard_count
        combined = 1.0 if reduce == "mean" else float(parts)
        model = context.parallelize(build(kind, seed=group.rank))  # rank 0's values win
        torch.compiler.reset()  # models of one class share code, and their compilations its limit
        mode = pk.execution_mode("graph" if graph else "eager", **GRAPH if graph else {})
        model = mode.compile(model)
        reference = build(kind, seed=0).to(device)
        values(model, reference, what)
        mine = slice(part * ITEMS // parts, (part + 1) * ITEMS // parts)

        # a mean loss over even parts
        loss = mean_loss(reference(x), y)
        loss.backward()
        value = context.train_step(model, x[mine], y[mine], loss=mean_loss)
        local = mean_loss(reference(x[mine]), y[mine]).detach()
        torch.testing.assert_close(value, local, rtol=1e-4, atol=1e-6)
        compare(model, reference, f"mean, {reduce}, {what}", factor=combined)

        # the same once more, on top of gradients that are reduced already
        mean_loss(reference(x), y).backward()
        context.train_step(model, x[mine], y[mine], loss=mean_loss)
        compare(model, reference, f"added, {reduce}, {what}", factor=combined)

        # clipping over all shards and stages
        norms = [nn.utils.clip_grad_norm_(reference.parameters(), 0.1 / combined)]
        norms.append(context.clip_grad_norm_(model, 0.1))
        torch.testing.assert_close(norms[1], norms[0] * combined, rtol=1e-4, atol=1e-6)
        compare(model, reference, f"clip, {reduce}, {what}", factor=combined)

        # an optimiser step; then uneven parts, weighted by tokens, in microbatches
        mine_steps = torch.optim.SGD(
            model.parameters(),
            lr=0.5 / combined,
            momentum=0.9,
            foreach=True,  # the default on GPUs
        )
        steps = torch.optim.SGD(reference.parameters(), lr=0.5, momentum=0.9)
        mine_steps.step()
        steps.step()
        values(model, reference, f"step, {reduce}, {what}")
        mine_steps.zero_grad()
        steps.zero_grad()
        bounds = [0, *[ITEMS - parts + 1 + number for number in range(parts)]]
        uneven = slice(bounds[part], bounds[part + 1])
        used = slice(0, bounds[parts])
        (sum_loss(reference(x[used]), y[used]) / y[used].numel()).backward()
        value = context.train_step(
            model, x[uneven], y[uneven], loss=sum_loss, weight=y[uneven].numel(), microbatches=2
        )
        compare(model, reference, f"weighted, {reduce}, {what}")
        mine_steps.zero_grad()
        steps.zero_grad()

        # two batches accumulated, reduced once
        half = (mine.stop - mine.start) // 2
        mean_loss(reference(x), y).backward()
        for start, sync in ((mine.start, False), (mine.start + half, True)):
            rows = slice(start, start + half)
            context.train_step(
                model, x[rows], y[rows], sync=sync,
                loss=lambda output, target: mean_loss(output, target) / 2,
            )  # fmt: skip
        compare(model, reference, f"accumulated, {reduce}, {what}", factor=combined)

        # evaluation leaves no gradient
        mine_steps.zero_grad()
        context.train_step(model, x[mine], y[mine], loss=mean_loss, backward=False)
        assert all(p.grad is None for p in model.parameters())
        assert (mode.graphs > 0) == graph, mode.explain()
        assert "take rank 0's values" in context.explain() or plan.data == plan.world_size


group = pk.init_process_group(device=sys.argv[2] if len(sys.argv) > 2 else "cpu", timeout=60)
device = torch.device(group.device)
for one in json.loads(sys.argv[1]):
    try:
        run(one)
    except BaseException as error:
        error.add_note(f"case {one}")
        raise
group.close()
