"""The subscriber's half of moving bytes: where memory runs out, and by a loader."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from parallelkit.protocols import FiniteSink
from parallelkit.testing.arrays import Arrays
from parallelkit.testing.peer import sample_model
from parallelkit.testing.scripted import Memory
from parallelkit.weights import placement, subscribe_weights
from parallelkit.weights.finite import non_finite
from parallelkit.weights.placement import Placement

SECONDS = 10.0


def test_staging_memory_is_had_whole_or_not_at_all(monkeypatch):
    model = sample_model()
    readers = Memory(model.manifest()).readers()
    subject = Placement(model, model.needs(), readers, "digest", bytes(16))
    left = [1]

    class Scarce:
        """numpy, with memory for one more array."""

        def __getattr__(self, name):
            return getattr(np, name)

        def zeros(self, *given):
            if not left.pop():
                raise MemoryError("no more")
            left.append(0)
            return np.zeros(*given)

    with monkeypatch.context() as scarce:
        scarce.setattr(placement, "np", Scarce())
        with pytest.raises(MemoryError, match="no more"):
            subject.allocate_staging()
    assert (subject._spare, subject._staging) == (None, None)
    subject.allocate_staging()
    assert subject._spare is not None
    assert subject._staging is not None


class Loading(Arrays):
    """A target by a loader that keeps some tensors in a form that cannot be read back."""

    unread = (1,)

    def learn(self, published):
        assert [t.name for t in published.unique] == list(self.arrays)

    def readable(self, index):
        return index not in self.unread

    def explain(self):
        return "by hand"

    def destination(self, index):
        return super().destination(index) if self.readable(index) else None

    def host_bytes(self, index):
        assert self.readable(index)
        return super().host_bytes(index)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("commit", ["staged", "in_place"])
@pytest.mark.parametrize("serve", [False, True])
def test_what_a_loader_changed_counts_as_received(job, spread, transport, commit, serve):
    run = job(spread(), verify="readback", transport=transport, commit=commit)
    arrays = {t.name: np.zeros(t.shape, t.dtype) for t in run.manifest.unique}
    target = Loading(arrays)
    with subscribe_weights(target, run.lead.new_ticket(), timeout=SECONDS) as member:
        assert member.explain() == "by hand"
        if serve:
            member.serve()
        else:
            run.members.append((member, target, None))
        for version in (1, 2):
            run.change(version)
            results, errors = run.update()
            assert not errors
            report = results[0]
            assert report.members[0].state == ("staged" if serve else "committed")
            mixed = "live memory; staged bytes for 1 of 3 tensors"
            assert report.members[0].verified == ("staged bytes" if serve else mixed)
            assert "received and in live memory" not in report.verified
            assert f"verified: {report.members[0].verified}" in str(report)
            if serve:
                assert member.step(SECONDS) == version
            for array, value in zip(arrays.values(), run.values, strict=True):
                assert array.tobytes() == value.tobytes()
        run.members.clear()


def test_a_loader_that_nothing_can_be_read_back_from_is_staged_bytes(bench):
    """Also where live memory is asked for: the report must not claim it."""

    class Opaque(Loading):
        unread = range(100)

        def learn(self, published):
            pass

    publisher = bench.publish(verify="readback")
    bench.follow(model=Opaque(sample_model().arrays))
    bench.follow()
    report = bench.update()
    assert [m.verified for m in report.members] == ["staged bytes", "live memory"]
    assert report.verified == (
        "verified: every byte, at the source and as received; live memory where a member says so"
    )
    assert publisher.version == 1


class Late(Loading):
    """A target that keeps views of what it is given, and places all of it at the end."""

    def __init__(self, arrays):
        super().__init__(arrays)
        self.views: dict[int, memoryview] = {}
        self.meanwhile = lambda: None

    def destination(self, index):
        return None

    def write(self, index, data):
        self.views[index] = data

    def finish(self):
        self.meanwhile()
        for index, data in self.views.items():
            super().write(index, data)
        self.views.clear()


def zeros(run):
    return {t.name: np.zeros(t.shape, t.dtype) for t in run.manifest.unique}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("commit", ["staged", "in_place"])
@pytest.mark.parametrize("serve", [False, True])
def test_written_bytes_stay_until_the_end(job, spread, transport, commit, serve):
    run = job(spread(), transport=transport, commit=commit)
    target = Late(zeros(run))
    with subscribe_weights(target, run.lead.new_ticket(), timeout=SECONDS) as member:
        if serve:
            member.serve()
        else:
            run.members.append((member, target, None))
        for version in (1, 2, 3):
            run.change(version)
            results, errors = run.update()
            assert not errors
            assert results[0].members[0].state == ("staged" if serve else "committed")
            if serve:
                assert member.step(SECONDS) == version
            for array, value in zip(target.arrays.values(), run.values, strict=True):
                assert array.tobytes() == value.tobytes()
        run.members.clear()


def test_written_bytes_stay_while_the_next_version_arrives(job, spread):
    run = job(spread())
    target = Late(zeros(run))
    with subscribe_weights(target, run.lead.new_ticket(), timeout=SECONDS) as member:
        member.serve()
        run.change(1)
        assert not run.update()[1]
        first = [value.copy() for value in run.values]
        arrives = threading.Thread(target=lambda: (run.change(2), run.update()))

        def meanwhile():
            before = member._placement._fetched
            arrives.start()
            deadline = time.monotonic() + SECONDS
            while member._placement._fetched == before:
                assert time.monotonic() < deadline, "the next version does not arrive"
                time.sleep(0.01)

        target.meanwhile = meanwhile
        assert member.step(SECONDS) == 1
        for array, value in zip(target.arrays.values(), first, strict=True):
            assert array.tobytes() == value.tobytes()
        target.meanwhile = lambda: None
        arrives.join(SECONDS)
        assert member.step(SECONDS) == 2
        for array, value in zip(target.arrays.values(), run.values, strict=True):
            assert array.tobytes() == value.tobytes()


class Noted(Late):
    """A target that has to know whether its values are finite; says when it heard it."""

    def __init__(self, arrays):
        super().__init__(arrays)
        self.heard: list[object] = []

    def begin(self):
        super().begin()
        self.heard.append("begin")

    def note_finite(self, finite):
        self.heard.append(finite)

    def finish(self):
        super().finish()
        self.heard.append("finish")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("commit", ["staged", "in_place"])
@pytest.mark.parametrize("serve", [False, True])
def test_values_are_looked_at_before_the_target_stands_still(
    job, spread, monkeypatch, transport, commit, serve
):
    run = job(spread(), transport=transport, commit=commit)
    target = Noted(zeros(run))
    assert isinstance(target, FiniteSink)
    heard = target.heard

    def look(*given):
        heard.append("look")
        return non_finite(*given)

    monkeypatch.setattr(placement, "non_finite", look)
    with subscribe_weights(target, run.lead.new_ticket(), timeout=SECONDS) as member:
        if serve:
            member.serve()
        else:
            run.members.append((member, target, None))
        for version, finite in enumerate((True, False, True), 1):
            for value in run.values:
                value[...] = version
            if not finite:
                run.values[0][6, 2] = [0, 0, 0xC0, 0x7F]  # NaN, in what rank 1 hands out
            assert not run.update()[1]
            if serve:
                assert set(heard) == {"look"}  # while it is received, and may still be called off
                assert member.step(SECONDS) == version
            before = serve or commit == "staged"
            looks = heard.count("look")
            assert bool(looks) == before
            assert heard == ["look"] * looks + ["begin"] + [finite] * before + ["finish"]
            heard.clear()
        run.members.clear()


def test_what_was_fetched_for_nothing_is_not_told(job, spread):
    """A version with NaN is called off after it arrived; the next one's values count."""
    run = job(spread())
    for value in run.values:
        value[...] = 1
    target = Noted(zeros(run))
    with subscribe_weights(target, run.lead.new_ticket(), timeout=SECONDS) as member:
        member.serve()
        assert not run.update()[1]
        run.values[0][6, 2] = [0, 0, 0xC0, 0x7F]
        member._phase = called_off
        assert not run.update()[1]
        assert member._placement._fetched_finite is False
        assert member.step(SECONDS) == 1
        assert target.heard == ["begin", True, "finish"]


def called_off(phase):
    if phase == "transfer":
        raise RuntimeError("no")
