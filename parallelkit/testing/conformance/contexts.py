"""Parts of the context suite: what a `ParallelContext` over the data axis promises.

The numbers are those of `reference.MLP`, one process with the whole batch, in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import numpy as np

import parallelkit as pk
from parallelkit.errors import (
    CheckpointError,
    DataShardError,
    DataStateError,
    ParallelKitError,
    PlanError,
    RankMismatchError,
    UnsupportedFeatureError,
)
from parallelkit.protocols import ParallelContext
from parallelkit.testing.conformance import reference
from parallelkit.testing.conformance.groups import open_group
from parallelkit.testing.conformance.parts import Case, Parts, all_close, close, main, raises
from parallelkit.testing.conformance.reference import mean_output, mean_squares, sum_squares

#: A float32 model against the reference.
TOLERANCE: Final = 2e-6
#: A float64 model against it; an optimiser may still compute in float32.
FINE: Final = 1e-7
#: Exact in float32, which some optimisers keep them in.
LR, MOMENTUM = 0.125, 0.875
DATA: Final = ("context.data", "axis.data")

PARTS: Final = Parts()


@PARTS.part()
def refusals(case: Case) -> None:
    """What cannot be is refused before anything: rank 0 alone asks for it."""
    case.group = open_group(case)
    if case.rank:
        return
    beyond = case.world + 1
    for error, said, given in (
        (PlanError, "'parallel'", {"mode": "parallel"}),
        (PlanError, "'avg'", {"mode": "data", "reduce": "avg"}),
        (PlanError, str(case.world), {"data": beyond}),
        (PlanError, "0", {"data": 0}),
        (PlanError, "-1", {"data": -1, "tensor": -1}),
        (PlanError, "-2", {"data": -2}),
        (UnsupportedFeatureError, "no_such_option", {"no_such_option": 1}),
    ):
        raises(error, partial(pk.parallel_context, **given), said)


@PARTS.part(needs=["context.standalone"])
def standalone(case: Case) -> None:
    """A mode for a world of one: there it leaves the model as it is, elsewhere it is refused."""
    if case.world > 1:
        raises(PlanError, lambda: pk.parallel_context("standalone"), str(case.world))
        return
    with context_of(case, mode="standalone") as context:
        model = context.parallelize(case.adapter.mlp(reference.mlp_weights()))
        all_close(case.adapter.parameters(model), reference.mlp_weights(), 0)
        inputs, targets = reference.batch(4)
        loss = context.train_step(
            model, case.tensor(inputs), case.tensor(targets), loss=mean_squares
        )
        expected = reference.MLP(reference.mlp_weights())
        close(number(case, loss), expected.loss(inputs, targets), TOLERANCE)
        all_close(
            case.adapter.gradients(context, model), expected.gradients(inputs, targets), TOLERANCE
        )


@PARTS.part(needs=DATA)
def facts(case: Case) -> None:
    """The context says what it is."""
    with context_of(case) as context:
        assert isinstance(context, ParallelContext)
        assert (context.mode, context.effective, context.reduce) == ("data", "data", "mean")
        assert context.plan.data == case.world
        assert context.group.world_size == case.world
        assert "mean" in context.explain()
    context.reset()


@PARTS.part(needs=DATA, ranks=2)
def mean_and_sum(case: Case) -> None:
    """Gradients of 1 on rank 0 and 4 elsewhere: their mean unless their sum is asked for."""
    by_rank = [1.0] + [4.0] * (case.world - 1)
    values = {"mean": np.mean(by_rank), "sum": np.sum(by_rank)}
    for given in ({}, {"reduce": "mean"}, {"reduce": "sum"}):
        reduce = given.get("reduce", "mean")
        with context_of(case, **given) as context:
            model = context.parallelize(case.adapter.scale(0.0))
            context.train_step(model, case.tensor([by_rank[case.rank]]), None, loss=mean_output)
            found = case.adapter.gradients(context, model)
            assert float(found["weight"]) == values[reduce], f"{reduce}: {found}"
            assert reduce in context.explain()
            del model


@PARTS.part(needs=DATA)
def steps_of_the_full_batch(case: Case) -> None:
    """Some steps with momentum are those of one process with all items; rank 0's values win."""
    for reduce, factor, dtype, tolerance in (
        ("mean", 1.0, "float32", TOLERANCE),
        ("mean", 1.0, "float64", FINE),
        ("sum", float(case.world), "float64", FINE),
    ):
        expected = reference.MLP(reference.mlp_weights())
        with context_of(case, reduce=reduce) as context:
            different = case.adapter.mlp(reference.mlp_weights(seed=case.rank), dtype)
            model = context.parallelize(different)
            all_close(case.adapter.parameters(model), expected.weights, 0)
            optimizer = case.adapter.momentum(model, LR, MOMENTUM)
            assert no_gradients(case, context, model)
            for step in range(3):
                mine, whole = batches(case, seed=step, dtype=dtype)
                loss = context.train_step(model, *mine, loss=mean_squares)
                close(mean_over_ranks(case, loss), expected.loss(*whole), tolerance, "loss")
                gradients = expected.gradients(*whole)
                all_close(case.adapter.gradients(context, model), gradients, tolerance, factor)
                context.apply_gradients(model, optimizer)
                assert no_gradients(case, context, model)
                expected.step({n: factor * g for n, g in gradients.items()}, LR, MOMENTUM)
                all_close(case.adapter.parameters(model), expected.weights, 10 * tolerance)
            del different, model, optimizer


