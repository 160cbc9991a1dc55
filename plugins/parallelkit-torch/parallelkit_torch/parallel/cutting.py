"""Make one stage of a model: the model's own forward, over this stage's modules alone."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from parallelkit.errors import StageError
from parallelkit_torch.parallel.units import anatomy

_SAMPLE_TOKENS: Final = 8


class PassThrough(nn.Module):
    """Stands where another stage has a module: gives its first argument back."""

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return x


class Nothing(nn.Module):
    """Stands where the first stage adds something to the embedding: gives 0."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros((), device=x.device)


#: What a stage has where another one has a module.
STAND_INS: Final = (PassThrough, Nothing)


class KeptList(nn.ModuleList):
    """The entries of a list that this stage has, under their names in the whole list.

    Iterating, `len` and slices are over what is here; an index counts what is here.
    """

    def __getitem__(self, index: Any) -> Any:
        return list(self._modules.values())[index]


def cut(model: nn.Module, stages: Sequence[Sequence[str]], index: int) -> nn.Module:
    """Make stage `index` of `model`. Not collective; `model` stays as it is.

    The stage shares its modules, and so its parameters, with `model`, under the same names. Where
    `model` goes out of use, the parameters of other stages are freed. Of modules that are in no
    stage, all without parameters, each stage has its own or the same one.

    Args:
        model: the whole one.
        stages: what `assign` gave.
        index: of the stage.

    Returns:
        A module of the model's class. Called with what the stage before gave (the first one:
        with the model's arguments), it gives a tensor or a tuple of tensors for the next; the
        last one gives the model's output, as a tensor: the `logits` or `last_hidden_state` of an
        output of Hugging Face, else its first entry.

    Raises:
        StageError: `index` is no stage.
    """
    if not 0 <= index < len(stages):
        raise StageError(f"stage {index!r} was asked for; there are 0 to {len(stages) - 1}")
    kept = set(stages[index])
    away = {name for names in stages for name in names} - kept
    stage = _clone(model, "", kept, away, _added(model))
    if index > 0 and "inputs_embeds" in inspect.signature(type(model).forward).parameters:
        stage.register_forward_pre_hook(_by_name, with_kwargs=True)
    stage.register_forward_hook(_as_tensors)
    return stage


def check(model: nn.Module, stages: Sequence[Sequence[str]], example: Any = None) -> str:
    """Compare the stages, one after the other, with the whole model, on an example.

    A forward that does more than call its parts, such as scaling the embedding's output, would
    do so in every stage: this finds it. Eight tokens are run twice, in evaluation mode, without
    gradients, on the model's device. Not collective.

    Args:
        model: with values.
        stages: what `assign` gave.
        example: inputs of a small batch, a tensor or a tuple of positional arguments. None: eight
            tokens, for a decoder; a model of no known form needs one.

    Returns:
        What was compared, or why nothing was.

    Raises:
        StageError: a stage fails, the result differs, nothing is there to compare with, or hooks
            would run once a stage.
    """
    _refuse_hooks(model, stages)
    try:
        kind = anatomy(model).kind
    except StageError:
        kind = "unknown"
    if example is None and kind == "unknown":
        raise StageError(
            "stages were named for a model of no known form: whether its forward runs stage by "
            "stage can only be seen by running it. Give example=inputs, those of a small batch"
        )
    if example is None and kind != "decoder":
        return "an nn.Sequential, which needs no comparison"
    given = _sample(model, stages) if example is None else example
    given = given if isinstance(given, tuple) else (given,)
    on = "the example" if example is not None else f"{_SAMPLE_TOKENS} tokens"
    with _evaluating(model), torch.no_grad():
        try:
            whole = _as_tensors(model, (), model(*given))
        except Exception as error:
            if example is not None:
                raise StageError(f"the model does not run on the example: {error}") from error
            # It needs more than tokens; that is no mistake.
            return f"not compared with the whole model: it does not run on tokens alone ({error})"
        x: Any = given
        for index in range(len(stages)):
            try:
                x = cut(model, stages, index)(*(x if isinstance(x, tuple) else (x,)))
            except Exception as error:
                raise StageError(
                    f"stage {index} does not run on what stage {index - 1} gives: {error}. The "
                    "model's forward must work when its first argument is the hidden states"
                ) from error
    largest = max(_apart(mine, all_) for mine, all_ in zip(_tuple(x), _tuple(whole), strict=True))
    if largest > 0:
        raise StageError(
            f"the stages give another result than the whole model (it differs by {largest:.3g} on "
            f"{on}): its forward does more between its parts, such as scaling "
            "the embedding or the logits, and each stage would do so. Move that into a part"
        )
    return f"equal to the whole model on {on}"


# --- inner parts


def _tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


def _apart(mine: Any, whole: Any) -> float:
    """How far two outputs are apart; 0 within what kernels that are not deterministic give."""
    if mine.shape != whole.shape:
        return float("inf")
    if not whole.numel():
        return 0.0
    if not whole.is_floating_point():
        return float((mine != whole).any())
    apart = float((mine - whole).abs().max())
    return 0.0 if apart <= 4 * torch.finfo(whole.dtype).eps * float(whole.abs().max()) else apart


def _refuse_hooks(model: nn.Module, stages: Sequence[Sequence[str]]) -> None:
    """Raise for hooks on what is above the units: they would run in every stage."""
    names = [name for stage in stages for name in stage]
    for name, module in model.named_modules():
        above = any(unit.startswith(f"{name}." if name else "") for unit in names)
        forward = module._forward_hooks or module._forward_pre_hooks
        backward = module._backward_hooks or module._backward_pre_hooks
        if above and name not in names and (forward or backward):
            raise StageError(
                f"{name or 'the model'} has hooks and is cut into stages, so each stage would run "
                "them. Put them on a part of one stage, or take them off"
            )


def _clone(
    module: nn.Module, prefix: str, kept: set[str], away: set[str], added: frozenset[str]
) -> nn.Module:
    """Copy a module above the units; share what is in it, but its children."""
    copied = module.__new__(type(module))
    copied.__dict__ = dict(module.__dict__)
    copied.__dict__["_modules"] = {}
    for name, value in module.__dict__.items():
        if name.endswith(("_hooks", "_hooks_with_kwargs")):
            copied.__dict__[name] = type(value)(value) if isinstance(value, dict) else value
    above = {name for name in module._modules if _reaches(f"{prefix}{name}.", kept | away)}
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    # A dict of layers is gone through; one that holds a list of layers, as GPT-2's, is asked.
    is_list = is_list or (isinstance(module, nn.ModuleDict) and not above)
    for name, child in module._modules.items():
        full = prefix + name
        if full in away:
            if not is_list:
                copied._modules[name] = Nothing() if full in added else PassThrough()
        elif child is not None and name in above:
            copied._modules[name] = _clone(child, f"{full}.", kept, away, added)
        else:
            copied._modules[name] = child
    if type(module) is nn.ModuleList:
        copied.__class__ = KeptList
    return copied


def _reaches(start: str, names: set[str]) -> bool:
    return any(name.startswith(start) for name in names)


def _added(model: nn.Module) -> frozenset[str]:
    try:
        return anatomy(model).added
    except StageError:
        return frozenset()


def _by_name(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Hand hidden states to a model that takes them by name."""
    return (), {"inputs_embeds": args[0], **kwargs}


def _as_tensors(module: nn.Module, args: object, output: Any) -> Any:
    """A tensor, or a tuple of tensors, of whatever a model gives; contiguous, to be sent."""
    if isinstance(output, torch.Tensor):
        return output.contiguous()
    for name in ("logits", "last_hidden_state"):
        if isinstance(getattr(output, name, None), torch.Tensor):
            return getattr(output, name).contiguous()
    if isinstance(output, Mapping) and output:
        output = next(iter(output.values()))
    elif isinstance(output, tuple | list) and output:
        if all(isinstance(x, torch.Tensor) for x in output):
            return tuple(x.contiguous() for x in output)
        output = output[0]
    if not isinstance(output, torch.Tensor):
        raise StageError(
            f"{type(module).__qualname__} gave a {type(output).__qualname__}; a stage gives a "
            "tensor, a tuple of tensors, or an output of Hugging Face"
        )
    return output.contiguous()


def _sample(model: nn.Module, stages: Sequence[Sequence[str]]) -> torch.Tensor:
    """A few tokens [1, 8] that the embedding has, on its device."""
    weight = next(model.get_submodule(stages[0][0]).parameters())
    return (torch.arange(_SAMPLE_TOKENS, device=weight.device) % weight.shape[0]).unsqueeze(0)


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
