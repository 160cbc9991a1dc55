"""Parameters, gradients and optimiser state divided over the data axes: FSDP2's `fully_shard`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils._pytree import tree_map_only

from parallelkit.errors import LayoutError
from parallelkit_torch import names

#: Arguments of `fully_shard` that the context sets.
OURS: Final = frozenset({"module", "mesh", "dp_mesh_dims"})


def blocks(
    model: nn.Module, patterns: Sequence[str] | None = None, *, strict: bool = True
) -> list[str]:
    """Names of the submodules to be gathered one at a time, in forward order.

    Args:
        model: not sharded yet.
        patterns: of plain module names, such as `layers.*`; None: each entry of every outermost
            `nn.ModuleList` or `nn.ModuleDict`, and each child of a model that is an
            `nn.Sequential`, as far as they have parameters.
        strict: whether a pattern that matches nothing is a mistake.

    Raises:
        LayoutError: a pattern matches no submodule with parameters.
    """
    if patterns is None:
        return [name for name in _repeated(model) if _has_parameters(model.get_submodule(name))]
    known = [name for name, module in model.named_modules() if name and _has_parameters(module)]
    wanted: set[str] = set()
    for pattern in patterns:
        found = [name for name in known if names.fits(pattern, name)]
        if not found and strict:
            raise LayoutError(
                f"blocks has the pattern {pattern!r}, which matches no submodule with parameters; "
                f"there are {', '.join(known[:8])}{', ...' if len(known) > 8 else ''}"
            )
        wanted.update(found)
    return [name for name in known if name in wanted]


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    names_of_blocks: Iterable[str],
    reduce: str,
    options: Mapping[str, Any],
) -> None:
    """Shard `model` in place, its blocks first, each a unit of its own. Collective over `mesh`.

    Args:
        mesh: one dim, over which parameters are divided, or two: replicas, then shards.
        reduce: `"mean"` or `"sum"` of the gradients over `mesh`.
        options: of `fully_shard`, such as `reshard_after_forward`, `mp_policy`.
    """
    for module in [*(model.get_submodule(name) for name in names_of_blocks), model]:
        module.register_forward_hook(_own_views)
        fully_shard(module, mesh=mesh, **options)
    for unit in (module for module in model.modules() if isinstance(module, FSDPModule)):
        # gloo has neither AVG nor PREMUL_SUM, and NCCL's AVG over one rank is documented to be
        # unreliable: a sum, then a division, is right everywhere.
        unit.set_force_sum_reduction_for_comms(True)
        if reduce == "sum":
            # A factor for a mean must not be set: over one shard torch divides by it twice.
            unit.set_gradient_divide_factor(1.0)


def _own_views(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Copy outputs that are views: an in-place change of one would drop FSDP2's hook on it."""
    if isinstance(output, torch.Tensor):
        return output.clone() if output.requires_grad and output._is_view() else output
    return tree_map_only(torch.Tensor, lambda x: _own_views(module, inputs, x), output)


def _repeated(model: nn.Module) -> list[str]:
    if isinstance(model, nn.Sequential):
        return [name for name, _ in model.named_children()]
    found: list[str] = []
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            found += [f"{name}.{key}" for key, _ in child.named_children()]
        else:
            inner = [] if isinstance(child, nn.Sequential) else _repeated(child)
            found += [f"{name}.{key}" for key in inner]
    return found


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
