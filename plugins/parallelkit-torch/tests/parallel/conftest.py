"""A world of one, and what saves and loads in it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from parallelkit_torch.group import TorchProcessGroup, init_process_group
from parallelkit_torch.parallel import checkpoint

from parallelkit.plan import plan
from parallelkit.plugin import GroupSpec


@pytest.fixture
def group(spec: Callable[..., GroupSpec]) -> Iterator[TorchProcessGroup]:
    with init_process_group(spec()) as opened:
        yield opened


@pytest.fixture
def save(group: TorchProcessGroup) -> Callable[..., None]:
    return functools.partial(checkpoint.save, group=group, plan=plan(1))


@pytest.fixture
def load(group: TorchProcessGroup) -> Callable[..., dict[str, Any]]:
    return functools.partial(checkpoint.load, group=group)
