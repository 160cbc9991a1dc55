"""What a model holds, as a manifest, and whether it holds the same later; no framework.

A plugin lists every name of its model as a `Found`; names whose `identity` is equal are one tensor.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final

import attrs

from parallelkit.errors import ManifestError
from parallelkit.weights.manifest import Manifest, TensorSpec

KEEP: Final = (
    "a model keeps its names, shapes, dtypes and ties while it is published or subscribed; "
    "publish or subscribe it again"
)
#: So many differences are listed in one message.
_SHOWN: Final = 5


@attrs.frozen
class Found:
    """One name of one tensor, as it is now.

    Attributes:
        name: plain, without wrapper prefixes.
        dtype: by the manifest's name.
        shape: in elements.
        identity: equal for two names exactly when they are the same elements in the same order.
        problem: why it has no bytes that can be moved; None where it has.
    """

    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    identity: Hashable = None
    problem: str | None = None


def describe(found: Sequence[Found]) -> tuple[Manifest, list[list[int]]]:
    """Make the manifest, and for each unique tensor the places in `found` that are its names.

    Raises:
        ManifestError: a tensor has a problem, or a name is there twice.
    """
    specs: list[TensorSpec] = []
    groups: list[list[int]] = []
    known: dict[Hashable, int] = {}
    for place, item in enumerate(found):
        if item.problem:
            raise ManifestError(f"tensor {item.name!r} {item.problem}")
        index = known.setdefault(item.identity, len(groups))
        alias_of = None
        if index == len(groups):
            groups.append([])
        else:
            alias_of = found[groups[index][0]].name
        groups[index].append(place)
        specs.append(
            TensorSpec(name=item.name, dtype=item.dtype, shape=item.shape, alias_of=alias_of)
        )
    return Manifest(specs), groups


def changed(spec: TensorSpec, dtype: str, shape: Sequence[int]) -> str | None:
    """Say how a tensor differs from its entry in the manifest; None where it does not."""
    if dtype == spec.dtype and tuple(shape) == spec.shape:
        return None
    return f"was {spec.describe()} and is now {dtype}{list(shape)}"


def match(manifest: Manifest, found: Sequence[Found]) -> list[list[int]]:
    """Find each unique tensor of `manifest` again; returns the places in `found` of its names.

    Raises:
        ManifestError: names, dtypes, shapes or ties are others.
    """
    places = {item.name: place for place, item in enumerate(found)}
    groups: list[list[int]] = []
    positions: dict[str, int] = {}
    identities: dict[str, Hashable] = {}
    owners: dict[Hashable, str] = {}
    problems: list[str] = []
    for spec in manifest.tensors:
        place = places.pop(spec.name, None)
        if spec.alias_of is None:
            positions[spec.name] = len(groups)
            groups.append([])
        if place is None:
            problems.append(f"tensor {spec.name!r} is no longer there")
            continue
        item = found[place]
        problem = item.problem or changed(spec, item.dtype, item.shape)
        if problem:
            problems.append(f"tensor {spec.name!r} {problem}")
            continue
        identities[spec.name] = item.identity
        owner = owners.setdefault(item.identity, spec.name)
        groups[positions[spec.alias_of or spec.name]].append(place)
        if spec.alias_of is None and owner != spec.name:
            problems.append(f"tensor {spec.name!r} is now tied to {owner!r}")
        elif spec.alias_of in identities and identities[spec.alias_of] != item.identity:
            problems.append(f"tensor {spec.name!r} is no longer tied to {spec.alias_of!r}")
    problems += [f"tensor {name!r} is new" for name in places]
    if problems:
        more = f" (and {len(problems) - _SHOWN} more)" if len(problems) > _SHOWN else ""
        raise ManifestError(f"{'; '.join(problems[:_SHOWN])}{more}; {KEEP}")
    return groups
