"""Tensors that are larger than a bucket, in whole updates."""

import numpy as np
import pytest

from parallelkit.testing.arrays import Arrays
from parallelkit.weights.plan import BUCKET_BYTES

SHAPES = {
    "before": ((3,), np.uint8),
    "flat": ((2 * BUCKET_BYTES + 5,), np.uint8),
    "rows": ((3, BUCKET_BYTES // 4 + 1), np.float32),  # each larger than a bucket by itself
    "after": ((), np.float64),
}


def arrays(rng=None):
    if rng is None:
        return {name: np.zeros(shape, dtype) for name, (shape, dtype) in SHAPES.items()}
    return {
        name: rng.integers(0, 200, shape).astype(dtype) for name, (shape, dtype) in SHAPES.items()
    }


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("commit", ["staged", "in_place"])
@pytest.mark.parametrize("indirect", [False, True])
def test_a_tensor_larger_than_a_bucket_arrives(bench, transport, commit, indirect):
    bench.source = Arrays(arrays(np.random.default_rng(1)))
    bench.publish(transport=transport, commit=commit, verify="readback", timeout=30.0)
    target = Arrays(arrays())
    if indirect:
        target.destination = lambda index: None
    follower = bench.follow(model=target)
    assert any(t.nbytes > BUCKET_BYTES for t in bench.publisher.plan.manifest.unique)
    bench.update()
    assert follower.subscriber.version == 1
    for name, array in bench.source.arrays.items():
        np.testing.assert_array_equal(follower.model.arrays[name], array)
