"""Parts of a model of numpy bytes: a source of what a rank holds, a sink of what a member keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from parallelkit.errors import ManifestError, UnsupportedFeatureError
from parallelkit.protocols import ProcessGroup
from parallelkit.testing.shards import held
from parallelkit.weights.layout import Region
from parallelkit.weights.manifest import DTYPE_BYTES, Manifest
from parallelkit.weights.needs import Needs
from parallelkit.weights.regions import Bytes


class PartsSource:
    """One rank's parts of a model, as a `ShardedSource`.

    Attributes:
        values: all of every unique tensor, as `parallelkit.testing.shards.random_values` makes it;
            this rank reads no more than its own parts of them.
        problem: raised once by `host_bytes`, if set.
    """

    device = "cpu"

    def __init__(self, manifest: Manifest, values: list[Bytes], rank: int) -> None:
        self.values = values
        self.problem: BaseException | None = None
        self.calls: list[str] = []
        self._manifest = manifest
        self._rank = rank

    def join(self, group: ProcessGroup | None) -> None:
        self.calls.append("join")

    def manifest(self) -> Manifest:
        return self._manifest

    def look(self) -> None:
        self.calls.append("look")

    def begin(self) -> None:
        self.calls.append("begin")

    def host_bytes(self, index: int) -> memoryview:
        if self.problem is not None:
            problem, self.problem = self.problem, None
            raise problem
        spec = self._manifest.unique[index]
        one = Manifest([attrs.evolve(spec, alias_of=None)], self._manifest.mesh)
        part = held(one, [self.values[index]], self._rank)[0]
        if part is None:
            raise ManifestError(f"rank {self._rank} holds nothing of {spec.name!r}")
        return np.ascontiguousarray(part).reshape(-1).data

    def adopt(self, buffers: Sequence[memoryview]) -> None:
        raise UnsupportedFeatureError("parts cannot live where whole tensors do")


class PartsSink:
    """What a member keeps of a model, as a `RegionSink`.

    Attributes:
        kept: the bytes of the kept region of each unique tensor.
        indirect: tensors of which `destination` gives nothing, so that `write` is called.
    """

    device = "cpu"

    def __init__(self, manifest: Manifest, needs: Needs, indirect: frozenset[int]) -> None:
        self._manifest = manifest
        self._regions = [needs[i] for i in range(len(needs))]
        self.indirect = indirect
        self.kept = [
            np.zeros(0 if box is None else box.elements * DTYPE_BYTES[t.dtype], np.uint8)
            for t, box in zip(manifest.unique, self._regions, strict=True)
        ]

    @property
    def module(self) -> Any:
        return self.kept

    def needs(self) -> Manifest:
        return Manifest(attrs.evolve(t, layout=None, fusion=None) for t in self._manifest.tensors)

    def regions(self) -> Sequence[Region | None]:
        return self._regions

    def check(self) -> None:
        """Nothing can change unseen."""

    def begin(self) -> None:
        """Nothing to prepare."""

    def destination(self, index: int) -> memoryview | None:
        return None if index in self.indirect else self.kept[index].data

    def write(self, index: int, data: memoryview) -> None:
        self.kept[index][:] = np.frombuffer(data, np.uint8)

    def host_bytes(self, index: int) -> memoryview:
        return self.kept[index].data

    def finish(self) -> None:
        """Nothing is derived."""
