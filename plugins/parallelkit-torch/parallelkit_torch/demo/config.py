"""Settings of one demo run, and how its processes get them. Imports no torch."""

from __future__ import annotations

import json
import math
from typing import Final

import attrs

from parallelkit.decoder import ModelConfig
from parallelkit.errors import ParallelKitError

#: What the follower continues at each version.
PROMPT: Final = 'The "for" statement '


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

    Raises:
        DemoSettingsError: a number that is not positive.
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

    def __attrs_post_init__(self) -> None:
        for name, value in attrs.asdict(self).items():
            if name not in ("seed", "warmup") and not value > 0:
                raise DemoSettingsError(f"{name} is {value!r}; it is a positive number")
        if self.seed < 0:
            raise DemoSettingsError(f"seed is {self.seed}; it is an integer from 0")

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
