"""One batch without a pipeline: microbatches, forward, loss, backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from parallelkit.errors import DataShardError, PlanError, RankMismatchError
from parallelkit.protocols import ProcessGroup


def items_in(inputs: Any, target: Any) -> int:
    """Number of items of a batch: the size of dim 0 of every tensor in it.

    Raises:
        DataShardError: there is none, no tensor, or the tensors disagree.
    """
    tensors = [x for x in tree_flatten((inputs, target))[0] if isinstance(x, torch.Tensor)]
    sizes = {x.shape[0] for x in tensors if x.dim()}
    if len(sizes) != 1 or 0 in sizes:
        raise DataShardError(
            f"tensors of the batch have dim 0 of sizes {sorted(sizes)}; inputs and target need one "
            "and the same number of items, at least 1"
        )
    return int(sizes.pop())


def cut(tree: Any, start: int, stop: int) -> Any:
    """Items `start` to `stop` of every tensor with dims in a tree; plain values as they are.

    Raises:
        DataShardError: something else is in it, which may hold items and cannot be cut.
    """
    leaves, spec = tree_flatten(tree)
    for leaf in leaves:
        if leaf is not None and not isinstance(leaf, torch.Tensor | bool | int | float | str):
            raise DataShardError(
                f"a batch with a {type(leaf).__qualname__} cannot be cut into microbatches; use "
                "tensors in tuples, lists and dicts, or microbatches=1"
            )
    parts = [x[start:stop] if isinstance(x, torch.Tensor) and x.dim() else x for x in leaves]
    return tree_unflatten(parts, spec)


def check_microbatches(count: object) -> int:
    """Raise `PlanError` unless `count` is a positive integer."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise PlanError(f"microbatches is {count!r}; it is a positive integer")
    return count


def dividing(asked: int, sizes: Sequence[int]) -> int:
    """The largest number up to `asked` that divides every one of `sizes`.

    Example:
        >>> dividing(4, [6, 9]), dividing(4, [8, 4]), dividing(4, [5])
        (3, 4, 1)
    """
    common = math.gcd(*sizes)
    return max(number for number in range(1, min(asked, common) + 1) if common % number == 0)


def totals(weight: float, items: int, group: ProcessGroup) -> tuple[float, list[int]]:
    """Sum of the weights, and numbers of items, of all data parts. Collective over `group`.

    Raises:
        PlanError: `weight` is no finite number of at least 0.
        RankMismatchError: the weights add up to nothing.
    """
    number = isinstance(weight, int | float | torch.Tensor) and not isinstance(weight, bool)
    if not number or not 0 <= float(weight) < math.inf:
        raise PlanError(f"weight is {weight!r:.80}; it is a number of items or tokens, 0 or more")
    mine = torch.tensor([float(weight), items], dtype=torch.float64, device=group.device)
    rows = torch.stack(group.all_gather(mine)).tolist()
    total = sum(row[0] for row in rows)
    if not total > 0:
        raise RankMismatchError(
            f"the weights of all data parts add up to {total}, not above 0: "
            f"{[row[0] for row in rows]}"
        )
    return total, [int(row[1]) for row in rows]


def plain_step(
    model: Any,
    inputs: Any,
    target: Any,
    *,
    loss: Callable[[Any, Any], torch.Tensor],
    items: int,
    microbatches: int,
    scale: float | None,
    synchronised: Callable[[bool], AbstractContextManager[None]],
    backward: bool,
) -> torch.Tensor:
    """Run a batch in microbatches, as even as can be; see `TorchParallelContext.train_step`.

    A batch of fewer items than microbatches runs its first item again, with no weight, in place of
    the empty ones: every rank has to make the same number of passes.

    Args:
        items: what `items_in` says of the batch.
        microbatches: what `check_microbatches` let pass.
        scale: by what each microbatch's loss, a sum, is multiplied; None: losses are means, and
            weighed by their numbers of items.
        synchronised: is told whether a microbatch is the last one.

    Returns:
        The sum of the scaled losses, detached.
    """
    count = microbatches
    bounds = [items * number // count for number in range(count + 1)]
    total: torch.Tensor | None = None
    for number in range(count):
        start, stop = bounds[number], bounds[number + 1]
        share = (stop - start) / items if scale is None else scale
        if start == stop:
            start, stop, share = 0, 1, 0.0
        part = inputs if count == 1 else cut(inputs, start, stop)
        named = part if isinstance(part, Mapping) else {}
        arguments = () if named else part if isinstance(part, tuple) else (part,)
        with synchronised(number == count - 1), torch.set_grad_enabled(backward):
            output = model(*arguments, **named)
            value = loss(output, target if count == 1 else cut(target, start, stop)) * share
            if not isinstance(value, torch.Tensor) or value.dim():
                raise PlanError(f"loss gave {value!r:.80}; it gives a tensor without dims")
            if backward:
                value.backward()  # type: ignore[no-untyped-call]
        total = value.detach() if total is None else total + value.detach()
    assert total is not None
    return total
