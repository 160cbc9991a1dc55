"""Files of a checkpoint: tensors as safetensors, and one JSON document that says what they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import safetensors
import xxhash

from parallelkit import checkpoint_files as files
from parallelkit.errors import CheckpointError, NotPlainError
from parallelkit.plain import TYPES, check
from parallelkit.plan import ParallelPlan
from parallelkit.protocols import Plain
from parallelkit.weights.manifest import SAFETENSORS_DTYPES
from parallelkit_mindspore.tensors import as_bytes, dtype_name, nbytes

ABOUT: Final = "parallelkit.json"
FILES: Final[Mapping[str, str]] = {
    "model": "model.safetensors",
    "optimizer": "optimizer.safetensors",
}
#: The version that is written and the only one that is read.
FORMAT: Final = 1
#: What JSON gives back as it was.
_TYPES: Final = {kind: name for kind, name in TYPES.items() if kind is not bytes}


class Stored(NamedTuple):
    """One tensor as it was saved, row-major."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size in bytes and xxh3-64 digest of one file."""

    size: int
    digest: int


class About(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint is; written last, so its presence says that the rest is there.

    Attributes:
        format: version of this layout.
        framework: `"mindspore"`.
        versions: of parallelkit and mindspore, when it was written.
        world_size: ranks of the plan that it was saved under; degrees: of its axes.
        optimizer: name of its class; empty: saved without one.
        files: by name.
        extra: what the caller gave.
    """

    format: int
    framework: str
    versions: dict[str, str]
    world_size: int
    degrees: dict[str, int]
    optimizer: str
    files: dict[str, File]
    extra: dict[str, Any]

    @property
    def mark(self) -> str:
        """Text by which two checkpoints can be told apart."""
        return ",".join(f"{name}:{file.digest:x}" for name, file in sorted(self.files.items()))


def encode_extra(extra: Mapping[str, Plain]) -> str:
    """JSON of what the caller wants kept.

    Raises:
        NotPlainError: something in it JSON would not give back as it was.
    """
    if not isinstance(extra, Mapping):
        raise NotPlainError(f"extra is a {type(extra).__qualname__}; it is a dict of plain values")
    check(dict(extra), "extra", _TYPES, why=", which JSON would not give back as it was")
    try:
        return json.dumps(dict(extra), sort_keys=True, allow_nan=False)
    except ValueError as error:
        raise NotPlainError(
            "extra holds a float that is infinite or no number, which JSON would not give back as "
            "it was; save it as a string"
        ) from error


def write(path: Path, tensors: Mapping[str, Any]) -> File:
    """Write tensors to a file, so that it lasts.

    Raises:
        CheckpointError: it cannot be written, or a tensor cannot be stored.
    """
    held = {name: as_bytes(tensor) for name, tensor in tensors.items()}
    try:
        specs = {
            name: safetensors.TensorSpec(
                dtype=dtype_name(tensor),
                shape=[int(size) for size in tensor.shape],
                data_ptr=int(tensor.data_ptr()) if nbytes(tensor) else 0,
                data_len=nbytes(tensor),
            )
            for name, tensor in tensors.items()
        }
        data = safetensors.serialize(specs)
        files.write(path, data)
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"cannot write {path}: {error}") from error
    finally:
        del held
    return File(size=len(data), digest=xxhash.xxh3_64_intdigest(data))


def describe(
    folder: Path,
    written: Mapping[str, File],
    plan: ParallelPlan,
    *,
    kind: str,
    extra: Mapping[str, Plain] | None,
) -> None:
    """Write the document that says that the checkpoint is complete.

    Raises:
        CheckpointError: it cannot be written.
    """
    about = About(
        format=FORMAT,
        framework="mindspore",
        versions={"parallelkit": version("parallelkit"), "mindspore": version("mindspore")},
        world_size=plan.world_size,
        degrees=dict(plan.degrees),
        optimizer=kind,
        files={FILES[part]: file for part, file in written.items()},
        extra=dict(extra or {}),
    )
    try:
        files.write(folder / ABOUT, msgspec.json.encode(about))
    except OSError as error:
        raise CheckpointError(f"cannot write to {folder}: {error}") from error


def read_about(folder: Path) -> About:
    """Read what a checkpoint is.

    Raises:
        CheckpointError: there is no document, or it is damaged, of another framework or of
            another version.
    """
    try:
        data = (folder / ABOUT).read_bytes()
        kind = msgspec.json.decode(data)
        if isinstance(kind, dict) and kind.get("framework") != "mindspore":
            raise CheckpointError(
                f"the checkpoint {folder} is of the framework {kind.get('framework')!r:.40}; "
                "this is mindspore's"
            )
        if isinstance(kind, dict) and kind.get("format") != FORMAT:
            raise CheckpointError(
                f"the checkpoint {folder} has format {kind.get('format')!r:.40}; this version of "
                f"parallelkit reads {FORMAT}"
            )
        return msgspec.json.decode(data, type=About)
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is no complete checkpoint: {ABOUT} is missing") from error
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(f"{folder / ABOUT} is damaged: {error}") from error


def read(folder: Path, part: str, about: About) -> dict[str, Stored]:
    """Read all tensors of a part, after comparing size and digest of its file.

    Raises:
        CheckpointError: the file is missing, damaged, or holds a dtype that is unknown here.
    """
    name = FILES[part]
    if name not in about.files:
        raise CheckpointError(f"the checkpoint {folder} has no {part}")
    try:
        data = (folder / name).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{folder / name} cannot be read: {error}") from error
    wanted = about.files[name]
    if len(data) != wanted.size or xxhash.xxh3_64_intdigest(data) != wanted.digest:
        raise CheckpointError(
            f"{folder / name} is damaged: it has {len(data)} bytes of {wanted.size}, or "
            "others than were written"
        )
    try:
        rows: Any = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
        return {
            str(key): Stored(
                SAFETENSORS_DTYPES[row["dtype"]], tuple(row["shape"]), bytes(row["data"])
            )
            for key, row in rows
        }
    except (safetensors.SafetensorError, KeyError) as error:
        raise CheckpointError(f"{folder / name} cannot be understood: {error!r}") from error
