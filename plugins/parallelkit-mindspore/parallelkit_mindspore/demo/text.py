"""The demo's text as arrays."""

from __future__ import annotations

from typing import Any

import attrs
import mindspore as ms
import numpy as np

from parallelkit.demo.text import Vocabulary, load_text, split, spread, vocabulary_of, window_count

Array = np.ndarray[Any, Any]


@attrs.frozen(kw_only=True, eq=False)
class Corpus:
    """Text split for training and validation, with its vocabulary.

    Attributes:
        vocabulary: all characters that occur, and no other.
        training, validation: token ids, int32; validation is the last part of the text.
    """

    vocabulary: Vocabulary
    training: Array
    validation: Array


def load_corpus() -> Corpus:
    """Read, encode and split the text. A pure function of the Python version."""
    text = load_text()
    vocabulary = vocabulary_of(text)
    tokens = np.array(vocabulary.encode(text), np.int32)
    cut = split(len(tokens))
    return Corpus(vocabulary=vocabulary, training=tokens[:cut], validation=tokens[cut:])


def windows(tokens: Array, block: int, stride: int) -> tuple[Array, Array]:
    """Return inputs and targets, one character ahead, each `(windows, block)`."""
    starts = np.arange(window_count(len(tokens), block, stride)) * stride
    places = starts[:, None] + np.arange(block)
    return tokens[places], tokens[places + 1]


def dataset(tokens: Array, block: int, stride: int) -> Any:
    """Return MindSpore's data set of windows."""
    columns = windows(tokens, block, stride)
    return ms.dataset.NumpySlicesDataset(columns, ["inputs", "targets"], shuffle=False)


def held_out(corpus: Corpus, block: int, rows: int) -> tuple[Any, Any]:
    """Return a fixed batch of the validation text, `rows` windows spread evenly over it."""
    inputs, targets = windows(corpus.validation, block, block)
    places = spread(len(inputs), rows)
    return ms.Tensor(inputs[places]), ms.Tensor(targets[places])
