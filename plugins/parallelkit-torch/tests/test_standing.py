"""Every change of a module that an update has to see is one that `Standing` sees."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from parallelkit_torch.standing import Standing
from torch import nn


def model() -> nn.Sequential:
    made = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    made[2].register_buffer("lent", torch.zeros(3), persistent=False)
    return made


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "another parameter": lambda m: setattr(m[0], "weight", nn.Parameter(torch.zeros(4, 4))),
    "other memory": lambda m: setattr(m[0].weight, "data", m[0].weight.data.clone()),
    "another shape": lambda m: setattr(m[0].weight, "data", m[0].weight.data.view(2, 8)),
    "other strides": lambda m: setattr(m[0].weight, "data", m[0].weight.data.t()),
    "another dtype": lambda m: setattr(m[1].running_var, "data", torch.ones(4).int()),
    "a parameter gone": lambda m: setattr(m[0], "bias", None),
    "a parameter more": lambda m: m[0].register_parameter("more", nn.Parameter(torch.zeros(1))),
    "a buffer more": lambda m: m.register_buffer("more", torch.zeros(1)),
    "a buffer that is kept now": lambda m: m[2].register_buffer("lent", m[2].lent),
    "a module more": lambda m: m.add_module("more", nn.ReLU()),
    "another module": lambda m: m.__setitem__(0, nn.Linear(4, 4)),
    "another name": lambda m: m._modules.update(x=m._modules.pop("2")),
    "a tie": lambda m: setattr(m[2], "weight", m[0].weight),
    "another class": lambda m: setattr(m[0], "__class__", nn.Bilinear),
}


def test_a_module_that_is_used_stands() -> None:
    made = model()
    standing = Standing(made)
    made(torch.zeros(2, 4)).sum().backward()
    with torch.no_grad():
        made[0].weight.add_(1)
    made.eval()
    assert standing.holds()


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str) -> None:
    made = model()
    standing = Standing(made)
    CHANGES[change](made)
    assert not standing.holds()


def test_a_tensor_without_data_never_stands() -> None:
    assert not Standing(nn.Linear(2, 2, device="meta")).holds()
