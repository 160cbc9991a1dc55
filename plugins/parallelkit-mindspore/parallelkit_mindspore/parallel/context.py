"""The parallel context of MindSpore: a model's spread, its steps, its data and its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from mindspore import nn

from parallelkit.plan import ParallelPlan
from parallelkit.protocols import Plain, ProcessGroup
from parallelkit.specs import ContextSpec
from parallelkit_mindspore import runtime
from parallelkit_mindspore.parallel import gradients as grads
from parallelkit_mindspore.parallel import step, trees
from parallelkit_mindspore.parallel.axes import DATA, AxisGroups, is_world
from parallelkit_mindspore.parallel.existing import refuse_steps, retire_steps
from parallelkit_mindspore.parallel.explain import described
from parallelkit_mindspore.parallel.recipe import Recipe, Spread, spread_of
from parallelkit_mindspore.parallel.seeding import seed_all
from parallelkit_mindspore.parallel.settings import Settings
from parallelkit_mindspore.parallel.settings_native import NativeSettings, in_force


class MindSporeParallelContext:
    """A `parallelkit.protocols.ParallelContext` over the axes data and tensor.

    MindSpore's own settings are set when it is made, if the group is the whole world, so that
    `Model`, `TrainOneStepCell` and `DistributedGradReducer` that are built later reduce gradients
    as the context does. Build them after it. All calls are for the thread that owns MindSpore.

    MindSpore's parameters have no `.grad`: the context keeps the gradients of `train_step`, and
    `apply_gradients` gives them to the optimiser. They are reduced after the backward pass, in few
    flat buffers, by the process group and outside of any graph, so that a late rank is noticed;
    forward and backward are compiled in graph mode (`mindspore.set_context(mode=0)`, or inside
    `with pk.execution_mode("graph")`). Cells start in evaluation mode: call `model.set_train()`.
    """

    framework: ClassVar[str] = "mindspore"

    def __init__(
        self,
        spec: ContextSpec,
        group: ProcessGroup,
        settings: Settings,
        *,
        effective: str | None = None,
        chosen: Sequence[str] = (),
    ) -> None:
        """`effective` is the mode that runs, where another was asked for; `chosen` says why."""
        self._spec = spec
        self._group = group
        self._settings = settings
        self._effective = effective or spec.mode
        self._chosen = list(chosen)
        self._groups = AxisGroups(spec.plan, group)
        self._recipe = Recipe(
            plan=spec.plan,
            reduce=spec.reduce,
            group=group,
            groups=self._groups,
            layouts=settings.layouts,
        )
        self._models: WeakKeyDictionary[Any, Spread] = WeakKeyDictionary()
        values = settings.native(spec.plan, spec.reduce, whole_world=is_world(group))
        if spec.plan.world_size > 1 and values:
            refuse_steps({name: values[name] for name in ("parallel_mode", "gradients_mean")})
        self._native = NativeSettings(values)
        self._native.apply()

    # --- facts

    @property
    def plan(self) -> ParallelPlan:
        return self._spec.plan

    @property
    def group(self) -> ProcessGroup:
        return self._group

    @property
    def mode(self) -> str:
        return self._spec.mode

    @property
    def effective(self) -> str:
        """The mode that runs; with `fallback=True` it may be another than `mode`."""
        return self._effective

    @property
    def reduce(self) -> str:
        return self._spec.reduce

    @property
    def native(self) -> dict[str, Any]:
        """What the context has set by `set_auto_parallel_context`, as it is now; empty: nothing."""
        return self._native.values | self._native.changed()

    # --- models

    def parallelize(self, model: nn.Cell) -> nn.Cell:
        """Spread `model` over the ranks as planned. Collective, in the same order on every rank.

        Rank 0's values win, and are written in place. Blocks up to the group's timeout for each
        collective. Names of parameters stay the model's own. Build the optimiser from what comes
        back.

        Args:
            model: the whole model, the same on every rank, with values.

        Returns:
            The model itself, changed in place; another cell if it is one single layer that is
            divided.

        Raises:
            UnsupportedFeatureError: it is no `nn.Cell`, is divided already, or has parameters
                without values or of a dtype that cannot be divided here.
            LayoutError: the tensor axis cannot divide its layers as laid out.
            ContextOrderError: an optimiser holds parameters that would be divided; or, here and in
                `train_step` and `grad_reducer`, the user changed MindSpore's settings since.
            RankMismatchError: ranks gave different models.
        """
        self._own("parallelize")
        spread_model, spread = self._recipe.apply(model)
        self._models[spread_model] = spread
        return spread_model

    def train_step(
        self,
        model: nn.Cell,
        inputs: Any,
        target: Any = None,
        *,
        loss: Callable[[Any, Any], Any],
        microbatches: int | None = None,
        weight: float | None = None,
        sync: bool = True,
        backward: bool = True,
    ) -> Any:
        """Run one batch forward and backward, alike under every plan; `apply_gradients` follows.

        Collective over all ranks. Gradients are added to what is there.

        Args:
            model: what `parallelize` gave, compiled or not.
            inputs: a tensor, a tuple of the model's positional arguments, or a dict by name; dim 0
                is the items.
            target: handed to `loss`; tensors in it are cut along dim 0 like the inputs.
            loss: of the model's output and the target, a scalar: the mean over items, or with
                `weight` the sum over items or tokens. A function or a cell; in graph mode one that
                MindSpore can compile, and the same object in every call, since another is compiled
                anew.
            microbatches: into how many parts the batch is cut, against memory; default 1.
            weight: of this data part's batch, such as its number of tokens; the gradients are
                then those of the sum of all losses over the sum of all weights.
            sync: reduce gradients over the data axes; False on all but the last of several
                batches that are accumulated.
            backward: False only evaluates.

        Returns:
            The loss of this data part: the mean over its items, or with `weight` its sum over all
            parts' weights. The same on every rank of the data part.

        Raises:
            UnsupportedFeatureError: the model was not spread by this context.
            DataShardError: the batch is empty, or its tensors have different numbers of items.
            PlanError: the loss has dims.
            RankMismatchError: the weights add up to nothing; or, on the CPU, ranks are in different
                steps, as after one that failed on one rank alone, or train other parameters.
            LayoutError: after the first backward pass: a parameter that the tensor axis leaves
                whole got different gradients on its ranks.
        """
        self._own("train_step")
        spread = self._spread(model)
        reducing = backward and sync and spread.sync
        with spread.numbered(type(model).__name__) if reducing else nullcontext():
            items = trees.items_in(inputs, target)
            count = step.check_microbatches(1 if microbatches is None else microbatches)
            scale, parts = None, self._recipe.parts
            if weight is not None:
                scale = parts / step.total_weight(weight, self._groups.group(*DATA))
            weights = spread.trained if backward else []
            function = spread.steps.function(
                model, loss, weights, named=isinstance(inputs, Mapping), backward=backward
            )
            with spread.following(model):
                value, found = step.run(
                    function, inputs, target, items=items, microbatches=count, scale=scale
                )
            spread.gradients.add(weights, found)
            if reducing:
                self._recipe.reduce_gradients(spread)
        return value if scale is None else value / parts

    def accumulate(self, model: nn.Cell, *, sync: bool) -> AbstractContextManager[None]:
        """Within, `train_step` reduces gradients over the data axes only if `sync`.

        Not collective. Use it with False for all but the last batch of an optimiser step:
        gradients add up on each rank, with no mean over batches, and cross the network once.
        A cell of `grad_reducer` and MindSpore's own steps do not hear of it.

        Raises:
            UnsupportedFeatureError: the model was not spread by this context.
        """
        return self._spread(model).synchronised(sync)

    def gradients(self, model: nn.Cell) -> tuple[Any, ...]:
        """Gradients of the train steps since the last `apply_gradients`. Not collective.

        Returns:
            Tensors in the order of `model.trainable_params()`; zeros where there was no step. With
            `sync=False` they are this rank's alone, until a step that reduces them.
        """
        spread = self._spread(model)
        return spread.gradients.of(spread.trained)

    def apply_gradients(self, model: nn.Cell, optimizer: nn.Cell) -> None:
        """Let the optimiser use the gradients of the train steps since the last call.

        Those of its parameters are forgotten afterwards. Nothing is sent; every rank calls it. A
        parameter of the optimiser's that no step gave a gradient counts as zero.

        Args:
            optimizer: built from the model that `parallelize` gave; of `mindspore.nn` or of
                `mindspore.experimental.optim`; one of `mint.optim` does nothing on the CPU.

        Raises:
            GradientError: there are none, or the last step had `sync=False`.
            UnsupportedFeatureError: the optimiser is of another kind or of another model.
        """
        runtime.own("apply_gradients")
        spread = self._spread(model)
        stepped = grads.optimizer_parameters(optimizer, spread.parameters)
        spread.gradients.finished(stepped, "apply_gradients")
        with spread.following(model, optimizer):
            optimizer(spread.gradients.of(stepped))
        spread.gradients.forget(stepped)

    def clip_grad_norm_(
        self,
        model: nn.Cell,
        max_norm: float,
        *,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Any:
        """Scale the gradients so that their norm over all shards is at most `max_norm`.

        Collective over the tensor axis; after `train_step`, before `apply_gradients`.

        Returns:
            The norm before scaling: a float32 scalar, the same on every rank, equal to that of one
            process with the whole model.

        Raises:
            PlanError: `max_norm` or `norm_type` is not a positive number.
            GradientError: there are none, or the last step had `sync=False`.
            NonFiniteGradientError: the norm is no finite number, with `error_if_nonfinite`.
            UnsupportedFeatureError: the model was not spread by this context.
        """
        runtime.own("clip_grad_norm_")
        spread = self._spread(model)
        return grads.clip_grad_norm_(
            spread.gradients,
            spread.trained,
            max_norm,
            divided=spread.divided,
            norm_type=norm_type,
            error_if_nonfinite=error_if_nonfinite,
            group=self._groups.group("tensor"),
        )

    def weighted_mean(self, total: Any, weight: float) -> Any:
        """Turn this data part's total loss into the loss to differentiate, weighted globally.

        Parts have different numbers of tokens, so a mean of their means is not the mean over
        tokens. The gradients are then those of the sum of all parts' totals over the sum of all
        weights, whichever `reduce` the context has. Collective over the data axes, outside of
        graphs: within `mindspore.jit` use `train_step(weight=...)`.

        Args:
            total: this part's summed loss.
            weight: this part's number of tokens or items; 0 is fine on some.

        Raises:
            RankMismatchError: the weights of all parts add up to nothing.
        """
        runtime.own("weighted_mean")
        return total * (self._recipe.parts / step.total_weight(weight, self._groups.group(*DATA)))

    def grad_reducer(self, parameters: Iterable[Any]) -> nn.Cell:
        """Make a cell that reduces gradients as the context does, for a step of your own.

        It is MindSpore's `DistributedGradReducer` with the group, degree and mean of this context,
        and works in PyNative and in Graph mode, within `mindspore.jit` too. Not collective to make,
        but every rank makes it alike; collective over the data axes to call. It reduces in
        float32, and a rank that is later than MindSpore's limit may get wrong values unnoticed.

        Args:
            parameters: in the order of the gradients, such as `optimizer.parameters`.
        """
        self._own("grad_reducer")
        return self._recipe.reducer(parameters)

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
            dataset: a MindSpore dataset, or items by index; the same on every rank.
            batch_size: items in a batch of this data part; None: those of the data set's own
                `batch`, else 1.
            mode: `"pad"`, `"drop"` or `"uneven"`; see `parallelkit.data.shard_indices`.
            shuffle: permute by `seed` and epoch; None: as the data set does.
            options: as `parallelkit_mindspore.loader.make_loader` has them.

        Raises:
            DataShardError, UnsupportedFeatureError: as `make_loader` says.
        """
        from parallelkit_mindspore.loader import make_loader

        return make_loader(
            dataset,
            index=self.plan.data_shard_index(self._group.rank),
            count=self.plan.data_shard_count,
            batch_size=batch_size,
            mode=mode,
            shuffle=shuffle,
            seed=seed,
            **options,
        )

    def seed(self, base: int) -> int:
        """Seed Python's, NumPy's and MindSpore's generators for this rank's place; return the seed.

        Data parts get different seeds, for dropout and augmentation; ranks of one data part, which
        compute one thing together, get the same. Not collective.

        Raises:
            DataShardError: `base` is no integer.
        """
        runtime.own("seed")
        return seed_all(base, self.plan.data_shard_index(self._group.rank))

    def save(
        self,
        path: str,
        model: nn.Cell,
        optimizer: nn.Cell | None = None,
        *,
        extra: Mapping[str, Plain] | None = None,
        overwrite: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Write a checkpoint that any other plan can load. Collective; see `checkpoint.save`.

        Args:
            path: a folder; it appears there when all of it is on disk.
            model: what `parallelize` gave, or a step or `Model` around it.
            optimizer: its state is saved too.
            extra: plain values that `load` gives back: a step's number, `loader.state_dict()`.
            overwrite: replace a checkpoint that is there.
            timeout: seconds; default ten times the group's.
        """
        from parallelkit_mindspore.parallel import checkpoint

        runtime.own("save")
        spread = self._spread(model, inside=True)
        checkpoint.save(
            path,
            checkpoint.State.of(spread.parameters, spread.dims, optimizer),
            plan=self.plan,
            groups=self._groups,
            group=self._group,
            extra=extra,
            overwrite=overwrite,
            timeout=timeout,
        )

    def load(
        self,
        path: str,
        model: nn.Cell,
        optimizer: nn.Cell | None = None,
        *,
        timeout: float | None = None,
    ) -> dict[str, Plain]:
        """Read a checkpoint in place, whatever plan wrote it. Collective; see `checkpoint.load`.

        Arguments are those of `save`. Gradients are forgotten; train steps count anew.

        Returns:
            The `extra` that was saved.

        Raises:
            CheckpointError: it is incomplete, damaged, or not this model's; nothing was changed.
        """
        from parallelkit_mindspore.parallel import checkpoint

        runtime.own("load")
        spread = self._spread(model, inside=True)
        extra = checkpoint.load(
            path,
            checkpoint.State.of(spread.parameters, spread.dims, optimizer),
            place=(self._groups.group("tensor").rank, self.plan.tensor),
            group=self._group,
            timeout=timeout,
        )
        spread.begin()
        return extra

    def reset(self) -> None:
        """Forget the models, and put MindSpore's settings back to what they were.

        Harmless when repeated. Steps that were built under it keep what they read.
        """
        runtime.own("reset")
        self._models.clear()
        self._native.restore()
        if not in_force():
            retire_steps()

    def explain(self) -> str:
        """Say what runs, why, and what was done to each model, in order."""
        lines = described(self, self._settings, self._chosen, self._native)
        for model, spread in self._models.items():
            lines.append(f"{type(model).__name__}, what was done to it:")
            lines += [f"  {n}. {done}" for n, done in enumerate(spread.done, 1)]
        return "\n".join(lines)

    def _own(self, what: str) -> None:
        runtime.own(what)
        self._native.refuse_changes(what)

    def _spread(self, model: Any, *, inside: bool = False) -> Spread:
        return spread_of(model, self._models, inside=inside)
