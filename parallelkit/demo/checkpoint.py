"""A model's weights as a Hugging Face checkpoint: one safetensors file and its `config.json`.

Bytes go from where the tensors lie into the file, so that every dtype is written as it is.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np

from parallelkit.decoder import INIT_STD, ModelConfig
from parallelkit.protocols import WeightSource
from parallelkit.weights.manifest import SAFETENSORS_DTYPES, TensorSpec

WEIGHTS: Final = "model.safetensors"
CONFIG: Final = "config.json"

_CODES: Final = {name: code for code, name in SAFETENSORS_DTYPES.items()}


def save_checkpoint(
    folder: Path, config: ModelConfig, source: WeightSource, *, positions: int
) -> None:
    """Write what `source` holds now; a tied head is in the file once, as the embedding.

    Args:
        folder: made if it is not there; files of an earlier checkpoint are replaced.
        config: the model's sizes.
        source: its weights, all of one dtype: `parallelkit.hooks.weight_source(model)`.
        positions: the longest sequence, for `config.json`.
    """
    source.begin()
    unique = source.manifest().unique
    tensors = ((spec, source.host_bytes(index)) for index, spec in enumerate(unique))
    _write(folder, config, unique, tensors, positions=positions)


def save_random_checkpoint(
    folder: Path, config: ModelConfig, *, seed: int, dtype: str, positions: int
) -> None:
    """Write a checkpoint of random weights: an engine starts with it before a trainer's arrive.

    Args:
        folder, config, positions: as for `save_checkpoint`.
        seed: same seed, same file.
        dtype: `"float32"` or `"bfloat16"`.
    """
    generator = np.random.default_rng(seed)
    specs = [TensorSpec(name=n, dtype=dtype, shape=s) for n, s in config.shapes().items()]
    tensors = ((spec, memoryview(_random(spec, generator))) for spec in specs)
    _write(folder, config, specs, tensors, positions=positions)


def _write(
    folder: Path,
    config: ModelConfig,
    specs: Iterable[TensorSpec],
    tensors: Iterable[tuple[TensorSpec, memoryview]],
    *,
    positions: int,
) -> None:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end, dtypes = 0, []
    for spec in specs:
        entries[spec.name] = {
            "dtype": _CODES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [end, end + spec.nbytes],
        }
        end += spec.nbytes
        dtypes.append(spec.dtype)
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # data begins at a multiple of eight
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{WEIGHTS}.part"
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, data in tensors:
            file.write(data)
    partial.replace(folder / WEIGHTS)  # whoever has mapped the old file keeps it
    described = config.to_hugging_face(dtype=dtypes[0], positions=positions)
    (folder / CONFIG).write_text(json.dumps(described, indent=1))


def _random(spec: TensorSpec, generator: np.random.Generator) -> bytes:
    """Values as the models begin with: norms of one, biases of zero, the rest normal."""
    if len(spec.shape) == 1:
        fill = np.zeros if spec.name.endswith("bias") else np.ones
        values = fill(spec.shape, np.float32)
    else:
        values = INIT_STD * generator.standard_normal(spec.shape, np.float32)
    if spec.dtype == "bfloat16":  # its bits are the upper half of float32's
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.astype(spec.dtype).tobytes()
