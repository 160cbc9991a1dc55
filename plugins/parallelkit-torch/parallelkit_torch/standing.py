"""Whether a module is still what it was when it was walked: asked in each update, so answered fast.

Walking thousands of tensors, naming and comparing them, takes longer than to copy them on a GPU.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn


class _Contents(NamedTuple):
    """What a dict of a module held: the very keys and objects, in order."""

    keys: tuple[str, ...]
    values: tuple[Any, ...]

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> _Contents:
        return cls(tuple(found), tuple(found.values()))

    def same(self, found: Mapping[str, Any]) -> bool:
        values = tuple(found.values())
        return (
            len(values) == len(self.values)
            and all(map(operator.is_, values, self.values))
            and tuple(found) == self.keys
        )


class _Part(NamedTuple):
    """One module of the tree."""

    module: nn.Module
    kind: type
    transient: int
    parameters: _Contents
    buffers: _Contents
    modules: _Contents

    def same(self) -> bool:
        module = self.module
        return (
            type(module) is self.kind
            and len(module._non_persistent_buffers_set) == self.transient
            and self.parameters.same(module._parameters)
            and self.buffers.same(module._buffers)
            and self.modules.same(module._modules)
        )


class Standing:
    """A module's tree and tensors at one time."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = [
            _Part(
                part,
                type(part),
                len(part._non_persistent_buffers_set),
                _Contents.of(part._parameters),
                _Contents.of(part._buffers),
                _Contents.of(part._modules),
            )
            for part in list(module.modules())
        ]
        found = {
            id(tensor): tensor
            for part in self._parts
            for tensor in (*part.parameters.values, *part.buffers.values)
            if tensor is not None
        }
        self._tensors = [(tensor, _look(tensor)) for tensor in found.values()]

    def holds(self) -> bool:
        """Whether every tensor is where it was, the same object with the same memory and form."""
        try:
            return all(part.same() for part in self._parts) and all(
                _look(tensor) == seen for tensor, seen in self._tensors
            )
        except RuntimeError:  # a tensor has no memory any more
            return False


def _look(tensor: torch.Tensor) -> object:
    """What writing and reading a tensor goes by; None, which is never the same, if it has none."""
    if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer) or tensor.is_meta:
        return float("nan")
    return (
        tensor.data_ptr(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )
