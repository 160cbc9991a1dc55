"""What was built already and reads the parallel settings only then: looked for, and refused.

MindSpore's training steps read `parallel_mode`, `gradients_mean` and `device_num` when they are
made. One that was made before the context goes on with what it read: ranks then train apart, and
nothing says so.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final
from weakref import WeakSet

import mindspore as ms
from mindspore import nn
from mindspore.train import Model

from parallelkit.errors import ContextOrderError

_STEPS: Final = (nn.TrainOneStepCell, Model, nn.DistributedGradReducer)
_retired: WeakSet[Any] = WeakSet()


def refuse_steps(values: Mapping[str, Any], *, like: Collection[str] = ()) -> None:
    """Raise if a living training step read other settings than `values`.

    Args:
        values: what is about to be set: `parallel_mode`, `gradients_mean`, `device_num`.
        like: parallel modes under which a step is built as it would be under that of `values`.

    Raises:
        ContextOrderError: with the kind of each step, and what it read.
    """
    found = list(_differing(values, like))
    if found:  # it may be garbage that only refers to itself
        found.clear()
        gc.collect()
        found = list(_differing(values, like))
    if found:
        wanted = ", ".join(f"{name}={value!r}" for name, value in values.items())
        raise ContextOrderError(
            f"{'; '.join(dict.fromkeys(found))}. MindSpore reads this once, when a step is built, "
            f"so these would not follow the context ({wanted}) and the ranks would train apart "
            "unnoticed. Call parallel_context before you build them, or delete them first; if they "
            "were built under another context that is done with, call its reset()"
        )


def retire_steps() -> None:
    """Let the steps that live now be: every context that they were built under is done with.

    MindSpore keeps what it has compiled, long after the user has let go of it.
    """
    for step in _living(_STEPS):
        _retired.add(step)


def refuse_optimizers(parameters: Collection[Any]) -> None:
    """Raise if a living optimiser holds one of these parameters, which are about to be replaced.

    Raises:
        ContextOrderError: with the optimiser's kind and the parameter's name.
    """
    wanted = {id(parameter) for parameter in parameters}
    for again in (False, True):
        held = _holding(wanted)
        if not held:
            return
        if not again:
            gc.collect()
    raise ContextOrderError(
        f"{held[0]}, which parallelize is about to divide. Build the optimiser from the model that "
        "parallelize gives back"
    )


def _holding(wanted: Collection[int]) -> list[str]:
    kinds = (nn.Optimizer, ms.experimental.optim.Optimizer)
    return [
        f"a {type(thing).__qualname__} holds the parameter {parameter.name!r}"
        for thing in _living(kinds)
        for parameter in thing.parameters
        if id(parameter) in wanted
    ]


def _living(kinds: tuple[type, ...]) -> Iterator[Any]:
    """Objects of these types. `type`, not `isinstance`: that would ask dead weak proxies."""
    return (thing for thing in gc.get_objects() if issubclass(type(thing), kinds))


def _differing(values: Mapping[str, Any], like: Collection[str]) -> Iterator[str]:
    found = [step for step in _living(_STEPS) if step not in _retired]
    inner = {id(step.grad_reducer) for step in found if isinstance(step, nn.TrainOneStepCell)}
    for thing in found:
        read = _read(thing)
        if read.get("parallel_mode") in like:
            del read["parallel_mode"]
        if id(thing) not in inner and any(values[name] != value for name, value in read.items()):
            said = ", ".join(f"{name}={value!r}" for name, value in read.items())
            yield f"a {type(thing).__qualname__} exists that was built with {said}"


def _read(thing: Any) -> dict[str, Any]:
    """What a step read when it was built."""
    if isinstance(thing, Model):
        if thing._optimizer is None:  # it only evaluates
            return {}
        return {"parallel_mode": thing._parallel_mode}
    if isinstance(thing, nn.TrainOneStepCell):
        read = {"parallel_mode": thing.parallel_mode}
        return read | ({"gradients_mean": thing.mean} if thing.reducer_flag else {})
    return {"gradients_mean": thing.mean}
