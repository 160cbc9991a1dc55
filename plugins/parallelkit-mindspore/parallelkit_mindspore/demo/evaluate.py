"""What both ends compute at a version: logits to be compared bit for bit, and texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import ops

from parallelkit.demo.config import GREEDY, PROMPT, TEMPERATURE, Settings
from parallelkit.demo.events import Likeliest
from parallelkit.demo.text import Vocabulary

#: A model, compiled or not: token ids `(batch, time)` to logits.
Forward = Callable[[Any], Any]


def width(settings: Settings) -> int:
    """The longest sequence: a window, or the prompt and what is compared after it."""
    return max(settings.block, len(PROMPT) + GREEDY)


def cross_entropy(logits: Any, targets: Any) -> Any:
    """The mean over all characters, in nats."""
    return ops.cross_entropy(logits.reshape((-1, logits.shape[-1])), targets.reshape((-1,)))


def evaluate(forward: Forward, batch: tuple[Any, Any]) -> tuple[bytes, float]:
    """Return the logits of a batch as bytes (float32, row-major), and the mean loss in nats."""
    inputs, targets = batch
    logits = forward(inputs)
    return logits.asnumpy().tobytes(), float(cross_entropy(logits, targets))


def generate(
    forward: Forward, vocabulary: Vocabulary, *, length: int, width: int, seed: int
) -> str:
    """Continue `PROMPT` by `length` characters, sampled by a generator of its own."""
    generator = np.random.default_rng(seed)
    tokens = vocabulary.encode(PROMPT)
    for _ in range(length):
        scores = _last(forward, tokens[-width:], width).astype(np.float64) / TEMPERATURE
        shares = np.exp(scores - scores.max())
        tokens.append(int(generator.choice(len(shares), p=shares / shares.sum())))
    return vocabulary.decode(tokens)


def likeliest(forward: Forward, vocabulary: Vocabulary, *, width: int) -> Likeliest:
    """Continue `PROMPT` by its likeliest tokens."""
    tokens = vocabulary.encode(PROMPT)
    margins: list[float] = []
    logprobs: list[float] = []
    for _ in range(GREEDY):
        scores = _last(forward, tokens, width).astype(np.float64)
        second, first = np.sort(scores)[-2:]
        margins.append(float(first - second))
        logprobs.append(-float(np.log(np.exp(scores - first).sum())))
        tokens.append(int(scores.argmax()))
    return Likeliest(tokens[-GREEDY:], logprobs, margins)


def _last(forward: Forward, tokens: list[int], width: int) -> np.ndarray[Any, Any]:
    """Logits after the last token. One shape for all lengths, so that one graph does for all:
    what follows a token has no part in its logits."""
    padded = np.zeros((1, width), np.int32)
    padded[0, : len(tokens)] = tokens
    logits = forward(ms.Tensor(padded)).asnumpy()
    last: np.ndarray[Any, Any] = logits[0, len(tokens) - 1]
    return last
