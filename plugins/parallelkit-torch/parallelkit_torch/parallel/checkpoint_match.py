"""A checkpoint against the model and optimizer it is to be loaded into: first compared, then put
in place."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import torch
from torch.distributed.tensor import DTensor

from parallelkit.errors import CheckpointError
from parallelkit_torch.parallel.checkpoint_format import About, Entry, Index, OptimizerAbout
from parallelkit_torch.parallel.checkpoint_state import (
    DTYPES,
    ModelState,
    dtype_name,
    parameter_names,
)

#: Options of how an optimizer computes, not of what: they stay as the optimizer was built.
_OWN_OPTIONS: Final = frozenset({"foreach", "fused", "capturable", "differentiable"})
_SHOWN: Final = 12
#: Pairs of names compared to suggest the nearest; a pair takes about a tenth of a millisecond.
_HINT_PAIRS: Final = 5_000


class _State(NamedTuple):
    """Something saved for one parameter of the optimizer, and what it is to be like here."""

    parameter: torch.Tensor
    key: str
    like: torch.Tensor


@final
class Match:
    """What of a checkpoint goes where on this rank.

    Attributes:
        entries: where each tensor to be read is, by a key of ours.
    """

    def __init__(
        self,
        about: About,
        index: Index,
        model: ModelState,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        """Compare, and change nothing. Not collective.

        Raises:
            CheckpointError: the optimizer is not of the model; all else is told by `refuse`.
        """
        self.entries: dict[str, Entry] = {}
        self._about, self._index = about, index
        self._model: dict[str, torch.Tensor] = {}
        self._states: dict[str, _State] = {}
        self._optimizer = optimizer
        self._groups: list[list[str]] = []
        self._options: list[dict[str, Any]] = []
        self._differences: list[str] = []
        self._hints = _HINT_PAIRS
        self._known = dict.fromkeys(("model", name) for name in index.model)
        self._used: set[tuple[str, str]] = set()
        self._compare_model(model)
        if optimizer is not None:
            names = parameter_names(optimizer, model)
            if about.optimizer is None:
                self._differences.append("optimizer: the checkpoint was saved without one")
            else:
                self._compare_optimizer(optimizer, about.optimizer, names)

    # --- comparing

    def found(self) -> tuple[bytes, list[str]]:
        """Which of the checkpoint's names this rank has, one bit each, and what differs."""
        bits = 0
        for position, known in enumerate(self._known):
            bits |= (known in self._used) << position
        return bits.to_bytes((len(self._known) + 7) // 8, "little"), self._differences

    def refuse(self, folder: Path, found: Sequence[tuple[bytes, list[str]]]) -> None:
        """Raise unless all ranks together have exactly what the checkpoint has.

        Args:
            found: of every rank.

        Raises:
            CheckpointError: lists the differences; the same on every rank.
        """
        if len({len(bits) for bits, _ in found}) > 1:
            raise CheckpointError("some ranks load an optimizer and others none")
        differences = dict.fromkeys(line for _, lines in found for line in lines)
        used = 0
        for bits, _ in found:
            used |= int.from_bytes(bits, "little")
        for position, (part, name) in enumerate(self._known):
            if not used >> position & 1:
                differences[f"{part}: the checkpoint has {name!r}, the {part} here has not"] = None
        if differences:
            lines = list(differences)
            more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
            raise CheckpointError(
                f"the checkpoint {folder} does not fit; nothing was loaded:\n  "
                + "\n  ".join(lines[:_SHOWN] + more)
            )

    def _compare_model(self, model: ModelState) -> None:
        for name, tensor in model.tensors.items():
            stored = self._stored(name, self._index.model)
            if stored is None:
                hint = self._nearest(name, self._index.model)
                self._differences.append(f"model: {name!r} is not in the checkpoint{hint}")
                continue
            self._used.add(("model", stored))
            entry = self._index.model[stored]
            here = (dtype_name(tensor), tuple(tensor.shape))
            if here != (entry.dtype, entry.shape):
                self._differences.append(
                    f"model: {name!r} is {here[0]} {list(here[1])} here and {entry.dtype} "
                    f"{list(entry.shape)} in the checkpoint"
                )
            self._model[f"model.{name}"] = tensor
            self.entries[f"model.{name}"] = entry

    def _compare_optimizer(
        self, optimizer: torch.optim.Optimizer, saved: OptimizerAbout, groups: list[list[str]]
    ) -> None:
        options = {name: group.options for group in saved.groups for name in group.names}
        self._known |= dict.fromkeys(("optimizer", name) for name in options)
        if saved.kind != type(optimizer).__qualname__:
            self._differences.append(
                f"optimizer: it is a {type(optimizer).__qualname__} here and was a {saved.kind}"
            )
            self._used |= {("optimizer", name) for name in options}
            return
        for number, names in enumerate(groups):
            group = optimizer.param_groups[number]
            self._groups.append([])
            self._options.append({})
            first = True
            for name, parameter in zip(names, group["params"], strict=True):
                stored = self._stored(name, options)
                self._groups[-1].append(stored or "")
                if stored is None:
                    hint = self._nearest(name, options)
                    self._differences.append(
                        f"optimizer: no state of {name!r} is in the checkpoint{hint}"
                    )
                    continue
                self._used.add(("optimizer", stored))
                if not first and options[stored] != self._options[-1]:
                    self._differences.append(
                        f"optimizer: group {number} has {name!r}, which was in a group of other "
                        f"options: {options[stored]}, not {self._options[-1]}"
                    )
                self._options[-1], first = options[stored], False
                self._compare_state(optimizer, name, stored, parameter, group)

    def _compare_state(
        self,
        optimizer: torch.optim.Optimizer,
        name: str,
        stored: str,
        parameter: torch.Tensor,
        group: Mapping[str, Any],
    ) -> None:
        current = optimizer.state.get(parameter, {})
        on_device = bool(group.get("capturable") or group.get("fused"))
        for key, entry in self._index.optimizer.get(stored, {}).items():
            like = _alike(key, entry, parameter, current.get(key), on_device=on_device)
            if like is None:
                self._differences.append(
                    f"optimizer: state {key!r} of {name!r} has shape {list(entry.shape)}, not its "
                    f"parameter's {list(parameter.shape)}, so how to divide it is not known"
                )
                continue
            self._states[f"optim.{name}.{key}"] = _State(parameter, key, like)
            self.entries[f"optim.{name}.{key}"] = entry

    def _stored(self, name: str, among: Mapping[str, Any]) -> str | None:
        """The name under which the checkpoint has a tensor: its own, or one that it is tied to."""
        if name in among:
            return name
        other = self._about.aliases.get(name)
        return other if other in among else None

    def _nearest(self, name: str, among: Mapping[str, Any]) -> str:
        """Words on the most similar name, as long as looking for it does not take long."""
        self._hints -= len(among)
        close = difflib.get_close_matches(name, among, n=1) if self._hints >= 0 else []
        return f"; the nearest there is {close[0]!r}" if close else ""

    # --- putting in place

    def staging(self) -> dict[str, torch.Tensor]:
        """Memory to read into, alike to what is here."""
        staged = {key: torch.empty_like(tensor.detach()) for key, tensor in self._model.items()}
        for key, state in self._states.items():
            dtype = DTYPES[self.entries[key].dtype]
            staged[key] = torch.empty_like(state.like.detach(), dtype=dtype)
        return staged

    def apply(self, staged: Mapping[str, torch.Tensor]) -> None:
        """Put what was read in place: the optimizer's first, since hooks in it may refuse."""
        if self._optimizer is not None:
            self._apply_optimizer(self._optimizer, staged)
        with torch.no_grad():
            for key, tensor in self._model.items():
                _local(tensor).copy_(_local(staged[key]))

    def _apply_optimizer(
        self, optimizer: torch.optim.Optimizer, staged: Mapping[str, torch.Tensor]
    ) -> None:
        saved = self._about.optimizer
        assert saved is not None
        states: dict[torch.Tensor, dict[str, Any]] = {}
        for key, state in self._states.items():
            states.setdefault(state.parameter, {})[state.key] = staged[key]
        packed = optimizer.state_dict()
        numbered: dict[int, dict[str, Any]] = {}
        for position, group in enumerate(optimizer.param_groups):
            for stored, parameter, number in zip(
                self._groups[position],
                group["params"],
                packed["param_groups"][position]["params"],
                strict=True,
            ):
                if stored in saved.plain:
                    states.setdefault(parameter, {}).update(saved.plain[stored])
                if parameter in states:
                    numbered[number] = states[parameter]
            options = {
                name: _as_before(group.get(name), value)
                for name, value in self._options[position].items()
                if not (name in _OWN_OPTIONS and name in group)
            }
            packed["param_groups"][position] |= options
        # The dicts are copied, for torch's loading moves tensors to the dtype of the parameter.
        exact = {parameter: dict(state) for parameter, state in states.items()}
        optimizer.load_state_dict({"state": numbered, "param_groups": packed["param_groups"]})
        for parameter, values in exact.items():
            optimizer.state[parameter].update(values)


def _alike(
    key: str,
    entry: Entry,
    parameter: torch.Tensor,
    current: object,
    *,
    on_device: bool,
) -> torch.Tensor | None:
    """A tensor of the shape, device and placement that a piece of state is to have here."""
    if isinstance(current, torch.Tensor) and tuple(current.shape) == entry.shape:
        return current
    if key != "step" and tuple(parameter.shape) == entry.shape:
        return parameter
    if not entry.shape:  # a count, which torch's optimizers keep on the CPU by default
        return torch.empty((), device=parameter.device if on_device else "cpu")
    if isinstance(parameter, DTensor):
        return None
    return torch.empty(entry.shape, device=parameter.device)


def _as_before(current: Any, saved: Any) -> Any:
    """An option in the type that it has here: JSON has neither tuples nor tensors."""
    if isinstance(current, torch.Tensor) and isinstance(saved, int | float):
        return torch.full_like(current, saved)
    if isinstance(current, tuple) and isinstance(saved, list):
        return tuple(saved)
    return saved


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
