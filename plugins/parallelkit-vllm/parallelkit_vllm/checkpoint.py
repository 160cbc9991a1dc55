"""What an engine needs, read from the checkpoint that it was made from; never from its live model.

A live model says too little: its layers are fused, sharded and packed away.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from parallelkit.weights.manifest import DTYPE_BYTES, SAFETENSORS_DTYPES
from parallelkit_vllm.compare import Needed
from parallelkit_vllm.errors import EngineCheckpointError

INDEX: Final = "model.safetensors.index.json"
#: The limit that the format itself sets.
MAX_HEADER_BYTES: Final = 100_000_000
#: So many configurations are remembered in a process.
_KEPT: Final = 16

Tensors = dict[str, tuple[str, tuple[int, ...]]]

_read: dict[tuple[object, ...], Tensors] = {}


def needed(model_config: Any, load_config: Any) -> Needed:
    """Names, shapes and dtypes that an engine with this configuration is loaded from.

    From the headers of its safetensors files; where it has none (other formats, or a folder with
    a configuration alone for `load_format="dummy"`), from its Hugging Face configuration, by a
    model without data. What was read is kept until the files change.

    Raises:
        EngineCheckpointError: neither can be read.
    """
    dtype = str(model_config.dtype).removeprefix("torch.")
    tied = _ties(model_config)
    folder = find_folder(model_config, load_config)
    files = [] if folder is None else shards(folder)
    if folder is not None and files:
        key = ("files", *((str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in files))
        found = _kept(key, lambda: read_headers(folder, files))
        return Needed(found, f"the checkpoint {folder}", dtype, tied)
    config = model_config.hf_config
    key = ("config", config.to_json_string(use_diff=False), dtype)
    found = _kept(key, lambda: by_config(config, dtype))
    return Needed(found, f"the configuration of {model_config.model}", dtype, tied)


def find_folder(model_config: Any, load_config: Any) -> Path | None:
    """The local folder of the checkpoint: given as such, or in the cache of the hub.

    Nothing is downloaded: the engine has loaded it already.
    """
    folder = Path(model_config.model)
    if folder.is_dir():
        return folder
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        return None
    try:
        found = snapshot_download(
            model_config.model,
            revision=getattr(model_config, "revision", None),
            cache_dir=getattr(load_config, "download_dir", None),
            local_files_only=True,
        )
    except (OSError, ValueError):  # not in the cache, or no name of the hub
        return None
    return Path(found)


def shards(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, those of its index where it has one; may be none.

    Raises:
        EngineCheckpointError: the index cannot be read, or names a file that is not there.
    """
    index = folder / INDEX
    if not index.is_file():
        found = sorted(folder.glob("*.safetensors"))
        whole = [p for p in found if not p.name.startswith("consolidated")]
        return whole or found
    names = sorted(set(_weight_map(index).values()))
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise EngineCheckpointError(f"{index} names {name!r:.200}, which is no file beside it")
    return [folder / name for name in names]


def read_headers(folder: Path, files: list[Path]) -> Tensors:
    """Dtype and shape of every tensor, in the files' order.

    Raises:
        EngineCheckpointError: a file is damaged, two have the same tensor, or the index lies.
    """
    found: Tensors = {}
    for path in files:
        for name, tensor in read_header(path):
            if name in found:
                raise EngineCheckpointError(f"{path} has {name!r:.200}, as another file has, too")
            found[name] = tensor
    index = folder / INDEX
    if index.is_file():
        listed = set(_weight_map(index))
        if odd := sorted(listed - found.keys()):
            raise EngineCheckpointError(
                f"{index} lists {len(odd)} tensors that no file has, such as {odd[0]!r:.200}"
            )
        found = {name: tensor for name, tensor in found.items() if name in listed}
    if not found:
        raise EngineCheckpointError(f"there is no tensor in the safetensors files of {folder}")
    return found


def read_header(path: Path) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """Names, dtypes and shapes of one safetensors file; no tensor is read.

    Raises:
        EngineCheckpointError: it is none, or is cut short.
    """
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > min(MAX_HEADER_BYTES, path.stat().st_size - 8):
                raise EngineCheckpointError(
                    f"{path} is no safetensors file: its header would have {size} bytes"
                )
            header = json.loads(file.read(size))
        room = path.stat().st_size - 8 - size
    except (OSError, ValueError) as error:
        raise EngineCheckpointError(f"{path} cannot be read as safetensors: {error}") from error
    if not isinstance(header, dict):
        raise EngineCheckpointError(f"{path} is no safetensors file: its header is no table")
    for name, entry in header.items():
        if name != "__metadata__":
            yield name, _entry(path, name, entry, room)


def by_config(config: Any, dtype: str) -> Tensors:
    """Names and shapes of the model that transformers makes of a configuration, without data.

    Raises:
        EngineCheckpointError: transformers cannot make it.
    """
    import torch
    import transformers

    names = getattr(config, "architectures", None) or ()
    kind = next((k for n in names if (k := getattr(transformers, n, None)) is not None), None)
    try:
        with torch.device("meta"):
            if kind is not None:
                model = kind(config)
            else:
                model = transformers.AutoModelForCausalLM.from_config(config)
        state = dict(model.state_dict(keep_vars=True))
    except Exception as error:  # whatever a model's constructor raises
        raise EngineCheckpointError(
            f"the engine has no safetensors checkpoint, and no model can be made of its "
            f"configuration to learn names and shapes from: {type(error).__name__}: {error}"
        ) from error
    seen: dict[int, str] = {}
    found: Tensors = {}
    for name, tensor in state.items():
        if seen.setdefault(id(tensor), name) == name:  # a tied one is no tensor of its own
            found[name] = (dtype, tuple(tensor.shape))
    return found


def _kept(key: tuple[object, ...], read: Callable[[], Tensors]) -> Tensors:
    if key not in _read:
        found = read()
        if len(_read) >= _KEPT:
            _read.clear()
        _read[key] = found
    return _read[key]


def _entry(path: Path, name: str, entry: Any, room: int) -> tuple[str, tuple[int, ...]]:
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        known = SAFETENSORS_DTYPES[dtype]
        good = all(type(n) is int and n >= 0 for n in (start, end, *shape)) and end <= room
        good = good and end - start == math.prod(shape) * DTYPE_BYTES[known]
    except KeyError as error:
        raise EngineCheckpointError(
            f"{path}: {name!r:.200} has no or an unknown {error}; dtypes that can be transferred "
            f"are {', '.join(SAFETENSORS_DTYPES)}"
        ) from error
    except (TypeError, ValueError) as error:
        raise EngineCheckpointError(f"{path}: the entry of {name!r:.200} is malformed") from error
    if not good:
        raise EngineCheckpointError(
            f"{path}: {name!r:.200} has shape {shape!r:.200} and bytes {start} to {end} of {room}, "
            "which do not agree; the file is damaged or cut short"
        )
    return known, tuple(shape)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found = json.loads(index.read_bytes())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineCheckpointError(
            f"{index} cannot be read: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise EngineCheckpointError(f"{index}: its weight_map is no table of file names")
    return found


def _ties(model_config: Any) -> bool:
    config = model_config.hf_config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return bool(getattr(text, "tie_word_embeddings", False))
