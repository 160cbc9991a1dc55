"""What of a model and its optimizer goes into a checkpoint, under plain names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial

from parallelkit.errors import CheckpointError
from parallelkit.weights.manifest import DTYPE_BYTES
from parallelkit_torch import names
from parallelkit_torch.parallel.checkpoint_format import GroupOptions

#: Keys of a parameter group that hold its parameters, not options.
_PARAMETERS: Final = ("params", "param_names")


@attrs.frozen
class ModelState:
    """A model's tensors as they are on this rank: the live ones, not copies.

    Attributes:
        tensors: by plain name, tied ones once.
        aliases: further names of tied tensors, and the name that `tensors` has.
        buffers: names in `tensors` that are no parameters.
    """

    tensors: dict[str, torch.Tensor]
    aliases: dict[str, str]
    buffers: frozenset[str]


@attrs.frozen
class OptimizerState:
    """An optimizer's state as it is on this rank.

    Attributes:
        kind: name of its class.
        groups: plain names and plain options of its parameter groups.
        tensors: state that is a tensor, by plain name and key.
        plain: the rest.
    """

    kind: str
    groups: list[GroupOptions]
    tensors: dict[str, dict[str, torch.Tensor]]
    plain: dict[str, dict[str, Any]]


def model_state(model: nn.Module) -> ModelState:
    """Name every parameter and persistent buffer that this rank holds. Nothing is sent.

    Parameters that FSDP2 has gathered, as after a forward pass, are put back into shards first.

    Raises:
        CheckpointError: one cannot be stored, or a module keeps state that is no tensor.
    """
    for module in names.unwrap(model).modules():
        if isinstance(module, FSDPModule):
            module.reshard()
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise CheckpointError(
                f"a {type(module).__qualname__} in the model keeps extra state, which is no "
                "tensor and would be lost; keep it in a buffer, or in `extra` of the checkpoint"
            )
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    buffers = set()
    first: dict[int, str] = {}
    for slot in names.slots(model):
        tensor = slot.tensor
        if id(tensor) in first:
            aliases[slot.name] = first[id(tensor)]
            continue
        _refuse_unstorable(f"tensor {slot.name!r}", tensor)
        first[id(tensor)] = slot.name
        tensors[slot.name] = tensor
        if not isinstance(tensor, nn.Parameter):
            buffers.add(slot.name)
    return ModelState(tensors, aliases, frozenset(buffers))


def parameter_names(optimizer: torch.optim.Optimizer, model: ModelState) -> list[list[str]]:
    """Plain names of the parameters in each of an optimizer's groups, in order.

    Raises:
        CheckpointError: it is no optimizer, or has a parameter that the model does not have.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise CheckpointError(
            f"the optimizer is a {type(optimizer).__qualname__}, not a torch.optim.Optimizer"
        )
    known = {id(tensor): name for name, tensor in model.tensors.items()}
    found: list[list[str]] = []
    for number, group in enumerate(optimizer.param_groups):
        found.append([])
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise CheckpointError(
                    f"group {number} of the optimizer has a parameter of shape "
                    f"{list(parameter.shape)} that the model does not have. Build the optimizer "
                    "from the model that parallelize gave back"
                )
            found[-1].append(known[id(parameter)])
    return found


def optimizer_state(optimizer: torch.optim.Optimizer, model: ModelState) -> OptimizerState:
    """Name what an optimizer holds on this rank, and change nothing in it. Nothing is sent.

    torch's own `get_optimizer_state_dict` would make the state of an optimizer without any by a
    step with gradients of zero, which leaves step counts of 1, and momenta of weight decay.

    Raises:
        CheckpointError: something in it is neither tensor nor plain, or cannot be stored.
    """
    groups, tensors, plain = [], {}, {}
    for number, group_names in enumerate(parameter_names(optimizer, model)):
        group = optimizer.param_groups[number]
        options = {
            key: _plain(value, f"option {key!r} of group {number} of the optimizer")
            for key, value in group.items()
            if key not in _PARAMETERS
        }
        groups.append(GroupOptions(group_names, options))
        for name, parameter in zip(group_names, group["params"], strict=True):
            state: Mapping[str, Any] = optimizer.state.get(parameter, {})
            held, rest = _split(state, name, parameter)
            if held:
                tensors[name] = held
            if rest:
                plain[name] = rest
    return OptimizerState(type(optimizer).__qualname__, groups, tensors, plain)


def _split(
    state: Mapping[str, Any], name: str, parameter: torch.Tensor
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of one parameter's state, and the rest."""
    held: dict[str, torch.Tensor] = {}
    rest: dict[str, Any] = {}
    for key, value in state.items():
        where = f"state {key!r} of {name!r} in the optimizer"
        if type(key) is not str or "." in key:
            raise CheckpointError(f"{where} has a key that is no name without dots")
        if not isinstance(value, torch.Tensor):
            rest[key] = _plain(value, where)
            continue
        _refuse_unstorable(where, value)
        if isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.dim():
            raise CheckpointError(
                f"{where} is a plain tensor of shape {list(value.shape)} while its parameter is "
                "divided over ranks: which part of the whole it is cannot be told"
            )
        held[key] = value
    return held, rest


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


#: torch's dtypes by the names that checkpoints use.
DTYPES: Final = {
    name: dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and (name := str(dtype).removeprefix("torch.")) in DTYPE_BYTES
}


def _refuse_unstorable(where: str, tensor: torch.Tensor) -> None:
    problem = None
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if torch.nn.parameter.is_lazy(tensor):
        problem = "is uninitialised; run the model once before"
    elif tensor.is_meta:
        problem = "is on the meta device and has no values"
    elif type(local) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        problem = f"is a {type(local).__qualname__}, which is not a plain dense tensor"
    elif local.layout is not torch.strided or local.is_nested:
        problem = f"has layout {local.layout}; only dense tensors can be stored"
    elif dtype_name(tensor) not in DTYPES:
        problem = f"has dtype {dtype_name(tensor)!r}; allowed are {', '.join(DTYPES)}"
    elif isinstance(tensor, DTensor) and any(isinstance(p, Partial) for p in tensor.placements):
        problem = "holds partial sums (placement Partial); redistribute it before"
    if problem:
        raise CheckpointError(f"{where} {problem}")


def _plain(value: Any, where: str) -> Any:
    """A JSON-able copy: scalar tensors as numbers, tuples as lists.

    Raises:
        CheckpointError: it has none.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not isinstance(value, DTensor):
        return value.item()
    if isinstance(value, list | tuple):
        return [_plain(item, where) for item in value]
    for kind in (bool, int, float, str):  # subclasses too, such as numpy's float64
        if isinstance(value, kind):
            return kind(value)
    if value is None:
        return None
    raise CheckpointError(
        f"{where} is a {type(value).__qualname__}, which a checkpoint cannot hold; it can hold "
        "tensors, numbers, strings, None and lists of these"
    )
