"""For the jobs here: be one rank of a world that is not there, and compile as it would."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.communication import management
from parallelkit_mindspore.parallel import semi_auto

from parallelkit.launch import LaunchInfo
from parallelkit.plan import plan
from parallelkit.specs import ContextSpec, GroupSpec
from parallelkit.testing.fake import FakeGroup

DEVICE = b"Ascend"


class World:
    """Rank and size come from the environment: `PLANNED_RANK`, `PLANNED_SIZE`."""

    def __init__(self, library: str) -> None:
        self.rank = int(os.environ["PLANNED_RANK"])
        self.size = int(os.environ["PLANNED_SIZE"])
        self._library = ctypes.CDLL(library)
        self._library.pretend_device.restype = ctypes.c_char_p
        assert self._library.planned_world(DEVICE, self.rank, self.size) == 1
        # Operators that the compiler makes in Python ask here for the size of their group.
        management._get_size_helper = lambda group, *_: self._library.planned_size(group.encode())
        management._get_rank_helper = lambda group, *_: self._library.planned_rank(group.encode())

    @contextlib.contextmanager
    def device(self) -> Iterator[None]:
        """Within, MindSpore believes that it is on an Ascend device."""
        before = bytes(self._library.pretend_device(DEVICE))
        assert before == b"CPU", before
        try:
            yield
        finally:
            self._library.pretend_device(before)

    def context(self, mode: str, options: dict[str, Any] | None = None, **degrees: int) -> Any:
        """A context of ours, as a rank with an NPU would get it."""
        group = FakeGroup(
            GroupSpec(
                framework="mindspore",
                backend="hccl",
                device=f"npu:{self.rank}",
                rank=self.rank,
                world_size=self.size,
                local_rank=self.rank,
                local_world_size=self.size,
                launch=LaunchInfo(),
            )
        )
        spread = plan(self.size, mode, **degrees)
        spec = ContextSpec(plan=spread, mode=mode, pinned=degrees, options=options or {})
        return semi_auto.setup(spec, group)


class Perceptron(nn.Cell):
    """Two dense layers."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Dense(width, inner)
        self.relu = nn.ReLU()
        self.down = nn.Dense(inner, width)

    def construct(self, x: Any) -> Any:
        return self.down(self.relu(self.up(x)))


def whole_step(net: nn.Cell) -> nn.Cell:
    """Loss, gradients and momentum as one cell."""
    optimizer = nn.Momentum(net.trainable_params(), 0.01, 0.9)
    return nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer).set_train()


def batch(width: int, items: int = 64) -> Any:
    return ms.Tensor(np.ones((items, width)), ms.float32)


def lines(context: Any, start: str) -> list[str]:
    """The lines of `explain()` that begin with `start`, stripped."""
    return [
        line.strip() for line in context.explain().splitlines() if line.strip().startswith(start)
    ]


def strategy_of(context: Any, step: Any, name: str) -> Any:
    """The strategy of the operator whose name holds `name`."""
    found = [s for key, s in context.strategies(step).operators.items() if name in key]
    assert len(found) == 1, (name, context.strategies(step).operators)
    return found[0]


def file_of(folder: str, name: str) -> str:
    return str(Path(folder) / name)
