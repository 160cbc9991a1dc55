"""Names never carry a wrapper's prefix, and a module that is called `module` keeps its name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from parallelkit_torch import names
from parallelkit_torch.sharded_target import weight_sink
from parallelkit_torch.sharded_weights import weight_source
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from parallelkit.errors import ManifestError


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


class Headed(nn.DataParallel):  # type: ignore[type-arg]
    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.head = nn.Linear(2, 2)


def with_buffer(inner: nn.Module) -> nn.Module:
    compiled: nn.Module = torch.compile(inner, backend="eager")  # type: ignore[assignment]
    compiled.register_buffer("head", torch.ones(1))  # goes to the wrapper
    return compiled


@pytest.mark.parametrize("wrap", [Headed, with_buffer])
def test_tensors_of_a_wrapper_itself_do_not_stay_behind_in_silence(
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    with pytest.raises(ManifestError, match="'inner' is a .*a wrapper.*'head' of its own"):
        weight_source(nn.ModuleDict({"inner": wrap(nn.Linear(2, 2))}))
    with pytest.raises(ManifestError, match="'the model' is a "):
        weight_sink(wrap(nn.Linear(2, 2)))


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


class Extra(nn.Module):
    """Keeps something beside its tensors."""

    def __init__(self, state: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.state = state

    def get_extra_state(self) -> object:
        return self.state


class Packed(nn.Module):
    """Keeps its weight as quantised layers of torch do: in no parameter and no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2))
        self.packed = (torch.zeros(2, 2), 0.5)

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:  # type: ignore[type-arg]
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "packed"] = self.packed


class Plain(nn.Module):
    """Saves in a way of its own, and tensors of its own alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1))

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:  # type: ignore[type-arg]
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "scale"] = self.scale


@pytest.mark.parametrize("role", [weight_source, weight_sink])
def test_state_that_is_no_tensor_is_refused_by_name(role: Callable[[nn.Module], object]) -> None:
    for part, said in (
        (Extra({"scale": 2.0}), "'1', a Extra, keeps extra state in its state_dict"),
        (Extra(torch.ones(3)), "'1', a Extra, keeps extra state"),
        (Packed(), "'1', a Packed, keeps 'packed' in its state_dict"),
    ):
        with pytest.raises(ManifestError, match=said):
            role(nn.DataParallel(nn.Sequential(nn.Linear(2, 2), part)))
    with pytest.raises(ManifestError, match="'the model', a Packed, keeps"):
        role(Packed())
    empties: tuple[object, ...] = (None, {}, b"", torch.empty(0))
    for empty in empties:
        role(nn.Sequential(Extra(empty), Plain()))
