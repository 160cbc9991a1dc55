"""A rank's stages as one module: plain names for parameters, one place for modes and devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self, final

from torch import nn

from parallelkit.errors import StageError
from parallelkit_torch.parallel.cutting import KeptList, Nothing, PassThrough

if TYPE_CHECKING:
    from parallelkit_torch.parallel.schedule import Runner


class Part(nn.Module):
    """A module of the model of which several stages of this rank have something."""


@final
class PipelineModule(nn.Module):
    """The stages that one rank of a pipeline holds.

    Its submodules, parameters, buffers and `state_dict` are those of its stages, under the
    names they have in the whole model; it holds the same objects, so that what is done to a
    stage in place, such as sharding, shows here. It is run by `context.train_step`, never by
    calling it.

    Attributes:
        stage_modules: this rank's stages, in order; each runs by itself.
        stages: names of modules, for every stage of the pipeline.
        indices: which of them are here.
        runner: what runs them.
    """

    stage_modules: tuple[nn.Module, ...]

    def __init__(
        self,
        stage_modules: Sequence[nn.Module],
        *,
        stages: Sequence[Sequence[str]],
        indices: Sequence[int],
        runner: Runner | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.stage_modules = tuple(stage_modules)  # a tuple, so they are no submodules
        self.stages = [list(names) for names in stages]
        self.indices = tuple(indices)
        self.runner = runner
        self.notes = list(notes)
        self.training = self.stage_modules[0].training
        _merge_into(self, self.stage_modules)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: a stage has no output of the whole model.

        Raises:
            StageError: always.
        """
        raise StageError(
            "a pipeline is not called: use context.train_step(model, inputs, target, loss=...), "
            "or with backward=False to evaluate"
        )

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode on every stage."""
        for stage in self.stage_modules:
            stage.train(mode)
        self.training = mode
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each stage in place, as `nn.Module.compile` does."""
        for stage in self.stage_modules:
            stage.compile(*args, **kwargs)

    def explain(self) -> list[str]:
        """Say what is in which stage, what was compared, and how batches ran so far."""
        here = dict.fromkeys(self.indices, " (here)")
        lines = [
            f"stage {index}{here.get(index, '')}: {names[0]}"
            + (f" to {names[-1]}, {len(names)} modules" if len(names) > 1 else "")
            for index, names in enumerate(self.stages)
        ]
        return [*lines, *self.notes, *(self.runner.explain() if self.runner is not None else [])]

    def extra_repr(self) -> str:
        return f"stages {', '.join(map(str, self.indices))} of {len(self.stages)}"


def _merge_into(target: nn.Module, modules: Sequence[nn.Module]) -> None:
    """Give `target` what `modules`, clones of one module, have together, as the same objects."""
    first = modules[0]
    target._buffers, target._parameters = first._buffers, first._parameters
    target._non_persistent_buffers_set = first._non_persistent_buffers_set
    if len(modules) == 1:
        target._modules = first._modules
        return
    names = dict.fromkeys(name for module in modules for name in module._modules)
    for name in names:
        here = [m._modules[name] for m in modules if name in m._modules]
        real = [m for m in here if m is not None and not isinstance(m, PassThrough | Nothing)]
        different = list({id(m): m for m in real}.values())
        if len(different) > 1:
            part: nn.Module = Part()
            if isinstance(different[0], nn.ModuleList):
                part = KeptList()
            _merge_into(part, different)
            target._modules[name] = part
        else:
            target._modules[name] = different[0] if different else here[0]
