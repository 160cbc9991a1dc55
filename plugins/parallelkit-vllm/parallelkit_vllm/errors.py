"""Errors about vLLM's engine, under the core's classes."""

from __future__ import annotations

from collections.abc import Sequence

from parallelkit.errors import ParallelKitError, WeightTransferError


class EngineVersionError(ParallelKitError):
    """The installed vLLM is too old, or lacks a piece that is needed; the message has the range."""


class EngineCheckpointError(WeightTransferError):
    """The checkpoint that an engine was made from cannot be read, or is damaged."""


class EngineTargetError(WeightTransferError):
    """This engine cannot follow in this way; the message says which way is open."""


class EngineRequestError(WeightTransferError):
    """An engine was asked for something with other fields or values than are allowed."""


class ReloadError(WeightTransferError):
    """Weights could not be put in place by the engine's loader; its layers are of no version.

    Attributes:
        layers: names of the layers that are concerned, as far as known.
    """

    def __init__(self, message: str, *, layers: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.layers = tuple(layers)


class WorkerError(WeightTransferError):
    """A call failed on some of an engine's workers; the message has each one's error.

    Attributes:
        ranks: those workers.
    """

    def __init__(self, message: str, *, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