@PARTS.part(needs=DATA)
def microbatches_and_evaluation(case: Case) -> None:
    """Cutting the batch changes nothing; `backward=False` leaves no gradient."""
    expected = reference.MLP(reference.mlp_weights())
    with context_of(case) as context:
        model = context.parallelize(case.adapter.mlp(reference.mlp_weights()))
        mine, whole = batches(case)
        loss = context.train_step(model, *mine, loss=mean_squares, backward=False)
        close(mean_over_ranks(case, loss), expected.loss(*whole), TOLERANCE)
        assert no_gradients(case, context, model)
        loss = context.train_step(model, *mine, loss=mean_squares, microbatches=2)
        close(mean_over_ranks(case, loss), expected.loss(*whole), TOLERANCE)
        all_close(case.adapter.gradients(context, model), expected.gradients(*whole), TOLERANCE)


@PARTS.part(needs=DATA)
def accumulation(case: Case) -> None:
    """Gradients of several steps add up; `sync=False` only puts their reduction off."""
    expected = reference.MLP(reference.mlp_weights())
    with context_of(case) as context:
        model = context.parallelize(case.adapter.mlp(reference.mlp_weights()))
        gradients: list[reference.Arrays] = []
        for step, sync in enumerate((False, False, True)):
            mine, whole = batches(case, seed=step)
            context.train_step(model, *mine, loss=mean_squares, sync=sync)
            gradients.append(expected.gradients(*whole))
        total = {name: sum(g[name] for g in gradients) for name in gradients[0]}
        all_close(case.adapter.gradients(context, model), total, TOLERANCE)


@PARTS.part(needs=DATA)
def weights_of_items(case: Case) -> None:
    """Parts of 1, 4, 4, ... items: with `weight=` every item counts alike, whatever `reduce`."""
    counts = [1] + [4] * (case.world - 1)
    inputs, targets = reference.batch(sum(counts))
    start = sum(counts[: case.rank])
    mine = slice(start, start + counts[case.rank])
    expected = reference.MLP(reference.mlp_weights())
    for reduce in ("mean", "sum"):
        with context_of(case, reduce=reduce) as context:
            model = context.parallelize(case.adapter.mlp(reference.mlp_weights()))
            share = context.train_step(
                model,
                case.tensor(inputs[mine]),
                case.tensor(targets[mine]),
                loss=sum_squares,
                weight=counts[case.rank],
            )
            total = case.world * mean_over_ranks(case, share)
            close(total, expected.loss(inputs, targets), TOLERANCE, "the shares' sum")
            all_close(
                case.adapter.gradients(context, model),
                expected.gradients(inputs, targets),
                TOLERANCE,
            )
            weighted = context.weighted_mean(case.tensor(6.0), counts[case.rank])
            parts = case.world if reduce == "mean" else 1
            close(number(case, weighted), 6.0 * parts / sum(counts), TOLERANCE)
            if case.world > 1:
                raises(RankMismatchError, lambda: context.weighted_mean(case.tensor(6.0), 0))
            del model


