"""The subscriber's half of moving bytes, where memory runs out."""

from __future__ import annotations

import numpy as np
import pytest

from parallelkit.testing.peer import sample_model
from parallelkit.testing.scripted import Memory
from parallelkit.weights import placement
from parallelkit.weights.placement import Placement


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
