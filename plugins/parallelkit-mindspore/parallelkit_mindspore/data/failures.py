"""Errors of ours that went through MindSpore's pipeline, which makes text of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from parallelkit.errors import DataShardError, ParallelKitError, UnsupportedFeatureError

_KINDS: Final = {kind.__name__: kind for kind in (DataShardError, UnsupportedFeatureError)}
#: The last line of a traceback of one of ours, in this process or in a worker's.
_OURS: Final = re.compile(rf"^(?:parallelkit\.errors\.)?({'|'.join(_KINDS)}): (.+)$", re.MULTILINE)
_UNEVEN: Final = re.compile(r"Cannot batch tensors[^\n]*")


def told(running: Iterator[Any]) -> Iterator[Any]:
    """Give what a pipeline's iterator gives.

    Raises:
        DataShardError: items cannot be put into one batch, or have other columns.
        UnsupportedFeatureError: an item is not of numbers or text.
        RuntimeError: whatever else MindSpore says, such as an error of the user's data set.
    """
    while True:
        try:
            batch = next(running)
        except StopIteration:
            return
        except RuntimeError as error:
            ours = _read(str(error))
            if ours is None:
                raise
            raise ours from error
        yield batch
        del batch


def _read(text: str) -> ParallelKitError | None:
    found = _OURS.findall(text)
    if found:
        kind, said = found[-1]  # of a worker's error, MindSpore puts one more traceback before
        return _KINDS[kind](said)
    uneven = _UNEVEN.search(text)
    if uneven is not None:
        return DataShardError(
            f"items of a batch are not alike: {uneven[0]}. Make them alike, or take batch_size=1"
        )
    return None
