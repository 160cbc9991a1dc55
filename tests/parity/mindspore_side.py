"""What the parity run needs of MindSpore beyond its adapter: model, loss and data set."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import ops
from parallelkit_mindspore.demo.model import CausalLM
from parallelkit_mindspore.testing import adapter

from parallelkit.decoder import ModelConfig

__all__ = ["adapter", "cross_entropy", "dataset", "model"]


def model(config: ModelConfig, dtype: str) -> Any:
    """The plugin's demo model."""
    return CausalLM(config, dtype=getattr(ms, dtype))


def cross_entropy(logits: Any, targets: Any) -> Any:
    """The mean over all characters."""
    return ops.cross_entropy(logits.reshape((-1, logits.shape[-1])), targets.reshape((-1,)))


def dataset(windows: np.ndarray) -> Any:
    """Inputs and targets, one character apart."""
    columns = (windows[:, :-1], windows[:, 1:])
    return ms.dataset.NumpySlicesDataset(columns, ["inputs", "targets"], shuffle=False)
