"""How many attention heads a projection makes: what decides how far it can be divided."""

from __future__ import annotations

from typing import Final

from torch import nn

_SIZES: Final = ("head_dim", "head_size")
_COUNTS: Final = ("num_heads", "num_attention_heads", "n_heads", "n_head")


def head_size(attention: nn.Module, model: nn.Module) -> int | None:
    """Width of one attention head, None where nothing says it.

    Said by the attention's own attributes, else by a `config`, its own or the model's, as
    Hugging Face's models have.
    """
    size = _number(attention, _SIZES)
    if size:
        return size
    for owner in (attention, model):
        config = getattr(owner, "config", None)
        config = getattr(config, "text_config", None) or config
        size = _number(config, _SIZES)
        width, count = _number(config, ("hidden_size",)), _number(config, _COUNTS)
        if size or (width and count):
            return size or width // count  # type: ignore[operator]
    count = _number(attention, _COUNTS)
    query = next((getattr(attention, key, None) for key in ("q_proj", "wq")), None)
    if count and isinstance(query, nn.Linear) and query.out_features % count == 0:
        return query.out_features // count
    return None


def _number(owner: object, keys: tuple[str, ...]) -> int | None:
    for key in keys:
        value = getattr(owner, key, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
