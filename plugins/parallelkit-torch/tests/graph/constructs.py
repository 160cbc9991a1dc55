"""Functions that do not go into one graph, each for a reason of its own; lines are looked up."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Iterator

import torch

LOCK = threading.Lock()


def fine(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * 2


def prints(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    print("here")  # break: call of print()
    return y * 2


def branches(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:  # break: branch on a tensor's value
        return x * 2
    return x


def loops(x: torch.Tensor) -> torch.Tensor:
    while x.sum() < 10:  # break: while loop on a tensor's value
        x = x + 1
    return x


def items(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()  # break: Tensor.item()


def lists(x: torch.Tensor) -> torch.Tensor:
    return x * float(x.tolist()[0])  # break: Tensor.tolist()


def generates(x: torch.Tensor) -> Iterator[torch.Tensor]:  # break: generator (yield)
    for i in range(3):
        yield x + i


def tries(x: torch.Tensor) -> torch.Tensor:
    try:
        y = x * 2
        print("here")  # break: call of print() inside a try block
        return y
    except ValueError:
        return x


def locks(x: torch.Tensor) -> torch.Tensor:
    with LOCK:  # break: with statement on a lock
        return x * 2


@contextlib.contextmanager
def nothing() -> Iterator[None]:
    yield


def breaks_inside_with(x: torch.Tensor) -> torch.Tensor:
    with nothing():
        x = x + 1
        time.sleep(0)  # break: call of time.sleep() inside a with block
        return x * 2


def called(x: torch.Tensor) -> torch.Tensor:
    return helper(x) * 2


def helper(x: torch.Tensor) -> torch.Tensor:
    return x + random.random()  # break: call of Random.random()


def shapes(x: torch.Tensor) -> torch.Tensor:
    return x.nonzero()  # break: aten.nonzero.default, whose shape depends on the data


@torch.compiler.disable
def kept_out(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def calls_kept_out(x: torch.Tensor) -> torch.Tensor:
    return kept_out(x) * 2  # break: call of a function kept from compiling


def logs(x: torch.Tensor) -> torch.Tensor:
    LOGGER.info("here")  # break: call of a logger
    return x * 2


LOGGER = logging.getLogger(__name__)


def opens(x: torch.Tensor) -> torch.Tensor:
    open("/dev/null").close()  # break: call of open()
    return x * 2


def goes_back(x: torch.Tensor) -> torch.Tensor:
    y = x.detach().requires_grad_()
    (y * 2).sum().backward()  # break: Tensor.backward()
    return y * 2


def no_tensor(x: torch.Tensor) -> int:  # break: nothing to compile
    return 3
