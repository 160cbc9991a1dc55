"""What a live model computes with: a digest of each layer, also of those that are packed away.

On the CPU vLLM keeps the weights of most layers in a form that only their own product reads, and
leaves an empty parameter behind, or one that is no longer used. Such a layer is seen by what it
makes of random numbers, the same at every look.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import attrs
import torch
import xxhash
from torch import nn

#: Rows of random numbers that a packed layer is given: enough that each of its outputs shows the
#: rounding of many different sums.
_ROWS: Final = 64
_SEED: Final = 20_250_101


@attrs.frozen
class Look:
    """What a model computes with at one moment.

    Attributes:
        digests: of each parameter, and each packed layer, by name. Never different for the same
            weights. The same for different weights only in a packed layer, if all that changed is
            less than the rounding of 64 random outputs.
        zero: whether all weights are zero.
        unseen: layers whose weights can be read in neither way.
    """

    digests: dict[str, bytes]
    zero: bool
    unseen: tuple[str, ...] = ()


def look(model: nn.Module) -> Look:
    """Look at every layer; the engine computes nothing meanwhile. Costs about a pass of 64 tokens.

    Each rank sees its own part of the model.
    """
    digests: dict[str, bytes] = {}
    zero = True
    unseen: list[str] = []
    with torch.no_grad():
        for name, tensor in _readable(model):
            digests[name] = digest(tensor)
            zero = zero and _is_zero(tensor)
        for name, layer in model.named_modules():
            if not isinstance(getattr(layer, "weight", None), torch.Tensor):
                continue
            made = _product(layer)
            if made is not None:
                digests[f"{name} (product)"] = digest(made)
                zero = zero and _is_zero(made)
            elif not layer.weight.numel():
                unseen.append(name)
    return Look(digests, zero and bool(digests), tuple(unseen))


def digest(tensor: torch.Tensor) -> bytes:
    """Digest the bytes of a tensor on the CPU, row-major, with its dtype and shape."""
    h = xxhash.xxh3_128(f"{tensor.dtype}{list(tensor.shape)}".encode())
    h.update(as_bytes(tensor))
    return bytes(h.digest())


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor on the CPU, row-major; a view where it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _readable(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        if parameter.numel() and not parameter.is_meta:
            yield name, parameter.detach().cpu()


def _product(layer: Any) -> torch.Tensor | None:
    """What a layer's own product makes of random numbers; None for a layer without one."""
    product = getattr(layer, "cpu_linear", None)
    weight = layer.weight
    width = weight.shape[1] if weight.ndim == 2 else None
    for name in ("input_size_per_partition", "embedding_dim"):
        width = getattr(layer, name, None) if width is None else width
    if product is None or width is None or weight.is_meta:
        return None
    generator = torch.Generator().manual_seed(_SEED)
    x = torch.randn((_ROWS, int(width)), generator=generator).to(weight.dtype)
    made: torch.Tensor = product(x, weight, None)
    return made


def _is_zero(tensor: torch.Tensor) -> bool:
    if tensor.is_floating_point() and tensor.element_size() == 1:  # torch does not count these
        tensor = tensor.to(torch.float32)
    return not bool(torch.count_nonzero(tensor))
