"""Whether what is published is what an engine needs, and how it is given to the engine's loader."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from parallelkit.errors import ManifestMismatchError
from parallelkit.weights.manifest import Manifest, TensorSpec

#: Parts of names that vLLM's loaders drop: a checkpoint may have them or not.
DROPPED: Final = (
    "rotary_emb.inv_freq",
    "rotary_pos_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
)
#: A loader casts these to the dtype that the engine computes in.
FLOATS: Final = frozenset({"float16", "bfloat16", "float32", "float64"})
#: So many differences are listed in the message; the error carries them all.
_SHOWN: Final = 20
#: Names for which the nearest is looked up, which takes time with many.
_HINTED: Final = 20


@attrs.frozen
class Needed:
    """What an engine needs, by checkpoint names.

    Attributes:
        tensors: dtype and shape of each name, as the checkpoint has them.
        source: where that was read, for messages.
        dtype: what the engine computes in; a float tensor may be published so, too.
        tied: whether the engine's head is its embedding.
    """

    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    source: str
    dtype: str
    tied: bool = False


@attrs.frozen
class Given:
    """One tensor as the loader gets it: all of a published one, or some of its rows.

    Attributes:
        name: the checkpoint's.
        index: of the unique published tensor.
        start, rows: which rows of a fused one; `rows` None for all.
    """

    name: str
    index: int
    start: int = 0
    rows: int | None = None


def compare(
    published: Manifest, needed: Needed, packed: Mapping[str, Sequence[str]]
) -> list[Given]:
    """Compare, and say what the loader is given, in the publisher's order.

    A head that the engine ties to its embedding may be absent, or an alias. Fused names, as the
    engine itself calls them, are cut into those of the checkpoint.

    Args:
        packed: the last part of a fused module's name, and of those that it is made of, in order.

    Raises:
        ManifestMismatchError: names, shapes or dtypes differ; every difference is listed.
    """
    return _Comparison(published, needed, packed).outcome()


def compare_one(
    tensor: TensorSpec, needed: Needed, packed: Mapping[str, Sequence[str]]
) -> list[str]:
    """Compare a tensor that comes by itself; returns the names of the checkpoint that it brings.

    Raises:
        ManifestMismatchError: the checkpoint has no such tensor, or another shape or dtype.
    """
    one = _Comparison(Manifest([tensor]), needed, packed)
    lines = one.lines_of(tensor)
    if lines:
        raise ManifestMismatchError(
            f"what is sent is not what the engine needs by {needed.source}:\n  "
            + "\n  ".join(lines)
            + "\nNothing was touched. Send the model that the engine was started with.",
            differences=lines,
        )
    return [given.name for given in one.given]


def required(needed: Needed) -> list[str]:
    """Names without which an engine is not whole: neither a tied head, nor what loaders drop."""
    return [n for n in needed.tensors if not is_derived(n, needed)]


def is_derived(name: str, needed: Needed) -> bool:
    """Whether an engine makes this tensor of others: a head that it ties, rotary tables."""
    return is_tied_head(name, needed) or any(part in name for part in DROPPED)


def is_tied_head(name: str, needed: Needed) -> bool:
    """Whether this is a head that the engine ties to its embedding."""
    return needed.tied and name.split(".")[-2:] == ["lm_head", "weight"]


class _Comparison:
    def __init__(
        self, published: Manifest, needed: Needed, packed: Mapping[str, Sequence[str]]
    ) -> None:
        self._published = published
        self._needed = needed
        self._packed = packed
        self._have = {t.name: t for t in published.tensors}
        self._index = {t.name: i for i, t in enumerate(published.unique)}
        self.given: list[Given] = []
        self._by: dict[str, str] = {}  # a needed name, and which published one brings it
        self._unknown: list[TensorSpec] = []
        self._lines: list[str] = []

    def outcome(self) -> list[Given]:
        for tensor in self._published.tensors:
            self._take(tensor)
        missing = [n for n in required(self._needed) if n not in self._by]
        lines = self._missing_lines(missing) + self._unknown_lines(missing) + self._lines
        if lines:
            more = len(lines) - _SHOWN
            shown = lines[:_SHOWN] + ([f"... and {more} more"] if more > 0 else [])
            raise ManifestMismatchError(
                f"what is published is not what the engine needs by {self._needed.source}, "
                f"{len(lines)} difference(s):\n  "
                + "\n  ".join(shown)
                + "\nNothing was touched. Publish the model that the engine was started with.",
                differences=lines,
            )
        return self.given

    def lines_of(self, tensor: TensorSpec) -> list[str]:
        """What is wrong with one tensor, whatever else is missing."""
        self._take(tensor)
        return self._unknown_lines([]) + self._lines

    def _take(self, tensor: TensorSpec) -> None:
        name = tensor.name
        if is_tied_head(name, self._needed):
            self._take_head(tensor)
        elif name in self._needed.tensors:
            self._take_named(tensor)
        elif any(part in name for part in DROPPED):
            return
        elif not self._take_fused(tensor):
            self._unknown.append(tensor)

    def _take_named(self, tensor: TensorSpec) -> None:
        name = tensor.name
        dtype, shape = self._needed.tensors[name]
        self._bring(name, name)
        if not self._fits(tensor.dtype, dtype):
            self._lines.append(self._dtype_line(name, tensor.dtype, dtype))
        if tensor.shape != shape:
            self._lines.append(
                f"shape of {name!r}: the publisher has {list(tensor.shape)}, the engine needs "
                f"{list(shape)}{_rows(tensor.shape, shape)}"
            )
        self.given.append(Given(name, self._owner(tensor)))

    def _take_head(self, tensor: TensorSpec) -> None:
        """The head of an engine that ties it: no bytes of its own may come for it."""
        group = tensor.alias_of or tensor.name
        others = [
            t.name
            for t in self._published.tensors
            if (t.alias_of or t.name) == group and t.name != tensor.name
        ]
        if any(name in self._needed.tensors for name in others):
            return  # the engine derives it from the embedding
        self._lines.append(
            f"aliases: the engine ties {tensor.name!r} to its embedding, the publisher sends it "
            "apart; tie them (tie_word_embeddings), or start an engine whose config does not"
        )

    def _take_fused(self, tensor: TensorSpec) -> bool:
        """Cut a tensor under a fused name of the engine's own; False: it is no such name."""
        path, _, kind = tensor.name.rpartition(".")
        prefix, _, module = path.rpartition(".")
        stem = f"{prefix}." if prefix else ""
        names = [f"{stem}{part}.{kind}" for part in self._packed.get(module, ())]
        if not names or not all(name in self._needed.tensors for name in names):
            return False
        needs = [self._needed.tensors[name] for name in names]
        rows = [shape[0] if shape else 1 for _, shape in needs]
        whole = (sum(rows), *needs[0][1][1:])
        for name in names:
            self._bring(name, tensor.name)
        wrong = [dtype for dtype, _ in needs if not self._fits(tensor.dtype, dtype)]
        if wrong:
            self._lines.append(self._dtype_line(tensor.name, tensor.dtype, wrong[0]))
        if tensor.shape != whole:
            self._lines.append(
                f"shape of {tensor.name!r}: the publisher has {list(tensor.shape)}, its parts "
                f"{', '.join(map(repr, names))} make {list(whole)}"
            )
        start = 0
        for name, count in zip(names, rows, strict=True):
            self.given.append(Given(name, self._owner(tensor), start, count))
            start += count
        return True

    def _bring(self, needed: str, published: str) -> None:
        before = self._by.setdefault(needed, published)
        if before != published:
            self._lines.append(
                f"twice: {needed!r} is published as {before!r} and in {published!r}; leave one out"
            )

    def _owner(self, tensor: TensorSpec) -> int:
        return self._index[tensor.alias_of or tensor.name]

    def _fits(self, published: str, checkpoint: str) -> bool:
        """The engine casts floats to its own dtype at loading, so that one is as good."""
        if published == checkpoint:
            return True
        return checkpoint in FLOATS and published in FLOATS and published == self._needed.dtype

    def _dtype_line(self, name: str, published: str, checkpoint: str) -> str:
        allowed = checkpoint
        if checkpoint in FLOATS and checkpoint != self._needed.dtype:
            allowed += f" or {self._needed.dtype}"
        return f"dtype of {name!r}: the publisher has {published}, the engine needs {allowed}"

    def _missing_lines(self, missing: list[str]) -> list[str]:
        unknown = [t.name for t in self._unknown]
        lines = []
        for i, name in enumerate(missing):
            dtype, shape = self._needed.tensors[name]
            lines.append(
                f"missing: the engine needs {name!r} ({dtype}{list(shape)}), the publisher does "
                f"not have it{_hint(name, unknown) if i < _HINTED else ''}"
            )
        return lines

    def _unknown_lines(self, missing: list[str]) -> list[str]:
        return [
            f"unknown: the publisher sends {t.name!r} ({t.describe()}), the engine's checkpoint "
            f"has no such tensor{_hint(t.name, missing or self._needed.tensors, i < _HINTED)}"
            for i, t in enumerate(self._unknown)
        ]


def _rows(have: tuple[int, ...], need: tuple[int, ...]) -> str:
    """How shapes that differ in the first dim alone do so, which vLLM would not notice."""
    if len(have) != len(need) or not need or have[1:] != need[1:]:
        return ""
    more = have[0] - need[0]
    return f" ({abs(more)} rows too {'many' if more > 0 else 'few'})"


def _hint(name: str, among: Sequence[str] | Mapping[str, object], wanted: bool = True) -> str:
    close = difflib.get_close_matches(name, among, n=1, cutoff=0.6) if wanted else []
    return f"; did you mean {close[0]!r}?" if close else ""
