"""What goes from stage to stage: found by running each stage once, told in msgpack.

torch can find it by itself, but tells the next stage by pickle, so it is given the shapes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallelkit.errors import StageError
from parallelkit.protocols import Plain, ProcessGroup

_DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


class Shape(NamedTuple):
    """One tensor between two stages.

    Attributes:
        sizes: of its dims.
        dtype: such as `bfloat16`.
        trained: whether a gradient comes back for it.
    """

    sizes: tuple[int, ...]
    dtype: str
    trained: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Shape:
        name = str(tensor.dtype).removeprefix("torch.")
        return cls(tuple(tensor.shape), name, tensor.requires_grad)

    def make(self, device: torch.device | str) -> torch.Tensor:
        """Zeros like this one, a leaf."""
        zeros = torch.zeros(self.sizes, dtype=_DTYPES[self.dtype], device=device)
        return zeros.requires_grad_(self.trained)


def find(
    stage_modules: Mapping[int, nn.Module],
    count: int,
    group: ProcessGroup,
    arguments: Sequence[torch.Tensor],
    named: Mapping[str, torch.Tensor],
    *,
    backward: bool,
) -> list[tuple[Shape, ...]]:
    """Run every stage but the last on one microbatch and note what each gives.

    Collective over `group`, one message a stage. The first stage runs on real values, the others
    on zeros; buffers and random numbers are as before afterwards.

    Args:
        stage_modules: this rank's, by index.
        count: of all stages; stage k is on rank k modulo the group's size.
        arguments: of the first stage: one microbatch.
        named: arguments that every stage gets by name.
        backward: whether gradients will be asked for.

    Returns:
        For each stage but the last, the tensors that it gives.

    Raises:
        StageError: a stage failed, on any rank.
    """
    found: list[tuple[Shape, ...]] = []
    for index in range(count - 1):
        mine, problem = None, None
        if index in stage_modules:
            try:
                given = [s.make(group.device) for s in found[-1]] if found else arguments
                mine = _run(stage_modules[index], index, given, named, backward=backward)
            except Exception as error:  # the other ranks wait: tell them, then raise
                error.add_note(f"parallelkit: in stage {index}, run to find what it gives")
                problem = error
        told: Plain = None
        if problem is not None:
            told = f"{type(problem).__name__}: {problem}"
        elif mine is not None:
            told = [[list(shape.sizes), shape.dtype, shape.trained] for shape in mine]
        told = group.broadcast_object(told, index % group.world_size)
        if problem is not None:
            raise problem
        if not isinstance(told, list):  # the text of the error
            raise StageError(f"stage {index} failed, on rank {index % group.world_size}: {told!s}")
        found.append(tuple(_shape(item) for item in told))
    return found


def _shape(item: Plain) -> Shape:
    sizes, dtype, trained = cast("list[Any]", item)
    return Shape(tuple(sizes), dtype, trained)


def _run(
    stage: nn.Module,
    index: int,
    arguments: Sequence[torch.Tensor],
    named: Mapping[str, torch.Tensor],
    *,
    backward: bool,
) -> tuple[Shape, ...]:
    with _untouched(stage, arguments), torch.no_grad():
        output = stage(*arguments, **named)
    outputs = output if isinstance(output, tuple) else (output,)
    for x in outputs:
        if isinstance(x, DTensor):
            raise StageError(
                f"stage {index} gives a DTensor; what goes to the next stage is a plain tensor: "
                "let the layout of its last module give local output"
            )
    # Not seen without a graph, which would cost its memory. Where this says too much, zeros come
    # back for the output, and torch leaves them out.
    trained = backward and any(x.requires_grad for x in (*arguments, *stage.parameters()))
    return tuple(Shape.of(x)._replace(trained=trained and x.is_floating_point()) for x in outputs)


@contextlib.contextmanager
def _untouched(stage: nn.Module, arguments: Sequence[torch.Tensor]) -> Iterator[None]:
    """Put buffers, such as running statistics, and random states back afterwards."""
    kept = [
        (module._buffers, name, buffer, buffer.clone())
        for module in stage.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    devices = {x.device for x in arguments if x.device.type not in ("cpu", "meta")}
    kind = next((device.type for device in devices), "cuda")
    try:
        with torch.random.fork_rng(devices=list(devices), device_type=kind):
            yield
    finally:
        with torch.no_grad():
            for holder, name, buffer, values in kept:
                holder[name] = buffer.copy_(values)
