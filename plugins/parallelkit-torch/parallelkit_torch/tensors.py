"""Facts about one tensor: its name for a dtype, its bytes, and what memory it shares."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from parallelkit.errors import ManifestError
from parallelkit.weights.manifest import DTYPE_BYTES


def identity(tensor: torch.Tensor) -> object:
    """Equal for two tensors exactly when they are the same elements in the same order."""
    if tensor.numel() == 0:  # no memory: the same only if it is the same object
        return id(tensor)
    shape, strides = tuple(tensor.shape), tensor.stride()
    if 1 in shape:  # the stride of a dimension of one element says nothing
        strides = tuple(0 if n == 1 else step for n, step in zip(shape, strides, strict=True))
    return (
        tensor.device,
        tensor.data_ptr(),
        shape,
        strides,
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def unreadable(tensor: torch.Tensor) -> str | None:
    """Say why a tensor has no plain bytes in this process; None where it has."""
    if torch.nn.parameter.is_lazy(tensor):
        return "is uninitialised; run the model once before publishing it"
    if tensor.is_meta:
        return "is on the meta device and has no data; materialise the model first"
    if tensor.is_nested:
        return "is a nested tensor, which is not a plain dense tensor"
    if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        return f"is a {type(tensor).__qualname__}, which is not a plain dense tensor"
    if tensor.layout is not torch.strided:
        return f"has layout {tensor.layout}; only dense tensors can be transferred"
    if dtype_name(tensor) not in DTYPE_BYTES:
        return f"has dtype {dtype_name(tensor)!r}; allowed are {', '.join(DTYPE_BYTES)}"
    return None


def refuse_unreadable(name: str, tensor: torch.Tensor) -> None:
    """Raise `ManifestError` for a tensor that has no plain bytes in this process."""
    problem = unreadable(tensor)
    if problem:
        raise ManifestError(f"tensor {name!r} {problem}")


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Row-major bytes: the tensor's own memory if it is contiguous on the CPU, else a copy."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    return _view(_flat(tensor))


def live_bytes(tensor: torch.Tensor) -> memoryview | None:
    """The tensor's own memory as row-major bytes; None where only a copy would have them."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None  # would be copied, for nothing
    flat = _flat(tensor)
    return _view(flat) if flat.data_ptr() == tensor.data_ptr() else None


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Row-major bytes on the tensor's own device: its own memory if it is contiguous."""
    return _plain(tensor.detach()).view(torch.uint8)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return _plain(tensor.detach().cpu())


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)


def _view(flat: torch.Tensor) -> memoryview:
    array: Any = flat.view(torch.uint8).numpy()
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


def overlap(named: Iterable[tuple[str, torch.Tensor]]) -> tuple[str, str] | None:
    """Name two tensors that have an element's memory in common, the first found; else None.

    Exact: views of one storage that interleave, as the columns of a matrix, do not overlap.
    """
    spans: dict[torch.device, list[_Span]] = {}
    for name, tensor in named:
        if tensor.numel():
            spans.setdefault(tensor.device, []).append(_Span(name, tensor))
    for on_device in spans.values():
        for cluster in _clusters(on_device):
            pair = _overlap_within(cluster)
            if pair:
                return pair
    return None


class _Span:
    """Where a tensor's elements lie, in bytes."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        self.item = tensor.element_size()
        self.start = tensor.data_ptr()
        self.shape = tuple(tensor.shape)
        self.steps = tuple(step * self.item for step in tensor.stride())
        reach = sum(step * (n - 1) for step, n in zip(self.steps, self.shape, strict=True))
        self.end = self.start + reach + self.item

    def within(self, mask: np.ndarray[Any, Any], base: int, unit: int) -> np.ndarray[Any, Any]:
        """The part of `mask`, one flag for each `unit` bytes from `base`, that is this tensor."""
        return np.lib.stride_tricks.as_strided(
            mask[(self.start - base) // unit :],
            (*self.shape, self.item // unit),
            (*(step // unit for step in self.steps), 1),
        )


def _clusters(spans: list[_Span]) -> Iterator[list[_Span]]:
    """Groups of spans that touch one another; a span on its own is in none."""
    spans.sort(key=lambda span: span.start)
    cluster: list[_Span] = []
    end = 0
    for span in spans:
        if span.start >= end:
            if len(cluster) > 1:
                yield cluster
            cluster = []
        cluster.append(span)
        end = max(end, span.end)
    if len(cluster) > 1:
        yield cluster


def _overlap_within(cluster: list[_Span]) -> tuple[str, str] | None:
    base, end = cluster[0].start, max(span.end for span in cluster)
    unit = math.gcd(*(n for s in cluster for n in (s.item, s.start - base, *s.steps)))
    mask = np.zeros((end - base) // unit, np.bool_)
    for position, span in enumerate(cluster):
        mine = span.within(mask, base, unit)
        if mine.any():
            for other in itertools.islice(cluster, position):
                mask[:] = False
                other.within(mask, base, unit)[...] = True
                if mine.any():
                    return other.name, span.name
        mine[...] = True
    return None
