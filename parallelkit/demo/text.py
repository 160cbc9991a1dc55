"""The demo's text, which every Python carries: the help topics of `pydoc`, by character."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Final

import attrs

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

    def encode(self, text: str) -> list[int]:
        """Return a token id for each character."""
        ids = {character: place for place, character in enumerate(self.characters)}
        return [ids[character] for character in text]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of token ids; an id that no character has is shown as U+FFFD.

        An engine may pad its table of tokens; it never should choose one of those.
        """
        held = self.characters
        return "".join(
            held[i] if 0 <= i < len(held) else "\N{REPLACEMENT CHARACTER}" for i in tokens
        )


def load_text() -> str:
    """Return the help topics in alphabetical order, about 470,000 characters."""
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    return "\n\n".join(topics[name].strip() for name in sorted(topics)).translate(_PLAIN)


def vocabulary_of(text: str) -> Vocabulary:
    """Return all characters that occur, and no other."""
    return Vocabulary("".join(sorted(set(text))))


def split(length: int) -> int:
    """Return how many of so many tokens are for training: all but the last part of the text.

    Topics share passages, so the validation loss shows progress and is no measure of
    generalisation.
    """
    return int(length * (1 - _VALIDATION_SHARE))


def window_count(length: int, block: int, stride: int) -> int:
    """How many windows of `block` tokens, and one more for the targets, a text has.

    Example:
        >>> [window_count(length, 5, 3) for length in (5, 6, 8, 9)]
        [0, 1, 1, 2]
    """
    return max(0, (length - block - 1) // stride + 1)


def spread(windows: int, rows: int) -> list[int]:
    """Return the places of `rows` windows spread evenly over all."""
    return [row * windows // rows for row in range(rows)]
