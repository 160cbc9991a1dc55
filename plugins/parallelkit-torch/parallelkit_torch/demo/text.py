"""The demo's text as tensors."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from parallelkit.demo.text import Vocabulary, load_text, split, spread, vocabulary_of, window_count


class Windows:
    """Windows of a token sequence as a map-style dataset.

    Item `i` is a pair `(inputs, targets)`, each `(block,)`, targets one character ahead. Windows
    begin every `stride` characters.
    """

    def __init__(self, tokens: Tensor, block: int, stride: int) -> None:
        self._tokens = tokens
        self._block = block
        self._stride = stride

    def __len__(self) -> int:
        return window_count(len(self._tokens), self._block, self._stride)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self._stride
        window = self._tokens[start : start + self._block + 1]
        return window[:-1], window[1:]


@attrs.frozen(kw_only=True, eq=False)
class Corpus:
    """Text split for training and validation, with its vocabulary.

    Attributes:
        vocabulary: all characters that occur, and no other.
        training, validation: token ids, int64; validation is the last part of the text.
    """

    vocabulary: Vocabulary
    training: Tensor
    validation: Tensor


def load_corpus() -> Corpus:
    """Read, encode and split the text. A pure function of the Python version."""
    text = load_text()
    vocabulary = vocabulary_of(text)
    tokens = torch.tensor(vocabulary.encode(text), dtype=torch.int64)
    cut = split(len(tokens))
    return Corpus(vocabulary=vocabulary, training=tokens[:cut], validation=tokens[cut:])


def held_out(corpus: Corpus, block: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return a fixed batch of the validation text, `rows` windows spread evenly over it."""
    windows = Windows(corpus.validation, block, block)
    pairs = [windows[place] for place in spread(len(windows), rows)]
    return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])