@PARTS.part(needs=DATA)
def clipping(case: Case) -> None:
    """The norm is the whole model's, and the gradients are scaled to the one asked for."""
    expected = reference.MLP(reference.mlp_weights())
    with context_of(case) as context:
        model = context.parallelize(case.adapter.mlp(reference.mlp_weights()))
        mine, whole = batches(case)
        gradients = expected.gradients(*whole)
        norm = np.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
        for limit in (norm / 4, norm * 4):
            context.train_step(model, *mine, loss=mean_squares)
            found = number(case, context.clip_grad_norm_(model, limit))
            close(found, norm, TOLERANCE, "norm")
            all_close(
                case.adapter.gradients(context, model),
                gradients,
                10 * TOLERANCE,
                min(1.0, limit / norm),
            )
            context.apply_gradients(model, case.adapter.momentum(model, 0.0, 0.0))
        wrong: list[Any] = [0, -1.0, "1"]
        for value in wrong:
            raises(PlanError, partial(context.clip_grad_norm_, model, value), "max_norm")


@PARTS.part(needs=DATA, ranks=2)
def models_that_differ(case: Case) -> None:
    """Ranks with different models all learn it; a model of nobody's is refused."""
    with context_of(case) as context:
        kinds = (case.adapter.scale(1.0), case.adapter.mlp(reference.mlp_weights()))
        raises(RankMismatchError, lambda: context.parallelize(kinds[case.rank % 2]))
        stranger = case.adapter.scale(1.0)
        raises(
            UnsupportedFeatureError,
            lambda: context.train_step(stranger, case.tensor([1.0]), None, loss=mean_output),
            "parallelize",
        )
    case.group.barrier()


@PARTS.part(needs=DATA)
def seeds(case: Case) -> None:
    """Data parts draw differently, and the same again from the same seed."""
    with context_of(case) as context:
        drawn = []
        for base in (7, 7, 8):
            context.seed(base)
            drawn.append((case.adapter.draw(), float(np.random.rand())))
        assert drawn[0] == drawn[1] != drawn[2]
        everyone = case.group.all_gather(case.tensor(drawn[0][1], "float64"))
        values = {number(case, value) for value in everyone}
        assert len(values) == case.world, f"parts share a seed: {values}"
        raises(DataShardError, lambda: context.seed("x"))  # type: ignore[arg-type]


@PARTS.part(needs=DATA)
def shards(case: Case) -> None:
    """Five items, and fewer items than parts: pad, drop and uneven keep their promises."""
    with context_of(case) as context:
        for items in (5, 2 * case.world + 1):
            for mode in ("pad", "drop", "uneven"):
                loader = context.shard(case.adapter.dataset(items), batch_size=2, mode=mode)
                mine = read(case, loader)
                assert len(mine) == len(loader)
                flat = gathered(case, [n for batch in mine for n in batch])
                lengths = gathered(case, len(mine))
                every = sorted(number for part in flat for number in part)
                if mode == "pad":
                    assert set(every) == set(range(items))
                    assert len({len(part) for part in flat}) == len(set(lengths)) == 1
                elif mode == "drop":
                    assert len(every) == len(set(every)) == items // case.world * case.world
                    assert len(set(lengths)) == 1
                else:
                    assert every == list(range(items))
        if case.world > 1:
            few = case.adapter.dataset(1)
            assert read(case, context.shard(few, mode="pad")) == [[0]]
            raises(DataShardError, lambda: context.shard(few, mode="drop"))
        raises(DataShardError, lambda: context.shard(case.adapter.dataset(4), mode="wrap"), "wrap")
        raises(DataShardError, lambda: context.shard(case.adapter.dataset(4), batch_size=0))
        raises(
            UnsupportedFeatureError,
            lambda: context.shard(case.adapter.dataset(4), no_such_option=1),
            "no_such_option",
        )


