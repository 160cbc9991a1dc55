"""What of a model is compiled, and what was done to the model before."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from parallelkit.errors import ExecutionModeError
from parallelkit_torch import kinds, names, sharding

_Parts = list[tuple[str, nn.Module]]


def parts(model: nn.Module, regions: str | tuple[str, ...]) -> _Parts:
    """List the parts of `model` to compile one by one, by plain name; none means the whole.

    `"auto"` is the whole, except for a model sharded by FSDP2: its hooks gather parameters
    outside any graph, so that a graph ends at each unit; there it is the innermost units.

    Raises:
        ExecutionModeError: nothing repeats, or no module has a name that fits.
    """
    stages = sharding.stages(model)
    if stages is not None:  # a pipeline runs these, and never the module that holds them
        return _of_stages([stage for _, stage in stages], regions)
    while isinstance(model, DistributedDataParallel):
        model = model.module
    if regions == "whole":
        return []
    if regions == "auto":
        return _innermost_units(model)
    if isinstance(regions, str):
        found = _blocks(model, "")
        if not found:
            raise ExecutionModeError(
                f"regions='blocks' finds no block in {type(model).__qualname__}: no list of "
                "modules holds two of one class that have parts of their own. Name them, such as "
                "regions=['layers.*'], or take regions='whole'"
            )
        return found
    return _named(model, regions)


def whole_in_place(model: nn.Module) -> _Parts:
    """The model as one part, where `torch.compile` around it would end graphs in hooks that
    gather or reduce: sharded by FSDP2, or the module inside `DistributedDataParallel`."""
    inner = model
    while isinstance(inner, DistributedDataParallel):
        inner = inner.module
    return [("", inner)] if inner is not model or is_sharded(model) else []


def units(model: nn.Module) -> list[Any]:
    """The modules that FSDP2 shards as one, the whole included."""
    return [module for module in model.modules() if kinds.is_unit(module)]


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 shards `model` or a part of it."""
    return bool(units(model))


def undo(model: Any) -> int:
    """Take off what `module.compile()` did to a model and its parts; return how many those were."""
    if not isinstance(model, nn.Module):
        return 0
    compiled = [part for part in model.modules() if part._compiled_call_impl is not None]
    for part in compiled:
        part._compiled_call_impl = None
    return len(compiled)


def history(target: Any) -> list[str]:
    """Say what was done to a model before it is compiled, outermost last."""
    if not isinstance(target, nn.Module):
        return []
    lines = []
    where = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    kind = getattr(where, "CheckpointWrapper", ())
    wrapped = sum(isinstance(module, kind) for module in target.modules())
    if wrapped:
        lines.append(f"activation checkpoints around {wrapped} part(s)")
    lines += [f"sharded: {line}" for line in _layouts(target)]
    gathered = len(units(target))
    if gathered:
        lines.append(f"FSDP2 gathers {gathered} unit(s)")
    if isinstance(target, DistributedDataParallel):
        lines.append(f"replicated {target.process_group.size()} times")
    return lines


def refuse_compiled_inside(target: Any) -> None:
    """Raise where a replicated model was compiled first: the order is parallelize, then compile.

    Raises:
        ExecutionModeError: it was.
    """
    if not isinstance(target, DistributedDataParallel):
        return
    if names.uncompiled(target.module) is not target.module:
        raise ExecutionModeError(
            "compile got a model that was compiled before it was replicated; the order is "
            "pk.execution_mode('graph').compile(context.parallelize(model))"
        )


def _of_stages(stages: Iterable[nn.Module], regions: str | tuple[str, ...]) -> _Parts:
    found: _Parts = []
    for number, stage in enumerate(stages):
        inner = parts(stage, regions) or [("", stage)]
        found += [(f"stage {number} here{name and ': '}{name}", part) for name, part in inner]
    return found


def _innermost_units(model: nn.Module) -> _Parts:
    found = [(name, m) for name, m in model.named_modules() if name and kinds.is_unit(m)]
    inner = [(n, m) for n, m in found if not any(o.startswith(f"{n}.") for o, _ in found)]
    # a single operation is not worth a graph, nor does dynamo take a layer of torch's own
    return [(n, m) for n, m in inner if any(True for _ in names.unwrap(m).children())]


def _blocks(module: nn.Module, prefix: str) -> _Parts:
    """Members of lists that repeat a class of more than one operation, outermost first."""
    found: _Parts = []
    children = [(f"{prefix}{key}", child) for key, child in module.named_children()]
    repeated: Counter[type[nn.Module]] = Counter()
    if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        repeated.update(type(names.unwrap(child)) for _, child in children)
    for name, child in children:
        inner = names.unwrap(child)
        if repeated[type(inner)] > 1 and any(True for _ in inner.children()):
            found.append((name, child))
        else:
            found += _blocks(child, f"{name}.")
    return found


def _named(model: nn.Module, patterns: tuple[str, ...]) -> _Parts:
    found: dict[str, nn.Module] = {}
    everything = [(name, module) for name, module in model.named_modules() if name]
    for pattern in patterns:
        fitting = [(name, module) for name, module in everything if names.fits(pattern, name)]
        if not fitting:
            tops = ", ".join(name for name, _ in model.named_children()) or "none"
            raise ExecutionModeError(
                f"regions: no module of {type(model).__qualname__} is named like {pattern!r}; at "
                f"the top it has {tops}"
            )
        found.update(fitting)
    nested = [(a, b) for a in found for b in found if b.startswith(f"{a}.")]
    if nested:
        outer, inner = nested[0]
        raise ExecutionModeError(f"regions names {inner!r} and {outer!r}, which contains it")
    return list(found.items())


def _layouts(model: nn.Module) -> list[str]:
    """Axes over which parameters are sharded, with how many parameters that are."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if kind is None:
        return []
    counts: Counter[str] = Counter()
    total = 0
    for parameter in model.parameters():
        total += 1
        if not isinstance(parameter, kind):
            continue
        mesh = parameter.device_mesh
        axes = mesh.mesh_dim_names or tuple(f"axis {i}" for i in range(mesh.ndim))
        for axis, size, placement in zip(axes, mesh.shape, parameter.placements, strict=True):
            if placement.is_shard():
                counts[f"{axis} {size}"] += 1
    return [f"{n} of {total} parameters over {axis}" for axis, n in sorted(counts.items())]
