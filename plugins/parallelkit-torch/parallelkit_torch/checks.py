"""What one rank alone can see is wrong with a collective's arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch

from parallelkit.errors import CollectiveError, GroupError
from parallelkit.specs import check_timeout
from parallelkit_torch.wire import OPS

#: What gloo can combine. It moves everything.
_GLOO_DTYPES: Final = frozenset(
    {torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool}
    | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
    | {torch.complex64, torch.complex128}
)


def describe(call: str, x: torch.Tensor, device: torch.device) -> str:
    """Check that `x` is a dense tensor on the group's device; return the call with its type."""
    if not isinstance(x, torch.Tensor):
        raise CollectiveError(f"{call} got a {type(x).__qualname__}; it takes a torch.Tensor")
    if x.layout is not torch.strided or x.device.type != device.type:
        raise CollectiveError(
            f"{call} got a {x.layout} tensor on {x.device}; this group takes dense tensors on "
            f"{device}"
        )
    return f"{call} of {str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def operation(call: str, x: torch.Tensor, op: str, backend: str) -> None:
    """Check that `backend` can combine tensors like `x` by `op`."""
    if op not in OPS:
        raise CollectiveError(f"{call}: op is {op!r}; allowed are {', '.join(OPS)}")
    if op == "mean" and not (x.is_floating_point() or x.is_complex()):
        raise CollectiveError(
            f"{call} got {x.dtype}: a mean of integers is not an integer; convert the tensor, or "
            "use 'sum'"
        )
    if x.is_complex() and op not in ("sum", "mean"):
        raise CollectiveError(f"{call} got {x.dtype}: complex numbers have 'sum' and 'mean' only")
    if backend == "gloo" and x.dtype not in _GLOO_DTYPES:
        names = sorted(str(d).removeprefix("torch.") for d in _GLOO_DTYPES)
        raise CollectiveError(
            f"{call} got {x.dtype}, which gloo cannot combine; allowed are {', '.join(names)}"
        )


def source(src: int, world_size: int) -> int:
    """Check that `src` is a rank of the group."""
    if isinstance(src, bool) or not isinstance(src, int) or not 0 <= src < world_size:
        raise CollectiveError(f"src is {src!r}; it is a rank of this group, 0 to {world_size - 1}")
    return src


def members(ranks: Sequence[int], world_size: int) -> list[int]:
    """Check the ranks of a subgroup: one or more, each once, all in the group."""
    if not isinstance(ranks, Iterable):
        raise GroupError(f"subgroup got {ranks!r}; it takes a list of ranks")
    wanted = list(ranks)
    good = all(type(r) is int and 0 <= r < world_size for r in wanted)
    if not wanted or not good or len(set(wanted)) != len(wanted):
        raise GroupError(
            f"subgroup got ranks {wanted!r}; allowed are one or more ranks from 0 to "
            f"{world_size - 1}, each once"
        )
    return wanted


def seconds(timeout: float | None, default: float) -> float:
    """Check a call's own timeout."""
    if timeout is None:
        return default
    try:
        check_timeout(timeout)
    except GroupError as error:
        raise CollectiveError(str(error)) from None
    return timeout
