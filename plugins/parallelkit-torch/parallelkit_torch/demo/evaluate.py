"""What both ends compute at a version, to be compared bit for bit."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from parallelkit.demo.config import GREEDY, PROMPT, TEMPERATURE
from parallelkit.demo.events import Likeliest
from parallelkit.demo.text import Vocabulary
from parallelkit_torch.demo.model import CausalLM


@torch.no_grad()
def evaluate(model: CausalLM, batch: tuple[Tensor, Tensor]) -> tuple[bytes, float]:
    """Return the logits of a batch as bytes (float32, row-major), and the mean loss in nats."""
    inputs, targets = batch
    logits = model(inputs)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return logits.contiguous().numpy().tobytes(), float(loss)


@torch.no_grad()
def generate(model: CausalLM, vocabulary: Vocabulary, *, length: int, block: int, seed: int) -> str:
    """Continue `PROMPT` by `length` characters, sampled by a generator of its own."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([vocabulary.encode(PROMPT)])
    for _ in range(length):
        logits = model(tokens[:, -block:])[0, -1] / TEMPERATURE
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        tokens = torch.cat((tokens, drawn[None]), dim=1)
    return vocabulary.decode(tokens[0].tolist())


@torch.no_grad()
def likeliest(model: CausalLM, vocabulary: Vocabulary) -> Likeliest:
    """Continue `PROMPT` by its likeliest tokens."""
    tokens = torch.tensor([vocabulary.encode(PROMPT)])
    margins: list[float] = []
    logprobs: list[float] = []
    for _ in range(GREEDY):
        scores = model(tokens)[0, -1].log_softmax(-1)
        best = scores.topk(2)
        logprobs.append(float(best.values[0]))
        margins.append(float(best.values[0] - best.values[1]))
        tokens = torch.cat((tokens, best.indices[None, :1]), dim=1)
    return Likeliest(tokens[0, -GREEDY:].tolist(), logprobs, margins)
