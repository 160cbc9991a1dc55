"""Checkpoints that any plan can load, whatever plan wrote them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from parallelkit import checkpoint_files as files
from parallelkit.errors import CheckpointError, PlanError, RankMismatchError
from parallelkit.plan import ParallelPlan
from parallelkit.protocols import Plain, ProcessGroup
from parallelkit_torch.parallel import checkpoint_format as formats
from parallelkit_torch.parallel import checkpoint_store as store
from parallelkit_torch.parallel.checkpoint_format import (
    About,
    Entry,
    GroupOptions,
    Index,
    OptimizerAbout,
)
from parallelkit_torch.parallel.checkpoint_match import Match
from parallelkit_torch.parallel.checkpoint_peers import Peers
from parallelkit_torch.parallel.checkpoint_state import (
    ModelState,
    OptimizerState,
    model_state,
    optimizer_state,
)


class _Request(msgspec.Struct, frozen=True):
    """What a rank asks for, and what it has that is no tensor."""

    path: str = ""
    overwrite: bool = False
    extra: str = ""
    aliases: dict[str, str] = {}
    optimizer: str = ""
    groups: list[GroupOptions] = []
    plain: dict[str, dict[str, Any]] = {}


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    group: ProcessGroup,
    plan: ParallelPlan,
    extra: Mapping[str, Plain] | None = None,
    overwrite: bool = False,
    timeout: float | None = None,
) -> None:
    """Write a checkpoint that any other plan can load. Collective over `group`.

    Every rank calls it with the same arguments and its own part of the model, and each writes
    what it holds, replicas once. The checkpoint appears at `path` when all of it is on disk;
    until then, and if any rank fails, what was there stays. Blocks until all ranks are done.

    Args:
        path: a folder to be made, on a file system that all ranks share; parents are made too.
        model: plain, wrapped, sharded or a pipeline's stages; parameters and persistent buffers
            are saved.
        optimizer: built from `model`; None: its state is not saved.
        group: the ranks that hold the model.
        plan: how it is spread over them; kept as a note, a load does not need it.
        extra: plain values, such as a step number and `loader.state_dict()`; the same on every
            rank, or None on all but rank 0.
        overwrite: replace a checkpoint at `path`; the old one is there until the new one is.
        timeout: seconds that one rank may be later than the others with writing; None: ten
            times the group's timeout.

    Raises:
        NotPlainError: `extra` holds something that JSON would not give back.
        RankMismatchError: ranks gave different arguments, or hold different tensors of a name.
        PlanError: `plan` is not for the ranks of `group`.
        CheckpointError: `path` exists or cannot be written, something in the model or the
            optimizer cannot be stored, or a rank failed; raised on every rank, and on those
            that did not fail with the rank that did. No file is left.
        CollectiveTimeoutError, CollectiveError: a rank did not come, or is gone.
    """
    peers = Peers(group, timeout)
    problem: Exception | None = None
    request = _Request()
    try:
        if plan.world_size != group.world_size:
            raise PlanError(
                f"the plan is for {plan.world_size} ranks and the group has {group.world_size}"
            )
        target = files.target_of(path)
        held = model_state(model)
        state = None if optimizer is None else optimizer_state(optimizer, held)
        request = _Request(
            path=str(target),
            overwrite=bool(overwrite),
            extra="" if extra is None and group.rank else formats.encode_extra(extra),
            aliases=held.aliases,
            optimizer="" if state is None else state.kind,
            groups=[] if state is None else state.groups,
            plain={} if state is None else state.plain,
        )
    except Exception as error:  # whatever it is, the other ranks must know
        problem = error
    requests = peers.meet("checking what to save", request, _Request, problem=problem)
    _compare(requests)
    saving: files.Saving | None = None
    try:
        if group.rank == 0:
            saving = files.Saving(target, overwrite=overwrite)
    except Exception as error:  # whatever it is, the other ranks must know
        problem = error
    name = saving.folder.name if saving is not None else ""
    try:
        folders = peers.meet("making the folder", name, str, problem=problem)
        try:
            folder = target.with_name(folders[0])
            files.wait_for(folder)
            _write(folder, held, state, peers, plan, requests)
            if saving is not None:
                saving.finish(overwrite=overwrite)
        except Exception as error:  # whatever it is, the other ranks must know
            problem = error
        peers.meet("finishing the checkpoint", None, type(None), problem=problem)
    finally:
        if saving is not None:
            saving.close()


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    group: ProcessGroup,
    timeout: float | None = None,
) -> dict[str, Plain]:
    """Read a checkpoint into a model and an optimizer, in place. Collective over `group`.

    Each rank reads what its own part needs, whatever plan wrote the checkpoint. Names, shapes,
    dtypes and files are compared before anything is read, and bytes with their digests before
    anything is changed: unless every rank has all that it needs, no rank's model or optimizer is
    touched. Meanwhile this rank's part of the model and of the optimizer's state takes its
    memory once more. Nothing is unpickled but tensors by torch's restricted `weights_only`.

    Args:
        path: of the checkpoint.
        model: of the same tensors as the one saved, spread in whatever way.
        optimizer: of the same kind, over the same parameters; its state and the options of its
            groups become those saved. None: what was saved of an optimizer is left.
        group: the ranks that hold the model.
        timeout: seconds that one rank may be later than the others with reading; None: ten
            times the group's timeout.

    Returns:
        The `extra` that was saved.

    Raises:
        CheckpointError: there is none, it is damaged, or it is not this model's or optimizer's;
            the message lists the differences. Raised on every rank.
        CollectiveTimeoutError, CollectiveError: a rank did not come, or is gone.
    """
    peers = Peers(group, timeout)
    problem: Exception | None = None
    folder, mark, match = Path(), "", None
    try:
        folder = files.existing(files.target_of(path))
        about, index, mark = formats.read(folder)
        if group.rank == 0:
            formats.check_files(folder, about)
        match = Match(about, index, model_state(model), optimizer)
    except Exception as error:  # whatever it is, the other ranks must know
        problem = error
    marks = peers.meet("reading the checkpoint", mark, str, problem=problem)
    assert match is not None
    if len(set(marks)) > 1:
        raise CheckpointError(
            f"ranks read different checkpoints at {folder}: its path must be on a file system "
            "that all ranks share, and nobody may write there meanwhile"
        )
    match.refuse(folder, peers.meet("comparing names", match.found(), tuple[bytes, list[str]]))
    try:
        staged = match.staging()
        store.read(folder, staged, match.entries)
    except Exception as error:  # whatever it is, the other ranks must know
        problem = error
    peers.meet("reading the tensors", None, type(None), problem=problem)
    try:
        match.apply(staged)
    except Exception as error:
        problem = CheckpointError(
            f"the optimizer refused its state: {error}; model and optimizer may differ now"
        )
        problem.__cause__ = error
    peers.meet("putting the tensors in place", None, type(None), problem=problem)
    return about.extra


def _write(
    folder: Path,
    held: ModelState,
    state: OptimizerState | None,
    peers: Peers,
    plan: ParallelPlan,
    requests: Sequence[_Request],
) -> None:
    """Write all files; the one that says that the checkpoint is complete comes last."""
    states = {} if state is None else state.tensors
    optim = {f"state.{n}.{key}": t for n, values in states.items() for key, t in values.items()}
    buffers = frozenset(f"model.{name}" for name in held.buffers)
    entries = store.write(
        folder, {"model": held.tensors, "optim": optim}, buffers=buffers, peers=peers
    )
    if peers.rank == 0:
        _describe(folder, entries, plan, requests)


def _describe(
    folder: Path, entries: Mapping[str, Entry], plan: ParallelPlan, requests: Sequence[_Request]
) -> None:
    index = Index({}, {})
    for key, entry in entries.items():
        part, _, name = key.partition(".")
        if part == "model":
            index.model[name] = entry
        else:
            name, _, inner = name.removeprefix("state.").rpartition(".")
            index.optimizer.setdefault(name, {})[inner] = entry
    files_written = {chunk.file for entry in entries.values() for chunk in entry.chunks}
    data = formats.encode_index(index)
    about = About(
        format=formats.FORMAT,
        framework="torch",
        versions={"parallelkit": version("parallelkit"), "torch": str(torch.__version__)},
        world_size=plan.world_size,
        degrees=dict(plan.degrees),
        aliases={k: v for request in requests for k, v in request.aliases.items()},
        optimizer=_merged(requests),
        files={name: (folder / name).stat().st_size for name in sorted(files_written)},
        index=formats.digest(data),
        extra=json.loads(requests[0].extra or "{}"),
    )
    try:
        files.write(folder / formats.INDEX, data)
        files.write(folder / formats.ABOUT, formats.encode_about(about))
    except OSError as error:
        raise CheckpointError(f"cannot write to {folder}: {error}") from error


def _merged(requests: Sequence[_Request]) -> OptimizerAbout | None:
    """One account of the optimizers of all ranks: replicas once, stages of a pipeline together."""
    if not requests[0].optimizer:
        return None
    groups: dict[tuple[int, str], GroupOptions] = {}
    plain: dict[str, dict[str, Any]] = {}
    seen: set[str] = set()
    for request in requests:
        for number, group in enumerate(request.groups):
            place = (number, json.dumps(group.options, sort_keys=True))
            merged = groups.setdefault(place, GroupOptions([], group.options))
            merged.names.extend(name for name in group.names if name not in seen)
            seen.update(group.names)
        plain = request.plain | plain
    return OptimizerAbout(requests[0].optimizer, [g for g in groups.values() if g.names], plain)


def _compare(requests: Sequence[_Request]) -> None:
    """Raise `RankMismatchError` unless all ranks asked for the same."""
    first = requests[0]
    options: dict[str, tuple[int, dict[str, Any]]] = {}
    for rank, request in enumerate(requests):
        pairs: list[tuple[str, Any, Any]] = [
            ("path", request.path, first.path),
            ("overwrite", request.overwrite, first.overwrite),
            ("optimizer", request.optimizer or None, first.optimizer or None),
            ("extra", request.extra or first.extra, first.extra),
        ]
        for group in request.groups:
            for name in group.names:
                before, other = options.setdefault(name, (rank, group.options))
                pairs.append((f"options of {name!r} (rank {before})", group.options, other))
        for what, here, there in pairs:
            if here != there:
                hint = ", or None on all but rank 0" if what == "extra" else ""
                raise RankMismatchError(
                    f"rank {rank} saves with another {what} than rank 0: {here!r:.200} instead of "
                    f"{there!r:.200}. Give every rank the same{hint}"
                )
