"""The layer-wise reload: new weights through the engine's own loader, or the layers as they were.

A loader cannot write into a live CPU engine, whose linear weights are packed away after loading.
vLLM's layer-wise reload gives each layer its loadable form back, collects what is loaded for it,
and packs it again as soon as it is complete. What it does not notice is seen to here: shards that
never came, tied heads whose packed copy is stale, and errors that would stay in its buffers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from parallelkit_vllm.errors import ReloadError
from parallelkit_vllm.versions import need

Pairs = Iterable[tuple[str, torch.Tensor]]

_WHY: Final = "the layer-wise reload"
#: Arguments of a weight loader that say which part of a fused parameter is given.
_SHARD_ARGUMENTS: Final = ("loaded_shard_id", "shard_id", "expert_id", "loaded_expert_id")
_SHOWN: Final = 8


def load(
    model: nn.Module, model_config: Any, vllm_config: Any, pairs: Pairs, *, whole: bool = True
) -> None:
    """Put new weights in place; the engine generates nothing meanwhile.

    Tensors are referred to until their layer is complete: they must stay as they are until this
    returns.

    Args:
        model, model_config, vllm_config: the worker's.
        pairs: checkpoint names and tensors, of the whole model.
        whole: refuse a layer that got nothing. False where the names were compared with the
            checkpoint's before: then the engine's first loading gave such a layer nothing either.

    Raises:
        ReloadError: the loader raised, or left a layer incomplete. Layers are usable again, some
            with old weights and some with new; a full update brings them together.
        EngineVersionError: this vLLM has no layer-wise reload as it is known here.
    """
    layerwise = functions()
    if opened(model):
        raise ReloadError(
            "an update of this model is open already: finish it first (finish_weight_update), or "
            "start the engine anew"
        )
    from vllm.config import set_current_vllm_config

    groups = _tied(model)
    with set_current_vllm_config(vllm_config), torch.no_grad():
        try:
            layerwise.initialize_layerwise_reload(model)
            model.load_weights(pairs)  # type: ignore[operator]
            loaded = _loaded(model, layerwise)
            problems = incomplete(model, layerwise, groups, whole=whole)
            if problems:
                raise ReloadError(_text(problems), layers=problems)
            layerwise.finalize_layerwise_reload(model, model_config)
            _refresh(groups, loaded)
        except BaseException as error:
            roll_back(model, layerwise)
            if isinstance(error, ReloadError) or not isinstance(error, Exception):
                raise
            what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise ReloadError(
                f"the engine's loader failed with {what}; its layers are usable again, but of no "
                "version: send a full update"
            ) from error


def functions() -> Any:
    """vLLM's module of the layer-wise reload, with every function that is used here.

    Raises:
        EngineVersionError: one is missing.
    """
    from vllm.model_executor.model_loader import reload

    module = need(reload, "layerwise", _WHY)
    for name in (
        "initialize_layerwise_reload",
        "finalize_layerwise_reload",
        "get_layerwise_info",
        "_place_kernel_tensors",
    ):
        need(module, name, _WHY)
    return module


def opened(model: nn.Module) -> bool:
    """Whether a reload of this model was begun and is not finished: it cannot generate."""
    layerwise = functions()
    return any(layerwise.get_layerwise_info(layer).can_load() for layer in model.modules())


def incomplete(
    model: nn.Module, layerwise: Any, groups: list[list[nn.Module]], *, whole: bool
) -> list[str]:
    """Names of layers, or of their parameters, that lack values; between loading and finishing.

    Args:
        groups: modules that share a parameter; one of them is enough.
    """
    info = layerwise.get_layerwise_info
    provided = {id(m) for group in groups if any(_got(info(x)) for x in group) for m in group}
    deferred = getattr(layerwise, "is_deferred_attention_layer", lambda layer: False)
    found: list[str] = []
    for name, layer in model.named_modules():
        state = info(layer)
        parameters = dict(layer.named_parameters(recurse=False))
        if not parameters or not state.can_load() or deferred(layer):
            continue  # complete and processed, or with nothing that a checkpoint must have
        if state.load_numel <= 0:
            if whole and id(layer) not in provided:
                found.append(name)
        elif state.load_numel < state.load_numel_total:
            found += [f"{name}.{lack}" for lack in _lacking(layer, state, parameters)]
    return found


def roll_back(model: nn.Module, layerwise: Any) -> None:
    """Give layers that were not completed their tensors back, and forget what was buffered."""
    for layer in model.modules():
        state = layerwise.get_layerwise_info(layer)
        if state.can_load() and state.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, state)
        state.reset()
    loading = getattr(layerwise, "LOADING_LAYERS", None)
    if loading is not None:
        loading.clear()
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload


def asleep(tag: str = "weights") -> bool:
    """Whether vLLM's sleep mode has taken this worker's memory away; on GPUs only.

    Args:
        tag: what of it: `weights` or `kv_cache`, which can be woken apart.
    """
    module = sys.modules.get("vllm.device_allocator.cumem")
    allocator = getattr(getattr(module, "CuMemAllocator", None), "instance", None)
    held = getattr(allocator, "pointer_to_data", None) or {}
    return any(
        getattr(data, "is_asleep", False) and getattr(data, "tag", tag) == tag
        for data in held.values()
    )


def clear_kv(vllm_config: Any) -> int:
    """Zero the key-value caches of this worker; returns how many tensors that were.

    Caches whose memory sleep mode has taken away are left, since they come back empty.

    A value that is not finite stays in a block's unused rows, and from there reaches whatever is
    computed with that block, even with a mask.
    """
    done: dict[int, torch.Tensor] = {}
    if asleep("kv_cache"):
        return 0
    for layer in vllm_config.compilation_config.static_forward_context.values():
        for tensor in _tensors(getattr(layer, "kv_cache", None)):
            if tensor.numel() and not tensor.is_meta:
                done[id(tensor)] = tensor
    for tensor in done.values():
        tensor.zero_()
    return len(done)


def _tensors(held: Any) -> Iterator[torch.Tensor]:
    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, list | tuple):
        for item in held:
            yield from _tensors(item)


def _tied(model: nn.Module) -> list[list[nn.Module]]:
    """Groups of modules that hold the same parameter."""
    holders: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), []).append(module)
    return [group for group in holders.values() if len(group) > 1]


def _loaded(model: nn.Module, layerwise: Any) -> set[int]:
    return {id(m) for m in model.modules() if _got(layerwise.get_layerwise_info(m))}


def _got(state: Any) -> bool:
    """Whether a layer was given something; one that is complete has been reset already."""
    return bool(not state.can_load() or state.load_numel > 0)


def _refresh(groups: list[list[nn.Module]], loaded: set[int]) -> None:
    """Let modules that got their parameter by way of another derive from it what they keep."""
    for group in groups:
        for module in group:
            method = getattr(module, "quant_method", None)
            process = getattr(method, "process_weights_after_loading", None)
            if id(module) not in loaded and process is not None:
                process(module)


def _lacking(layer: nn.Module, state: Any, parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Parameters of a layer that are incomplete, with the shards that lack.

    Less than all elements is no proof: padding is never loaded.
    """
    given: dict[str, list[tuple[Any, ...]]] = {}
    for name, bound in state.loaded_weights:
        arguments = bound.arguments
        shard = tuple(arguments[a] for a in _SHARD_ARGUMENTS if arguments.get(a) is not None)
        given.setdefault(name, []).append(shard)
    found: list[str] = []
    for name in parameters:
        shards = given.get(name)
        if shards is None:
            found.append(name)
        elif () not in shards:  # else it came in one piece
            wanted = _wanted(layer, shards)
            if wanted is None:
                found.append(f"{name} (of parts that are not known, {len(shards)} came)")
            elif lack := wanted - set(shards):
                texts = sorted(" of expert ".join(map(str, shard)) for shard in lack)
                found.append(f"{name} (without {', '.join(texts[:_SHOWN])})")
    return found


def _wanted(layer: nn.Module, shards: list[tuple[Any, ...]]) -> set[tuple[Any, ...]] | None:
    """Every shard of a layer's fused parameter; None where that is not known."""
    if all(len(shard) == 2 and type(shard[1]) is int for shard in shards):
        kinds = {"w2"} if shards[0][0] == "w2" else {"w1", "w3"}  # down; gate and up
        return {(k, e) for k in kinds for e in range(1 + max(shard[1] for shard in shards))}
    if any(len(shard) != 1 for shard in shards):
        return None
    if all(isinstance(shard[0], str) for shard in shards) and hasattr(layer, "total_num_kv_heads"):
        return {("q",), ("k",), ("v",)}
    sizes = getattr(layer, "output_sizes", None)
    if sizes is not None and all(type(shard[0]) is int for shard in shards):
        return {(i,) for i in range(len(sizes))}
    return None


def _text(problems: list[str]) -> str:
    more = len(problems) - _SHOWN
    shown = ", ".join(problems[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
    return (
        f"the update is incomplete: the engine got no values for {shown}. Its layers are usable "
        "again, but of no version: send a full update"
    )
