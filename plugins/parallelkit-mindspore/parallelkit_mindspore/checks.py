"""What one rank alone can see is wrong with a tensor that it gives to a collective."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

from parallelkit.errors import CollectiveError
from parallelkit_mindspore import reductions, runtime
from parallelkit_mindspore.tensors import dtype_name

#: What HCCL and NCCL combine, and what else they move; others are refused by name.
DEVICE_COMBINES: Final = ("int8", "int32", "int64", "float16", "bfloat16", "float32")
DEVICE_MOVES: Final = (*DEVICE_COMBINES, "uint8", "float64")

#: What is added to the description of every call now; `noted` sets it.
_note = ""


@contextlib.contextmanager
def noted(note: str) -> Iterator[None]:
    """Within, `note` is part of what describes a call that moves a tensor.

    Where calls are compared across ranks, on the CPU, ranks with different notes get an error in
    place of a result, without a further exchange.
    """
    global _note
    before, _note = _note, f" {note}"
    try:
        yield
    finally:
        _note = before


def describe(call: str, x: Any, kind: str) -> str:
    """Check that `x` is a tensor that can be moved; return the call with its type."""
    ms = runtime.mindspore(call)
    if not isinstance(x, ms.Tensor):
        raise CollectiveError(f"{call} got a {type(x).__qualname__}; it takes a mindspore.Tensor")
    name = dtype_name(x)
    if kind != "cpu" and name not in DEVICE_MOVES:
        raise CollectiveError(
            f"{call} got {name}, which is not moved on {kind}; allowed are "
            f"{', '.join(DEVICE_MOVES)}"
        )
    return f"{call} of {name}{list(x.shape)}{_note}"


def operation(call: str, x: Any, op: str, kind: str) -> None:
    """Check that tensors like `x` can be combined by `op`."""
    if not isinstance(op, str) or op not in reductions.OPS:
        raise CollectiveError(f"{call}: op is {op!r}; allowed are {', '.join(reductions.OPS)}")
    name = dtype_name(x)
    if op == "mean" and (name == "bool" or name in reductions.INTEGERS):
        raise CollectiveError(
            f"{call} got {name}: a mean of integers is not an integer; convert the tensor, or "
            "use 'sum'"
        )
    if name in reductions.COMPLEX and op not in ("sum", "mean"):
        raise CollectiveError(f"{call} got {name}: complex numbers have 'sum' and 'mean' only")
    allowed = reductions.DTYPES if kind == "cpu" else DEVICE_COMBINES
    if name not in allowed:
        raise CollectiveError(
            f"{call} got {name}, which cannot be combined on {kind}; allowed are "
            f"{', '.join(sorted(allowed))}"
        )
