"""What both ends compute at a version, to be compared bit for bit."""

from __future__ import annotations

import hashlib

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from parallelkit_torch.demo.config import PROMPT
from parallelkit_torch.demo.model import CausalLM
from parallelkit_torch.demo.text import Vocabulary

_TEMPERATURE = 0.5


@torch.no_grad()
def evaluate(model: CausalLM, batch: tuple[Tensor, Tensor]) -> tuple[bytes, float]:
    """Return the logits of a batch as bytes (float32, row-major), and the mean loss in nats."""
    inputs, targets = batch
    logits = model(inputs)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return logits.contiguous().numpy().tobytes(), float(loss)


def digest(logits: bytes) -> str:
    """Return the SHA-256 of logits in hexadecimal."""
    return hashlib.sha256(logits).hexdigest()


@torch.no_grad()
def generate(model: CausalLM, vocabulary: Vocabulary, *, length: int, block: int, seed: int) -> str:
    """Continue `PROMPT` by `length` characters, sampled by a generator of its own."""
    generator = torch.Generator().manual_seed(seed)
    tokens = vocabulary.encode(PROMPT)[None]
    for _ in range(length):
        logits = model(tokens[:, -block:])[0, -1] / _TEMPERATURE
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        tokens = torch.cat((tokens, drawn[None]), dim=1)
    return vocabulary.decode(tokens)
