"""Checkpoints that any plan can load, whatever plan wrote them.

A folder of two files of safetensors, the model's and the optimiser's, and a JSON document that is
written last. Rank 0 writes whole tensors; divided ones are gathered first, one at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar, final

import attrs
import mindspore as ms
from mindspore import mint

from parallelkit import checkpoint_files as files
from parallelkit.errors import CheckpointError, RankMismatchError
from parallelkit.plan import ParallelPlan
from parallelkit.protocols import Plain, ProcessGroup
from parallelkit_mindspore import runtime
from parallelkit_mindspore.parallel import autograd
from parallelkit_mindspore.parallel import checkpoint_format as formats
from parallelkit_mindspore.parallel.agreement import gather
from parallelkit_mindspore.parallel.axes import AxisGroups
from parallelkit_mindspore.tensors import dtype_name, from_bytes

T = TypeVar("T")
#: How many times the group's timeout a rank waits for others to write or read.
PATIENCE: Final = 10
_SHOWN: Final = 5


@attrs.frozen(eq=False)
class State:
    """What is saved of a model and an optimiser: parameters, by part and name.

    Attributes:
        parts: `"model"` and `"optimizer"` to tensors by name, all of this rank's own size.
        dims: of divided ones, by part and name.
        kind: the optimiser's class, `""` without one.
    """

    parts: dict[str, dict[str, Any]]
    dims: dict[str, dict[str, int]]
    kind: str

    @classmethod
    def of(cls, model: Mapping[str, Any], dims: Mapping[str, int], optimizer: Any) -> State:
        """Look at a model's parameters, and at those of the optimiser that are its own.

        MindSpore names an optimiser's state after the parameter it belongs to, with a word and a
        dot before: what belongs to a divided parameter, and is as large, is divided the same way.
        """
        parts = {"model": dict(model)}
        divided = {"model": dict(dims)}
        if optimizer is None:
            return cls(parts, divided, "")
        if not hasattr(optimizer, "parameters_and_names"):
            raise CheckpointError(
                f"the optimizer is a {type(optimizer).__qualname__}; it is one of MindSpore's"
            )
        known = set(map(id, model.values()))
        own = {n: p for n, p in optimizer.parameters_and_names() if id(p) not in known}
        known.update(map(id, own.values()))
        own.update((p.name, p) for p in _listed(optimizer) if id(p) not in known)
        parts["optimizer"] = own
        named = {model[name].name: (model[name], dim) for name, dim in dims.items()}
        divided["optimizer"] = {}
        for name, tensor in own.items():
            of, dim = named.get(name.partition(".")[2], (None, 0))  # no word has a dot
            if of is not None and tensor.shape == of.shape:
                divided["optimizer"][name] = dim
        return cls(parts, divided, type(optimizer).__qualname__)

    def shape(self, part: str, name: str, degree: int) -> list[int]:
        """The shape of the whole tensor."""
        shape = [int(size) for size in self.parts[part][name].shape]
        dim = self.dims[part].get(name)
        if dim is not None:
            shape[dim] *= degree
        return shape


def save(
    path: str,
    state: State,
    *,
    plan: ParallelPlan,
    groups: AxisGroups,
    group: ProcessGroup,
    extra: Mapping[str, Plain] | None,
    overwrite: bool,
    timeout: float | None,
) -> None:
    """Write a checkpoint that any other plan can load. Collective over `group`.

    The checkpoint appears at `path` when all of it is on disk; until then, and if rank 0 fails,
    what was there stays. Blocks until all ranks are done.

    Args:
        state: of this rank.
        plan: how the model is spread; kept as a note.
        groups: of the plan's axes; divided tensors are gathered over `"tensor"`.
        extra: plain values; the same on every rank, or None on all but rank 0.
        timeout: seconds that rank 0 may write; None: ten times the group's.

    Raises:
        NotPlainError: `extra` holds something that JSON would not give back.
        RankMismatchError: ranks gave different arguments.
        CheckpointError: `path` exists or cannot be written, on every rank.
        CollectiveTimeoutError, CollectiveError: a rank did not come, or is gone.
    """
    ranks = _Ranks(group, timeout)
    asked = ranks.together("checking what to save", lambda: _asked(path, state, extra, overwrite))
    _same(asked)
    target = files.target_of(path)
    tensor_group = groups.group("tensor")
    whole = {
        part: {name: _whole(state, part, name, tensor_group) for name in tensors}
        for part, tensors in state.parts.items()
    }

    def write() -> None:
        with contextlib.closing(files.Saving(target, overwrite=overwrite)) as saving:
            written = {
                part: formats.write(saving.folder / formats.FILES[part], tensors)
                for part, tensors in whole.items()
            }
            formats.describe(saving.folder, written, plan, kind=state.kind, extra=extra)
            saving.finish(overwrite=overwrite)

    runtime.synchronize()
    ranks.together("writing the checkpoint", write if group.rank == 0 else lambda: None)


def load(
    path: str,
    state: State,
    *,
    place: tuple[int, int],
    group: ProcessGroup,
    timeout: float | None,
) -> dict[str, Plain]:
    """Read a checkpoint into a model and an optimiser, in place. Collective over `group`.

    Every rank reads what it needs. Names, shapes, dtypes and the bytes' digests are compared first:
    unless all ranks have all that they need, nothing is changed on any.

    Args:
        state: of this rank.
        place: rank and degree on the tensor axis.

    Returns:
        The `extra` that was saved.

    Raises:
        CheckpointError: there is none, it is damaged, or it is not this model's or optimiser's;
            the message lists the differences. Raised on every rank.
        RankMismatchError: some ranks gave an optimiser and others did not; on every rank.
        CollectiveTimeoutError, CollectiveError: a rank did not come, or is gone.
    """
    ranks = _Ranks(group, timeout)
    about: formats.About | None = None
    found: dict[str, dict[str, formats.Stored]] = {}

    def read() -> list[Plain]:
        nonlocal about, found
        folder = files.existing(files.target_of(path))
        about = formats.read_about(folder)
        _same_kind(folder, about, state.kind)
        found = {part: formats.read(folder, part, about) for part in state.parts}
        for part in state.parts:
            _match(folder, part, found[part], state, place[1])
        return [about.mark, state.kind]

    seen: list[Any] = ranks.together("reading the checkpoint", read)
    kinds = [kind for _, kind in seen]
    if len(set(kinds)) > 1:
        raise RankMismatchError(
            f"ranks load with different optimizers: {kinds}, by rank, where '' is none. Give "
            "every rank the same"
        )
    if len({mark for mark, _ in seen}) > 1:
        raise CheckpointError(
            f"ranks read different checkpoints at {path}: it must be on a file system that all "
            "ranks share, and nobody may write there meanwhile"
        )
    assert about is not None

    def put() -> None:
        with autograd.unrecorded():
            for part, tensors in state.parts.items():
                for name, tensor in tensors.items():
                    stored = found[part][name]
                    value = from_bytes(stored.data, stored.dtype, stored.shape)
                    tensor.copy_(_mine(value, state.dims[part].get(name), place))
            runtime.synchronize()

    ranks.together("putting the tensors in place", put)
    return about.extra


def _listed(optimizer: Any) -> Iterator[Any]:
    """Parameters in plain lists, which MindSpore does not count: NAdam and ASGD have some."""
    for value in vars(optimizer).values():
        if isinstance(value, list):
            yield from (item for item in value if isinstance(item, ms.Parameter))


@final
class _Ranks:
    """All ranks, which go through the same steps: what one of them cannot do, none goes on from."""

    def __init__(self, group: ProcessGroup, timeout: float | None) -> None:
        self._group = group
        self._timeout = group.timeout * PATIENCE if timeout is None else timeout

    def together(self, what: str, act: Callable[[], Any]) -> list[Plain]:
        """Do something on every rank, and give all what it returned on each. Collective.

        Raises:
            Exception: what `act` raised here.
            CheckpointError: it raised on another rank; the message says which, and what.
        """
        problem: Exception | None = None
        answer: Plain = None
        try:
            answer = act()
        except Exception as error:  # whatever it is, the other ranks must know
            problem = error
        mine: Plain = ["" if problem is None else f"{problem}"[:500] or "an error", answer]
        everyone: list[Any] = gather(mine, self._group, timeout=self._timeout)
        if problem is not None:
            raise problem
        failed = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(everyone) if text]
        if failed:
            raise CheckpointError(f"{what} failed; {'; '.join(failed)}")
        return [one for _, one in everyone]


def _asked(
    path: str, state: State, extra: Mapping[str, Plain] | None, overwrite: bool
) -> list[Plain]:
    if not isinstance(overwrite, bool):
        raise CheckpointError(f"overwrite is {overwrite!r:.80}; it is True or False")
    text = None if extra is None else formats.encode_extra(extra)
    return [str(files.target_of(path)), overwrite, state.kind, text]


def _same(asked: list[Any]) -> None:
    """Raise `RankMismatchError` unless all ranks asked for the same."""
    for rank, mine in enumerate(asked):
        for number, what in enumerate(("path", "overwrite", "optimizer")):
            here, there = mine[number], asked[0][number]
            if here != there:
                raise RankMismatchError(
                    f"rank {rank} saves with another {what} than rank 0: {here!r:.200} instead of "
                    f"{there!r:.200}. Give every rank the same"
                )
        if mine[3] not in (None, asked[0][3]):
            raise RankMismatchError(
                f"rank {rank} saves with another extra than rank 0. Give every rank the same, or "
                "None on all but rank 0"
            )


def _whole(state: State, part: str, name: str, tensor_group: ProcessGroup) -> Any:
    """A tensor as a whole; gathered where it is divided, by all ranks alike."""
    tensor, dim = state.parts[part][name], state.dims[part].get(name)
    if dim is None:
        return tensor
    return mint.cat(tensor_group.all_gather(ms.Tensor(tensor.value())), dim)


def _mine(value: Any, dim: int | None, place: tuple[int, int]) -> Any:
    if dim is None:
        return value
    rank, degree = place
    size = int(value.shape[dim]) // degree
    index = [slice(None)] * value.ndim
    index[dim] = slice(rank * size, (rank + 1) * size)
    return value[tuple(index)].contiguous().copy()


def _same_kind(folder: Path, about: formats.About, kind: str) -> None:
    if kind and about.optimizer != kind:
        saved = about.optimizer or "none"
        raise CheckpointError(
            f"the checkpoint {folder} was saved with the optimizer {saved}, and {kind} is to be "
            "loaded"
        )


def _match(
    folder: Path, part: str, found: Mapping[str, formats.Stored], state: State, degree: int
) -> None:
    """Raise unless exactly these tensors were saved."""
    wrong = []
    for name, tensor in state.parts[part].items():
        wanted = f"{dtype_name(tensor)} {state.shape(part, name, degree)}"
        there = found.get(name)
        if there is None:
            wrong.append(f"{name!r} is not in it")
        elif f"{there.dtype} {list(there.shape)}" != wanted:
            wrong.append(f"{name!r} is {there.dtype} {list(there.shape)} in it, here {wanted}")
    wrong += [f"{name!r} is in it and not here" for name in found if name not in state.parts[part]]
    if wrong:
        more = f", and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise CheckpointError(
            f"the checkpoint {folder} is of another {part}: {'; '.join(wrong[:_SHOWN])}{more}"
        )
