"""A copy of a module, and of its loader, that has no data: to try the loader on."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from parallelkit_torch.placement.record import ValuesNeededError, memory_of

Weights = Iterable[tuple[str, torch.Tensor]]
Loader = Callable[[Weights], Iterable[str] | None]

_PLAIN: Final[Any] = torch.Tensor.__torch_dispatch__


def without_data(root: nn.Module, loader: Loader) -> tuple[nn.Module, Loader]:
    """Copy a module, and the loader that belongs to it, with all tensors on the meta device.

    Tensors that share memory do so in the copy, with the same offsets and strides.

    Raises:
        ValuesNeededError: that is not possible; the text says why.
    """
    parts = set(map(id, root.modules()))
    if not _belongs(loader, parts):
        raise ValuesNeededError("it is not a method of the module, so it cannot be tried on a copy")
    twins = _Twins()
    pairs = [(tensor, twins.of(tensor)) for tensor in _tensors_of(root)]
    try:
        with twins:
            for tensor, twin in pairs:  # such as the `weight_loader` that engines keep there
                twin.__dict__.update(copy.deepcopy(tensor.__dict__, twins.memo))
            return copy.deepcopy(root, twins.memo), copy.deepcopy(loader, twins.memo)
    except ValuesNeededError:
        raise
    except Exception as error:
        text = f"the module cannot be copied ({type(error).__name__}: {error})"
        raise ValuesNeededError(text) from error


@final
class _Twins(TorchFunctionMode):
    """Tensors without data for tensors with, while modules are copied.

    Also for those that a module holds in lists or objects, such as caches as large as the model.
    """

    def __init__(self) -> None:
        super().__init__()
        self.memo: dict[int, Any] = {}
        self._memories: dict[int, Any] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            return self.of(args[0])
        if func is torch.Tensor.clone:  # by which a Parameter is copied
            return torch.empty_like(args[0], device="meta")
        return func(*args, **(kwargs or {}))

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The twin, the same one whenever it is asked for."""
        if id(tensor) not in self.memo:
            self.memo[id(tensor)] = self._made(tensor)
        twin: torch.Tensor = self.memo[id(tensor)]
        return twin

    def _made(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided or type(tensor).__torch_dispatch__ is not _PLAIN:
            raise ValuesNeededError(f"the module has a {type(tensor).__qualname__}")
        memory = self._memories.get(memory_of(tensor))
        if memory is None:
            size = tensor.untyped_storage().nbytes()
            flat = torch.empty(size, dtype=torch.uint8, device="meta")
            memory = self._memories[memory_of(tensor)] = flat.untyped_storage()
        twin = torch.empty(0, dtype=tensor.dtype, device="meta")
        twin.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
        if isinstance(tensor, nn.Parameter):
            twin = torch.Tensor._make_subclass(type(tensor), twin, tensor.requires_grad)
        return twin


def _belongs(loader: Any, parts: set[int]) -> bool:
    """Whether a copy of the loader works on the copy of the module whose parts are given."""
    if isinstance(loader, functools.partial):
        given = (*loader.args, *loader.keywords.values())
        return _belongs(loader.func, parts) or any(id(value) in parts for value in given)
    return isinstance(loader, types.MethodType) and id(loader.__self__) in parts


def _tensors_of(root: nn.Module) -> Iterator[torch.Tensor]:
    for part in root.modules():
        for held in (part._parameters, part._buffers, vars(part)):
            for value in list(held.values()):
                if isinstance(value, torch.Tensor):
                    yield value
