"""Text that every Python carries, by character: the help topics of `pydoc`."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text; item i is (inputs, targets), each [length], targets one character ahead.

    Args:
        tokens: int64 [n].
        length: characters in a window.
        stride: characters from the start of one to the start of the next.
    """

    def __init__(self, tokens: Tensor, length: int, stride: int) -> None:
        self._tokens, self._length, self._stride = tokens, length, stride

    def __len__(self) -> int:
        return max(0, (len(self._tokens) - self._length - 1) // self._stride + 1)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self._stride
        window = self._tokens[start : start + self._length + 1]
        return window[:-1], window[1:]


def load_text(share: float = 0.95) -> tuple[int, Tensor, Tensor]:
    """Return the number of different characters, and tokens to train on and to keep aside.

    About 470,000 characters, int64. Which they are depends on the version of Python alone.
    """
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    text = "\n\n".join(topics[name].strip() for name in sorted(topics))
    places = {character: place for place, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([places[character] for character in text])
    cut = int(len(tokens) * share)
    return len(places), tokens[:cut], tokens[cut:]
