"""Ranks that publish one Cell, whole or in parts: all hear of the outcome, good or bad.

The follower is a thread of rank 0 over arrays of NumPy's, which needs no framework.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn
from parallelkit_mindspore.tensors import as_bytes

import parallelkit as pk
from parallelkit.errors import (
    CorruptionError,
    RankMismatchError,
    UnsupportedFeatureError,
    UpdateAbortedError,
)
from parallelkit.launch import LaunchInfo
from parallelkit.specs import GroupSpec
from parallelkit.testing.arrays import Arrays
from parallelkit.testing.fake import FakeGroup


class Net(nn.Cell):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Dense(4, width)
        self.norm = nn.LayerNorm((width,))
        self.second = nn.Dense(width, 4)

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return self.second(self.norm(self.first(x)))


def arrays(net: nn.Cell) -> Arrays:
    """A follower's model: the names are written out, not asked of the plugin."""
    renamed = {"norm.gamma": "norm.weight", "norm.beta": "norm.bias"}
    found = {renamed.get(n, n): np.zeros(p.shape, np.float32) for n, p in _named(net)}
    return Arrays(found)


def _named(net: nn.Cell) -> list[tuple[str, ms.Parameter]]:
    return list(net.parameters_and_names())


def raises(kind: type[BaseException], call: Callable[[], Any]) -> BaseException:
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


class Follower:
    """Steps in a thread of rank 0; nothing on the others."""

    def __init__(self, group: Any, publisher: Any, net: nn.Cell) -> None:
        self.model = arrays(net)
        self.subscriber = None
        if group.rank == 0:
            self.subscriber = pk.subscribe_weights(self.model, publisher.ticket)

    def update(self, publisher: Any) -> Any:
        thread = threading.Thread(target=self._step)
        thread.start()
        try:
            return publisher.update()
        finally:
            thread.join()

    def _step(self) -> None:
        if self.subscriber is not None:
            try:
                self.subscriber.step(60.0)
            except pk.ParallelKitError as error:
                self.error = error

    def check(self, net: nn.Cell) -> None:
        """On rank 0: it holds what this rank holds, bit for bit."""
        if self.subscriber is not None:
            held = [array.tobytes() for array in self.model.arrays.values()]
            assert held == [p.asnumpy().tobytes() for _, p in _named(net)]

    def close(self) -> None:
        if self.subscriber is not None:
            self.subscriber.close()


def follows_training(group: Any) -> None:
    """Two data parallel ranks train; every version arrives, and is the same on both ranks."""
    ms.set_seed(group.rank)  # parallelize makes them equal
    context = pk.parallel_context(data=-1, reduce="mean")
    net = context.parallelize(Net())
    optimizer = nn.SGD(net.trainable_params(), learning_rate=0.1)
    data = np.random.default_rng(group.rank).normal(size=(6, 4)).astype(np.float32)
    with pk.publish_weights(net, timeout=100.0) as publisher:
        follower = Follower(group, publisher, net)
        publisher.wait(1, timeout=60.0)
        seen = set()
        for version in (1, 2, 3):
            x = ms.Tensor(data + version)
            context.train_step(net, x, x, loss=nn.MSELoss())
            context.apply_gradients(net, optimizer)
            report = follower.update(publisher)
            assert report.version == publisher.version == version
            follower.check(net)
            sums = [float(np.abs(p.asnumpy()).sum()) for _, p in _named(net)]
            assert sums == group.broadcast_object(sums, 0), "the ranks hold the same"
            seen.add(tuple(sums))
        assert len(seen) == 3
        _spoiled_byte(group, publisher, follower, net)
        follower.close()
    context.reset()


def _spoiled_byte(group: Any, publisher: Any, follower: Follower, net: nn.Cell) -> None:
    """Rank 0's arena is damaged: every rank hears it, and the next update is good."""

    def spoil(phase: str) -> None:
        if phase == "stage":
            publisher._coordinator.exporter.arena.bytes[0] ^= 1
            publisher._coordinator._phase_hook = lambda phase: None

    if group.rank == 0:
        publisher._coordinator._phase_hook = spoil
    error = raises(UpdateAbortedError, lambda: follower.update(publisher))
    if group.rank == 0:
        assert isinstance(error.__cause__, CorruptionError), error.__cause__
    else:
        assert "as rank 0 reports" in str(error)
    assert publisher.version == 3
    assert follower.update(publisher).version == 4
    follower.check(net)


