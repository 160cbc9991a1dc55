"""Items of Python data sets as rows of columns, which MindSpore's pipelines are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import attrs
import numpy as np

from parallelkit.errors import DataShardError, UnsupportedFeatureError

#: Kinds of NumPy's dtypes that pipelines take.
_KINDS: Final = "biufSU"


def names_of(item: Any) -> tuple[str, ...]:
    """Name the columns of an item: the keys of a mapping, else `column_0`, `column_1`, ..."""
    if isinstance(item, Mapping):
        return tuple(item)
    count = len(item) if isinstance(item, (tuple, list)) else 1
    return tuple(f"column_{number}" for number in range(count))


def row_of(item: Any, names: Sequence[str]) -> tuple[Any, ...]:
    """Return an item's columns as arrays: by key of a mapping, by place of a tuple or list.

    Anything else is one column. Tensors of any framework are taken by `__array__`.

    Raises:
        DataShardError: the item has other columns than `names`.
    """
    if isinstance(item, Mapping):
        if item.keys() != set(names):
            raise DataShardError(
                f"an item has the keys {', '.join(map(repr, item))}; the columns are "
                f"{', '.join(map(repr, names))}. Every item needs the same"
            )
        values = [item[name] for name in names]
    else:
        values = list(item) if isinstance(item, (tuple, list)) else [item]
    if len(values) != len(names):
        raise DataShardError(
            f"an item has {len(values)} columns; there are {len(names)} names: "
            f"{', '.join(map(repr, names))}"
        )
    return tuple(map(_array, values))


def pipeline_row(item: Any, names: Sequence[str]) -> tuple[Any, ...]:
    """As `row_of`, for a pipeline of MindSpore's, which has fewer dtypes than tensors.

    Raises:
        DataShardError: a column has another dtype; or as `row_of`.
    """
    row = row_of(item, names)
    for name, array in zip(names, row, strict=True):
        if array.dtype.kind not in _KINDS or array.dtype.name == "bfloat16":
            raise DataShardError(
                f"column {name!r} of an item is {array.dtype}; MindSpore's pipelines take bool, "
                "integers, float16, float32, float64 and text. Convert it, or give an iterable in "
                "place of a data set with __getitem__, which is read without a pipeline"
            )
    return row


def check_names(names: object) -> tuple[str, ...]:
    """Return `column_names` as a tuple.

    Raises:
        DataShardError: it is neither a name nor different names.
    """
    given = [names] if isinstance(names, str) else names
    if (
        not isinstance(given, Sequence)
        or not given
        or not all(isinstance(name, str) and name for name in given)
        or len(set(given)) != len(given)
    ):
        raise DataShardError(f"column_names is {names!r}; it is a name, or different names")
    return tuple(given)


@final
@attrs.frozen(eq=False)
class Rows:
    """A Python data set with `__len__` and `__getitem__`, as MindSpore wants its source to be.

    Attributes:
        dataset: the user's.
        names: of the columns.
    """

    dataset: Any
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, item: Any) -> tuple[Any, ...]:
        return pipeline_row(self.dataset[int(item)], self.names)


def _array(value: Any) -> Any:
    if hasattr(value, "asnumpy"):
        return value.asnumpy()
    try:
        array = np.asarray(value)
    except ValueError as error:  # of sequences of different lengths
        raise UnsupportedFeatureError(f"a column of an item is no array: {error}") from error
    if array.dtype == object:
        raise UnsupportedFeatureError(
            f"a column of an item is a {type(value).__qualname__}; columns are numbers, text or "
            "arrays of them"
        )
    return array
