"""The demo's text, which every Python carries: the help topics of `pydoc`, by character."""

from __future__ import annotations

from importlib import import_module
from typing import Final

import attrs
import torch
from torch import Tensor

#: Typographic characters are too rare to be learned; written as people type them.
_PLAIN: Final = str.maketrans(
    {"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "…": "...", "°": "", "ß": "ss"}
)
_VALIDATION_SHARE: Final = 0.05


@attrs.frozen
class Vocabulary:
    """Characters in a fixed order; a token id is a place in it."""

    characters: str

    def __len__(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> Tensor:
        """Return token ids, int64, shape `(len(text),)`."""
        ids = {character: place for place, character in enumerate(self.characters)}
        return torch.tensor([ids[character] for character in text], dtype=torch.int64)

    def decode(self, tokens: Tensor) -> str:
        """Return the text of token ids of any shape, row by row."""
        return "".join(self.characters[place] for place in tokens.flatten().tolist())


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
        return max(0, (len(self._tokens) - self._block - 1) // self._stride + 1)

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
        training, validation: token ids; validation is the last part of the text. Topics share
            passages, so its loss shows progress and is no measure of generalisation.
    """

    vocabulary: Vocabulary
    training: Tensor
    validation: Tensor


def load_text() -> str:
    """Return the help topics in alphabetical order, about 470,000 characters."""
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    return "\n\n".join(topics[name].strip() for name in sorted(topics)).translate(_PLAIN)


def load_corpus() -> Corpus:
    """Read, encode and split the text. A pure function of the Python version."""
    text = load_text()
    vocabulary = Vocabulary("".join(sorted(set(text))))
    tokens = vocabulary.encode(text)
    cut = int(len(tokens) * (1 - _VALIDATION_SHARE))
    return Corpus(vocabulary=vocabulary, training=tokens[:cut], validation=tokens[cut:])


def held_out(corpus: Corpus, block: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return a fixed batch of the validation text, `rows` windows spread evenly over it."""
    windows = Windows(corpus.validation, block, block)
    places = [row * len(windows) // rows for row in range(rows)]
    pairs = [windows[place] for place in places]
    return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])
