"""Plain names: what a model calls its tensors, whatever wraps it.

Wrappers are recognised by their type and taken off; no prefix is ever guessed from a string, so
a submodule that really is called `module` keeps its name.
"""

from __future__ import annotations

import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from parallelkit.errors import ManifestError

#: Wrapper types by where they live, and the attribute that holds what they wrap. A wrapper whose
#: module was never imported cannot be in the model, so nothing is imported to look for it.
_WRAPPERS: Final = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "CheckpointWrapper",
        "_checkpoint_wrapped_module",
    ),
)

#: Under this key a module's state_dict has what `get_extra_state` gives.
_EXTRA: Final = "_extra_state"

_Wrappers = list[tuple[type[nn.Module], str]]


class Slot(NamedTuple):
    """A place in a model that holds a tensor, under its plain name.

    Attributes:
        name: such as `layers.0.weight`.
        holder: the dict, `_parameters` or `_buffers`, of the module that owns it.
        key: its key in `holder`.
        transient: a buffer that is not in the `state_dict`.
    """

    name: str
    holder: dict[str, torch.Tensor | None]
    key: str
    transient: bool = False

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor as it is now; it may have been replaced since.

        Raises:
            ManifestError: it was removed.
        """
        tensor = self.holder.get(self.key)
        if tensor is None:
            raise ManifestError(f"tensor {self.name!r} is no longer there")
        return tensor


def unwrap(module: nn.Module) -> nn.Module:
    """Take off data-parallel, compile and checkpoint wrappers, in whatever order they are."""
    return _unwrap(module, _known_wrappers())


def is_compiled(module: nn.Module) -> bool:
    """Whether `module` is the wrapper that `torch.compile` makes, or compiled in place, or has
    a part that is."""
    if uncompiled(module) is not module:
        return True
    return any(part._compiled_call_impl is not None for part in module.modules())


def uncompiled(target: Any) -> Any:
    """Return what `torch.compile` was given to make `target`; `target` if it is not compiled."""
    kind = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
    while isinstance(target, kind):
        target = target._orig_mod
    if getattr(target, "_torchdynamo_disable", False):  # torch.compiler.disable's, not compile's
        return target
    return getattr(target, "_torchdynamo_orig_callable", target)


def slots(module: nn.Module, *, transient: bool = False) -> list[Slot]:
    """List every parameter and persistent buffer, in the order of the plain `state_dict`.

    With `transient` the other buffers too, each beside those of its module.

    A tensor under two names is listed twice: which names are one tensor is the caller's business.

    Raises:
        ManifestError: a part is of a kind whose tensors cannot be told by name, which is given.
    """
    found: list[Slot] = []
    _walk(module, "", _known_wrappers(), found)
    return found if transient else [slot for slot in found if not slot.transient]


def plain_names(module: nn.Module) -> list[str]:
    """Names of the parameters and persistent buffers, without wrapper prefixes.

    Example:
        >>> plain_names(torch.compile(nn.Linear(2, 2), backend="eager"))
        ['weight', 'bias']
    """
    return [slot.name for slot in slots(module)]


def refuse_hidden_state(module: nn.Module) -> None:
    """Raise `ManifestError` for a part that keeps state in no parameter and no buffer.

    Such are packed weights of quantised layers, and what `get_extra_state` gives. A follower would
    compute with its own old ones, at the new version.
    """
    for name, part in unwrap(module).named_modules():
        hidden = _hidden_state(part)
        if hidden:
            raise ManifestError(
                f"{name or 'the model'!r}, a {type(part).__qualname__}, keeps {hidden} in its "
                "state_dict, which is no parameter and no buffer and would stay behind; keep it "
                "in a buffer, or publish the layer before it is quantised"
            )


def _hidden_state(part: nn.Module) -> str:
    kind = type(part)
    if kind._save_to_state_dict is not nn.Module._save_to_state_dict:
        kept: dict[str, Any] = {}
        part._save_to_state_dict(kept, "", True)
        known = part._parameters.keys() | part._buffers.keys() | {_EXTRA}
        own = [key for key in kept if key not in known]
        if own:
            return ", ".join(map(repr, own[:3])) + (", ..." if len(own) > 3 else "")
    if kind.get_extra_state is not nn.Module.get_extra_state:
        state = part.get_extra_state()
        empty = not state.numel() if isinstance(state, torch.Tensor) else not state
        return "" if empty else "extra state"
    return ""


def refuse_frozen(module: nn.Module) -> None:
    """Raise `ManifestError` where compiled code may have weights folded into it as constants."""
    config = sys.modules.get("torch._inductor.config")
    if getattr(config, "freezing", False) and is_compiled(module):
        raise ManifestError(
            "the target is compiled and torch._inductor.config.freezing is set: compiled code has "
            "its weights as constants then, and would go on with the old ones; set it to False "
            "and compile again"
        )


def fits(pattern: str, name: str) -> bool:
    """Whether a plain module name fits a pattern; a star stops at a dot, as in a shell at a slash.

    Example:
        >>> fits("layers.*", "layers.0"), fits("layers.*", "layers.0.mlp")
        (True, False)
    """
    return name.count(".") == pattern.count(".") and fnmatchcase(name, pattern)


def _walk(module: nn.Module, prefix: str, wrappers: _Wrappers, found: list[Slot]) -> None:
    # The dicts are copied: another thread may be changing the model, which is told elsewhere.
    name = prefix.rstrip(".") or "the model"
    module = _unwrap(module, wrappers, name)
    _refuse_kind(module, name)
    transient = module._non_persistent_buffers_set
    parameters: dict[str, torch.Tensor | None] = module._parameters  # type: ignore[assignment]
    for key, parameter in list(parameters.items()):
        if parameter is not None:
            found.append(Slot(prefix + key, parameters, key))
    for key, buffer in list(module._buffers.items()):
        if buffer is not None:
            found.append(Slot(prefix + key, module._buffers, key, key in transient))
    for key, child in list(module._modules.items()):
        if child is not None:
            _walk(child, f"{prefix}{key}.", wrappers, found)


def _refuse_kind(module: nn.Module, name: str) -> None:
    """Raise for modules whose tensors here are not what their names say."""
    flat = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    if isinstance(module, flat):
        raise ManifestError(
            f"{name!r} is wrapped in FullyShardedDataParallel, by which each rank holds other "
            "elements in plain tensors that look like replicas; use fully_shard instead"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise ManifestError(
            f"{name!r} is a {type(module).__qualname__}, whose tensors TorchScript keeps to "
            "itself; take the module that it was made of"
        )


def _unwrap(module: nn.Module, wrappers: _Wrappers, name: str = "") -> nn.Module:
    """Take off wrappers; with a name, raise `ManifestError` for one that has tensors of its own."""
    while True:
        for kind, attribute in wrappers:
            if isinstance(module, kind):
                if name:
                    _refuse_own(module, attribute, name)
                module = getattr(module, attribute)
                break
        else:
            return module


def _refuse_own(wrapper: nn.Module, attribute: str, name: str) -> None:
    held: list[dict[str, Any]] = [wrapper._parameters, wrapper._buffers, wrapper._modules]
    own = [key for d in held for key, value in d.items() if key != attribute and value is not None]
    if own:
        raise ManifestError(
            f"{name!r} is a {type(wrapper).__qualname__}, a wrapper that is taken off, and "
            f"{own[0]!r} of its own would stay behind; give it to the module that is wrapped"
        )


def _known_wrappers() -> _Wrappers:
    found = []
    for where, name, attribute in _WRAPPERS:
        kind = getattr(sys.modules.get(where), name, None)
        if kind is not None:
            found.append((kind, attribute))
    return found


def torch_folder() -> str:
    """The folder that torch's own code lies in."""
    return str(Path(torch.__file__).parent)
