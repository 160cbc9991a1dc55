"""Facts about one tensor: its name for a dtype, its bytes, and what memory it shares."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from parallelkit.errors import ManifestError
from parallelkit.weights.manifest import DTYPE_BYTES


def identity(tensor: torch.Tensor) -> object:
    """Equal for two tensors exactly when they are the same elements in the same order."""
    if tensor.numel() == 0:  # no memory: the same only if it is the same object
        return id(tensor)
    return (
        tensor.device,
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def refuse_unreadable(name: str, tensor: torch.Tensor) -> None:
    """Raise `ManifestError` for a tensor that has no plain bytes in this process."""
    problem = None
    if torch.nn.parameter.is_lazy(tensor):
        problem = "is uninitialised; run the model once before publishing it"
    elif tensor.is_meta:
        problem = "is on the meta device and has no data; materialise the model first"
    elif type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        problem = f"is a {type(tensor).__qualname__}, which is not a plain dense tensor"
    elif tensor.layout is not torch.strided:
        problem = f"has layout {tensor.layout}; only dense tensors can be transferred"
    elif dtype_name(tensor) not in DTYPE_BYTES:
        problem = f"has dtype {dtype_name(tensor)!r}; allowed are {', '.join(DTYPE_BYTES)}"
    if problem:
        raise ManifestError(f"tensor {name!r} {problem}")


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Row-major bytes: the tensor's own memory if it is contiguous on the CPU, else a copy."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    array: Any = plain.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def self_overlapping(tensor: torch.Tensor) -> bool:
    """Whether two elements may share one place; exact for every tensor made by views."""
    if tensor.numel() == 0:
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False
