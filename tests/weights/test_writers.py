"""Two subscribers of one target: each vouches for what it wrote itself, and for nothing else."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from parallelkit.errors import QuarantinedError
from parallelkit.testing.peer import fill, sample_model, values
from parallelkit.weights.writers import Writer


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
    first, second, third = (np.zeros(4, np.uint8) for _ in range(3))
    nothing = first[:0]
    whole, part, other = Writer("whole"), Writer("part"), Writer("other")
    whole.writes("model", [nothing, first, second])
    other.writes("another", [nothing, third])
    assert (whole.displaced, other.displaced) == ("", "")
    part.writes("layer", [second])
    assert "part, another subscriber of this process, has written its target" in whole.displaced
    assert other.displaced == ""
    whole.writes("model", [first, second])
    assert (whole.displaced, bool(part.displaced)) == ("", True)


def test_a_writer_of_some_rows_displaces_that_of_the_tensor():
    tensor, other = np.zeros(64, np.uint8), np.zeros(4, np.uint8)
    whole, rows, rest = Writer("whole"), Writer("rows"), Writer("rest")
    whole.writes("model", [tensor, other])
    rows.writes("view", [tensor[16:32]])
    assert "rows, another subscriber of this process" in whole.displaced
    rest.writes("another view", [tensor[32:]])
    assert rows.displaced == ""


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
