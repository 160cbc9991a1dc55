"""Modes `semi_auto` and `auto`: MindSpore divides the operators of one graph over all ranks.

The graph holds the whole training step: forward, backward, reductions and optimiser. MindSpore
compiles it for Ascend and GPU only. None of this was ever run on an NPU, nor on a GPU; tests
compile forward graphs and whole steps for 8 ranks, and compare what MindSpore planned.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, NoReturn, final
from weakref import WeakKeyDictionary

from parallelkit.data import derive_seed
from parallelkit.errors import (
    LayoutError,
    StrategyError,
    UnsupportedFeatureError,
)
from parallelkit.plan import ParallelPlan
from parallelkit.protocols import ParallelContext, Plain, ProcessGroup
from parallelkit.specs import ContextSpec
from parallelkit_mindspore import runtime
from parallelkit_mindspore.parallel import auto_native
from parallelkit_mindspore.parallel.auto_settings import AutoSettings
from parallelkit_mindspore.parallel.settings_native import NativeSettings
from parallelkit_mindspore.parallel.strategies import Strategies, from_compiled, read_file

#: Said wherever a CPU cannot do it.
WHY_NOT = "MindSpore compiles modes 'semi_auto' and 'auto' for Ascend and GPU only"

#: MindSpore builds its steps alike in these modes: without a reducer of their own.
_BUILT_ALIKE = ("stand_alone", "semi_auto_parallel", "auto_parallel")


def setup(spec: ContextSpec, group: ProcessGroup) -> ParallelContext:
    """Make a context of mode `semi_auto` or `auto`. Nothing is sent.

    With `fallback` on a CPU: the same degrees as mode data or hybrid; options are checked alike.

    Raises:
        UnsupportedFeatureError: this device is a CPU and `fallback` is off; or an option is
            unknown or has a wrong value, or the group is not MindSpore's whole world.
        StrategyError: the file to load is missing, damaged, or for other ranks.
        ContextOrderError: a training step exists that was built under other settings.
    """
    cpu = group.device.partition(":")[0] == "cpu"
    if cpu and not spec.fallback:
        raise UnsupportedFeatureError(
            f"mode {spec.mode!r} cannot run on {group.device!r}: {WHY_NOT}. Here run "
            "'standalone', 'data' and 'hybrid'; fallback=True takes one of them"
        )
    settings = AutoSettings.of(spec.options, spec.plan, spec.mode, spec.pinned)
    _, load = settings.files(spec.plan, group.rank)
    if load is not None:
        read_file(load).check(spec.plan, f"the strategy file {load!r}")
    if cpu:
        from parallelkit_mindspore.parallel.without_search import ContextWithoutSearch

        return ContextWithoutSearch(spec, group, settings, WHY_NOT)
    runtime.mindspore("parallel_context")
    if auto_native.world() != (group.rank, group.world_size):
        rank, size = auto_native.world()
        raise UnsupportedFeatureError(
            f"the group has rank {group.rank} of {group.world_size}, and MindSpore's world has "
            f"rank {rank} of {size}; mode {spec.mode!r} spreads over the whole world only"
        )
    return MindSporeAutoContext(spec, group, settings)


@final
class MindSporeAutoContext:
    """A `parallelkit.protocols.ParallelContext` whose division MindSpore's compiler makes.

    `parallelize` takes the cell that will be called outermost: a whole training step such as
    `nn.TrainOneStepCell`, or the network that `Model` is given. What belongs to the step by hand
    (`train_step`, `accumulate`, `clip_grad_norm_`, ...) is refused by name: it has to be in the
    graph.

    Never run on an NPU or a GPU; compiled in tests.
    """

    framework: ClassVar[str] = "mindspore"

    def __init__(self, spec: ContextSpec, group: ProcessGroup, settings: AutoSettings) -> None:
        self._spec = spec
        self._group = group
        self._settings = settings
        self._steps: WeakKeyDictionary[Any, list[str]] = WeakKeyDictionary()
        values = settings.context_values(spec.plan, group.rank, spec.reduce)
        self._values = values
        self._native = NativeSettings(values if settings.api == "context" else {})
        if settings.api == "context":
            from parallelkit_mindspore.parallel.existing import refuse_steps

            like = _BUILT_ALIKE if spec.plan.pipeline == 1 else ()
            read = ("parallel_mode", "gradients_mean", "device_num")
            refuse_steps({name: values[name] for name in read}, like=like)
            self._native.apply()

    # --- facts

    @property
    def plan(self) -> ParallelPlan:
        """The plan asked for; what a search found is in `found_plan`."""
        return self._spec.plan

    @property
    def group(self) -> ProcessGroup:
        return self._group

    @property
    def mode(self) -> str:
        return self._spec.mode

    @property
    def effective(self) -> str:
        return self._spec.mode

    @property
    def reduce(self) -> str:
        return self._spec.reduce

    @property
    def native(self) -> Mapping[str, Any]:
        """The settings as `mindspore.set_auto_parallel_context` names them."""
        return self._values | self._native.changed()

    # --- models

    def parallelize(self, model: Any) -> Any:
        """Prepare the outermost cell to be divided when it is compiled. Collective.

        Ranks compare names, shapes, dtypes and what is trained; rank 0's values win, where there
        are values already. Layouts go by the names of the cell given here.

        Args:
            model: the whole training step, or the network for `Model(...)`.

        Returns:
            With api `"AutoParallel"` MindSpore's wrapper, else the cell itself.

        Raises:
            UnsupportedFeatureError: it is no cell, or api `"context"` without graph mode.
            LayoutError: the layouts do not fit the model; or mode `"semi_auto"` has a tensor axis
                and nothing says what it divides.
            RankMismatchError: ranks gave different models.
            ContextOrderError: with api `"context"`, the user changed MindSpore's settings since.
        """
        ms = runtime.mindspore("parallelize")
        self._native.refuse_changes("parallelize")
        if not isinstance(model, ms.nn.Cell):
            raise UnsupportedFeatureError(
                f"parallelize got a {type(model).__qualname__}; it takes a mindspore.nn.Cell"
            )
        if self._settings.api == "context" and ms.get_context("mode") != ms.GRAPH_MODE:
            raise UnsupportedFeatureError(
                f"mode {self.mode!r} divides graphs, and PyNative mode is on; call "
                "mindspore.set_context(mode=mindspore.GRAPH_MODE) first, or leave out "
                "api='context'"
            )
        done = self._lay_out(model)
        self._same_model(model)
        made = model
        if self._settings.api == "AutoParallel":
            made = auto_native.wrap(model, self._settings, self.plan, self._group.rank, self.reduce)
        self._steps[made] = done
        return made

    def compile(self, model: Any, *inputs: Any) -> Any:
        """Compile a step for inputs like these, and look at the strategies. Returns `model`.

        Not necessary before a step is called, which compiles too; but here errors have names, and
        `explain()` shows what was planned before anything runs. Every rank compiles; on a device
        MindSpore makes its groups then, and waits for all ranks.

        Args:
            model: what `parallelize` gave.
            inputs: as the step takes them.

        Raises:
            LayoutError: an operator cannot be divided as laid out; with its name.
            StrategyError: the strategy file was not written.
            UnsupportedFeatureError: `model` is not of this context, or the backend cannot.
        """
        self._known(model)
        auto_native.compile_cell(model, inputs)
        save, _ = self._settings.files(self.plan, self._group.rank)
        if save is not None:
            if not Path(save).exists():
                raise StrategyError(f"MindSpore compiled without writing strategy_save={save!r}")
            read_file(save)
        return model

    def strategies(self, model: Any) -> Strategies:
        """How MindSpore divides a compiled step.

        Raises:
            StrategyError: the step is not compiled, or MindSpore's answer cannot be read.
            UnsupportedFeatureError: `model` is not of this context.
        """
        self._known(model)
        if not auto_native.is_compiled(model):
            raise StrategyError("the step is not compiled yet; call context.compile(step, *inputs)")
        operators, layouts = auto_native.strategies_of(model)
        stage = self.plan.coordinates(self._group.rank)["pipeline"]
        return from_compiled(operators, layouts, names=auto_native.trained(model), stage=stage)

    def found_plan(self, model: Any) -> ParallelPlan | None:
        """The degrees that a search came to, where they are those of a plan; see `strategies`."""
        return self.strategies(model).found_plan(self.plan)

    def train_step(
        self, model: Any, inputs: Any, target: Any = None, *, loss: Callable[..., Any], **other: Any
    ) -> NoReturn:
        """Refused: the step is one graph, which `parallelize` was given."""
        raise self._in_the_graph("train_step")

    def accumulate(self, model: Any, *, sync: bool) -> AbstractContextManager[None]:
        """Refused: gradients are reduced inside the graph."""
        raise self._in_the_graph("accumulate")

    def apply_gradients(self, model: Any, optimizer: Any) -> NoReturn:
        """Refused: the optimiser is in the graph."""
        raise self._in_the_graph("apply_gradients")

    def clip_grad_norm_(self, model: Any, max_norm: float, *, norm_type: float = 2.0) -> NoReturn:
        """Refused: gradients exist inside the graph only."""
        raise self._in_the_graph("clip_grad_norm_")

    def weighted_mean(self, total: Any, weight: float) -> NoReturn:
        """Refused: the loss of the graph is that of the whole batch already."""
        raise self._in_the_graph("weighted_mean")

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
        """Make a loader over the part of `dataset` that this rank puts in. Not collective.

        Which part follows `dataset_strategy`: by default each rank of a stage has its own.
        """
        from parallelkit_mindspore import loader

        index, count = self._data_part()
        return loader.make_loader(
            dataset,
            index=index,
            count=count,
            batch_size=batch_size,
            mode=mode,
            shuffle=shuffle,
            seed=seed,
            **options,
        )

    def seed(self, base: int) -> int:
        """Seed MindSpore alike on every rank, as one graph needs; Python and NumPy by data part.

        Returns the seed of this data part. Not collective.

        Raises:
            DataShardError: `base` is no integer.
        """
        import numpy as np

        part = derive_seed(base, self._data_part()[0])
        runtime.mindspore("seed").set_seed(derive_seed(base, 0) % 2**31)
        np.random.seed(part % 2**32)
        random.seed(part)
        return part

    def save(
        self,
        path: str,
        model: Any,
        optimizer: Any = None,
        *,
        extra: Mapping[str, Plain] | None = None,
        overwrite: bool = False,
        timeout: float | None = None,
    ) -> NoReturn:
        """Refused: parameters are divided as compiled; MindSpore's own functions know how."""
        raise self._by_mindspore("save", "save_checkpoint")

    def load(
        self, path: str, model: Any, optimizer: Any = None, *, timeout: float | None = None
    ) -> NoReturn:
        """Refused; see `save`."""
        raise self._by_mindspore("load", "load_distributed_checkpoint")

    def reset(self) -> None:
        """Put MindSpore's settings back as they were, and forget the steps."""
        self._native.restore()
        self._steps.clear()

    def explain(self) -> str:
        """Say what was asked for, and for each compiled step how MindSpore divides it."""
        fixed = self._spec.pinned if self.mode == "auto" else self.plan.degrees
        degrees = ", ".join(f"{axis} {degree}" for axis, degree in fixed.items() if degree > 1)
        index, count = self._data_part()
        lines = [
            f"mode {self.mode!r} on {self._group.device} with {self._group.backend}: "
            f"{self.plan.world_size} ranks{', ' + degrees if degrees else ''}",
            f"gradients: {self.reduce}, inside the graph",
            f"data: part {index} of {count}",
            *self._native.changed_lines(),
            *self._settings.lines(),
        ]
        for step, done in self._steps.items():
            inner = getattr(step, "network", step) if self._settings.api != "context" else step
            lines.append(f"{type(inner).__name__}:")
            lines += [f"  layout: {line}" for line in done]
            if not auto_native.is_compiled(step):
                lines.append("  not compiled yet; call context.compile(step, *inputs)")
                continue
            strategies = self.strategies(step)
            found = strategies.found_plan(self.plan) if self.mode == "auto" else None
            if found is not None:
                lines.append(f"  the search found {found.title}")
            lines += [f"  {line}" for line in strategies.explain(found or self.plan)]
        return "\n".join(lines)

    # --- inner parts

    def _lay_out(self, model: Any) -> list[str]:
        from parallelkit_mindspore.parallel import operator_layouts

        done = operator_layouts.apply(model, self._settings.layouts, self.plan)
        needed = self.mode == "semi_auto" and self.plan.tensor > 1
        if needed and self._settings.strategy_load is None and not operator_layouts.divided(model):
            raise LayoutError(
                f"tensor={self.plan.tensor} was asked for in mode 'semi_auto', and nothing says "
                "what it divides; give layouts={pattern: 'colwise' | 'rowwise' | strategy}, "
                "strategy_load=, or call operator.shard(...) in the model"
            )
        return done

    def _same_model(self, model: Any) -> None:
        from parallelkit_mindspore.parallel import replicate

        replicate.check_same(model, self._group)
        if not any(p.has_init for p in replicate.parameters(model).values()):
            replicate.synchronise(model, self._group)

    def _data_part(self) -> tuple[int, int]:
        """Which part of a batch this rank puts in, and of how many."""
        ranks = self.plan.world_size // self.plan.pipeline
        count = self._settings.data_parts(self.plan)
        return self._group.rank % ranks // (ranks // count), count

    def _known(self, model: Any) -> None:
        if model not in self._steps:
            raise UnsupportedFeatureError(
                f"this {type(model).__qualname__} was not given back by parallelize() of this "
                "context; call step = context.parallelize(step) first"
            )

    def _in_the_graph(self, what: str) -> UnsupportedFeatureError:
        return UnsupportedFeatureError(
            f"{what}() cannot be used in mode {self.mode!r}: MindSpore divides a whole training "
            "step as one graph. Put it into a cell, such as nn.TrainOneStepCell, and give that "
            "cell to context.parallelize()"
        )

    def _by_mindspore(self, what: str, function: str) -> UnsupportedFeatureError:
        return UnsupportedFeatureError(
            f"{what}() cannot be used in mode {self.mode!r}, whose parameters are divided as "
            f"MindSpore compiled them; use mindspore.{function}, with the strategy file of "
            "strategy_save="
        )