def mistakes(group: Any) -> None:
    """What is wrong is an error on every rank, and nothing is left open."""
    error = raises(UnsupportedFeatureError, lambda: pk.publish_weights(Net(), aliased=True))
    assert "aliased=True is not possible with MindSpore" in str(error)
    error = raises(RankMismatchError, lambda: pk.publish_weights(Net(4 + group.rank)))
    assert "rank 1:" in str(error)


class Two(nn.Cell):
    """Two layers that are divided, and what is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Dense(4, 8)
        self.norm = nn.LayerNorm((4,))
        self.second = nn.Dense(8, 4)

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return self.norm(self.second(self.first(x)))


def divided(group: Any) -> None:
    """Each rank hands out its parts of layers that a context divided, and takes its own."""
    context = pk.parallel_context(tensor=2, layouts={"first": "colwise", "second": "rowwise"})
    ms.set_seed(7)
    whole = Two()
    expected = {name: p.asnumpy().copy() for name, p in _named(whole)}
    net = context.parallelize(whole)
    parts = dict(_named(net))
    assert parts["first.weight"].shape == (4, 4)
    with pk.publish_weights(net, timeout=100.0) as publisher:
        assert "sharded over tensor 2" in publisher.explain()
        follower = Follower(group, publisher, Two())
        publisher.wait(1, timeout=60.0)
        for version in (1, 2):
            assert follower.update(publisher).version == version
            if follower.subscriber is not None:
                for (name, wanted), array in zip(
                    expected.items(), follower.model.arrays.values(), strict=True
                ):
                    assert np.array_equal(array, wanted), (version, name)
            for name, parameter in parts.items():
                memory = as_bytes(parameter)
                memory[:] = (2 * parameter.asnumpy() + 1).tobytes()
                expected[name] = 2 * expected[name] + 1
        follower.close()
    _takes_its_parts(group, net, expected)
    context.reset()


def _takes_its_parts(group: Any, net: nn.Cell, expected: dict[str, np.ndarray]) -> None:
    """A whole model in another thread of rank 0 publishes to both ranks."""
    given = {name: np.full_like(array, 5) + array for name, array in expected.items()}
    renamed = {"norm.gamma": "norm.weight", "norm.beta": "norm.bias"}
    ticket, publisher = "", None
    if group.rank == 0:
        source = Arrays({renamed.get(n, n): a for n, a in given.items()})
        alone = FakeGroup(
            GroupSpec(
                framework="fake",
                backend="memory",
                device="cpu",
                rank=0,
                world_size=1,
                local_rank=0,
                local_world_size=1,
                master_addr="127.0.0.1",
                timeout=5.0,
                launch=LaunchInfo(),
            )
        )
        publisher = pk.publish_weights(source, timeout=60.0, group=alone)
        ticket = publisher.new_ticket(members=2)
    ticket = group.broadcast_object(ticket, 0)
    parts = dict(_named(net))
    places = {name: p.data_ptr() for name, p in parts.items()}
    with pk.subscribe_weights(net, ticket, member=group.rank, timeout=60.0) as subscriber:
        thread = threading.Thread(target=lambda: publisher and publisher.update())
        if publisher is not None:
            publisher.wait(2, timeout=60.0)
        thread.start()
        assert subscriber.step(60.0) == 1
        thread.join()
        assert subscriber.plan.nbytes == sum(p.nbytes for p in parts.values())
    for name, parameter in parts.items():
        rows = slice(4 * group.rank, 4 * group.rank + 4)
        where = {"first.weight": rows, "first.bias": rows, "second.weight": (slice(None), rows)}
        wanted = given[name][where.get(name, ...)]
        assert np.array_equal(parameter.asnumpy(), wanted), name
    assert {name: p.data_ptr() for name, p in parts.items()} == places
    if publisher is not None:
        publisher.close()


def main() -> None:
    # At its end MindSpore looks for a thread of its own by a deprecated name.
    warnings.filterwarnings("ignore", "getName", DeprecationWarning)
    with pk.init_process_group(framework="mindspore", device="cpu", timeout=100.0) as group:
        mistakes(group)
        follows_training(group)
        divided(group)
        group.barrier()


if __name__ == "__main__":
    main()
