"""What is published: names, dtypes, shapes, aliases, layouts. No data, no framework."""

from __future__ import annotations

import difflib
import hashlib
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, Final, NamedTuple

import attrs

from parallelkit.errors import ManifestError, ManifestMismatchError
from parallelkit.weights.layout import Mesh, ShardLayout, as_tuple

#: Allowed dtypes and their size in bytes. Names from the wire are looked up here, nowhere else.
DTYPE_BYTES: Final[Mapping[str, int]] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
#: The same dtypes, by what a safetensors header calls them.
SAFETENSORS_DTYPES: Final[Mapping[str, str]] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}

MAX_NAME_BYTES: Final = 512
MAX_DIMS: Final = 16
MAX_TENSOR_BYTES: Final = 1 << 46
#: Pairs of names compared to suggest the nearest; a pair takes about a tenth of a millisecond.
_HINT_PAIRS: Final = 5_000


def _is_name(value: object) -> bool:
    # A lone surrogate has no UTF-8 form and is dropped here; the name could not be sent.
    encoded = value.encode(errors="ignore") if isinstance(value, str) else b""
    return 0 < len(encoded) <= MAX_NAME_BYTES and encoded.decode() == value


class Kind(NamedTuple):
    """What decides where a tensor's bytes lie; all tensors of one kind are treated alike."""

    layout: ShardLayout | None
    shape: tuple[int, ...]
    dtype: str
    fused: bool

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPE_BYTES[self.dtype]


