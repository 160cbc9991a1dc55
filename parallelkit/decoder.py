"""The sizes of a small language model, for the demo and the tests, whatever the framework."""

from __future__ import annotations

from typing import Any, Final

import attrs

#: Standard deviation of initial weights; larger than a big model's 0.02: at this width it saves a
#: hundred steps.
INIT_STD: Final = 0.06


@attrs.frozen(kw_only=True)
class ModelConfig:
    """Sizes of the model, under the names of Qwen2's `config.json`.

    Attributes:
        vocab_size: number of tokens.
        hidden_size: width of the residual stream.
        intermediate_size: width inside the MLP.
        num_hidden_layers: decoder layers.
        num_attention_heads: query heads; num_key_value_heads: heads of keys and values, each
            shared by an equal number of query heads.
        rope_theta: base of the rotary embedding's wavelengths.
        rms_norm_eps: added under the root of the norm.
    """

    vocab_size: int
    hidden_size: int = 128
    intermediate_size: int = 352
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of a Qwen2 checkpoint of these sizes, without the tied head.

        Example:
            >>> ModelConfig(vocab_size=7, num_hidden_layers=0).shapes()
            {'model.embed_tokens.weight': (7, 128), 'model.norm.weight': (128,)}
        """
        width, inner = self.hidden_size, self.intermediate_size
        kv = self.num_key_value_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {}
        for projection, rows in (("q", width), ("k", kv), ("v", kv)):
            layer[f"self_attn.{projection}_proj.weight"] = (rows, width)
            layer[f"self_attn.{projection}_proj.bias"] = (rows,)
        layer |= {
            "self_attn.o_proj.weight": (width, width),
            "mlp.gate_proj.weight": (inner, width),
            "mlp.up_proj.weight": (inner, width),
            "mlp.down_proj.weight": (width, inner),
            "input_layernorm.weight": (width,),
            "post_attention_layernorm.weight": (width,),
        }
        layers = {
            f"model.layers.{number}.{name}": shape
            for number in range(self.num_hidden_layers)
            for name, shape in layer.items()
        }
        table = {"model.embed_tokens.weight": (self.vocab_size, width)}
        return table | layers | {"model.norm.weight": (width,)}

    def to_hugging_face(self, *, dtype: str, positions: int) -> dict[str, Any]:
        """Return what `config.json` says of a Qwen2 model of these sizes with a tied head.

        Args:
            dtype: of the weights, such as `"bfloat16"`.
            positions: the longest sequence.
        """
        return attrs.asdict(self) | {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "max_position_embeddings": positions,
            "torch_dtype": dtype,
            # no token ends a text of this model
            "bos_token_id": None,
            "eos_token_id": None,
        }
