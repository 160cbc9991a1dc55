"""Servers attached by their URL to a real publisher: the guard, the client and the protocol are
real, the engines are made up, and their workers are subscribers of arrays."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parallelkit as pk
from parallelkit.errors import EngineError, PartialCommitError, UpdateAbortedError
from parallelkit.testing.arrays import Arrays
from parallelkit.weights.subscriber import WeightSubscriber

sys.path.insert(0, str(Path(__file__).parent))

from fake_engine import FakeEngine
from fake_server import TOKEN, Guarded

sys.path.pop(0)

TIMEOUT = 20.0


def values(version: int) -> dict[str, np.ndarray[Any, Any]]:
    return {"a": np.full((64, 3), version, np.float32), "b": np.full(7, -version, np.int32)}


class Working(FakeEngine):
    """Its workers follow, and stage each version in a thread of theirs."""

    def __init__(self, members: int = 1, shapes: dict[str, Any] | None = None) -> None:
        super().__init__(members)
        self.targets = [Arrays(shapes or values(0)) for _ in range(members)]
        self.workers: list[WeightSubscriber] = []

    async def init_weight_transfer_engine(self, request: Any) -> None:
        ticket = request.init_info["ticket"]

        def join(rank: int) -> WeightSubscriber:
            worker = pk.subscribe_weights(
                self.targets[rank], ticket, member=rank, timeout=request.init_info["timeout"]
            )
            worker.serve()
            return worker

        for rank in range(len(self.targets)):
            self.workers.append(await asyncio.to_thread(join, rank))

    async def update_weights(self, request: Any) -> None:
        await super().update_weights(request)
        for worker in self.workers:
            await asyncio.to_thread(worker.step, request.update_info["timeout"])

    def close(self) -> None:
        for worker in self.workers:
            worker.close()

    @property
    def live(self) -> list[float]:
        """The values that are in place, one for each worker."""
        return [float(target.arrays["a"][0, 0]) for target in self.targets]


class Rig:
    def __init__(self, *members: int) -> None:
        self.servers = [Guarded(engine=Working(count)) for count in members]
        self.orphans: list[Working] = []
        self.source = Arrays(values(0))
        self.publisher = pk.publish_weights(self.source, timeout=TIMEOUT)

    def attach(self) -> list[Any]:
        return [
            self.publisher.attach(server.url, token=TOKEN, name=f"engine-{i}")
            for i, server in enumerate(self.servers)
        ]

    def update(self, version: int) -> Any:
        for name, array in values(version).items():
            self.source.arrays[name][...] = array
        return self.publisher.update()

    def kill(self, index: int, *, workers: bool) -> None:
        """The server is gone, and its workers with it, or a little later."""
        server = self.servers.pop(index)
        server.close()
        self.orphans.append(server.engine)
        if workers:
            server.engine.close()

    def close(self) -> None:
        self.publisher.close()
        for engine in self.orphans:
            engine.close()
        for server in self.servers:
            server.engine.close()
            server.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(1, 2)
    yield rig
    rig.close()


def test_several_engines_follow(rig):
    handles = rig.attach()
    for version in (1, 2):
        report = rig.update(version)
        assert [e.name for e in report.engines] == ["engine-0", "engine-1"]
        assert {(e.state, e.weight_version) for e in report.engines} == {
            ("committed", str(version))
        }
        assert {m.state for m in report.members} == {"committed"}
        assert len(report.members) == 3
        assert [h.version for h in handles] == [version] * 2
        assert [s.engine.live for s in rig.servers] == [[version], [version] * 2]


def test_one_is_gone(rig):
    """Named within the deadline, and nothing moves; then the other goes on without it."""
    rig.attach()
    rig.update(1)
    rig.kill(0, workers=False)
    began = time.monotonic()
    with pytest.raises(UpdateAbortedError, match="engine-0"):
        rig.update(2)
    assert time.monotonic() - began < TIMEOUT
    (server,) = rig.servers
    assert server.engine.live == [1, 1]
    report = rig.update(2)
    assert [e.name for e in report.engines] == ["engine-1"]
    assert server.engine.live == [2, 2]
    assert [e.state for e in rig.publisher.engines] == ["lost", "attached"]


def test_one_is_known_to_be_gone(rig):
    """Its workers' connections ended before the update: it is named in the report."""
    rig.attach()
    rig.update(1)
    rig.kill(0, workers=True)
    end = time.monotonic() + TIMEOUT
    while sum(m.present for m in rig.publisher.members) > 2:
        assert time.monotonic() < end
        time.sleep(0.01)
    report = rig.update(2)
    assert [e.name for e in report.engines] == ["engine-1"]
    assert any(note.startswith("engine-0: lost") for note in report.notes)
    assert rig.servers[0].engine.live == [2, 2]


def test_one_fails_in_its_commit(rig):
    """It alone is quarantined, and refuses; the next update brings it back."""
    first, second = rig.attach()
    rig.update(1)
    engine = rig.servers[0].engine
    rig.servers[0].on_loop(lambda: engine.fail.update({"start_weight_update": RuntimeError("no")}))
    with pytest.raises(PartialCommitError, match="engine-0") as caught:
        rig.update(2)
    states = {e.name: e.state for e in caught.value.report.engines}  # type: ignore[attr-defined]
    assert states == {"engine-0": "quarantined", "engine-1": "committed"}
    assert (first.state, second.state) == ("quarantined", "serving")
    ask = b'{"count": 1}'
    assert rig.servers[0].handle("POST", "/v1/completions", {}, ask)[0] == 503
    assert rig.servers[1].handle("POST", "/v1/completions", {}, ask)[0] == 200
    rig.update(3)
    assert [s.engine.live for s in rig.servers] == [[3], [3, 3]]
    assert first.state == "serving"
    assert rig.servers[0].handle("POST", "/v1/completions", {}, ask)[0] == 200


def test_one_is_asleep(rig):
    """Nobody moves."""
    rig.attach()
    rig.update(1)
    rig.servers[1].engine.sleeping = True
    with pytest.raises(UpdateAbortedError, match=r"engine-1.*asleep"):
        rig.update(2)
    assert [s.engine.live for s in rig.servers] == [[1], [1, 1]]
    rig.servers[1].engine.sleeping = False
    rig.update(2)
    assert [s.engine.live for s in rig.servers] == [[2], [2, 2]]


def test_one_has_other_weights(rig):
    odd = Guarded(engine=Working(1, {"a": np.zeros((64, 4), np.float32)}))
    rig.servers.append(odd)
    with pytest.raises(EngineError, match=r"engine-2.*\n?.*b"):
        rig.attach()
    rig.update(1)
    assert [s.engine.live for s in rig.servers] == [[1], [1, 1], [0]]
