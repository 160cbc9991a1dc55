"""Names never carry a wrapper's prefix, and a module that is called `module` keeps its name."""

from __future__ import annotations

import torch
from parallelkit_torch import names
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 3)  # really called so
        self._orig_mod = nn.BatchNorm1d(3)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("lost", torch.zeros(2), persistent=False)
        self.register_parameter("absent", None)


def test_names_are_those_of_the_state_dict() -> None:
    net = Net()
    assert names.plain_names(net) == list(net.state_dict())


def test_compiled_model() -> None:
    net = Net()
    assert names.plain_names(torch.compile(net, backend="eager")) == list(net.state_dict())


def test_wrappers_in_the_middle_of_a_model() -> None:
    net = nn.Sequential(nn.Linear(2, 2), Net())
    plain = list(net.state_dict())
    net[0] = checkpoint_wrapper(torch.compile(net[0], backend="eager"))
    net[1] = nn.DataParallel(net[1])
    assert names.plain_names(net) == plain


def test_unwrap_and_uncompiled() -> None:
    net = Net()
    compiled = torch.compile(net, backend="eager")
    assert names.unwrap(nn.DataParallel(compiled)) is net
    assert names.is_compiled(compiled)
    assert not names.is_compiled(net)

    def function(x: int) -> int:
        return x

    assert names.uncompiled(torch.compile(function, backend="eager")) is function
    disabled = torch.compiler.disable(function)
    assert names.uncompiled(disabled) is disabled


def test_shared_module_has_both_names() -> None:
    shared = nn.Linear(2, 2)
    assert names.plain_names(nn.Sequential(shared, shared)) == [
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
    ]
