"""Cells as publisher and as follower, the other side a thread of arrays or another process.

One thread owns MindSpore, so a Cell's `update()` and `step()` are this one's; the other side needs
no framework.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

import parallelkit as pk
from parallelkit.errors import (
    CorruptionError,
    ManifestError,
    ManifestMismatchError,
    PartialCommitError,
    PeerLostError,
    QuarantinedError,
    UnsupportedFeatureError,
    UpdateAbortedError,
    WrongThreadError,
)
from parallelkit.testing.arrays import Arrays
from parallelkit.testing.peer import PUBLISHER_PHASES, SUBSCRIBER_PHASES, Peer
from parallelkit.weights.segments import SHM_DIR

#: Well under the deadline: a death is noticed, not waited for.
AT_ONCE = 60.0


@pytest.fixture(autouse=True)
def _nothing_remains() -> Iterator[None]:
    before = set(SHM_DIR.iterdir())
    yield
    assert {p for p in set(SHM_DIR.iterdir()) - before if p.name.startswith("parallelkit")} == set()


class Model(nn.Cell):
    """The names, shapes and dtypes of `parallelkit.testing.peer.sample_model`, one tie included."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        for name, shape, dtype in (
            ("body", (1 << 16,), np.float32),
            ("half", (7,), np.float16),
            ("head", (3, 5), np.float32),
        ):
            setattr(self, name, ms.Parameter(ms.Tensor(np.full(shape, value, dtype)), name=name))
        self.insert_param_to_cell("tail", self.head)
        self.register_buffer("scalar", ms.Tensor(np.full((), value, np.float64)))
        self.register_buffer("empty", ms.Tensor(np.zeros((0, 4), np.int8)))

    def fill(self, value: float) -> None:
        """New values by MindSpore's own operations, without waiting for them."""
        for tensor in (self.body, self.half, self.head):
            ms.ops.assign(tensor, tensor * 0 + value)
        self.scalar.copy_(ms.Tensor(np.full((), value, np.float64)))

    def held(self) -> set[float]:
        tensors = [*self.get_parameters(), *(b for _, b in self.named_buffers())]
        return {float(v) for t in tensors for v in np.unique(t.asnumpy())}

    def addresses(self) -> list[int]:
        return [p.data_ptr() for p in self.get_parameters()]


def arrays(value: float = 0.0) -> Arrays:
    from parallelkit.testing.peer import sample_model

    return sample_model(value)


