"""A language model in the shape of Qwen2, with its checkpoint's parameter names, small enough for
one CPU core.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from parallelkit.decoder import INIT_STD, ModelConfig


class CausalLM(nn.Module):
    """Token ids, shape `(batch, time)`, to logits, shape `(batch, time, vocab_size)`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.apply(_initialise)
        self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.model(tokens))
        return logits


class Decoder(nn.Module):
    """Embedding, layers and the final norm; `model.` in the parameter names."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config)
        self.config = config

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed_tokens(tokens)
        cos, sin = rotary_table(self.config, tokens.shape[1], hidden.device)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin)
        normed: Tensor = self.norm(hidden)
        return normed


class Layer(nn.Module):
    """Attention, then the MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config)
        self.post_attention_layernorm = RMSNorm(config)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin)
        added: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return added


class Attention(nn.Module):
    """Causal attention with rotary positions and grouped keys and values."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width = config.hidden_size
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, kv_width)
        self.v_proj = nn.Linear(width, kv_width)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            projection(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


class RMSNorm(nn.Module):
    """Scale to a root mean square of one, then by a learned weight."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden_size))
        self.eps = config.rms_norm_eps

    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


def rotary_table(config: ModelConfig, time: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the angles at positions 0 to `time`, each `(time, head_dim)`."""
    pair = torch.arange(0, config.head_dim, 2, device=device) / config.head_dim
    angles = torch.outer(torch.arange(time, device=device), config.rope_theta**-pair).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of dims `(i, i + head_dim / 2)` of `x` by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=INIT_STD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
