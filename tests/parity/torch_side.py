"""What the parity run needs of torch beyond its adapter: model, loss and data set."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from parallelkit_torch.demo.model import CausalLM
from parallelkit_torch.testing import adapter
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import TensorDataset

from parallelkit.decoder import ModelConfig

__all__ = ["adapter", "cross_entropy", "dataset", "model"]


def model(config: ModelConfig, dtype: str) -> Any:
    """The plugin's demo model."""
    return CausalLM(config).to(getattr(torch, dtype))


def cross_entropy(logits: Any, targets: Any) -> Any:
    """The mean over all characters."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def dataset(windows: np.ndarray) -> Any:
    """Inputs and targets, one character apart."""
    numbers = torch.from_numpy(windows).long()
    return TensorDataset(numbers[:, :-1], numbers[:, 1:])
