"""Styles that divide activations along the sequence between attention and MLP.

Inside the blocks of a model the residual stream is [batch, length / degree, width] on each rank;
outside of them every tensor is whole, so positions, masks and losses need no change.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle

from parallelkit.errors import LayoutError
from parallelkit_torch.parallel.local import moved

_Change = Callable[[torch.Tensor], torch.Tensor]


@final
class Sequence(ParallelStyle):
    """Run a norm on a part of a dim: its input and output are local, divided in `dim`.

    Its weights become whole `DTensor`s, with the values of the first rank; their gradients are
    summed over ranks. Torch's own `SequenceParallel` trusts that values agree already, and makes
    frozen weights trainable.

    Args:
        dim: 1, the sequence; 2 for norms of each head, [batch, length, heads, head width].
    """

    def __init__(self, dim: int = 1) -> None:
        self.dim = dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        divided = [Shard(self.dim)]

        def enter(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            first = DTensor.from_local(inputs[0], mesh, divided, run_check=False)
            return (first, *inputs[1:])

        def leave(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.redistribute(mesh, divided).to_local()

        if not any(True for _ in module.parameters()):
            return module  # dropout and the like work on a part as they are
        return distribute_module(module, device_mesh, _replicate, enter, leave)

    def __repr__(self) -> str:
        return f"Sequence(dim={self.dim})"


@final
class Entry(ParallelStyle):
    """Gather a region's first input, once for all its projections.

    The region sees a whole `DTensor`, so its gradient is summed and divided again in one
    reduce-scatter. A region that does more with its input than to project it fails there, loudly.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(x: torch.Tensor) -> torch.Tensor:
            divided = DTensor.from_local(x, device_mesh, [Shard(1)], run_check=False)
            return divided.redistribute(placements=[Replicate()])

        _on_first_input(module, gather)
        return module

    def __repr__(self) -> str:
        return "Entry()"


@final
class Block(ParallelStyle):
    """Mark a layer whose inner activations are divided along the sequence.

    Args:
        first: its input is whole, and is divided on entry.
        last: its output is gathered. `tensor.apply` finds out which blocks are first and last
            of those that the rank holds, since a pipeline stage holds only some.
    """

    def __init__(self, *, first: bool = False, last: bool = False) -> None:
        self.first, self.last = first, last

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        degree = device_mesh.size()

        def divide(x: torch.Tensor) -> torch.Tensor:
            _check_length(x, degree)
            return moved(x, device_mesh, Replicate(), Shard(1))

        def gather(_: nn.Module, __: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                whole = moved(output[0], device_mesh, Shard(1), Replicate())
                return (whole, *output[1:])
            return moved(output, device_mesh, Shard(1), Replicate())

        if self.first:
            _on_first_input(module, divide)
        if self.last:
            module.register_forward_hook(gather)
        return module

    def __repr__(self) -> str:
        return f"Block(first={self.first}, last={self.last})"


def _replicate(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for key, value in list(module.named_parameters(recurse=False)):
        whole = distribute_tensor(value, mesh, [Replicate()])
        module.register_parameter(key, nn.Parameter(whole, requires_grad=value.requires_grad))


def _check_length(x: torch.Tensor, degree: int) -> None:
    if x.dim() < 3 or x.shape[1] % degree:
        raise LayoutError(
            f"sequence=True with tensor={degree} got hidden states of shape {list(x.shape)}; they "
            f"are [batch, length, width] with a length that {degree} divides. Pad the sequence, "
            "or leave sequence=False"
        )


def _on_first_input(module: nn.Module, change: _Change) -> None:
    """Change the first input of `module` at each call, by whichever way it is passed."""
    name = next(iter(inspect.signature(module.forward).parameters), "")

    def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        if name not in kwargs:
            raise LayoutError(
                f"sequence=True divides the first input, {name!r}, of a "
                f"{type(module).__qualname__}, and it was called with {sorted(kwargs)}"
            )
        return args, {**kwargs, name: change(kwargs[name])}

    module.register_forward_pre_hook(hook, with_kwargs=True)
