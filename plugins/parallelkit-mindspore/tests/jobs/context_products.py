"""Products of axes on real ranks: what is trained equals one process with the whole batch.

Argument: a JSON list of cases, each with degrees of `pk.parallel_context`, `model` (a kind of
`context_models`), `layouts` (a name there), `mode` ("eager" or "graph") and `reduce`. All cases
run in one job, one context each.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import mindspore as ms
import numpy as np
from context_models import (
    ITEMS,
    LAYOUTS,
    MODES,
    Reference,
    batch,
    build,
    close,
    half_loss,
    mean_loss,
    sum_loss,
)
from mindspore import nn

import parallelkit as pk
from parallelkit.errors import GradientError


def tensors(*arrays: np.ndarray[Any, Any]) -> list[Any]:
    return [ms.Tensor(array) for array in arrays]


def raises(error: type[Exception], call: Any, text: str) -> None:
    try:
        call()
    except error as found:
        assert text in str(found), found
        return
    raise AssertionError(f"no {error.__name__}")


def run(case: dict[str, Any]) -> None:
    case = dict(case)
    reduce = case.pop("reduce", "mean")
    kind, mode = case.pop("model", "mlp"), case.pop("mode", "eager")
    layouts = case.pop("layouts", kind)
    what = f"{kind} {case} {mode} {reduce}"
    ms.set_context(mode=MODES[mode])
    options = {"layouts": LAYOUTS[layouts]} if case.get("tensor", 1) > 1 else {}
    context = pk.parallel_context(reduce=reduce, **case, **options)
    plan, index = context.plan, context.plan.data_shard_index(group.rank)
    parts, place = plan.data_shard_count, plan.coordinates(group.rank)["tensor"]
    factor = 1.0 if reduce == "mean" else float(parts)
    reference = Reference(kind)
    names = [name for name, _ in reference.model.parameters_and_names()]

    given = build(kind, seed=group.rank)
    addresses = {p.name: p.data_ptr() for p in given.get_parameters()}
    model = context.parallelize(given)  # rank 0's values win
    assert model is given
    assert [name for name, _ in model.parameters_and_names()] == names, what
    assert [p.name for p in model.get_parameters()] == names, what
    if plan.tensor == 1:  # in place
        assert {p.name: p.data_ptr() for p in model.get_parameters()} == addresses
    whole = lambda: [p.asnumpy() for p in reference.model.trainable_params()]  # noqa: E731
    close(model.trainable_params(), whole(), f"values, {what}", rank=place, atol=0)

    x, y = batch(kind)
    mine = slice(index * ITEMS // parts, (index + 1) * ITEMS // parts)

    def check(name: str, times: float = factor) -> None:
        expected = [g * times for g in reference.gradients]
        atol = 1e-6 * max(1.0, times)
        close(context.gradients(model), expected, f"{name}, {what}", rank=place, atol=atol)

    # a mean loss over even parts, and once more on top of it
    local = Reference(kind).add(x[mine], y[mine], mean_loss)
    for name in ("mean", "added"):
        reference.add(x, y, mean_loss)
        value = context.train_step(model, *tensors(x[mine], y[mine]), loss=mean_loss)
        np.testing.assert_allclose(float(value), local, rtol=1e-5, err_msg=what)
        check(name)

    # clipping over all shards
    norm = float(context.clip_grad_norm_(model, 0.1 * factor))
    np.testing.assert_allclose(norm, reference.norm() * factor, rtol=1e-5, err_msg=what)
    reference.scale(0.1 / (norm / factor + 1e-6 / factor))
    check("clip")

    # the optimiser's step; then uneven parts, weighted by tokens, in microbatches
    optimizer = nn.Momentum(model.trainable_params(), 0.1, 0.9)
    context.apply_gradients(model, optimizer)
    reference.step(factor)
    close(model.trainable_params(), whole(), f"step, {what}", rank=place)
    raises(GradientError, lambda: context.apply_gradients(model, optimizer), "no gradients")
    bounds = [0, *[ITEMS - parts + 1 + number for number in range(parts)]]
    uneven, used = slice(bounds[index], bounds[index + 1]), slice(0, bounds[parts])
    total = y[used].size
    expected_loss = reference.add(x[used], y[used], sum_loss) / total
    reference.scale(1 / total)
    value = context.train_step(
        model,
        *tensors(x[uneven], y[uneven]),
        loss=sum_loss,
        weight=y[uneven].size,
        microbatches=2 if mode == "eager" else 1,  # other shapes are compiled anew
    )
    check("weighted", 1.0)
    shares = group.all_reduce(ms.Tensor([float(value)], ms.float32))
    shares = float(shares[0]) / plan.tensor
    np.testing.assert_allclose(shares, expected_loss, rtol=1e-5, err_msg=what)
    context.apply_gradients(model, optimizer)
    reference.step()

    # two batches accumulated, reduced once, both ways of saying so
    half = (mine.stop - mine.start) // 2
    rows = [slice(mine.start, mine.start + half), slice(mine.start + half, mine.stop)]
    for way in ("sync", "accumulate") if mode == "eager" else ():
        reference.add(x, y, mean_loss)
        first, second = (tensors(x[r], y[r]) for r in rows)
        if way == "sync":
            context.train_step(model, *first, loss=half_loss, sync=False)
        else:
            with context.accumulate(model, sync=False):
                context.train_step(model, *first, loss=half_loss)
        raises(GradientError, lambda: context.apply_gradients(model, optimizer), "sync=True")
        raises(GradientError, lambda: context.clip_grad_norm_(model, 1.0), "sync=True")
        context.train_step(model, *second, loss=half_loss)
        check(f"accumulated by {way}")
        context.apply_gradients(model, optimizer)
        reference.step(factor)
        close(model.trainable_params(), whole(), f"{way}, {what}", rank=place, atol=2e-6)

    # evaluation leaves no gradient
    context.train_step(model, *tensors(x[mine], y[mine]), loss=mean_loss, backward=False)
    raises(GradientError, lambda: context.clip_grad_norm_(model, 1.0), "no gradients")
    assert "take rank 0's values" in context.explain()
    if plan.tensor > 1:
        raises(
            pk.ParallelKitError,
            lambda: nn.TrainOneStepCell(nn.WithLossCell(model, mean_loss), optimizer),
            "context.grad_reducer",
        )
    own_step(context, model, reference, mode, factor)
    context.reset()
    assert ms.get_auto_parallel_context("parallel_mode") == "stand_alone"


def own_step(context: Any, model: Any, reference: Reference, mode: str, factor: float) -> None:
    """A custom step under any plan: `value_and_grad` and the context's reducer."""
    parts, index = context.plan.data_shard_count, context.plan.data_shard_index(group.rank)
    place = context.plan.coordinates(group.rank)["tensor"]
    kind = {"Mlp": "mlp", "Tokens": "tokens", "Images": "images"}[type(model).__name__]
    x, y = batch(kind)
    optimizer = nn.Momentum(model.trainable_params(), 0.1, 0.9)
    reducer = context.grad_reducer(optimizer.parameters)

    def forward(inputs: Any, target: Any) -> Any:
        return mean_loss(model(inputs), target)

    differentiate = ms.value_and_grad(forward, None, optimizer.parameters)

    def step(inputs: Any, target: Any) -> Any:
        value, found = differentiate(inputs, target)
        optimizer(reducer(found))
        return value

    run_step = ms.jit(step) if mode == "graph" else step
    reference._moments = [np.zeros_like(g) for g in reference.gradients]
    mine = slice(index * ITEMS // parts, (index + 1) * ITEMS // parts)
    for _ in range(2):
        reference.add(x, y, mean_loss)
        reference.step(factor)
        run_step(*tensors(x[mine], y[mine]))
    expected = [p.asnumpy() for p in reference.model.trainable_params()]
    close(model.trainable_params(), expected, f"own step {mode}", rank=place, atol=4e-6)


group = pk.init_process_group(framework="mindspore", device="cpu", timeout=60)
for one in json.loads(sys.argv[1]):
    try:
        run(one)
    except BaseException as error:
        error.add_note(f"case {one}")
        raise
group.close()
