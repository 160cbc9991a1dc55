"""For trainers in parts and their followers: a model that is awkward to divide, and a gather."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Low(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).clone()  # no view: fully_shard warns of those


class Awkward(nn.Module):
    """A tied head, bfloat16 and float32, a scalar, an empty tensor, buffers.

    Args:
        vocabulary: rows of the embedding; odd ones divide unevenly.
        dim: width; 2 leaves ranks of four without a row of the norms.
    """

    def __init__(self, vocabulary: int, dim: int, hidden: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(Block(dim, hidden) for _ in range(layers))
        self.low = Low(dim, 3, dtype=torch.bfloat16)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) + self.low(x.bfloat16()).float().sum()  # type: ignore[no-any-return]


def make(vocabulary: int, dim: int, **sizes: int) -> Awkward:
    """The same values everywhere."""
    torch.manual_seed(0)
    return Awkward(vocabulary, dim, **sizes)


def fingerprint(tensor: torch.Tensor) -> str:
    """A hash of a tensor's values, dtype and shape."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    text = f"{tensor.dtype} {list(tensor.shape)} ".encode()
    return hashlib.sha256(text + bytes(flat.tolist())).hexdigest()[:16]


def stepped(tensor: torch.Tensor) -> torch.Tensor:
    wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
    return (wide * 2 + 1).to(tensor.dtype)


def in_arena(publisher: Any) -> dict[str, torch.Tensor]:
    """The whole tensors that lie in rank 0's arena."""
    plan, arena = publisher.plan, publisher._coordinator._arena
    found = {}
    for spec, offset, size in zip(plan.manifest.unique, plan.offsets, plan.sizes, strict=True):
        whole = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        if size:
            data = torch.from_numpy(arena[offset : offset + size].copy())
            whole = data.view(whole.dtype).reshape(spec.shape)
        found[spec.name] = whole
    return found


def gather(publisher: Any) -> dict[str, torch.Tensor]:
    """What an update would bring into the arena; nothing on the other ranks."""
    source = publisher._sharded
    source.look()
    if publisher._rank:
        source.serve(20)
        return {}
    coordinator = publisher._coordinator
    coordinator._arena[:] = 255
    source.gather(coordinator._spans(), seconds=20, check=True)
    assert source.dismiss()
    return in_arena(publisher)
