"""Targets that hold a part of the names: what they keep of what is published."""

from __future__ import annotations

import numpy as np

from parallelkit.testing.arrays import Arrays
from parallelkit.weights.layout import Region
from parallelkit.weights.manifest import Manifest, TensorSpec
from parallelkit.weights.moves import needs_of
from parallelkit.weights.plan import plan_transfer


class Part(Arrays):
    """Whole tensors, of which the target may lack some."""

    def regions(self):
        return [Region((0,) * len(t.shape), t.shape) for t in self.needs().unique]


def spec(name, shape=(4,), alias_of=None):
    return TensorSpec(name=name, dtype="float32", shape=shape, alias_of=alias_of)


PUBLISHED = Manifest(
    [spec("embed"), spec("a", (2, 3)), spec("b", (3,)), spec("head", alias_of="embed")]
)


def kept(sink):
    needs = needs_of(sink, sink.needs(), PUBLISHED)
    return None if needs is None else [needs[i] for i in range(len(needs))]


def test_what_a_target_lacks_it_does_not_keep():
    sink = Part({"b": np.zeros(3, np.float32)})
    assert kept(sink) == [None, None, Region((0,), (3,))]
    assert plan_transfer(PUBLISHED, needs_of(sink, sink.needs(), PUBLISHED)).nbytes == 12


def test_a_tied_tensor_is_kept_under_whichever_name_the_target_has():
    sink = Part({"a": np.zeros((2, 3), np.float32), "head": np.zeros(4, np.float32)})
    assert kept(sink) == [Region((0,), (4,)), Region((0, 0), (2, 3)), None]


def test_a_target_that_has_all_of_it_keeps_everything():
    arrays = {n: np.zeros(s, np.float32) for n, s in {"b": 3, "a": (2, 3), "embed": 4}.items()}
    assert kept(Part(arrays)) is None
    assert kept(Arrays({"b": np.zeros(3, np.float32)})) is None, "not a target in parts"
