"""One stage as `torch.distributed.pipelining` runs it, with what it does differently for us."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

from parallelkit.errors import UnsupportedFeatureError
from parallelkit_torch.group import TorchProcessGroup
from parallelkit_torch.parallel.activations import Shape


class Stage(PipelineStage):
    """A stage that notes whose error it was, and reduces gradients when told to only.

    Attributes:
        blame: is told what the user's code raised, and where.
        sync: whether the last backward pass of this batch reduces over the data axes.
    """

    blame: Callable[[Exception, str], None]
    sync: bool

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]
        except Exception as error:
            self.blame(error, f"in the forward pass of stage {self.stage_index}")
            raise

    def backward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().backward_maybe_with_nosync(*args, **kwargs)
        except Exception as error:
            self.blame(error, f"in the backward pass of stage {self.stage_index}")
            raise

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Called by the schedule after the last backward pass, and by mistake after none."""
        if self.has_backward and self.sync:
            super().perform_reduce_grad(grad_scale_factor)

    def _validate_fwd_outputs(self, outputs: tuple[torch.Tensor, ...]) -> None:
        """Compare what is sent on with what was told; torch 2.11 does so for the last stage too.

        What the last stage gives is no one's input but the loss's, and was told to nobody.
        """
        if not self.is_last:
            super()._validate_fwd_outputs(outputs)  # type: ignore[misc]  # not in torch 2.13

    def _post_metadata_inference_cleanup(self) -> None:
        """Do nothing: torch would drop gradients that earlier batches left to add up.

        It does so after running the stage to find shapes, and, as of 2.13, where it was told the
        shapes and ran nothing, too.
        """


def make(
    module: nn.Module,
    index: int,
    edges: Sequence[tuple[Shape, ...]],
    group: TorchProcessGroup,
    blame: Callable[[Exception, str], None],
) -> Stage:
    """Make a stage of `len(edges) - 1` that is told what it gets and gives: nothing is sent.

    Args:
        module: what it runs.
        index: its place.
        edges: before the first stage, between every two, and after the last.
        group: over the pipeline axis.
        blame: see `Stage`.

    Raises:
        UnsupportedFeatureError: `module` is replicated by DDP, or this torch is another one than
            parallelkit knows.
    """
    if isinstance(module, DistributedDataParallel):
        raise UnsupportedFeatureError(
            "a stage is wrapped in DistributedDataParallel; replicas of a stage are made by "
            "fully_shard over a mesh of replicas and one shard, as the context does"
        )
    if not hasattr(PipelineStage, "perform_reduce_grad"):  # else `sync` would mean nothing
        raise UnsupportedFeatureError(
            f"torch {torch.__version__} reduces gradients of a pipeline in another way than "
            "parallelkit knows; use 2.11 to 2.13"
        )
    stage = Stage(
        module,
        index,
        len(edges) - 1,
        torch.device(group.device),
        input_args=tuple(shape.make("meta") for shape in edges[index]),
        output_args=tuple(shape.make("meta") for shape in edges[index + 1]),
        group=group.native,
    )
    stage.blame = blame
    return stage
