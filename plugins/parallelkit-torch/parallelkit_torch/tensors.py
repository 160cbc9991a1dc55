"""Facts about one tensor: its name for a dtype, its bytes, and what memory it shares."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from parallelkit.errors import ManifestError
from parallelkit.weights import overlap as spans
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
    if _lacks_memory(tensor):
        return "has no memory behind it: its storage was freed or made smaller (offloaded?)"
    return None


def _lacks_memory(tensor: torch.Tensor) -> bool:
    """Whether elements lie outside of the storage, which torch lets anyone resize."""
    reach = tensor.nbytes  # asked of every tensor in every update: most are contiguous
    if not reach:
        return False
    if not tensor.is_contiguous():
        reach = _span("", tensor).end - tensor.data_ptr()
    start = tensor.storage_offset() * tensor.element_size()
    return start + reach > tensor.untyped_storage().nbytes()


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


class LiveViews:
    """The bytes of live tensors by index, as `live_bytes`; kept while their memory is the same.

    A view keeps its memory alive, so an address that is equal is the same memory.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[int, tuple[int, ...], memoryview]] = {}

    def of(self, index: int, tensor: torch.Tensor) -> memoryview | None:
        """The tensor's own memory as row-major bytes; None where only a copy would have them."""
        if tensor.is_conj() or tensor.is_neg():
            return live_bytes(tensor)
        where = tensor.data_ptr()
        kept = self._kept.get(index)
        if kept is not None and kept[0] == where and kept[1] == tensor.stride():
            return kept[2]
        view = live_bytes(tensor)
        if view is not None and where:
            self._kept[index] = (where, tensor.stride(), view)
        return view

    def clear(self) -> None:
        """Let go of all memory."""
        self._kept.clear()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return _plain(tensor.detach().cpu())


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat if flat.stride() == (1,) else flat.as_strided((1,), (1,))  # one element alone


def _view(flat: torch.Tensor) -> memoryview:
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


def fill(name: str, tensor: torch.Tensor, data: memoryview) -> None:
    """Write row-major bytes into a live tensor, wherever it is, by way of a copy.

    Raises:
        ManifestError: these are not as many bytes as the tensor has.
    """
    staged = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    into = as_bytes(staged)
    if data.nbytes != into.nbytes:
        raise ManifestError(f"tensor {name!r} has {into.nbytes} bytes, {data.nbytes} were given")
    into[:] = data.cast("B")
    with torch.no_grad():
        tensor.detach().copy_(staged)


def mark_written(written: Iterable[torch.Tensor]) -> None:
    """Tell torch that memory of these tensors was written, which it did not see.

    A graph that autograd recorded before is void, and so is what torch keeps of parameters while
    it is told to: casts within `torch.autocast`, and weights that are made of others within
    `torch.nn.utils.parametrize.cached`. It would go on computing with the old values.
    """
    seen = [tensor for tensor in written if not tensor.is_inference()]
    torch.autograd.graph.increment_version(seen)
    torch.clear_autocast_cache()
    parametrize = sys.modules.get("torch.nn.utils.parametrize")
    getattr(parametrize, "_cache", {}).clear()


def settle(held: Iterable[torch.Tensor]) -> None:
    """Wait for everything that was asked of the devices of these tensors, in whatever stream.

    A stream of its own may still read the old values, or not have written those to be published.
    """
    for device in {tensor.device for tensor in held if tensor.device.type not in ("cpu", "meta")}:
        torch.accelerator.synchronize(device)


def refuse_overlaps(named: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Raise `ManifestError` if writing one element of a target would change another."""
    for name, tensor in named:
        if self_overlapping(tensor):
            raise ManifestError(
                f"tensor {name!r} of the target has shape {list(tensor.shape)} and strides "
                f"{list(tensor.stride())}: its elements share memory, so it cannot be "
                "written; make it contiguous first"
            )
    pair = overlap(named)
    if pair:
        raise ManifestError(
            f"tensors {pair[0]!r} and {pair[1]!r} of the target share memory without being "
            "the same: writing one would change the other; give each memory of its own"
        )


def self_overlapping(tensor: torch.Tensor) -> bool:
    """Whether two elements may share one place; exact for every tensor made by views."""
    return spans.self_overlapping(tensor.shape, tensor.stride())


def overlap(named: Iterable[tuple[str, torch.Tensor]]) -> tuple[str, str] | None:
    """Name two tensors that have an element's memory in common, the first found; else None."""
    return spans.overlap(located(named))


def located(named: Iterable[tuple[str, torch.Tensor]]) -> tuple[spans.Span, ...]:
    """Where the elements of tensors lie; of empty ones nothing."""
    return tuple(_span(name, tensor) for name, tensor in named if tensor.numel())


def _span(name: str, tensor: torch.Tensor) -> spans.Span:
    space = "cpu" if tensor.is_cpu else str(tensor.device)
    where, item = tensor.data_ptr(), tensor.element_size()
    return spans.Span.strided(name, where, item, tensor.shape, tensor.stride(), space)
