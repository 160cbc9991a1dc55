"""A model of plain numpy arrays: a weight source and sink that need no framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from parallelkit.errors import ManifestError
from parallelkit.weights.manifest import DTYPE_BYTES, Manifest, TensorSpec

Array = np.ndarray[Any, Any]


class Arrays:
    """Named arrays, as `WeightSource` and `WeightSink` both.

    The same array under two names is an alias. Example:
        >>> model = Arrays({"w": np.zeros((2, 3), np.float32)})
        >>> model.manifest().tensors[0].describe()
        'float32[2, 3]'
    """

    device = "cpu"

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self.arrays = dict(arrays)
        owners: dict[int, str] = {}
        self._unique: list[str] = []
        specs = []
        for name, array in self.arrays.items():
            if array.dtype.name not in DTYPE_BYTES:
                raise ManifestError(f"array {name!r} has dtype {array.dtype}")
            owner = owners.setdefault(id(array), name)
            if owner == name:
                self._unique.append(name)
            specs.append(
                TensorSpec(
                    name=name,
                    dtype=array.dtype.name,
                    shape=array.shape,
                    alias_of=None if owner == name else owner,
                )
            )
        self._manifest = Manifest(specs)

    @property
    def module(self) -> Mapping[str, Array]:
        return self.arrays

    def manifest(self) -> Manifest:
        return self._manifest

    needs = manifest

    def host_bytes(self, index: int) -> memoryview:
        array = np.ascontiguousarray(self.arrays[self._unique[index]])
        return array.reshape(-1).view(np.uint8).data

    def adopt(self, buffers: Sequence[memoryview]) -> None:
        for name, buffer in zip(self._unique, buffers, strict=True):
            old = self.arrays[name]
            new = np.frombuffer(buffer, old.dtype).reshape(old.shape)
            new[...] = old
            for other, array in self.arrays.items():
                if array is old:
                    self.arrays[other] = new

    def begin(self) -> None:
        """Nothing to prepare."""

    def check(self) -> None:
        """Nothing can change unseen."""

    def destination(self, index: int) -> memoryview | None:
        array = self.arrays[self._unique[index]]
        if not array.flags.c_contiguous:
            return None
        return array.reshape(-1).view(np.uint8).data

    def write(self, index: int, data: memoryview) -> None:
        array = self.arrays[self._unique[index]]
        array[...] = np.frombuffer(data, array.dtype).reshape(array.shape)

    def finish(self) -> None:
        """Nothing is derived."""
