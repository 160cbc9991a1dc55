"""The recipe: in which order the axes of a plan are applied to a model, written once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, final

import attrs
from mindspore import nn

from parallelkit.errors import CollectiveError, RankMismatchError, UnsupportedFeatureError
from parallelkit.plan import ParallelPlan
from parallelkit.protocols import ProcessGroup
from parallelkit_mindspore import checks, names
from parallelkit_mindspore.parallel import replicate, step, tensor
from parallelkit_mindspore.parallel.axes import DATA, AxisGroups
from parallelkit_mindspore.parallel.divided import reducing
from parallelkit_mindspore.parallel.fused import fused
from parallelkit_mindspore.parallel.gradients import Gradients
from parallelkit_mindspore.parallel.moved import Addresses


@attrs.define(eq=False)
class Spread:
    """What was made of one model.

    Attributes:
        done: in order, for people.
        parameters: of the model, by name.
        dims: the dim in which a parameter is divided over the tensor axis, by name.
        steps: its step functions.
        gradients: of its train steps.
        addresses: where its parameters lay after the last step, and its optimisers'.
        sync: whether train steps reduce; `accumulate` changes it.
        begun: number of the train step that reduces, from 1; those that failed count.
        compared: names of what the tensor axis leaves whole whose gradients were seen to be equal.
    """

    done: list[str]
    parameters: dict[str, Any]
    dims: Mapping[str, int] = attrs.field(factory=dict)
    steps: step.Steps = attrs.field(factory=step.Steps)
    gradients: Gradients = attrs.field(factory=Gradients)
    addresses: Addresses = attrs.field(factory=Addresses)
    sync: bool = True
    begun: int = 0
    compared: set[str] = attrs.field(factory=set)

    @property
    def trained(self) -> list[Any]:
        """Parameters with `requires_grad`, in the order of `trainable_params()`."""
        return [p for p in self.parameters.values() if p.requires_grad]

    @property
    def divided(self) -> set[int]:
        """Ids of the parameters that are divided."""
        return {id(self.parameters[name]) for name in self.dims}

    @contextlib.contextmanager
    def following(self, *owners: Any) -> Iterator[None]:
        """Before graphs run: refuse parameters of these cells that were given other memory.

        Args:
            owners: the model, and an optimiser.
        """
        for owner in owners:
            self.addresses.check(owner)
        yield
        for owner in owners:
            self.addresses.note(owner)

    def begin(self) -> None:
        """Forget the gradients, and count train steps anew."""
        self.gradients.forget(self.parameters.values())
        self.begun = 0

    @contextlib.contextmanager
    def numbered(self, title: str) -> Iterator[None]:
        """Within, collectives fail on all ranks unless all are in this step of the same parameters.

        On the CPU alone, where calls are compared. It costs no exchange of its own.

        Args:
            title: of the model, for messages.

        Raises:
            RankMismatchError: a rank is in another step, or trains other parameters.
        """
        self.begun += 1
        trained = [name for name, p in self.parameters.items() if p.requires_grad]
        frozen = [name for name, p in self.parameters.items() if not p.requires_grad]
        shorter = f"all but {frozen}" if len(frozen) < len(trained) else f"{trained}"
        which = shorter if frozen else "all parameters"
        try:
            with checks.noted(f"in train step {self.begun} of {title}, of {which}"):
                yield
        except CollectiveError as error:
            if "ranks made different calls" not in str(error):
                raise
            raise RankMismatchError(
                f"ranks are in different train steps, or train different parameters; {error}\n"
                "A rank whose step failed must not go on alone: load a checkpoint on every rank, "
                "which counts anew, or end them all"
            ) from error

    @contextlib.contextmanager
    def synchronised(self, sync: bool) -> Iterator[None]:
        """Within, train steps reduce gradients over the data axes only if `sync`."""
        before, self.sync = self.sync, sync
        try:
            yield
        finally:
            self.sync = before


def spread_of(model: Any, models: Mapping[Any, Spread], *, inside: bool) -> Spread:
    """Find what was made of a model.

    Args:
        models: of one context, by what `parallelize` gave.
        inside: whether a training step or another wrapper around one will do.

    Raises:
        UnsupportedFeatureError: there is none; says so if it is inside.
    """
    found = models.get(model) if isinstance(model, nn.Cell) else None
    if found is not None:
        return found
    inner = names.unwrap(model)
    within = models.get(inner) if inner is not model else None
    if within is None:
        raise UnsupportedFeatureError(
            f"this {type(model).__qualname__} was not given back by parallelize() of this "
            "context; call model = context.parallelize(model) first"
        )
    if not inside:
        raise UnsupportedFeatureError(
            f"this {type(model).__qualname__} is a wrapper around the {type(inner).__qualname__} "
            "that parallelize() gave back; give that model itself"
        )
    return within


@final
@attrs.frozen(kw_only=True)
class Recipe:
    """How one context spreads models, and reduces their gradients."""

    plan: ParallelPlan
    reduce: str
    group: ProcessGroup
    groups: AxisGroups
    layouts: Mapping[str, str] | None

    @property
    def parts(self) -> int:
        """By what a reduction over the data axes divides."""
        return self.plan.data_shard_count if self.reduce == "mean" else 1

    def apply(self, model: nn.Cell) -> tuple[nn.Cell, Spread]:
        """Spread a model: look, compare, take rank 0's values, divide layers.

        Collective; `MindSporeParallelContext.parallelize` says the rest.
        """
        replicate.refuse(model)
        degree, parts = self.plan.tensor, self.plan.data_shard_count
        styles = tensor.look(model, self.layouts, degree) if degree > 1 else {}
        done: list[str] = []
        if self.plan.world_size > 1:
            replicate.check_same(model, self.group)
            replicate.synchronise(model, self.group)
            done.append("take rank 0's values")
        dims: Mapping[str, int] = {}
        if degree > 1:
            division = tensor.apply(model, styles, self.groups.group("tensor"))
            model, dims = division.model, division.dims
            done += division.lines
        if parts > 1:
            done.append(f"replicate {parts} times, gradients by {self.reduce}")
        elif degree == 1:
            done.append("nothing to replicate: a world of one")
        return model, Spread(done, replicate.parameters(model), dims)

    def reduce_gradients(self, spread: Spread) -> None:
        """Reduce what waits over the data axes. Collective over them, and at first the tensor's.

        Raises:
            LayoutError: a parameter that the tensor axis leaves whole got different gradients on
                its ranks; seen when its first ones come that are not all zero.
        """
        spread.gradients.reduce(self._reduced)
        if self.plan.tensor > 1:
            known = spread.compared.union(spread.dims)
            left = {
                n: p for n, p in spread.parameters.items() if p.requires_grad and n not in known
            }
            found = dict(zip(left, spread.gradients.of(list(left.values())), strict=True))
            spread.compared |= tensor.check_whole(found, spread.dims, self.groups.group("tensor"))

    def reducer(self, parameters: Iterable[Any]) -> nn.Cell:
        """MindSpore's cell that reduces gradients over the data axes."""
        parts = self.plan.data_shard_count
        group = self.groups.group(*DATA)
        if parts == 1:
            return nn.Identity()
        with reducing():
            return nn.DistributedGradReducer(
                list(parameters), mean=self.reduce == "mean", degree=parts, group=group.native
            )

    def _reduced(self, values: list[Any]) -> list[Any]:
        if self.plan.data_shard_count == 1:
            return values
        group = self.groups.group(*DATA)
        return fused(values, lambda flat: group.all_reduce(flat, self.reduce))
