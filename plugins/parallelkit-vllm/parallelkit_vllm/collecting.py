"""Tensors that come one by one, until there is all that an engine needs. No framework is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import attrs

from parallelkit.errors import ManifestError, ManifestMismatchError
from parallelkit.weights.manifest import DTYPE_BYTES, TensorSpec
from parallelkit_vllm.compare import (
    FLOATS,
    Needed,
    compare_one,
    is_derived,
    is_tied_head,
    required,
)

#: Whether two tensors have the same bytes.
Same = Callable[[Any, Any], bool]


@attrs.frozen
class Admitted:
    """A tensor that may come.

    Attributes:
        spec: how it comes.
        dtype: what it is to be cast to before it is kept; mostly `spec.dtype`.
        use: `keep`; `head`, where the engine ties it and it must equal its embedding; `drop`, where
            the engine computes it itself.
        brings: names of the checkpoint.
    """

    spec: TensorSpec
    dtype: str
    use: Literal["keep", "head", "drop"] = "keep"
    brings: tuple[str, ...] = ()

    @property
    def kept(self) -> TensorSpec:
        """How it is kept."""
        return attrs.evolve(self.spec, dtype=self.dtype)


class Collection:
    """What has come of a model, and what is missing.

    The same name again replaces what came before, until the collection is drained.
    """

    def __init__(self, needed: Needed, packed: Mapping[str, Sequence[str]], same: Same) -> None:
        """
        Args:
            needed: what the engine's checkpoint has.
            packed: the last part of a fused module's name, and of those that it is made of.
            same: compares two tensors as they are kept.
        """
        self._needed = needed
        self._packed = packed
        self._same = same
        self._required = required(needed)
        self._held: dict[str, tuple[TensorSpec, Any]] = {}
        self._by: dict[str, str] = {}  # a required name, and which tensor that came brings it
        self._heads: dict[str, Any] = {}

    def __len__(self) -> int:
        """How many tensors are kept."""
        return len(self._held)

    def admit(self, name: object, dtype: object, shape: object) -> Admitted:
        """Say whether a tensor may come; nothing is kept.

        Args:
            dtype: its name, such as `bfloat16`, or torch's.
            shape: its dims.

        Raises:
            ManifestError: the name, dtype or shape are none that can be.
            ManifestMismatchError: the checkpoint has no such tensor, another shape or dtype, or it
                came already as a part of another tensor.
        """
        spec = _spec(name, dtype, shape)
        if is_tied_head(spec.name, self._needed):
            return Admitted(spec, self._cast(spec.dtype, self._needed.dtype), "head")
        if is_derived(spec.name, self._needed):
            return Admitted(spec, spec.dtype, "drop")
        target = self._needed.tensors.get(self._part_of(spec.name))
        kept = self._cast(spec.dtype, spec.dtype if target is None else target[0])
        brings = compare_one(attrs.evolve(spec, dtype=kept), self._needed, self._packed)
        for brought in brings:
            before = self._by.get(brought, spec.name)
            if before != spec.name:
                line = f"twice: {brought!r} came as {before!r}, and comes again in {spec.name!r}"
                raise ManifestMismatchError(
                    f"{line}; leave one out. Nothing was touched", differences=[line]
                )
        return Admitted(spec, kept, "keep", tuple(brings))

    def take(self, admitted: Admitted, tensor: Any) -> None:
        """Keep a tensor that was admitted, as it is to be kept: owned, and cast."""
        if admitted.use == "head":
            self._heads[admitted.spec.name] = tensor
        elif admitted.use == "keep":
            self._held[admitted.spec.name] = admitted.kept, tensor
            self._by.update(dict.fromkeys(admitted.brings, admitted.spec.name))

    @property
    def missing(self) -> list[str]:
        """Names of the checkpoint that nothing has brought yet."""
        return [name for name in self._required if name not in self._by]

    @property
    def whole(self) -> bool:
        """Whether nothing is missing."""
        return len(self._by) == len(self._required)

    @property
    def heads(self) -> list[str]:
        """Names of heads that came, to be compared with the embedding that they are tied to."""
        return list(self._heads)

    def drain(self) -> dict[str, tuple[TensorSpec, Any]]:
        """Give everything away and begin anew.

        Raises:
            ManifestMismatchError: a head came that is not the embedding, to which the engine ties
                it. What was collected is given up.
        """
        held, heads = self._held, self._heads
        self.clear()
        for name, head in heads.items():
            if not any(self._same(head, tensor) for _, tensor in held.values()):
                line = f"aliases: the engine ties {name!r} to its embedding, which differs from it"
                raise ManifestMismatchError(
                    f"{line}; nothing was touched, and what came is given up. Tie them "
                    "(tie_word_embeddings), or start an engine whose config does not",
                    differences=[line],
                )
        return held

    def clear(self) -> None:
        """Forget everything that came."""
        self._held, self._by, self._heads = {}, {}, {}

    def _part_of(self, name: str) -> str:
        """The name itself, or the first part of it where it is a fused one."""
        path, _, kind = name.rpartition(".")
        prefix, _, module = path.rpartition(".")
        parts = self._packed.get(module, ())
        if name in self._needed.tensors or not parts:
            return name
        return f"{prefix}.{parts[0]}.{kind}" if prefix else f"{parts[0]}.{kind}"

    def _cast(self, sent: str, checkpoint: str) -> str:
        """What to keep a tensor as: floats in the checkpoint's, or in the engine's own."""
        if sent in FLOATS and checkpoint in FLOATS and sent != self._needed.dtype:
            return checkpoint
        return sent


def dtype_name(dtype: object) -> str:
    """`bfloat16` of `"bfloat16"`, `"torch.bfloat16"` or `torch.bfloat16`.

    Raises:
        ManifestError: there is no such dtype, or it cannot be transferred.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ManifestError(
            f"dtype is {dtype!r:.80}; it is torch's, or its name: {', '.join(DTYPE_BYTES)}"
        )
    return name


def _spec(name: object, dtype: object, shape: object) -> TensorSpec:
    if not isinstance(name, str):
        raise ManifestError(f"the name of a tensor is {name!r:.80}; it is text")
    if not isinstance(shape, list | tuple):
        raise ManifestError(f"the shape of {name!r:.200} is {shape!r:.80}; it is a list of numbers")
    return TensorSpec(name=name, dtype=dtype_name(dtype), shape=shape)
