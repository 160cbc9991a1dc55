"""What one rank alone can see is wrong with a tensor that it gives to a collective."""

from __future__ import annotations

from typing import Final

import torch

from parallelkit.errors import CollectiveError
from parallelkit_torch.wire import OPS

#: What gloo can combine. It moves everything.
_GLOO_DTYPES: Final = frozenset(
    {torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool}
    | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
    | {torch.complex64, torch.complex128}
)


def describe(call: str, x: object, device: torch.device) -> str:
    """Check that `x` is a dense tensor on the group's device; return the call with its type."""
    if not isinstance(x, torch.Tensor):
        kind = f"{type(x).__module__.partition('.')[0]}.{type(x).__qualname__}"
        kind = kind.removeprefix("builtins.")
        hint = ", or init_process_group(framework='mindspore')" if "mindspore." in kind else ""
        raise CollectiveError(f"{call} got a {kind}; this group takes a torch.Tensor{hint}")
    if x.layout is not torch.strided or x.device.type != device.type:
        raise CollectiveError(
            f"{call} got a {x.layout} tensor on {x.device}; this group takes dense tensors on "
            f"{device}"
        )
    return f"{call} of {str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def operation(call: str, x: torch.Tensor, op: str, backend: str) -> None:
    """Check that `backend` can combine tensors like `x` by `op`."""
    if not isinstance(op, str) or op not in OPS:
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
