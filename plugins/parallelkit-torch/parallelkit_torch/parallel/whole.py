"""Parameters that a tensor axis does not divide: whole on each rank, and `DTensor`s all the same.

An optimiser that updates many tensors in one call, as torch's do on GPUs, cannot mix tensors of
different kinds or meshes in one parameter group. So every parameter of a divided model is a
`DTensor` of one mesh, and modules whose parameters are whole see plain tensors while they run: no
operation of theirs is dispatched through `DTensor`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from parallelkit.errors import LayoutError
from parallelkit.protocols import ProcessGroup


def replicate_rest(model: nn.Module, mesh: DeviceMesh) -> int:
    """Make every plain parameter of `model` a replicated `DTensor` over `mesh`, in place.

    Nothing is sent: the values have to be equal on all ranks already. Names stay, and parameters
    that were one stay one. Returns how many there were.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    # This one reads its projection's parameters and never calls it.
    attention = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    readers: dict[nn.Module, nn.Module] = {m.out_proj: m for m in attention}
    for module in model.modules():
        plain = [
            key
            for key, value in module._parameters.items()
            if value is not None and not isinstance(value, DTensor)
        ]
        for key in plain:
            before = module._parameters[key]
            assert before is not None
            if before not in made:
                made[before] = _replicated(before, mesh)
            module._parameters[key] = made[before]
        if plain:
            user = readers.get(module, module)
            user.register_forward_pre_hook(_Enter(module, plain))
            user.register_forward_hook(_Leave(module, plain), always_call=True)
    return len(made)


def check_gradients(model: nn.Module, group: ProcessGroup) -> None:
    """See that gradients of what is whole are equal on all ranks of a tensor axis.

    A parameter that is used between divided layers, where each rank has a part of the activations,
    gets a part of its gradient on each rank, and the copies would drift apart. Collective over
    `group`, the tensor axis: one number for each such parameter.

    Raises:
        LayoutError: on every rank, naming the parameters.
    """
    names, norms = [], []
    for name, parameter in model.named_parameters():
        gradient: Any = parameter.grad
        if isinstance(gradient, DTensor) and _is_whole(gradient):
            names.append(name)
            norms.append(gradient.to_local().double().norm())
    if not names:
        return
    rows = torch.stack(group.all_gather(torch.stack(norms)))
    spread = rows.max(dim=0).values - rows.min(dim=0).values
    wrong = (spread > 1e-2 * rows.max(dim=0).values).tolist()
    if any(wrong):
        found = [name for name, bad in zip(names, wrong, strict=True) if bad]
        raise LayoutError(
            f"gradients of {', '.join(found[:5])}{', ...' if len(found) > 5 else ''} differ "
            "between the ranks of the tensor axis, which hold them whole: they are used between "
            "divided layers, on a part of the activations. Divide them too, or move them out"
        )


def _is_whole(gradient: DTensor) -> bool:
    names = gradient.device_mesh.mesh_dim_names or ()
    at = dict(zip(names, gradient.placements, strict=True)).get("tensor")
    return at is not None and at.is_replicate()


def _replicated(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    whole = DTensor.from_local(parameter.detach(), mesh, [Replicate()], run_check=False)
    now = nn.Parameter(whole, requires_grad=parameter.requires_grad)
    vars(now).update(vars(parameter))
    return now


class _Enter:
    """Shows the local tensors of a module's parameters, under their own names, for one pass."""

    def __init__(self, module: nn.Module, keys: Sequence[str]) -> None:
        self.module, self.keys = module, tuple(keys)

    def __call__(self, _: nn.Module, __: Any) -> None:
        for key in self.keys:
            value: Any = self.module._parameters[key]  # FSDP2 may have put another object there
            if isinstance(value, DTensor):
                vars(self.module)[key] = local(value)


class _Leave:
    """Ends what `_Enter` began, however the pass ended."""

    def __init__(self, module: nn.Module, keys: Sequence[str]) -> None:
        self.module, self.keys = module, tuple(keys)

    def __call__(self, _: nn.Module, __: Any, ___: Any) -> None:
        for key in self.keys:
            vars(self.module).pop(key, None)


def local(value: DTensor) -> torch.Tensor:
    """The local tensor of a replicated one; its gradient is taken to be equal on all ranks."""
    tensor: torch.Tensor = value.to_local(grad_placements=[Replicate()])
    return tensor