def beside(call: Callable[[], Any]) -> Callable[[], Any]:
    """Run `call` in a thread; what is returned waits for it, and gives its result or error."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def wait() -> Any:
        thread.join(60)
        assert not thread.is_alive(), "the other side still runs"
        return found[0]

    return wait


def held(model: Arrays) -> set[float]:
    return {float(v) for a in model.arrays.values() for v in np.unique(a)}


# --- both directions ---------------------------------------------------------------------------


@pytest.mark.parametrize("verify", ["digest", "readback", "off"])
def test_arrays_follow_a_cell(verify: str) -> None:
    source, target = Model(), arrays()
    with pk.publish_weights(source, timeout=30, verify=verify) as publisher:
        with pk.subscribe_weights(target, publisher.ticket) as follower:
            for version in range(1, 9):
                source.fill(float(version))  # not waited for: update() does
                done = beside(follower.step)
                report = publisher.update()
                assert (done(), report.version) == (version, version)
                assert held(target) == {float(version)}


@pytest.mark.parametrize("verify", ["digest", "readback", "off"])
def test_a_cell_follows_arrays(verify: str) -> None:
    source, target = arrays(), Model()
    addresses = target.addresses()
    with pk.publish_weights(source, timeout=30, verify=verify) as publisher:
        with pk.subscribe_weights(target, publisher.ticket) as follower:
            for version in range(1, 9):
                for array in source.arrays.values():
                    array[...] = version
                done = beside(publisher.update)
                assert follower.step() == version
                assert done().version == version
                with follower.use() as model:
                    assert model.held() == {float(version)}
    assert target.addresses() == addresses


class Total(Model):
    def construct(self) -> Any:
        return self.body.sum() + self.head.sum()


def test_a_compiled_cell_follows_after_its_parameters_moved() -> None:
    source, target = arrays(), Total()
    pk.execution_mode("graph", framework="mindspore").compile(target)
    with pk.publish_weights(source, timeout=30) as publisher:
        with pk.subscribe_weights(target, publisher.ticket) as follower:
            for version in (1, 2):
                for array in source.arrays.values():
                    array[...] = version
                done = beside(publisher.update)
                follower.step()
                done()
                with follower.use() as model:
                    assert float(model().asnumpy()) == version * ((1 << 16) + 15)
                ms.load_param_into_net(target, {"body": ms.Parameter(target.body.copy())})


def test_a_cell_follows_a_cell_that_serves_from_a_thread() -> None:
    source, target = nn.WithLossCell(Model(), nn.MSELoss()), Model()
    with pk.publish_weights(ms.Model(source), timeout=30) as publisher:
        with pk.subscribe_weights(target, publisher.ticket) as follower:
            follower.serve()
            for version in (1, 2, 3):
                source._backbone.fill(float(version))
                publisher.update()
                assert target.held() == {float(version - 1)}, "staged, and not in place"
                if version == 2:
                    with follower.use() as model:
                        assert model.held() == {2.0}
                else:
                    assert follower.step() == version
                assert target.held() == {float(version)}


def test_another_thread_changes_nothing_of_a_follower_that_serves() -> None:
    source, target = arrays(), Model()

    def use() -> None:
        with follower.use():
            pass

    with pk.publish_weights(source, timeout=30) as publisher:
        with pk.subscribe_weights(target, publisher.ticket) as follower:
            follower.serve()
            for version in (1, 2):
                for array in source.arrays.values():
                    array[...] = version
                publisher.update()
                for call in (use, lambda: follower.step(0), use):
                    assert isinstance(beside(call)(), WrongThreadError)
                    expected = ("waiting" if version == 1 else "current", version - 1)
                    assert (follower.state, follower.version) == expected
                assert target.held() == {float(version - 1)}
                with follower.use() as model:
                    assert model.held() == {float(version)}, "it was staged still"
            assert isinstance(beside(use)(), WrongThreadError), "with nothing staged, too"
            assert (follower.state, follower.version) == ("current", 2)


def test_another_thread_s_step_calls_the_update_off() -> None:
    source, target = arrays(1.0), Model()
    with pk.publish_weights(source, timeout=30) as publisher:
        with pk.subscribe_weights(target, publisher.ticket) as follower:
            failed = beside(follower.step)
            with pytest.raises(UpdateAbortedError, match="not thread safe"):
                publisher.update()
            assert isinstance(failed(), WrongThreadError)
            assert follower.state == "waiting"
            done = beside(publisher.update)
            assert follower.step() == 1
            done()
    assert target.held() == {1.0}


# --- mistakes ----------------------------------------------------------------------------------


def test_names_that_differ_are_listed_with_the_nearest() -> None:
    class Other(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.bodi = ms.Parameter(ms.Tensor(np.zeros(4, np.float32)), name="bodi")
            self.norm = nn.BatchNorm1d(2)

    source = Arrays({"body": np.zeros(4, np.float32), "norm.gamma": np.zeros(2, np.float32)})
    with pk.publish_weights(source, timeout=30) as publisher:
        with pytest.raises(ManifestMismatchError) as caught:
            pk.subscribe_weights(Other(), publisher.ticket)
    text = "\n".join(caught.value.differences)
    assert "'bodi'" in text
    assert "did you mean 'body'?" in text
    assert "'norm.num_batches_tracked'" in text


def test_aliased_is_refused_with_the_reason() -> None:
    model = Model(1.0)
    addresses = model.addresses()
    with pytest.raises(UnsupportedFeatureError, match="aliased=True is not possible"):
        pk.publish_weights(model, aliased=True)
    assert model.addresses() == addresses


def test_a_cell_that_changed_is_refused_before_anything_is_sent() -> None:
    source, target = Model(), arrays()
    with pk.publish_weights(source, timeout=30) as publisher:
        with pk.subscribe_weights(target, publisher.ticket) as follower:
            source.half.set_data(ms.Tensor(np.zeros(8, np.float16)))
            with pytest.raises(ManifestError, match=r"'half' was float16\[7\] and is now"):
                publisher.update()
            source.half.set_data(ms.Tensor(np.zeros(7, np.float16)))
            done = beside(follower.step)
            publisher.update()
            assert done() == 1


def test_a_cell_that_changed_while_a_thread_serves_is_quarantined_until_it_fits() -> None:
    source, target = arrays(1.0), Model()
    with pk.publish_weights(source, timeout=30) as publisher:
        with pk.subscribe_weights(target, publisher.ticket) as follower:
            follower.serve()
            publisher.update()
            target.half.set_data(ms.Tensor(np.zeros(8, np.float16)))
            with pytest.raises(QuarantinedError, match="'half' was"):
                follower.step()
            target.half.set_data(ms.Tensor(np.zeros(7, np.float16)))
            assert follower.step() == 1
    assert target.held() == {1.0}


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_byte_that_arrives_changed_calls_the_update_off(side: str) -> None:
    source, target = (Model(1.0), arrays()) if side == "source" else (arrays(1.0), Model())
    with pk.publish_weights(source, timeout=30) as publisher:
        coordinator: Any = publisher._coordinator

        def spoil(phase: str) -> None:
            if phase == "stage":
                coordinator.exporter.arena.bytes[0] ^= 1
                coordinator._phase_hook = lambda phase: None

        coordinator._phase_hook = spoil
        with pk.subscribe_weights(target, publisher.ticket) as follower:
            ours, theirs = publisher.update, follower.step
            if side == "target":
                ours, theirs = theirs, ours
            other = beside(theirs)
            with pytest.raises(UpdateAbortedError) as caught:
                ours()
            aborted = caught.value if side == "source" else other()
            other()
            assert isinstance(aborted.__cause__, CorruptionError)
            assert "body" in aborted.__cause__.tensors
            assert target.held() == {0.0} if side == "target" else held(target) == {0.0}
            other = beside(theirs)
            ours()
            other()
    assert target.held() == {1.0} if side == "target" else held(target) == {1.0}


# --- processes that die ------------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.parametrize("phase", SUBSCRIBER_PHASES)
def test_a_follower_of_a_cell_is_killed(phase: str) -> None:
    source, target = Model(1.0), arrays()
    with pk.publish_weights(source, timeout=110.0) as publisher:
        with pk.subscribe_weights(target, publisher.ticket) as survivor:
            with Peer("subscribe", die_at=phase) as victim:
                victim.send(publisher.new_ticket())
                name = victim.event("joined")["name"]
                decided = phase in ("prepared", "commit", "committed")
                other = beside(survivor.step)
                started = time.monotonic()
                with pytest.raises(PartialCommitError if decided else UpdateAbortedError) as caught:
                    publisher.update()
                assert time.monotonic() - started < AT_ONCE
                assert name in str(caught.value)
                assert (other() == 1) is decided
            assert held(target) == ({1.0} if decided else {0.0})
            source.fill(2.0)
            other = beside(survivor.step)
            publisher.update()
            assert other() == 1 + decided
    assert held(target) == {2.0}
    assert source.held() == {2.0}


@pytest.mark.ranks
@pytest.mark.parametrize("phase", PUBLISHER_PHASES)
def test_the_publisher_of_a_cell_is_killed(phase: str) -> None:
    target = Model()
    with Peer("publish", die_at=phase, value=1.0, publish={"timeout": 110.0}) as victim:
        ticket = victim.event("ticket")["ticket"]
        with pk.subscribe_weights(target, ticket, timeout=110.0) as follower:
            victim.event("ready")
            victim.send("1.0")
            started = time.monotonic()
            try:
                follower.step(110.0)
            except PeerLostError as error:
                assert "publisher at tcp://" in str(error)
            assert time.monotonic() - started < AT_ONCE
            committed = follower.version == 1
            assert target.held() == ({1.0} if committed else {0.0})
            if committed:
                assert phase in ("verify", "committed")
            else:
                assert follower.state in ("waiting", "quarantined")
            with pytest.raises(PeerLostError):
                follower.step(30.0)
