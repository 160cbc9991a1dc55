"""The data of the parity runs: characters of the licence, in windows, and weights by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from parallelkit.decoder import INIT_STD, ModelConfig

BLOCK = 24


def corpus() -> tuple[np.ndarray, ModelConfig]:
    """Windows of `BLOCK + 1` character numbers, int32, and a model for them."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text()[:6000]
    alphabet = sorted(set(text))
    numbers = np.array([alphabet.index(c) for c in text], np.int32)
    starts = np.arange(0, len(numbers) - BLOCK - 1, 7)
    windows = numbers[starts[:, None] + np.arange(BLOCK + 1)]
    config = ModelConfig(
        vocab_size=len(alphabet),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return windows, config


def weight(name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Initial values of a parameter: a function of its name, in float32, whatever `dtype` is."""
    if len(shape) == 1:
        values = np.zeros(shape) if name.endswith("bias") else np.ones(shape)
    else:
        seed = int.from_bytes(name.encode(), "little") % (2**32 - 1)
        values = INIT_STD * np.random.RandomState(seed).randn(*shape)
    return values.astype(np.float32).astype(dtype)
