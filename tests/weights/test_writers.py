"""Two subscribers of one target: each vouches for what it wrote itself, and for nothing else."""

from __future__ import annotations

import contextlib
import gc
import weakref

import numpy as np
import pytest

from parallelkit.errors import PartialCommitError, QuarantinedError, StateError
from parallelkit.testing.arrays import Arrays
from parallelkit.testing.peer import fill, sample_model, values
from parallelkit.weights import writers
from parallelkit.weights.overlap import Span
from parallelkit.weights.turns import Turns
from parallelkit.weights.writers import Writer


def span(start: int, nbytes: int) -> Span:
    """Bytes of the host, without gaps."""
    return Span("", start, nbytes, (), ())


def test_a_writer_is_displaced_by_another_until_it_writes_again():
    target, other = [], []
    a, b = Writer("a"), Writer("b")
    a.writes(target)
    a.writes(target)
    b.writes(other)
    assert (a.displaced, b.displaced) == ("", "")
    b.writes(target)
    assert a.displaced.startswith("b, another subscriber of this process, has written its target")
    assert b.displaced == ""
    a.writes(target)
    assert (a.displaced, bool(b.displaced)) == ("", True)
    a.leaves()
    b.writes(target)
    assert (a.displaced, b.displaced) == ("", "")
    alive = weakref.ref(a)
    del a
    gc.collect()
    assert alive() is None


def test_a_writer_of_a_part_displaces_that_of_the_whole():
    first, second, third = span(0, 4), span(8, 4), span(16, 4)
    whole, part, other = Writer("whole"), Writer("part"), Writer("other")
    whole.writes("model", (first, second))
    other.writes("another", (third,))
    assert (whole.displaced, other.displaced) == ("", "")
    part.writes("layer", (second,))
    assert "part, another subscriber of this process, has written its target" in whole.displaced
    assert other.displaced == ""
    whole.writes("model", (first, second))
    assert (whole.displaced, bool(part.displaced)) == ("", True)


class Placed:
    """What `writing` asks of a placement."""

    def __init__(self, module: object, *memory: Span) -> None:
        self.module, self.memory = module, memory


def test_no_two_write_the_same_memory_at_one_time():
    whole, part, other = Writer("whole"), Writer("part"), Writer("other")
    placed, layer, apart = (
        Placed("m", span(0, 64)),
        Placed("l", span(16, 4)),
        Placed("o", span(99, 1)),
    )
    whole.writes(placed.module, placed.memory)
    with part.writing(layer):
        part.claims(layer.module, layer.memory)
        assert "part, another subscriber" in whole.displaced, "from the first byte on"
        with other.writing(apart):
            other.claims(apart.module, apart.memory)
        with pytest.raises(StateError, match="part, another .*, writes this target, or a part"):
            with whole.writing(placed):
                whole.claims(placed.module, placed.memory)
        assert part.displaced == "", "nothing was written"
    with whole.writing(placed):
        whole.claims(placed.module, placed.memory)
    assert (whole.displaced, bool(part.displaced), other.displaced) == ("", True, "")


def test_nobody_writes_what_another_ones_user_holds():
    turns = Turns()
    held, late = Writer("held", turns), Writer("late")
    held.writes("model")
    with turns.use(lambda: None), pytest.raises(StateError, match="held, .* has in use this"):
        late.claims("model")
    assert (held.displaced, late.displaced) == ("", "")
    late.claims("model")
    assert held.displaced


def test_a_second_subscriber_does_not_write_while_the_first_is_used(bench):
    publisher, target = bench.publish(), sample_model()
    first = bench.follow(model=target)
    bench.update()
    second = bench.follow(model=target)
    fill(bench.source, 2.0)
    first.subscriber.serve()
    second.subscriber.serve()
    publisher.update()
    with first.subscriber.use():
        for _ in range(2):
            with pytest.raises(QuarantinedError, match="has in use this target"):
                with second.subscriber.use():
                    pass
        assert values(target) == {2.0}
    assert first.subscriber.state == "current"


def test_a_writer_of_some_rows_displaces_that_of_the_tensor():
    whole, rows, rest = Writer("whole"), Writer("rows"), Writer("rest")
    whole.writes("model", (span(0, 64), span(100, 4)))
    rows.writes("view", (span(16, 16),))
    assert "rows, another subscriber of this process" in whole.displaced
    rest.writes("another view", (span(32, 32),))
    assert rows.displaced == ""


def test_memory_is_looked_through_again_only_where_it_is_another(monkeypatch):
    looks = []
    monkeypatch.setattr(writers, "shared", lambda *memory: looks.append(memory))
    one, other = Writer("one"), Writer("other")
    first, second = (span(0, 4),), (span(8, 4),)
    for _ in range(3):
        one.writes("a", first)
        other.writes("b", second)
    assert looks == [(second, first), (first, second)]
    moved = (span(16, 4),)
    one.writes("a", moved)
    assert looks[2:] == [(moved, second)]
    other.leaves()
    one.writes("a", (span(24, 4),))
    assert len(looks) == 3


def test_a_target_that_writes_by_itself_tells_where(bench):
    """Columns of one matrix, of which `destination` has nothing."""

    class Located(Arrays):
        def live_memory(self):
            array = self.arrays["a"]
            address = array.__array_interface__["data"][0]
            return (Span("a", address, array.itemsize, array.shape, array.strides),)

    matrix = np.zeros((4, 6), np.float32)
    bench.source = Arrays({"a": np.ones((4, 2), np.float32)})
    publisher = bench.publish()
    left, middle, right = (
        bench.follow(model=Located({"a": matrix[:, first : first + 2]})) for first in (0, 1, 2)
    )
    with contextlib.suppress(PartialCommitError):  # in any order, or one while another writes
        bench.update()
    publisher.drop(middle.subscriber.name)
    bench.update(left, right)
    assert left.subscriber.state == right.subscriber.state == "current"
    assert middle.subscriber.state == "quarantined"


@pytest.mark.parametrize("how", ["step", "serve"])
def test_a_subscriber_whose_target_another_one_wrote_serves_nothing(bench, how):
    publisher = bench.publish()
    target = sample_model()
    first = bench.follow(model=target)
    bench.update()
    second = bench.follow(model=target)
    if how == "serve":
        first.subscriber.serve()
        second.subscriber.serve()
    fill(bench.source, 2.0)
    if how == "serve":
        publisher.update()
        with second.subscriber.use():
            assert values(target) == {2.0}
        # What the first has staged goes live when it is asked: it has written last then.
        with first.subscriber.use():
            assert first.subscriber.version == 2
        displaced = second.subscriber
    else:
        publisher.drop(first.subscriber.name)
        bench.update(second)
        displaced = first.subscriber
    assert displaced.state == "quarantined"
    with (
        pytest.raises(QuarantinedError, match="another subscriber of this process, has written"),
        displaced.use(),
    ):
        pass
