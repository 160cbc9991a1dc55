"""The two JSON documents of a checkpoint: what it is, and where each tensor's bytes are.

They hold all that a load needs, so a load unpickles nothing: the `.metadata` that torch writes
beside them, a pickle, is for torch's own tools.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from parallelkit.errors import CheckpointError, NotPlainError
from parallelkit.plain import TYPES, check
from parallelkit.protocols import Plain

ABOUT: Final = "parallelkit.json"
INDEX: Final = "tensors.json"
#: The version that is written and the only one that is read.
FORMAT: Final = 1
#: What JSON gives back as it was.
_TYPES: Final = {kind: name for kind, name in TYPES.items() if kind is not bytes}


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """One region of a tensor, stored by `torch.save` in some bytes of a file.

    Attributes:
        offsets: where it begins, in elements of each dim.
        sizes: its shape.
        file: name, in the checkpoint's folder.
        start: first byte in `file`.
        length: in bytes.
        digest: xxh3-64 of those bytes.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int
    digest: int


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor: dtype by torch's name for it, global shape, and its regions."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every tensor.

    Attributes:
        model: parameters and buffers by plain name.
        optimizer: state by parameter's plain name and the optimizer's own key.
    """

    model: dict[str, Entry]
    optimizer: dict[str, dict[str, Entry]]


class GroupOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One parameter group: plain names, and options such as `lr`."""

    names: list[str]
    options: dict[str, Any]


class OptimizerAbout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is no tensor in an optimizer.

    Attributes:
        kind: name of its class.
        groups: parameter groups.
        plain: state that is not a tensor, by parameter and key.
    """

    kind: str
    groups: list[GroupOptions]
    plain: dict[str, dict[str, Any]]


class About(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint is; written last, so its presence says that the rest is there.

    Attributes:
        format: version of this layout.
        framework: `"torch"`.
        versions: of parallelkit and torch, when it was written.
        world_size: ranks that wrote it.
        degrees: of the axes of their plan.
        aliases: further names of tied tensors, and the name they are stored under.
        optimizer: None: saved without one.
        files: size in bytes of each file with tensors.
        index: BLAKE2b digest of the other document's bytes.
        extra: what the caller gave.
    """

    format: int
    framework: str
    versions: dict[str, str]
    world_size: int
    degrees: dict[str, int]
    aliases: dict[str, str]
    optimizer: OptimizerAbout | None
    files: dict[str, int]
    index: str
    extra: dict[str, Any]


def encode_extra(extra: Mapping[str, Plain] | None) -> str:
    """JSON of what the caller wants kept; floats that are not finite as Python writes them.

    Raises:
        NotPlainError: something in it is not None, bool, int, float, str, list or dict with
            string keys; the message says where. A subclass or a tuple would come back as
            something else, so it is refused too.
    """
    if not isinstance(extra, Mapping | None):
        raise NotPlainError(f"extra is a {type(extra).__qualname__}; it is a mapping, or None")
    kept = dict(extra or {})
    check(kept, "extra", _TYPES, why=", which is not kept in a checkpoint's JSON")
    return json.dumps(kept, sort_keys=True)


def encode_index(index: Index) -> bytes:
    return msgspec.json.encode(index)


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def encode_about(about: About) -> bytes:
    # Not by msgspec, which would write null for a float that is not finite.
    return json.dumps(msgspec.to_builtins(about), indent=1).encode() + b"\n"


def read(folder: Path) -> tuple[About, Index, str]:
    """Read and check both documents; the last value is the same exactly when they are.

    Raises:
        CheckpointError: one is missing, damaged, of another format, or does not fit the other.
    """
    first = _bytes(folder, ABOUT)
    about: About = _decode(folder / ABOUT, first, About)
    second = _bytes(folder, INDEX)
    if digest(second) != about.index:
        raise CheckpointError(
            f"{folder / INDEX} is not what {ABOUT} was written for: the checkpoint is damaged"
        )
    index: Index = _decode(folder / INDEX, second, Index)
    for name in about.files:
        if Path(name).name != name:
            raise CheckpointError(f"{folder / ABOUT} is damaged: {name!r} is no plain file name")
    for name, entry in index.model.items():
        _check_entry(folder, about, name, entry)
    for name, entries in index.optimizer.items():
        for key, entry in entries.items():
            _check_entry(folder, about, f"{name}.{key}", entry)
    return about, index, digest(first)


def _bytes(folder: Path, name: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} has no {name}: it is no complete checkpoint of parallelkit"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{folder / name} cannot be read: {error.strerror}") from error


def _decode(path: Path, data: bytes, kind: Any) -> Any:
    try:
        plain = json.loads(data)
        found = plain.get("format") if isinstance(plain, dict) else None
        if kind is About and found != FORMAT:
            raise CheckpointError(
                f"{path} has format {found!r}; this version of parallelkit reads {FORMAT}"
            )
        return msgspec.convert(plain, kind)
    except (ValueError, RecursionError) as error:  # both modules' errors are ValueErrors
        raise CheckpointError(f"{path} is damaged: {error}") from error


def _check_entry(folder: Path, about: About, name: str, entry: Entry) -> None:
    """Raise unless the regions lie in the tensor, add up to it, and lie in known files."""
    total = 0
    for chunk in entry.chunks:
        inside = len(entry.shape) == len(chunk.offsets) == len(chunk.sizes) and all(
            offset >= 0 and size >= 0 and offset + size <= dim
            for offset, size, dim in zip(chunk.offsets, chunk.sizes, entry.shape, strict=True)
        )
        held = chunk.start >= 0 < chunk.length
        if not inside or not held or chunk.start + chunk.length > about.files.get(chunk.file, -1):
            raise CheckpointError(
                f"{folder / INDEX} is damaged: tensor {name!r} has the impossible region {chunk}"
            )
        total += math.prod(chunk.sizes)
    if total != math.prod(entry.shape) or not entry.chunks:
        raise CheckpointError(
            f"{folder / INDEX} is damaged: tensor {name!r} has {total} of "
            f"{math.prod(entry.shape)} elements"
        )


def check_files(folder: Path, about: About) -> None:
    """Raise `CheckpointError` unless every file is there, with its size."""
    problems = []
    for name, size in about.files.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif path.stat().st_size != size:
            problems.append(f"{name} has {path.stat().st_size} bytes, not {size}")
    if problems:
        shown = "; ".join(problems[:5]) + ("; ..." if len(problems) > 5 else "")
        raise CheckpointError(f"the checkpoint {folder} is incomplete: {shown}")
