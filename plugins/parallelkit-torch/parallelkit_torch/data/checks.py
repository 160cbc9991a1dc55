"""The data set of a loader, checked before anything else happens."""

from __future__ import annotations

from collections.abc import Mapping, Sized

from torch.utils.data import IterableDataset

from parallelkit.errors import UnsupportedFeatureError


def check_dataset(dataset: object, *, shuffle: bool, ordered: bool) -> None:
    """Check that a data set can be sharded; `ordered` if a sampler says what its items are.

    Raises:
        UnsupportedFeatureError: it cannot.
    """
    name = type(dataset).__qualname__
    if isinstance(dataset, IterableDataset):
        if shuffle:
            raise UnsupportedFeatureError(
                f"shuffle=True with {name}: an IterableDataset gives its items in its own order. "
                "Shuffle inside it (its random generators are seeded alike on every rank)"
            )
        return
    if not hasattr(dataset, "__getitem__") or not (ordered or isinstance(dataset, Sized)):
        raise UnsupportedFeatureError(
            f"a {name} cannot be sharded; a data set has __len__ and __getitem__, or is an "
            "IterableDataset"
        )
    if isinstance(dataset, Mapping) and not ordered:
        raise UnsupportedFeatureError(f"a {name} is indexed by keys; give a sequence of its items")
