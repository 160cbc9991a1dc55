"""Models of a given size for `bench_shm.py`: few large tensors, many small ones, a mixture."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash

KINDS = ("few", "small", "mix")
SMALL_BYTES = 16 << 10
LARGE_TENSORS = 8

#: Width, layers and MLP width of the mixture by megabytes; the largest is Qwen2-0.5B's.
_SIZES = ((5, 64, 2, 176), (50, 192, 6, 512), (500, 512, 12, 1408), (math.inf, 896, 24, 4864))


class Layout(NamedTuple):
    """Names and shapes of two-byte (mix) or four-byte elements."""

    kind: str
    dtype: str
    shapes: dict[str, tuple[int, ...]]

    @property
    def nbytes(self) -> int:
        width = np.dtype(np.float16 if self.dtype == "bfloat16" else self.dtype).itemsize
        return width * sum(math.prod(shape) for shape in self.shapes.values())


def make_layout(kind: str, nbytes: int) -> Layout:
    """Tensors of about `nbytes` in all.

    few: eight matrices; small: as many vectors of 16 KiB as fit; mix: the names and shapes of a
    decoder in the style of Qwen2 in bfloat16, the vocabulary filling up what the layers leave.
    """
    if kind == "few":
        rows = nbytes // LARGE_TENSORS // 4 // 1024
        return Layout(kind, "float32", {f"w{i}": (rows, 1024) for i in range(LARGE_TENSORS)})
    if kind == "small":
        count = max(1, nbytes // SMALL_BYTES)
        return Layout(kind, "float32", {f"w{i}": (SMALL_BYTES // 4,) for i in range(count)})
    _, width, layers, inner = next(row for row in _SIZES if nbytes / 1e6 < row[0])
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(layers):
        at = f"model.layers.{i}"
        shapes[f"{at}.input_layernorm.weight"] = (width,)
        for name, rows in (("q", width), ("k", width // 4), ("v", width // 4)):
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (rows, width)
            shapes[f"{at}.self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{at}.self_attn.o_proj.weight"] = (width, width)
        shapes[f"{at}.post_attention_layernorm.weight"] = (width,)
        shapes[f"{at}.mlp.gate_proj.weight"] = (inner, width)
        shapes[f"{at}.mlp.up_proj.weight"] = (inner, width)
        shapes[f"{at}.mlp.down_proj.weight"] = (width, inner)
    shapes["model.norm.weight"] = (width,)
    used = sum(math.prod(shape) for shape in shapes.values())
    vocabulary = max(1, (nbytes // 2 - used) // width)
    return Layout(kind, "bfloat16", {"model.embed_tokens.weight": (vocabulary, width)} | shapes)


class Arrays:
    """A model of numpy arrays. bfloat16 becomes float16, which numpy has."""

    def __init__(self, layout: Layout) -> None:
        from parallelkit.testing.arrays import Arrays as Target

        dtype = layout.dtype.replace("bfloat", "float")
        arrays = {name: np.ones(shape, dtype) for name, shape in layout.shapes.items()}
        self.target = Target(arrays)

    def train(self) -> None:
        for array in self.target.arrays.values():
            np.add(array, 1, out=array)

    def state(self) -> dict[str, Any]:
        return dict(self.target.arrays)

    def load(self, state: dict[str, Any]) -> None:
        for name, array in self.target.arrays.items():
            np.copyto(array, state[name])

    def digest(self) -> str:
        h = xxhash.xxh3_64()
        for array in self.target.arrays.values():
            h.update(array.reshape(-1).view(np.uint8).data)
        return str(h.hexdigest())


class Module:
    """A model of torch parameters in nested modules."""

    def __init__(self, layout: Layout) -> None:
        import torch
        from torch import nn

        self._torch = torch
        self.target = nn.Module()
        for name, shape in layout.shapes.items():
            holder = self.target
            *path, key = name.split(".")
            for part in path:
                if part not in holder._modules:
                    holder.add_module(part, nn.Module())
                holder = holder.get_submodule(part)
            values = torch.ones(shape, dtype=getattr(torch, layout.dtype))
            holder.register_parameter(key, nn.Parameter(values))

    def train(self) -> None:
        with self._torch.no_grad():
            self._torch._foreach_add_(list(self.target.parameters()), 1.0)

    def randomise(self) -> None:
        """Give matrices random values of a scale that a decoder computes with, norms ones."""
        self._torch.manual_seed(0)
        with self._torch.no_grad():
            for name, p in self.target.named_parameters():
                if p.dim() > 1:
                    p.normal_(std=1.0 if "embed" in name else 1.5 / p.shape[1] ** 0.5)
                elif name.endswith("bias"):
                    p.normal_(std=0.1)

    def negate(self) -> None:
        """Change every element, and every value that is computed; twice is back again."""
        with self._torch.no_grad():
            self._torch._foreach_neg_(list(self.target.parameters()))

    def state(self) -> dict[str, Any]:
        return self.target.state_dict()

    def load(self, state: dict[str, Any]) -> None:
        self.target.load_state_dict(state)

    def digest(self) -> str:
        h = xxhash.xxh3_64()
        for p in self.target.parameters():
            h.update(p.detach().reshape(-1).view(self._torch.uint8).numpy().data)
        return str(h.hexdigest())


class Model(Protocol):
    """What the benchmark does with a model: `target` is what parallelkit gets."""

    target: Any

    def train(self) -> None:
        """Change every element."""

    def state(self) -> dict[str, Any]: ...
    def load(self, state: dict[str, Any]) -> None: ...
    def digest(self) -> str: ...


MODELS: dict[str, Callable[[Layout], Model]] = {"torch": Module, "arrays": Arrays}