@attrs.frozen(kw_only=True)
class TensorSpec:
    """One name of one tensor.

    Attributes:
        name: unique in its manifest, as the model itself names it (no wrapper prefixes).
        dtype: a key of `DTYPE_BYTES`.
        shape: global shape in elements; `()` for a scalar, zeros allowed.
        alias_of: name of an earlier entry that is the same tensor (a tied head), or None.
        layout: how it is spread over the publisher's ranks; None: whole on every rank.
        fusion: a group whose tensors arrive together, since a target fuses them; None: alone.
    """

    name: str = attrs.field()
    dtype: str = attrs.field()
    shape: tuple[int, ...] = attrs.field(converter=as_tuple)
    alias_of: str | None = attrs.field(default=None)
    layout: ShardLayout | None = attrs.field(default=None)
    fusion: str | None = attrs.field(default=None)

    @name.validator
    def _named(self, attribute: object, value: str) -> None:
        if not _is_name(value):
            raise ManifestError(
                f"tensor name {value!r:.80} is not a non-empty string of at most "
                f"{MAX_NAME_BYTES} bytes"
            )

    @alias_of.validator
    @layout.validator
    def _typed(self, attribute: attrs.Attribute[Any], value: object) -> None:
        kind = str if attribute.name == "alias_of" else ShardLayout
        if value is not None and not isinstance(value, kind):
            raise ManifestError(
                f"tensor {self.name!r} has {attribute.name} {value!r:.80}; it is a "
                f"{kind.__name__}, or None"
            )

    @fusion.validator
    def _grouped(self, attribute: object, value: str | None) -> None:
        if value is not None and not _is_name(value):
            raise ManifestError(
                f"tensor {self.name!r} has fusion group {value!r:.80}, which is not a non-empty "
                f"string of at most {MAX_NAME_BYTES} bytes"
            )

    @dtype.validator
    def _known(self, attribute: object, value: str) -> None:
        if not isinstance(value, str) or value not in DTYPE_BYTES:
            raise ManifestError(
                f"tensor {self.name!r} has dtype {value!r:.80}; allowed are "
                f"{', '.join(DTYPE_BYTES)}"
            )

    @shape.validator
    def _sized(self, attribute: object, value: tuple[int, ...]) -> None:
        good = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value)
        if not good or len(value) > MAX_DIMS:
            raise ManifestError(
                f"tensor {self.name!r} has shape {value!r:.200}; a shape is at most {MAX_DIMS} "
                "non-negative integers"
            )
        if self.nbytes > MAX_TENSOR_BYTES:
            raise ManifestError(
                f"tensor {self.name!r} has {self.nbytes} bytes; the limit is {MAX_TENSOR_BYTES}"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, row-major without padding."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def describe(self) -> str:
        """`bfloat16[1024, 896]`, for messages."""
        return f"{self.dtype}{list(self.shape)}"


@attrs.frozen(slots=False)
class Manifest:
    """An ordered, validated list of tensors.

    Attributes:
        tensors: every name, aliases included, in the order of the model.
        mesh: the publisher's ranks, which layouts refer to; None where there are no layouts.
    """

    tensors: tuple[TensorSpec, ...] = attrs.field(converter=as_tuple)
    mesh: Mesh | None = attrs.field(default=None)

    @tensors.validator
    def _consistent(self, attribute: object, value: tuple[TensorSpec, ...]) -> None:
        seen: dict[str, TensorSpec] = {}
        for tensor in value:
            if not isinstance(tensor, TensorSpec):
                raise ManifestError(f"{tensor!r:.80} stands in a manifest; it has TensorSpecs only")
            if tensor.name in seen:
                raise ManifestError(f"tensor name {tensor.name!r} occurs twice in the manifest")
            seen[tensor.name] = tensor
            if tensor.alias_of is None:
                continue
            target = seen.get(tensor.alias_of)
            if target is None or target.alias_of is not None:
                raise ManifestError(
                    f"tensor {tensor.name!r} is an alias of {tensor.alias_of!r}, which is not an "
                    "earlier tensor of its own"
                )
            if (target.dtype, target.shape) != (tensor.dtype, tensor.shape):
                raise ManifestError(
                    f"tensor {tensor.name!r} ({tensor.describe()}) is an alias of "
                    f"{target.name!r} ({target.describe()}): dtype and shape must be equal"
                )
            if target.layout != tensor.layout:
                raise ManifestError(
                    f"tensor {tensor.name!r} is an alias of {target.name!r}, and their layouts "
                    f"differ ({tensor.layout}; {target.layout})"
                )
            if target.fusion != tensor.fusion:
                raise ManifestError(
                    f"tensor {tensor.name!r} is an alias of {target.name!r}, and their fusion "
                    f"groups differ ({tensor.fusion!r}; {target.fusion!r})"
                )

    @mesh.validator
    def _laid_out(self, attribute: object, value: Mesh | None) -> None:
        if value is not None and not isinstance(value, Mesh):
            raise ManifestError(f"the mesh is {value!r:.80}; it is a Mesh, or None")
        checked: set[tuple[ShardLayout, int]] = set()
        for tensor in self.tensors:
            layout, dims = tensor.layout, len(tensor.shape)
            if layout is None or (layout, dims) in checked:
                continue
            if value is None:
                raise ManifestError(
                    f"tensor {tensor.name!r} has a layout ({layout}) and the manifest no mesh"
                )
            try:
                layout.check(value, tensor.shape)
            except ManifestError as error:
                raise ManifestError(f"tensor {tensor.name!r}: {error}") from None
            checked.add((layout, dims))

    @cached_property
    def unique(self) -> tuple[TensorSpec, ...]:
        """The tensors that own bytes; an alias owns none. Indexes elsewhere count these."""
        return tuple(t for t in self.tensors if t.alias_of is None)

    @cached_property
    def nbytes(self) -> int:
        """Bytes to move: each alias group once."""
        return sum(t.nbytes for t in self.unique)

    @cached_property
    def kinds(self) -> tuple[tuple[Kind, ...], array[int]]:
        """The kinds of unique tensors by first use, and for each unique tensor which it is."""
        numbers: dict[Kind, int] = {}
        # By identity first: to hash a layout by value for each tensor takes most of the time.
        seen: dict[tuple[int, tuple[int, ...], str, bool], int] = {}
        which = array("i")
        for t in self.unique:
            key = (id(t.layout), t.shape, t.dtype, t.fusion is not None)
            number = seen.get(key)
            if number is None:
                kind = Kind(t.layout, *key[1:])
                number = seen[key] = numbers.setdefault(kind, len(numbers))
            which.append(number)
        return tuple(numbers), which

    def digest(self) -> bytes:
        """A 16-byte fingerprint of all fields of all tensors, their order, and the mesh."""
        return self._digest

    @cached_property
    def _digest(self) -> bytes:
        kinds, which = self.kinds
        mesh = None if self.mesh is None else (self.mesh.axes, self.mesh.degrees)
        plain = [
            (None if k.layout is None else (k.layout.shards, k.layout.at), k.shape, k.dtype)
            for k in kinds
        ]
        names = [(t.name, t.alias_of, t.fusion) for t in self.tensors]
        h = hashlib.blake2b(repr((mesh, plain, which.tolist())).encode(), digest_size=16)
        h.update(repr(names).encode())
        return h.digest()


def differences(published: Manifest, needed: Manifest, *, partial: bool = False) -> list[str]:
    """List how `published` differs from what a target needs; empty when it is exactly that.

    Neither order nor layouts matter. With `partial` the target may lack tensors that are published,
    as a stage of a pipeline does. A target that ties two names needs a publisher that ties them
    too: one that publishes them apart may come to hold different values, and the reverse would lose
    one.
    """
    have = {t.name: t for t in published.tensors}
    need = {t.name: t for t in needed.tensors}
    missing = [t for name, t in need.items() if name not in have]
    unknown = [] if partial else [t for name, t in have.items() if name not in need]
    lines = [
        f"missing: the target needs {t.name!r} ({t.describe()}), the publisher does not have it"
        + hint
        for t, hint in zip(missing, _hints(missing, have), strict=True)
    ]
    lines += [
        f"unknown: the publisher sends {t.name!r} ({t.describe()}), the target has no such tensor"
        + hint
        for t, hint in zip(unknown, _hints(unknown, need), strict=True)
    ]
    both = [name for name in need if name in have]
    for name in both:
        if have[name].dtype != need[name].dtype:
            lines.append(
                f"dtype of {name!r}: the publisher has {have[name].dtype}, "
                f"the target {need[name].dtype}"
            )
        if have[name].shape != need[name].shape:
            lines.append(
                f"shape of {name!r}: the publisher has {list(have[name].shape)}, "
                f"the target {list(need[name].shape)}"
            )
    if _groups(published, both) != _groups(needed, both):
        lines += _alias_lines(published, needed, both)
    return lines


def check_manifest(value: object, of: object) -> None:
    """Raise `ManifestError` unless `value`, said by a source or sink, is a manifest."""
    if not isinstance(value, Manifest):
        raise ManifestError(
            f"a {type(of).__qualname__} gave {value!r:.80} in place of a Manifest of its tensors"
        )


def check_exact(
    published: Manifest, needed: Manifest, *, partial: bool = False, limit: int = 20
) -> None:
    """Raise `ManifestMismatchError` with every difference, or return; see `differences`."""
    lines = differences(published, needed, partial=partial)
    if not lines:
        return
    shown = lines[:limit] + ([f"... and {len(lines) - limit} more"] if len(lines) > limit else [])
    raise ManifestMismatchError(
        f"the published manifest is not what the target needs, {len(lines)} difference(s):\n  "
        + "\n  ".join(shown)
        + "\nNothing was touched. Publish and subscribe the same model.",
        differences=lines,
    )


def _hints(absent: list[TensorSpec], names: Mapping[str, TensorSpec]) -> Iterator[str]:
    """For each absent name, the nearest that is there; only for the first where there are many."""
    left = _HINT_PAIRS
    for t in absent:
        left -= len(names)
        close = difflib.get_close_matches(t.name, names, n=1, cutoff=0.6) if left >= 0 else []
        yield f"; did you mean {close[0]!r}?" if close else ""


def _groups(manifest: Manifest, names: Iterable[str]) -> set[frozenset[str]]:
    wanted = set(names)
    groups: dict[str, set[str]] = {}
    for t in manifest.tensors:
        if t.name in wanted:
            groups.setdefault(t.alias_of or t.name, set()).add(t.name)
    return {frozenset(g) for g in groups.values()}


def _alias_lines(published: Manifest, needed: Manifest, names: list[str]) -> list[str]:
    ours, theirs = _groups(published, names), _groups(needed, names)
    lines = [
        f"aliases: the publisher ties {sorted(g)}, the target does not"
        for g in sorted(ours - theirs, key=sorted)
        if len(g) > 1
    ]
    return lines + [
        f"aliases: the target ties {sorted(g)}, the publisher does not"
        for g in sorted(theirs - ours, key=sorted)
        if len(g) > 1
    ]
