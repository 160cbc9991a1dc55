"""The parallel context of torch: a model's spread, its steps, its data and its checkpoints."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, final
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelkit.data import derive_seed
from parallelkit.errors import PlanError, UnsupportedFeatureError
from parallelkit.plan import ParallelPlan
from parallelkit.protocols import Plain, ProcessGroup
from parallelkit.specs import ContextSpec
from parallelkit_torch import loader, names
from parallelkit_torch.parallel import gradients
from parallelkit_torch.parallel.mesh import DATA, Meshes
from parallelkit_torch.parallel.recipe import Recipe, Spread
from parallelkit_torch.parallel.settings import Settings
from parallelkit_torch.parallel.step import (
    check_microbatches,
    dividing,
    items_in,
    plain_step,
    totals,
)


@final
class TorchParallelContext:
    """A `parallelkit.protocols.ParallelContext` over the axes pipeline, data, data_shard, tensor.

    Order of what is done to a model, always: compare and synchronise over ranks, cut into
    stages, divide layers (tensor), shard (data_shard) or replicate (data); compiling comes after
    that, by `ExecutionMode.compile`, and the optimiser last. `explain()` shows what was done.
    """

    framework: ClassVar[str] = "torch"

    def __init__(
        self,
        spec: ContextSpec,
        plan: ParallelPlan,
        group: ProcessGroup,
        settings: Settings,
        chosen: list[str],
    ) -> None:
        self._spec = spec
        self._plan = plan
        self._group = group
        self._settings = settings
        self._chosen = chosen
        self._meshes = Meshes(plan, group)
        self._recipe = Recipe(
            plan=plan,
            mode=spec.mode,
            reduce=spec.reduce,
            group=group,
            meshes=self._meshes,
            settings=settings,
        )
        self._models: WeakKeyDictionary[nn.Module, Spread] = WeakKeyDictionary()

    # --- facts

    @property
    def plan(self) -> ParallelPlan:
        return self._plan

    @property
    def group(self) -> ProcessGroup:
        return self._group

    @property
    def mode(self) -> str:
        return self._spec.mode

    @property
    def effective(self) -> str:
        """The mode that runs; with `"auto"`, what the plan found amounts to."""
        if self.mode != "auto":
            return self.mode
        replicas = self._plan.data == self._plan.world_size
        return "standalone" if self._plan.world_size == 1 else "data" if replicas else "hybrid"

    @property
    def reduce(self) -> str:
        return self._spec.reduce

    @property
    def native(self) -> DeviceMesh:
        """torch's `DeviceMesh` over `parallelkit.plan.AXES`, those of degree 1 included.

        Made on first use, which is collective.
        """
        return self._meshes.native

    # --- models

    def parallelize(self, model: nn.Module) -> nn.Module:
        """Spread `model` over the ranks as planned. Collective, in the same order on every rank.

        Rank 0's values win. Blocks up to the group's timeout for each collective. Names of
        parameters stay the model's own. Build the optimiser from what comes back, and compile it
        after this, never before.

        Args:
            model: the whole model, the same on every rank, with values (not on the meta device).

        Returns:
            The model itself, changed in place; with DDP, its wrapper; with a pipeline, a
            `PipelineModule` that holds this rank's stages and is run by `train_step`.

        Raises:
            ExecutionModeError: the model is compiled already.
            UnsupportedFeatureError: it is spread already, on the meta device, or no `nn.Module`.
            LayoutError: the tensor axis cannot divide its layers as laid out.
            StageError: it cannot be cut into the stages asked for.
            RankMismatchError: ranks gave different models.
        """
        spread_model, spread = self._recipe.apply(model)
        self._models[spread_model] = spread
        return spread_model

    def train_step(
        self,
        model: nn.Module,
        inputs: Any,
        target: Any = None,
        *,
        loss: Callable[[Any, Any], torch.Tensor],
        microbatches: int | None = None,
        weight: float | None = None,
        sync: bool = True,
        backward: bool = True,
    ) -> torch.Tensor:
        """Run one batch forward and backward, alike under every plan; the optimiser is yours.

        Collective over all ranks. Gradients are added to what is there.

        Args:
            model: what `parallelize` gave, compiled or not.
            inputs: a tensor, or a tuple of the model's positional arguments; dim 0 is the items.
            target: handed to `loss`; tensors in it are cut along dim 0 like the inputs.
            loss: of the model's output and the target, a scalar: the mean over items, or with
                `weight` the sum over items or tokens.
            microbatches: into how many parts the batch is cut, for a pipeline and against memory;
                default 1, and with a pipeline its degree. Parts of a pipeline are of one size:
                where the number does not divide the batch, the next smaller one that does is
                taken; give `weight` where data parts have different numbers of items.
            weight: of this data part's batch, such as its number of tokens; the gradients are
                then those of the sum of all losses over the sum of all weights.
            sync: reduce gradients over the data axes; False on all but the last of several
                batches that are accumulated.
            backward: False only evaluates.

        Returns:
            The loss of this data part, detached: the mean over its items, or with `weight` its sum
            over all parts' weights (add the parts' up for the global one). The same on every rank
            of the data part.

        Raises:
            UnsupportedFeatureError: the model was not spread by this context.
            DataShardError: the batch is empty, or its tensors have different numbers of items.
            RankMismatchError: the weights add up to nothing.
            LayoutError: after the first backward pass: a parameter that the tensor axis leaves
                whole got different gradients on its ranks.
        """
        spread = self._spread(model)
        items = items_in(inputs, target)
        asked = check_microbatches(self._plan.pipeline if microbatches is None else microbatches)
        sizes, scale = [items], None
        if weight is not None:
            total, sizes = totals(weight, items, self._meshes.group(*DATA))
            scale = self._parts / total
        if self._plan.pipeline > 1:
            from parallelkit_torch.parallel import pipeline

            value = pipeline.step(
                names.uncompiled(model),
                inputs,
                target,
                loss=loss,
                microbatches=dividing(asked, sizes),
                scale=scale,
                sync=sync,
                backward=backward,
            )
        else:
            value = plain_step(
                model,
                inputs,
                target,
                loss=loss,
                items=items,
                microbatches=asked,
                scale=scale,
                synchronised=lambda last: gradients.synchronised(
                    spread.units, spread.replicas, sync=sync and last
                ),
                backward=backward,
            )
        if backward and sync:
            self._compare_whole(model, spread)
        return value if scale is None else value / self._parts

    def accumulate(self, model: nn.Module, *, sync: bool) -> AbstractContextManager[None]:
        """Within, backward passes reduce gradients over the data axes only if `sync`.

        Not collective. Use it with False for all but the last backward pass of an optimiser step:
        gradients add up on each rank and cross the network once. Under FSDP2 they are whole on
        each rank until then, which takes a parameter's memory each.

        Example:
            >>> for index, (x, y) in enumerate(batches):                    # doctest: +SKIP
            ...     with context.accumulate(model, sync=index == len(batches) - 1):
            ...         (loss(model(x), y) / len(batches)).backward()

        Raises:
            UnsupportedFeatureError: the model was not spread by this context.
        """
        spread = self._spread(model)
        return gradients.synchronised(spread.units, spread.replicas, sync=sync)

    def apply_gradients(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Do `optimizer.step()` and `zero_grad()`; `GradientError` where there is no gradient."""
        self._spread(model)
        gradients.apply(optimizer)

    def clip_grad_norm_(
        self,
        model: nn.Module,
        max_norm: float,
        *,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Scale the gradients so that their norm over all shards and stages is at most `max_norm`.

        Collective over all ranks; after backward, before the optimiser.

        Returns:
            The norm before scaling: a scalar, the same on every rank, equal to that of one process
            with the whole model.

        Raises:
            PlanError: `max_norm` or `norm_type` is not a positive number.
            NonFiniteGradientError: the norm is no finite number, with `error_if_nonfinite`.
            UnsupportedFeatureError: the model was not spread by this context.
        """
        spread = self._spread(model)
        for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
            if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
                raise PlanError(f"{name} is {value!r}; it is a positive number")
        self._compare_whole(model, spread)
        axes = ("pipeline", "data_shard", "tensor")  # over these a gradient may be divided
        return gradients.clip_grad_norm_(
            model.parameters(),
            float(max_norm),
            norm_type=float(norm_type),
            error_if_nonfinite=error_if_nonfinite,
            group=self._meshes.group(*axes),
            degrees={axis: self._plan.degree(axis) for axis in axes},
        )

    def weighted_mean(self, total: torch.Tensor, weight: float) -> torch.Tensor:
        """Turn this data part's total loss into the loss to call `backward` on, weighted globally.

        Parts have different numbers of tokens, so a mean of their means is not the mean over
        tokens. The gradients after `backward` are those of the sum of all parts' totals over the
        sum of all weights, whichever `reduce` the context has. Collective over the data axes.

        Args:
            total: this part's summed loss, with its graph.
            weight: this part's number of tokens or items; 0 is fine on some.

        Raises:
            RankMismatchError: the weights of all parts add up to nothing.
        """
        everyone, _ = totals(weight, 0, self._meshes.group(*DATA))
        return total * (self._parts / everyone)

    # --- data, checkpoints, life

    def shard(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        mode: str = "pad",
        shuffle: bool | None = None,
        seed: int = 0,
        **options: Any,
    ) -> Any:
        """Make a loader over this rank's part of `dataset`, by data coordinate. Not collective.

        Args:
            dataset: map-style or iterable, or a `DataLoader`; the same on every rank.
            batch_size: items in a batch of this data part; default 1, or the `DataLoader`'s.
            mode: `"pad"`, `"drop"` or `"uneven"`; see `parallelkit.data.shard_indices`.
            shuffle: permute by `seed` and epoch; call `loader.set_epoch` each epoch.
            options: `num_workers`, `drop_last`, `collate_fn`, ... of `DataLoader`.

        Raises:
            DataShardError, UnsupportedFeatureError: as `make_loader` says.
        """
        return loader.make_loader(
            dataset,
            index=self._plan.data_shard_index(self._group.rank),
            count=self._plan.data_shard_count,
            batch_size=batch_size,
            mode=mode,
            shuffle=shuffle,
            seed=seed,
            **options,
        )

    def seed(self, base: int) -> int:
        """Seed Python's, NumPy's and torch's generators for this rank's place; return the seed.

        Data parts get different seeds, for dropout and augmentation; ranks of one data part, which
        compute one thing together, get the same. Not collective.

        Raises:
            DataShardError: `base` is no integer.
        """
        seed = derive_seed(base, self._plan.data_shard_index(self._group.rank))
        random.seed(seed)
        torch.manual_seed(seed >> 1)
        import numpy as np

        np.random.seed(seed % 2**32)
        return seed

    def save(
        self,
        path: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        extra: Mapping[str, Plain] | None = None,
        overwrite: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Write a checkpoint that any other plan can load. Collective; see `checkpoint.save`.

        Args:
            path: a folder; it appears there when all of it is on disk.
            model: what `parallelize` gave, compiled or not.
            optimizer: its state is saved too.
            extra: plain values that `load` gives back: a step's number, `loader.state_dict()`.
            overwrite: replace a checkpoint that is there.
            timeout: seconds; default ten times the group's.

        Raises:
            CheckpointError: it cannot be written there; what was there stays.
        """
        from parallelkit_torch.parallel import checkpoint

        self._spread(model)
        checkpoint.save(
            path,
            names.uncompiled(model),
            optimizer,
            group=self._group,
            plan=self._plan,
            extra=extra,
            overwrite=overwrite,
            timeout=timeout,
        )

    def load(
        self,
        path: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        timeout: float | None = None,
    ) -> dict[str, Plain]:
        """Read a checkpoint in place, whatever plan wrote it. Collective; see `checkpoint.load`.

        Arguments are those of `save`.

        Returns:
            The `extra` that was saved.

        Raises:
            CheckpointError: it is incomplete, damaged, or not this model's; nothing was changed.
        """
        from parallelkit_torch.parallel import checkpoint

        self._spread(model)
        return checkpoint.load(
            path, names.uncompiled(model), optimizer, group=self._group, timeout=timeout
        )

    def reset(self) -> None:
        """Forget the models. Nothing global was changed, with torch."""
        self._models.clear()

    def explain(self) -> str:
        """Say what runs, why, and what was done to each model, in order."""
        plan = self._plan
        degrees = ", ".join(f"{a} {d}" for a, d in plan.degrees.items() if d > 1) or "one rank"
        lines = [
            f"mode {self.mode!r}"
            + (f", effective {self.effective!r}" if self.effective != self.mode else "")
            + f" on {self._group.device} with {self._group.backend}: {degrees}",
            f"gradients: {self.reduce} over {plan.data_shard_count} data part(s)",
            f"data: part {plan.data_shard_index(self._group.rank)} of {plan.data_shard_count}",
            *self._settings.lines(),
            *self._chosen,
        ]
        for model, spread in self._models.items():
            plain: Any = names.unwrap(model)
            lines.append(f"{type(plain).__name__}, what was done to it:")
            lines += [f"  {n}. {done}" for n, done in enumerate(spread.steps, 1)]
            lines += plain.explain() if self._plan.pipeline > 1 else []
        return "\n".join(lines)

    # --- inner parts

    def _spread(self, model: nn.Module) -> Spread:
        found = self._models.get(names.uncompiled(model))
        if found is None:
            raise UnsupportedFeatureError(
                f"this {type(model).__qualname__} was not given back by parallelize() of this "
                "context; call model = context.parallelize(model) first"
            )
        return found

    def _compare_whole(self, model: nn.Module, spread: Spread) -> None:
        """Once for each model that is divided; see `whole.check_gradients`."""
        if self._plan.tensor > 1 and not spread.compared:
            from parallelkit_torch.parallel.whole import check_gradients

            check_gradients(model, self._meshes.group("tensor"))
            spread.compared = True

    @property
    def _parts(self) -> int:
        """By what a reduction over the data axes divides."""
        return self._plan.data_shard_count if self.reduce == "mean" else 1
