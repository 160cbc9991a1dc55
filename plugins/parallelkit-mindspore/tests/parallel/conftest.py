"""A group of one for tests of contexts."""

from __future__ import annotations

from collections.abc import Iterator

import mindspore as ms
import pytest
from mindspore.communication import GlobalComm

import parallelkit as pk
from parallelkit.protocols import ProcessGroup


class Wide:
    """A group that says it is wide, for what is refused before communication."""

    framework, device, backend, rank = "mindspore", "cpu", "mccl", 0

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.native = GlobalComm.WORLD_COMM_GROUP


@pytest.fixture
def group() -> Iterator[ProcessGroup]:
    with pk.init_process_group(framework="mindspore", device="cpu") as opened:
        yield opened


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    """Every test leaves MindSpore's mode and parallel settings as they were."""
    mode = ms.get_context("mode")
    assert ms.get_auto_parallel_context("parallel_mode") == "stand_alone"
    yield
    ms.set_context(mode=mode)
    assert ms.get_auto_parallel_context("parallel_mode") == "stand_alone"


@pytest.fixture
def wide() -> Iterator[type[Wide]]:
    """Makes groups; settings of contexts over them are undone."""
    yield Wide
    from parallelkit_mindspore.parallel import settings_native

    for layer in list(settings_native._layers):
        layer.restore()