@PARTS.part(needs=DATA)
def shuffled_and_resumed(case: Case) -> None:
    """An epoch's order is a function of seed and epoch, and goes on where it stopped."""
    items = 12 * case.world

    def loader(seed: int = 3) -> Any:
        return context.shard(
            case.adapter.dataset(items), batch_size=4, shuffle=True, seed=seed, mode="drop"
        )

    with context_of(case) as context:
        first = loader()
        whole = read(case, first)
        assert whole == read(case, loader())
        assert whole != read(case, loader(seed=4))
        flat = sorted(n for part in gathered(case, whole) for batch in part for n in batch)
        assert flat == list(range(items))
        first.set_epoch(1)
        assert read(case, first) != whole
        begun = loader()
        batches_of = iter(begun)
        assert case.adapter.numbers(next(batches_of)) == whole[0]
        state = begun.state_dict()
        del batches_of
        resumed = loader()
        resumed.load_state_dict(state)
        assert read(case, resumed) == whole[1:]
        assert read(case, resumed) == whole, "the pass after the resumed one is whole"
        raises(DataStateError, lambda: loader(seed=4).load_state_dict(state), "seed")


@PARTS.part(needs=DATA)
def checkpoints(case: Case) -> None:
    """Model, optimiser and plain values come back; a wrong model is refused, unchanged."""
    path = str(case.folder / "checkpoint")
    with context_of(case) as context:

        def step(model: Any, optimizer: Any, seed: int) -> None:
            context.train_step(model, *batches(case, seed=seed)[0], loss=mean_squares)
            context.apply_gradients(model, optimizer)

        model, optimizer = fresh(case, context, 0)
        step(model, optimizer, 0)
        context.save(path, model, optimizer, extra={"step": 1, "note": "x"})
        raises(CheckpointError, partial(context.save, path, model, optimizer), "overwrite")
        step(model, optimizer, 1)
        expected = case.adapter.parameters(model)
        del model, optimizer

        model, optimizer = fresh(case, context, 5)
        assert context.load(path, model, optimizer) == {"step": 1, "note": "x"}
        step(model, optimizer, 1)
        all_close(case.adapter.parameters(model), expected, 0)
        del model, optimizer

        other = context.parallelize(case.adapter.scale(2.0))
        raises(CheckpointError, lambda: context.load(path, other), "weight")
        assert float(case.adapter.parameters(other)["weight"]) == 2.0
        raises(CheckpointError, lambda: context.load(path + "-missing", other), "missing")


@PARTS.part()
def second_group(case: Case) -> None:
    """After the last close a process opens another group, or is told that it cannot."""
    case.group.close()
    if case.adapter.reopens:
        with open_group(case) as again:
            again.barrier()
    else:
        raises(ParallelKitError, lambda: open_group(case), "process")


@contextmanager
def context_of(case: Case, **given: Any) -> Iterator[ParallelContext]:
    """Set a context up, and undo at the end what it changed."""
    if "mode" not in given:
        given["data"] = case.world
    context = pk.parallel_context(**given)
    try:
        yield context
    finally:
        context.reset()


def fresh(case: Case, context: ParallelContext, seed: int) -> tuple[Any, Any]:
    """A model spread by the context, and its optimiser."""
    model = context.parallelize(case.adapter.mlp(reference.mlp_weights(seed)))
    return model, case.adapter.momentum(model, LR, MOMENTUM)


def batches(
    case: Case, seed: int = 1, each: int = 4, dtype: str = "float32"
) -> tuple[tuple[Any, Any], tuple[reference.Array, reference.Array]]:
    """This rank's part of a batch as tensors, and the whole of it as arrays."""
    inputs, targets = reference.batch(each * case.world, seed)
    part = slice(each * case.rank, each * (case.rank + 1))
    mine = (case.tensor(inputs[part], dtype), case.tensor(targets[part], dtype))
    return mine, (inputs, targets)


def no_gradients(case: Case, context: ParallelContext, model: Any) -> bool:
    """Whether all gradients are absent or zero."""
    return not any(np.any(g) for g in case.adapter.gradients(context, model).values())


def number(case: Case, tensor: Any) -> float:
    """The value of a tensor of one element, or of a number."""
    return float(np.asarray(case.adapter.array(tensor)).reshape(()))


def mean_over_ranks(case: Case, loss: Any) -> float:
    """The mean of every rank's loss."""
    return number(case, case.group.all_reduce(loss, "mean"))


def read(case: Case, loader: Any) -> list[list[int]]:
    """One pass of a loader, as lists of integers."""
    return [case.adapter.numbers(batch) for batch in loader]


def gathered(case: Case, value: Any) -> list[Any]:
    """Every rank's plain value, by rank."""
    return [case.group.broadcast_object(value, rank) for rank in range(case.world)]


if __name__ == "__main__":
    main(PARTS)
