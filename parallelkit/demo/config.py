"""Settings of one demo run, and how its processes get them. Imports no framework."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs

from parallelkit.decoder import ModelConfig
from parallelkit.errors import ParallelKitError
from parallelkit.specs import DemoSpec

#: What the follower continues at each version.
PROMPT: Final = 'The "for" statement '
#: Of a sample that is drawn, to be read.
TEMPERATURE: Final = 0.5
#: Characters after the prompt that an engine and the trainer both choose, to be compared.
GREEDY: Final = 48
#: The longest sequence of the models.
POSITIONS: Final = 512

ENGINES: Final = ("module", "vllm")
#: Names a Python with vLLM, where this one has none.
PYTHON_VARIABLE: Final = "PARALLELKIT_VLLM_PYTHON"


class DemoSettingsError(ParallelKitError):
    """A setting of the demo that cannot be run."""


@attrs.frozen(kw_only=True)
class Settings:
    """Everything that decides a run's numbers; equal settings give equal runs.

    Attributes:
        seed: seeds the model, the order of the data and the sampling.
        steps: optimiser steps; every: steps between two updates of the follower.
        ranks: trainer processes.
        batch: windows in a batch of one rank; block: characters in a window.
        hidden, layers: width and depth of the model.
        rate: highest learning rate; warmup: steps until it is reached.
        held_out: windows of the validation text that both sides evaluate at each version.
        sample: characters to generate at each version.
        timeout: seconds for each wait on another process.
        engine: what follows: `module`, the same model in a process of its own, or `vllm`.

    Raises:
        DemoSettingsError: a number that is not positive, or an engine that there is not.
    """

    seed: int = 0
    steps: int = 300
    every: int = 50
    ranks: int = 2
    batch: int = 10
    block: int = 128
    hidden: int = 128
    layers: int = 4
    rate: float = 4e-3
    warmup: int = 20
    held_out: int = 16
    sample: int = 240
    timeout: float = 60.0
    engine: str = "module"

    def __attrs_post_init__(self) -> None:
        for name, value in attrs.asdict(self).items():
            if name not in ("seed", "warmup", "engine") and not value > 0:
                raise DemoSettingsError(f"{name} is {value!r}; it is a positive number")
        if self.seed < 0:
            raise DemoSettingsError(f"seed is {self.seed}; it is an integer from 0")
        if self.engine not in ENGINES:
            raise DemoSettingsError(f"engine is {self.engine!r}; it is {' or '.join(ENGINES)}")

    @property
    def update_steps(self) -> list[int]:
        """Steps after which the follower is updated: before the first, then every few, and last."""
        return sorted({0, *range(self.every, self.steps, self.every), self.steps})

    def model_config(self, vocab_size: int) -> ModelConfig:
        """Return the model's sizes: heads of 32, two query heads to one of keys and values."""
        heads = max(2, self.hidden // 32)
        return ModelConfig(
            vocab_size=vocab_size,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 11 // 4,
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
        )

    def rate_factor(self, step: int) -> float:
        """Return the share of `rate` at a step: a linear warm-up, then a cosine down to 5%."""
        progress = step / max(1, self.steps)
        cosine = 0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2
        return min(1.0, (step + 1) / max(1, self.warmup)) * cosine

    def to_json(self) -> str:
        return json.dumps(attrs.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        return cls(**json.loads(text))


def choose_engine(
    spec: DemoSpec,
    *,
    environ: Mapping[str, str] = os.environ,
    find: Callable[[str], Any] = importlib.util.find_spec,
) -> tuple[str, str]:
    """Say which engine follows, and the Python that runs it.

    `auto` is vLLM where this Python has it or another was given, else `module`. The Python of
    vLLM is the one that was given, else this one if it has vLLM, else the variable's.

    Args:
        spec: what was asked for.
        environ, find: where to look; others in tests.

    Raises:
        DemoSettingsError: an engine that there is not, no Python with vLLM, or none at its path.
    """
    if spec.engine not in ("auto", *ENGINES):
        raise DemoSettingsError(f"engine is {spec.engine!r}; it is auto, {' or '.join(ENGINES)}")
    here = all(find(name) is not None for name in ("vllm", "parallelkit_vllm"))
    if spec.engine == "module" or not (here or spec.engine_python or spec.engine == "vllm"):
        return "module", sys.executable
    if not spec.engine_python and here:
        return "vllm", sys.executable
    named = spec.engine_python or environ.get(PYTHON_VARIABLE, "")
    if not named:
        raise DemoSettingsError(
            "engine is 'vllm', and this Python has no vLLM with parallelkit-vllm; name one that "
            f"has, by --engine-python or {PYTHON_VARIABLE}, or run `make demo-vllm`"
        )
    python = shutil.which(named)
    if python is None:
        raise DemoSettingsError(f"the engine's Python is {named!r}: no program is there")
    return "vllm", os.path.abspath(python)
