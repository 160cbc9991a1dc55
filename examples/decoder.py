"""A small language model with the parameter names of Hugging Face's Qwen2.

It is plain torch and knows nothing of ranks. Two habits let it be divided and cut: heads are
counted from what a projection gives, so a rank may hold some of them only, and `forward` does
nothing but call its parts one after the other.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class Decoder(nn.Module):
    """Token ids [batch, time] to logits [batch, time, vocabulary].

    Head and embedding do not share their weight: stages of a pipeline could not.

    Args:
        vocabulary: number of tokens.
        hidden: width of the residual stream; the MLP is two and three quarters of it.
        layers: decoder layers.
        heads: query heads.
        kv_heads: heads of keys and values, each for an equal number of query heads.
    """

    def __init__(
        self, vocabulary: int, hidden: int = 128, layers: int = 4, heads: int = 4, kv_heads: int = 2
    ) -> None:
        super().__init__()
        self.model = Backbone(vocabulary, hidden, layers, heads, kv_heads)
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False)
        self.apply(initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.model(tokens))
        return logits


class Backbone(nn.Module):
    """Embedding, layers and the last norm: all that is under `model.` in the names."""

    def __init__(
        self, vocabulary: int, hidden: int, layers: int, heads: int, kv_heads: int
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads, kv_heads) for _ in range(layers))
        self.norm = RMSNorm(hidden)
        self.rotary_emb = Rotary(hidden // heads)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        cos, sin = self.rotary_emb(x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        normed: Tensor = self.norm(x)
        return normed


class Layer(nn.Module):
    """Attention, then the MLP, each behind a norm and added to the residual stream."""

    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.self_attn = Attention(hidden, heads, kv_heads)
        self.mlp = MLP(hidden, 11 * hidden // 4)
        self.input_layernorm = RMSNorm(hidden)
        self.post_attention_layernorm = RMSNorm(hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        added: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return added


class Attention(nn.Module):
    """Causal attention with rotary positions and grouped keys and values."""

    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.q_proj = nn.Linear(hidden, heads * self.head_dim)
        self.k_proj = nn.Linear(hidden, kv_heads * self.head_dim)
        self.v_proj = nn.Linear(hidden, kv_heads * self.head_dim)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class RMSNorm(nn.Module):
    """Scale to a root mean square of one, then by a learned weight."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Rotary(nn.Module):
    """Angles of positions, for hidden states [batch, time, ...]."""

    inv_freq: Tensor

    def __init__(self, head_dim: int, theta: float = 10_000.0) -> None:
        super().__init__()
        share = torch.arange(0, head_dim, 2) / head_dim
        self.register_buffer("inv_freq", theta**-share, persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each [time, head_dim]."""
        places = torch.arange(x.shape[1], device=self.inv_freq.device)
        angles = torch.outer(places.to(self.inv_freq.dtype), self.inv_freq).repeat(1, 2)
        return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of dims (i, i + head_dim / 2) of x [..., time, head_dim] by its angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def initialise(module: nn.Module) -> None:
    """Give matrices small random values, and biases 0."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.06)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
