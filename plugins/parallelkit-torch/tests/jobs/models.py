"""Small models that jobs and tests share: a decoder with the names of Qwen2, and a perceptron.

No dropout and no state that a step changes, so a run on many ranks can equal a run on one.
"""

from __future__ import annotations

import torch
from torch import nn


class RMSNorm(nn.Module):
    """Scale to a root mean square of one; `weight` [dim]."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Rotary(nn.Module):
    """Angles of rotary positions; no parameter, one buffer that is not saved."""

    inv_freq: torch.Tensor

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        steps = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        self.register_buffer("inv_freq", 10_000.0**-steps, persistent=False)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [length, head_dim] of positions [length]."""
        angles = torch.cat([torch.outer(positions.to(self.inv_freq.dtype), self.inv_freq)] * 2, -1)
        return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn x [batch, heads, length, head_dim] by its positions."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


class Attention(nn.Module):
    """Causal attention; heads are taken by views with -1, so shards of the projections work."""

    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.q_proj = nn.Linear(dim, heads * self.head_dim, bias=True)
        self.k_proj = nn.Linear(dim, kv_heads * self.head_dim, bias=True)
        self.v_proj = nn.Linear(dim, kv_heads * self.head_dim, bias=True)
        self.o_proj = nn.Linear(heads * self.head_dim, dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        shape = (batch, length, -1, self.head_dim)
        q = rotate(self.q_proj(x).view(shape).transpose(1, 2), cos, sin)
        k = rotate(self.k_proj(x).view(shape).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(  # type: ignore[no-any-return]
            mixed.transpose(1, 2).reshape(batch, length, -1)
        )


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(  # type: ignore[no-any-return]
            nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)
        )


class DecoderLayer(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.self_attn = Attention(dim, heads, kv_heads)
        self.mlp = Mlp(dim, 2 * dim)
        self.input_layernorm = RMSNorm(dim)
        self.post_attention_layernorm = RMSNorm(dim)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Backbone(nn.Module):
    """What Qwen2 has under `model.`: embedding, layers, norm, rotary angles."""

    def __init__(self, vocab: int, dim: int, heads: int, kv_heads: int, layers: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(DecoderLayer(dim, heads, kv_heads) for _ in range(layers))
        self.norm = RMSNorm(dim)
        self.rotary_emb = Rotary(dim // heads)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        cos, sin = self.rotary_emb(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)  # type: ignore[no-any-return]


class TinyDecoder(nn.Module):
    """A decoder with the parameter names of Hugging Face's Qwen2: tokens [batch, length] to
    logits [batch, length, vocab].

    Args:
        vocab, dim: sizes of the vocabulary and of the hidden states.
        heads, kv_heads: attention heads, and heads of keys and values (grouped queries).
        layers: number of decoder layers.
        tied: whether head and embedding share their weight.
    """

    def __init__(
        self,
        vocab: int = 32,
        dim: int = 16,
        heads: int = 4,
        kv_heads: int = 2,
        layers: int = 2,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.model = Backbone(vocab, dim, heads, kv_heads, layers)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model(tokens))  # type: ignore[no-any-return]


class TinyMlp(nn.Sequential):
    """A perceptron: inputs [batch, width] to outputs [batch, classes]."""

    def __init__(self, width: int = 6, hidden: int = 8, classes: int = 4, depth: int = 3) -> None:
        inner = [m for _ in range(depth - 1) for m in (nn.Linear(hidden, hidden), nn.Tanh())]
        super().__init__(nn.Linear(width, hidden), nn.Tanh(), *inner, nn.Linear(hidden, classes))


def decoder(seed: int = 0, **sizes: int) -> TinyDecoder:
    """A decoder whose values depend on `seed` alone; leaves torch's generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TinyDecoder(**sizes)


def mlp(seed: int = 0, **sizes: int) -> TinyMlp:
    """A perceptron whose values depend on `seed` alone; leaves torch's generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TinyMlp(**sizes)
