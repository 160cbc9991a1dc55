"""A language model in the shape of Qwen2, with its checkpoint's parameter names, small enough for
one CPU core.

The same function of the same weights as the torch plugin's; it runs in PyNative and as a graph.
"""

from __future__ import annotations

from typing import Any, Final

import mindspore as ms
import numpy as np
from mindspore import mint, nn, ops
from mindspore.common.initializer import Normal, initializer

from parallelkit.decoder import INIT_STD, ModelConfig

#: Added to the scores of later positions; its exponential is 0 in every floating-point dtype.
_FORBIDDEN: Final = -1e30


class CausalLM(nn.Cell):  # type: ignore[misc]
    """Token ids, shape `(batch, time)`, to logits, shape `(batch, time, vocab_size)`.

    Args:
        config: the sizes.
        positions: the longest `time`.
        dtype: of all parameters.
    """

    def __init__(self, config: ModelConfig, positions: int = 256, dtype: Any = ms.float32) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, positions, dtype)
        self.lm_head = _linear(config.hidden_size, config.vocab_size, False, dtype)
        self.lm_head.weight = self.model.embed_tokens.weight

    def construct(self, tokens: Any) -> Any:
        return self.lm_head(self.model(tokens))


class Decoder(nn.Cell):  # type: ignore[misc]
    """Embedding, layers and the final norm; `model.` in the parameter names."""

    def __init__(self, config: ModelConfig, positions: int, dtype: Any) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config, dtype)
        self.layers = nn.CellList([Layer(config, dtype) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config, dtype)
        cos, sin = rotary_table(config, positions)
        self.cos, self.sin = ms.Tensor(cos).astype(dtype), ms.Tensor(sin).astype(dtype)
        later = np.triu(np.full((positions, positions), _FORBIDDEN), k=1)
        self.mask = ms.Tensor(later.astype(np.float32)).astype(dtype)

    def construct(self, tokens: Any) -> Any:
        time = tokens.shape[1]
        cos, sin, mask = self.cos[:time], self.sin[:time], self.mask[:time, :time]
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, mask)
        return self.norm(hidden)


class Embedding(nn.Cell):  # type: ignore[misc]
    """Rows of a table; `mint.nn.Embedding` has no kernel for the CPU."""

    def __init__(self, config: ModelConfig, dtype: Any) -> None:
        super().__init__()
        shape = (config.vocab_size, config.hidden_size)
        self.weight = ms.Parameter(initializer(Normal(INIT_STD), shape, dtype), name="weight")

    def construct(self, tokens: Any) -> Any:
        return ops.gather(self.weight, tokens, 0)


class Layer(nn.Cell):  # type: ignore[misc]
    """Attention, then the MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, dtype: Any) -> None:
        super().__init__()
        self.self_attn = Attention(config, dtype)
        self.mlp = MLP(config, dtype)
        self.input_layernorm = RMSNorm(config, dtype)
        self.post_attention_layernorm = RMSNorm(config, dtype)

    def construct(self, hidden: Any, cos: Any, sin: Any, mask: Any) -> Any:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, mask)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Attention(nn.Cell):  # type: ignore[misc]
    """Causal attention with rotary positions and grouped keys and values."""

    def __init__(self, config: ModelConfig, dtype: Any) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.kv_heads = config.num_key_value_heads
        self.shared = config.num_attention_heads // config.num_key_value_heads
        width = config.hidden_size
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = _linear(width, width, True, dtype)
        self.k_proj = _linear(width, kv_width, True, dtype)
        self.v_proj = _linear(width, kv_width, True, dtype)
        self.o_proj = _linear(width, width, False, dtype)

    def construct(self, hidden: Any, cos: Any, sin: Any, mask: Any) -> Any:
        batch, time, width = hidden.shape
        q = self.heads(self.q_proj(hidden), batch, time)
        k = self.heads(self.k_proj(hidden), batch, time)
        v = self.heads(self.v_proj(hidden), batch, time)
        # the query heads that share keys and values, one below the other: no copies of those
        rows = (batch, self.kv_heads, self.shared * time, self.head_dim)
        q = rotate(q, cos, sin).reshape(rows)
        k = rotate(k, cos, sin)
        scores = ops.matmul(q, k.swapaxes(-1, -2)) * self.head_dim**-0.5
        apart = (batch, self.kv_heads, self.shared, time, time)
        shares = ops.softmax(scores.reshape(apart) + mask, axis=-1)
        mixed = ops.matmul(shares.reshape((batch, self.kv_heads, self.shared * time, time)), v)
        mixed = mixed.reshape((batch, self.kv_heads * self.shared, time, self.head_dim))
        return self.o_proj(mixed.swapaxes(1, 2).reshape((batch, time, width)))

    def heads(self, x: Any, batch: int, time: int) -> Any:
        """Cut the last dim into heads: `(batch, heads, time, head_dim)`."""
        return x.reshape((batch, time, -1, self.head_dim)).swapaxes(1, 2)


class MLP(nn.Cell):  # type: ignore[misc]
    """SwiGLU."""

    def __init__(self, config: ModelConfig, dtype: Any) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = _linear(width, inner, False, dtype)
        self.up_proj = _linear(width, inner, False, dtype)
        self.down_proj = _linear(inner, width, False, dtype)

    def construct(self, hidden: Any) -> Any:
        gate = self.gate_proj(hidden)
        return self.down_proj(gate * mint.sigmoid(gate) * self.up_proj(hidden))


class RMSNorm(nn.Cell):  # type: ignore[misc]
    """Scale to a root mean square of one, then by a learned weight."""

    def __init__(self, config: ModelConfig, dtype: Any) -> None:
        super().__init__()
        self.weight = ms.Parameter(initializer("ones", config.hidden_size, dtype), name="weight")
        self.eps = config.rms_norm_eps

    def construct(self, hidden: Any) -> Any:
        mean_square = mint.mean(hidden * hidden, -1, keepdim=True)
        return hidden * mint.rsqrt(mean_square + self.eps) * self.weight


def rotary_table(
    config: ModelConfig, positions: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return cosines and sines of the angles at positions 0 to `positions`, `(.., head_dim)`."""
    pair = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    rates = np.float32(config.rope_theta) ** -pair
    angles = np.tile(np.outer(np.arange(positions, dtype=np.float32), rates), (1, 2))
    return np.cos(angles), np.sin(angles)


def rotate(x: Any, cos: Any, sin: Any) -> Any:
    """Turn each pair of dims `(i, i + head_dim / 2)` of `x` by its position's angle."""
    half = x.shape[-1] // 2
    turned = mint.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos + turned * sin


def _linear(inputs: int, outputs: int, bias: bool, dtype: Any) -> nn.Cell:
    layer = mint.nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
    layer.weight.set_data(initializer(Normal(INIT_STD), (outputs, inputs), dtype))
    if bias:
        layer.bias.set_data(initializer("zeros", (outputs,), dtype))
    return layer


def copy_values(net: CausalLM, into: CausalLM) -> None:
    """Put the values of `net` into a model of the same sizes, in that one's dtype, in place.

    So a model that trains in float32 is published in bfloat16: rounded once, to the nearest.
    Waits for nothing: `publisher.update()` does.
    """
    for mine, theirs in zip(net.get_parameters(), into.get_parameters(), strict=True):
        theirs.copy_(mine.astype(theirs.dtype))
