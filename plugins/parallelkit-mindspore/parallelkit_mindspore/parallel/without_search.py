"""What `fallback=True` gives where MindSpore compiles neither `semi_auto` nor `auto`: a CPU.

The context of mode data or hybrid, with the methods that scripts for the other two call besides.
"""

from __future__ import annotations

from typing import Any, final

import attrs
from mindspore import nn

from parallelkit.context import plan_for
from parallelkit.errors import LayoutError
from parallelkit.plan import ParallelPlan
from parallelkit.protocols import ProcessGroup
from parallelkit.specs import ContextSpec
from parallelkit_mindspore import runtime
from parallelkit_mindspore.parallel import operator_layouts
from parallelkit_mindspore.parallel.auto_settings import AutoSettings
from parallelkit_mindspore.parallel.context import MindSporeParallelContext
from parallelkit_mindspore.parallel.device_layout import DeviceLayout
from parallelkit_mindspore.parallel.settings import Settings
from parallelkit_mindspore.parallel.strategies import Strategies


@final
class ContextWithoutSearch(MindSporeParallelContext):
    """A context of mode standalone, data or hybrid, in place of `semi_auto` or `auto`.

    Layouts are checked as these would; the styles among them are used, operators' strategies are
    not. `compile` does nothing, and `strategies` and `found_plan` tell of the plan that runs.
    """

    def __init__(
        self, spec: ContextSpec, group: ProcessGroup, asked: AutoSettings, why: str
    ) -> None:
        """
        Args:
            spec: as the user asked.
            asked: its options, checked.
            why: it cannot run here.
        """
        self._asked, self._asked_plan = asked, spec.plan
        plan = plan_for(spec.plan.world_size, None, spec.pinned)
        styles = {p: style for p, style in asked.layouts.items() if isinstance(style, str)}
        kept = {"layouts": styles} if styles and plan.tensor > 1 else {}
        dropped = sorted(set(spec.options) - set(kept))
        if kept:
            dropped += [f"layouts of {p!r}" for p in asked.layouts if p not in styles]
        chosen = [
            f"{why}, and this is {group.device!r}: mode {plan.mode!r} runs instead",
            *([f"not used by it: {', '.join(dropped)}"] if dropped else []),
            "compile() does nothing here: a step is compiled when it is called, in graph mode",
        ]
        nearest = attrs.evolve(spec, plan=plan, options=kept)
        settings = Settings.of(kept, plan, spec.mode, spec.reduce)
        super().__init__(nearest, group, settings, effective=plan.mode, chosen=chosen)

    def parallelize(self, model: nn.Cell) -> nn.Cell:
        """As `MindSporeParallelContext.parallelize`; collective.

        Raises:
            LayoutError: the layouts do not fit the model, as with MindSpore's own modes, or none
                of them is a style and there is a tensor axis to divide by.
        """
        runtime.own("parallelize")
        if isinstance(model, nn.Cell):
            operator_layouts.check(model, self._asked.layouts, self._asked_plan)
        if self.plan.tensor > 1 and self._asked.layouts and not self._settings.layouts:
            raise LayoutError(
                f"mode {self.effective!r}, which runs instead of {self.mode!r}, divides no "
                f"operators, and layouts has strategies of operators only; for "
                f"tensor={self.plan.tensor} add styles: layouts={{'layers.*.up': 'colwise', "
                "'layers.*.down': 'rowwise'}"
            )
        return super().parallelize(model)

    def compile(self, model: nn.Cell, *inputs: Any) -> nn.Cell:
        """Return `model`: there is nothing to plan beforehand. Not collective.

        Raises:
            UnsupportedFeatureError: `model` is not of this context.
        """
        self._spread(model)
        return model

    def strategies(self, model: nn.Cell) -> Strategies:
        """How the parameters lie; there are no operators' strategies. Not collective.

        Raises:
            UnsupportedFeatureError: `model` is not of this context.
        """
        spread, tensor = self._spread(model), self.plan.tensor
        layouts = {}
        for name, parameter in spread.parameters.items():
            cut = spread.dims.get(name)
            extents = enumerate(int(n) for n in parameter.shape)
            layouts[name] = DeviceLayout(
                matrix=(self.plan.world_size // tensor, tensor),
                tensor_map=[0 if dim == cut else -1 for dim in range(len(parameter.shape))],
                shape=[n * tensor if dim == cut else n for dim, n in extents],
            )
        return Strategies(parameters=layouts)

    def found_plan(self, model: nn.Cell) -> ParallelPlan:
        """The plan that runs: nothing was searched. Not collective.

        Raises:
            UnsupportedFeatureError: `model` is not of this context.
        """
        self._spread(model)
        return self.plan
