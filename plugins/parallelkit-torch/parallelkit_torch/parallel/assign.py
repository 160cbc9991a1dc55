"""Which modules of a model are in which pipeline stage: as named, or as even as can be. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import nn

from parallelkit.errors import StageError
from parallelkit_torch.parallel.units import anatomy, has_parameters, refuse_left_over, some


def assign(
    model: nn.Module, count: int, stages: Sequence[Sequence[str]] | None = None
) -> list[list[str]]:
    """Divide a model's units over `count` stages, in order; pure, nothing is changed.

    Without `stages`, the largest number of parameter bytes in a stage is as small as can be, and
    among such cuts the sum of squares is; parameters of the embedding and the head count too.

    Args:
        model: with or without values, so a model on the meta device will do.
        count: number of stages, over all ranks of the pipeline.
        stages: names of modules for each stage, in forward order. A name may be that of a parent,
            such as `model.layers`, and modules without parameters may be left out.

    Returns:
        For each stage the names of its modules.

    Raises:
        StageError: the model cannot be cut, into so many stages or as `stages` says; or two
            stages would share a parameter.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise StageError(f"the number of stages is {count!r}; it is a positive integer")
    if stages is None:
        found = anatomy(model).units
        if len(found) < count:
            raise StageError(
                f"the model has {len(found)} parts to cut between "
                f"({some([unit[0] for unit in found])}), fewer than the {count} stages asked for"
            )
        sizes = [sum(_bytes(model, name) for name in unit) for unit in found]
        made = [
            [name for unit in found[start:stop] for name in unit]
            for start, stop in _even(sizes, count)
        ]
    else:
        made = _given(model, count, stages)
    _refuse_ties(model, made)
    return made


# --- what the user gave


def _given(model: nn.Module, count: int, stages: Sequence[Sequence[str]]) -> list[list[str]]:
    lists = [[stage] if isinstance(stage, str) else list(stage) for stage in stages]
    if len(lists) != count or not all(lists):
        raise StageError(
            f"stages has {len(lists)} lists, of {', '.join(str(len(s)) for s in lists)} names; "
            f"the plan needs {count} of at least one name each"
        )
    listed = [(name, number) for number, names in enumerate(lists) for name in names]
    known = {name for name, _ in model.named_modules() if name}
    unknown = [name for name, _ in listed if name not in known]
    if unknown:
        raise StageError(
            f"stages names {unknown[0]!r}, which is no module of the model; there are "
            f"{some(sorted(known, key=lambda name: name.count('.')))}"
        )
    for (one, _), (two, _) in itertools.permutations(listed, 2):
        if two == one or two.startswith(f"{one}."):
            raise StageError(f"stages names {two!r} twice: {one!r} and {two!r} are both there")
    try:
        names = anatomy(model).names
    except StageError:  # not recognised: the user's word stands
        refuse_left_over(model, [name for name, _ in listed])
        return lists
    return _ordered(model, names, listed, count)


def _ordered(
    model: nn.Module, names: list[str], listed: list[tuple[str, int]], count: int
) -> list[list[str]]:
    """The user's stages in terms of the model's own units, checked for order and gaps."""
    made: list[list[str]] = [[] for _ in range(count)]
    number = 0
    for name in names:
        owners = [(n, k) for n, k in listed if name == n or name.startswith(f"{n}.")]
        if not owners and any(n.startswith(f"{name}.") for n, _ in listed):
            raise StageError(
                f"stages cuts inside of {name!r}; it stays in one piece: name it whole"
            )
        if not owners and has_parameters(model.get_submodule(name)):
            raise StageError(
                f"stages does not name {name!r}; every module with parameters has a stage"
            )
        mine = owners[0][1] if owners else number
        if mine < number:
            raise StageError(
                f"stages has {name!r} in stage {mine}, after modules of stage {number}; the order "
                f"of the model is {some(names)}"
            )
        number = mine
        made[number].append(name)
    if not all(made):
        raise StageError(f"stage {made.index([])} of stages has nothing that can start a stage")
    return made


def _refuse_ties(model: nn.Module, stages: Sequence[Sequence[str]]) -> None:
    place = {f"{name}.": number for number, names in enumerate(stages) for name in names}
    first: dict[int, tuple[str, int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        number = next(place[start] for start in place if name.startswith(start))
        other, there = first.setdefault(id(parameter), (name, number))
        if there != number:
            raise StageError(
                f"{other!r} (stage {there}) and {name!r} (stage {number}) are one parameter; "
                "stages cannot share one. Build the model without tied weights (Hugging Face: "
                "tie_word_embeddings=False), put both into one stage with stages=, or use an "
                "axis that keeps them together: tensor or data_shard"
            )


# --- balancing


def _even(sizes: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Cut a row of sizes into `count` non-empty pieces, the largest as small as can be."""
    sums = [0, *itertools.accumulate(sizes)]
    largest = _best(sums, count, power=0, limit=sums[-1])[0]
    return _best(sums, count, power=2, limit=largest)[1]


def _best(
    sums: Sequence[int], count: int, *, power: int, limit: int
) -> tuple[int, list[tuple[int, int]]]:
    """Least cost of pieces of at most `limit`: their maximum (power 0) or sum of powers.

    O(count * n^2) for n units, which is a few milliseconds for a hundred layers.
    """
    n = len(sums) - 1
    best: list[tuple[int, list[int]] | None] = [(0, [])] + [None] * n
    for piece in range(1, count + 1):
        after: list[tuple[int, list[int]] | None] = [None] * (n + 1)
        for stop in range(piece, n - (count - piece) + 1):
            for start in range(stop - 1, piece - 2, -1):
                size, before = sums[stop] - sums[start], best[start]
                if size > limit:
                    break
                if before is None:
                    continue
                cost = before[0] + size**power if power else max(before[0], size)
                now = after[stop]
                if now is None or cost < now[0]:
                    after[stop] = (cost, [*before[1], stop])
        best = after
    end = best[n]
    assert end is not None  # count <= n, and the limit was reached by some cut
    return end[0], list(itertools.pairwise([0, *end[1]]))


def _bytes(model: nn.Module, name: str) -> int:
    return sum(p.numel() * p.element_size() for p in model.get_submodule(name).parameters())
