"""Parts of tensors over `cuda_ipc`: ranks that hand theirs out, members that keep some of them."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parallelkit_torch.cuda.probe import accelerator_of
from parallelkit_torch.cuda.target import DeviceTarget

from parallelkit.protocols import DeviceSink, DeviceSource
from parallelkit.specs import Accelerator
from parallelkit.testing.meeting import meet, on_ranks
from parallelkit.testing.parts import PartsSink, PartsSource
from parallelkit.testing.shards import held, random_manifest, random_needs, random_values, slices
from parallelkit.weights import publish_weights, subscribe_weights
from parallelkit.weights.manifest import Manifest
from parallelkit.weights.needs import Needs
from parallelkit.weights.plan import plan_transfer
from parallelkit.weights.runs import runs_of

sys.path.insert(0, str(Path(__file__).parent))
from imagined import Machine, Scene, imagined

SECONDS = 10.0


class Source(PartsSource):
    """Parts on an imagined GPU, in new memory for each update."""

    def __init__(self, manifest: Manifest, values: Any, rank: int, machine: Machine) -> None:
        super().__init__(manifest, values, rank)
        self._machine = machine
        self._parts: list[torch.Tensor | None] = []
        self.look()

    def look(self) -> None:
        one = Manifest(self._manifest.unique, self._manifest.mesh)
        self._parts = [
            None if part is None else self._machine.tensor(np.ascontiguousarray(part).reshape(-1))
            for part in held(one, self.values, self._rank)
        ]

    def live(self) -> Sequence[torch.Tensor | None]:
        return self._parts

    def accelerator(self) -> Accelerator | None:
        return accelerator_of([p for p in self._parts if p is not None] or [torch.zeros(1)])


class Sink(DeviceTarget, PartsSink):
    """What a member keeps; of some tensors every other byte of memory, which is no run."""

    def __init__(self, manifest: Manifest, needs: Needs, strided: set[int]) -> None:
        super().__init__(manifest, needs, frozenset())
        self._tensors = []
        for i, kept in enumerate(self.kept):
            step = 2 if i in strided else 1
            self._tensors.append([torch.zeros(step * len(kept), dtype=torch.uint8)[::step]])

    def _parts(self) -> Sequence[Sequence[torch.Tensor]]:
        return self._tensors

    def accelerator(self) -> Accelerator | None:
        return accelerator_of([torch.zeros(1)])


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    with imagined(monkeypatch) as made:
        yield made


@pytest.mark.parametrize("seed", range(12))
def test_random_models_meshes_and_needs(scene: Scene, seed: int) -> None:
    rng = random.Random(seed)
    manifest = random_manifest(rng)
    while manifest.mesh is None or manifest.mesh.size > 6 or not manifest.nbytes:
        manifest = random_manifest(rng)
    groups = meet(manifest.mesh.size, timeout=SECONDS)
    values = random_values(manifest, seed)
    sources = [Source(manifest, values, r, scene.machine) for r in range(manifest.mesh.size)]
    assert isinstance(sources[0], DeviceSource)
    options = {
        "transport": "cuda_ipc",
        "commit": rng.choice(["staged", "in_place"]),
        "verify": rng.choice(["digest", "readback", "sample"]),
        "timeout": SECONDS,
    }
    publishers: list[Any] = on_ranks(
        groups, lambda group: publish_weights(sources[group.rank], group=group, **options)
    )
    for publisher in publishers:
        if isinstance(publisher, BaseException):
            raise publisher
    members: list[tuple[Any, Sink, Needs]] = []
    try:
        for _ in range(3):
            needs = random_needs(rng, manifest)
            sink = Sink(manifest, needs, {i for i in range(len(needs)) if rng.randrange(4) == 0})
            assert isinstance(sink, DeviceSink)
            ticket = publishers[0].new_ticket()
            member = subscribe_weights(sink, ticket, timeout=SECONDS, partial=True)
            members.append((member, sink, needs))
        for version in (1, 2, 3):
            for mine, new in zip(values, random_values(manifest, 100 + version), strict=True):
                mine[...] = new
            with ThreadPoolExecutor(len(members)) as pool:
                steps = [pool.submit(member.step, SECONDS) for member, *_ in members]
                results: list[Any] = on_ranks(groups, lambda g: publishers[g.rank].update())
                assert [step.result(SECONDS) for step in steps] == [version] * len(members)
            assert {r.version for r in results} == {version}
            assert results[0].transport == "cuda_ipc"
            for _, sink, needs in members:
                check(manifest, values, sink, needs)
    finally:
        for member, *_ in members:
            member.close()
        for publisher in publishers:
            publisher.close()


def check(manifest: Manifest, values: Any, sink: Sink, needs: Needs) -> None:
    """It holds what it keeps of the present values, bit for bit."""
    for i, (value, (kept,)) in enumerate(zip(values, sink._tensors, strict=True)):
        box = needs[i]
        expected = b"" if box is None else value[slices(box)].tobytes()
        assert bytes(kept.tolist()) == expected, manifest.unique[i]


@pytest.mark.parametrize("seed", range(20))
def test_runs_are_the_bytes_of_the_plan(seed: int) -> None:
    rng = random.Random(seed)
    manifest = random_manifest(rng)
    plan = plan_transfer(manifest, random_needs(rng, manifest), bucket_bytes=rng.choice([16, 4096]))
    runs = runs_of(plan.buckets)
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    rows = zip(*(column.tolist() for column in runs), strict=True)
    for rank, tensor, source, target, nbytes, bucket in rows:
        assert plan.buckets[bucket].rank == rank
        places = found.setdefault((bucket, tensor), [])
        places += [(source + i, target + i) for i in range(nbytes)]
    for number, bucket in enumerate(plan.buckets):
        wanted: dict[int, list[tuple[int, int]]] = {}
        for piece in bucket.pieces:
            sources, targets = places_of(piece.cut.source), places_of(piece.cut.target)
            wanted.setdefault(piece.tensor, []).extend(zip(sources, targets, strict=True))
        for tensor, places in wanted.items():
            assert found.pop((number, tensor)) == places
    assert not found
    some = sorted(rng.sample(range(len(plan.buckets)), len(plan.buckets) // 2))
    part = runs.of(some)
    assert int(part.nbytes.sum()) == sum(plan.buckets[i].nbytes for i in some)
    assert not len(part.bucket) or int(part.bucket.max()) < len(some)


def places_of(span: Any) -> list[int]:
    """Where each byte of a span is, in its order."""
    places = np.arange(span.run)
    for count, far in reversed(span.steps):
        places = (np.arange(count)[:, None] * far + places).reshape(-1)
    found: list[int] = (places + span.offset).tolist()
    return found
