"""For trainers in parts and their followers: a model that is awkward to divide, and its parts."""

from __future__ import annotations

import hashlib

import torch
from parallelkit_torch.sharded_weights import ShardedModuleSource
from torch import nn
from torch.distributed.tensor import DTensor

import parallelkit as pk
from parallelkit.weights.layout import owners


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


def collect(source: ShardedModuleSource, group: pk.ProcessGroup) -> dict[str, torch.Tensor]:
    """Whole tensors from what each rank hands out, on every rank; every element exactly once."""
    source.look()
    manifest = source.manifest()
    found = {}
    for index, spec in enumerate(manifest.unique):
        dtype = getattr(torch, spec.dtype)
        made = torch.empty(spec.shape, dtype=dtype)
        times = torch.zeros(spec.shape, dtype=torch.int64)
        for rank, box in owners(spec.layout, manifest.mesh, spec.shape):
            mine = bytes(source.host_bytes(index)) if rank == group.rank else b""
            said = group.broadcast_object(mine, src=rank)
            assert isinstance(said, bytes)
            part = torch.frombuffer(bytearray(said), dtype=dtype).reshape(box.sizes)
            inside = tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))
            made[inside] = part
            times[inside] += 1
        assert bool((times == 1).all()), (spec.name, times)
        found[spec.name] = made
    return found


def step_parts(model: nn.Module) -> None:
    """Change every part on its own rank, as an optimiser step does; a pipeline's stages too."""
    seen = set()
    with torch.no_grad():
        for module in getattr(model, "stage_modules", (model,)):
            for tensor in [*module.parameters(), *module.buffers()]:
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                if id(tensor) not in seen:
                    local.copy_(stepped(local))
                seen.add(id(tensor))
