"""Local tensors: what a module outside of divided layers sees."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement


def moved(x: torch.Tensor, mesh: DeviceMesh, have: Placement, want: Placement) -> torch.Tensor:
    """Turn a local tensor from one placement to another; its gradient goes the other way.

    Collective over the mesh where `want` needs another rank's part; the length of a dim that is
    divided has to be a multiple of the mesh's size.
    """
    spread = DTensor.from_local(x, mesh, [have], run_check=False)
    return spread.redistribute(placements=[want]).to_local()


def own_outputs(module: nn.Module) -> None:
    """Let the outputs of `module` be tensors of their own, not views, without a copy.

    `DTensor.to_local` gives a view, of a wait for a collective even. FSDP2 hangs its pre-backward
    hook on a module's output; an operation in place on a view (`logits /= 2`) would drop it and
    make gradients wrong without a word. For modules whose last operation saves no output for
    its gradient (a linear layer, a collective): what is saved would be changed in place as well.
    """
    module.register_forward_hook(_own)


def _own(_: nn.Module, __: Any, output: Any) -> Any:
    if torch.compiler.is_compiling():
        return output  # what is compiled has no hooks to lose
    if isinstance(output, tuple):
        return tuple(_owned(value) for value in output)
    return _owned(output)


def _owned(value: Any) -> Any:
    plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    return _Owned.apply(value) if plain else value  # type: ignore[no-untyped-call]


class _Owned(torch.autograd.Function):
    """The identity, as a new tensor on the same memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        fresh: Any = torch.empty(0, dtype=x.dtype, device=x.device)
        same_memory: torch.Tensor = fresh.set_(x.detach())
        return same_memory

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient
