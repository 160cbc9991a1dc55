"""The built-in tensor-parallel plan, for models named as Qwen2 and Llama are.

A *region* is a module whose input is whole, whose inner activations are divided, and whose output
is a sum over ranks: attention and MLP. A *block* is a layer that holds regions and norms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import RowwiseParallel

from parallelkit.errors import LayoutError
from parallelkit_torch.parallel.heads import head_size
from parallelkit_torch.parallel.layouts import Style, below, dividable
from parallelkit_torch.parallel.sequence import Block, Entry, Sequence

#: Projections divided by outputs, and the one divided by inputs that takes what they make.
_REGIONS: Final = (
    (("q_proj", "k_proj", "v_proj"), "o_proj"),
    (("gate_proj", "up_proj"), "down_proj"),
    (("up_proj",), "down_proj"),
    (("wq", "wk", "wv"), "wo"),
    (("w1", "w3"), "w2"),
)
#: Several projections in one weight: an even cut would give a rank all of one of them.
_FUSED: Final = frozenset(
    {"c_attn", "qkv_proj", "qkv", "wqkv", "Wqkv", "query_key_value", "gate_up_proj", "w13"}
)
_EMBEDDINGS: Final = ("embed_tokens", "tok_embeddings")
#: The head by name, and what must stand beside it where the name alone says little.
_HEADS: Final[Mapping[str, str | None]] = {"lm_head": None, "output": "tok_embeddings"}
_NORMS: Final = frozenset(
    {"input_layernorm", "post_attention_layernorm", "attention_norm", "ffn_norm"}
    | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
)
_HOW: Final = (
    "Write layouts: layouts={'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'} divides the "
    "outputs of one layer and the inputs of the one that follows it"
)


class Region(NamedTuple):
    """An attention or MLP by the full names of its parts."""

    name: str
    colwise: list[str]
    rowwise: str


def plan(
    found: Mapping[str, nn.Module], chosen: Mapping[str, Style], *, sequence: bool
) -> dict[str, Style]:
    """Styles of all modules that the built-in plan knows and `chosen` leaves open; pure.

    Raises:
        LayoutError: nothing is recognised, projections are fused or not `nn.Linear`, or
            `sequence` is asked for and a block holds something unknown.
    """
    children = _children(found)
    _refuse_fused(found, chosen)
    regions = _regions(found, children, chosen)
    styles = _ends(found, children)
    for region in regions:
        styles |= dict.fromkeys(region.colwise, "colwise")
        styles[region.rowwise] = RowwiseParallel(output_layouts=Shard(1)) if sequence else "rowwise"
        styles |= _head_norms(found, children, region)
    if not regions and not chosen:
        raise LayoutError(
            "the built-in layouts know models named as Qwen2 and Llama are (q_proj ... o_proj, "
            "gate_proj ... down_proj; wq ... wo, w1 ... w2), and nothing here is; the model has "
            f"{dividable(found)}. {_HOW}"
        )
    if sequence:
        styles |= _blocks(found, children, chosen, regions, styles)
    return {name: style for name, style in styles.items() if name not in chosen}


def _children(found: Mapping[str, nn.Module]) -> dict[str, dict[str, str]]:
    """Full names of direct children, by parent and key."""
    children: dict[str, dict[str, str]] = {}
    for name in found:
        if name:
            parent, _, key = name.rpartition(".")
            children.setdefault(parent, {})[key] = name
    return children


def _refuse_fused(found: Mapping[str, nn.Module], chosen: Mapping[str, Style]) -> None:
    for name, module in found.items():
        key = name.rpartition(".")[2]
        if key in _FUSED and name not in chosen and any(True for _ in module.parameters(False)):
            raise LayoutError(
                f"module {name!r} holds several projections in one weight, and dividing it evenly "
                "would give a rank all of one and none of another. Split it into one layer for "
                f"each, or leave it whole: layouts={{'**.{key}': 'replicate'}}, together with the "
                "layer that takes what it makes"
            )


def _regions(
    found: Mapping[str, nn.Module],
    children: Mapping[str, Mapping[str, str]],
    chosen: Mapping[str, Style],
) -> list[Region]:
    regions = []
    for name, own in children.items():
        for colwise, rowwise in _REGIONS:
            if rowwise not in own or any(key not in own for key in colwise):
                continue
            region = Region(name, [own[key] for key in colwise], own[rowwise])
            for part in (*region.colwise, region.rowwise):
                if part not in chosen and not isinstance(found[part], nn.Linear):
                    raise LayoutError(
                        f"the built-in layouts divide nn.Linear, and module {part!r} is a "
                        f"{type(found[part]).__qualname__}. Write layouts for it, with a "
                        "torch.distributed.tensor.parallel.ParallelStyle, or 'replicate'"
                    )
            regions.append(region)
            break
    return regions


def _ends(
    found: Mapping[str, nn.Module], children: Mapping[str, Mapping[str, str]]
) -> dict[str, Style]:
    """The embedding, divided by its rows, and the head, whose output is gathered."""
    styles: dict[str, Style] = {}
    for own in children.values():
        for key in _EMBEDDINGS:
            if key in own and isinstance(found[own[key]], nn.Embedding):
                styles[own[key]] = "rowwise"
        for key, beside in _HEADS.items():
            if (
                key in own
                and isinstance(found[own[key]], nn.Linear)
                and (not beside or beside in own)
            ):
                styles[own[key]] = "colwise_gather"
    return styles


def _head_norms(
    found: Mapping[str, nn.Module], children: Mapping[str, Mapping[str, str]], region: Region
) -> dict[str, Style]:
    """Norms of each head of queries and keys, as Qwen3 has: each rank sees its own heads only."""
    size = head_size(found[region.name], found[""])
    return {
        child: Sequence(dim=2)
        for key, child in children[region.name].items()
        if key in ("q_norm", "k_norm")
        and all(list(p.shape) == [size] for p in found[child].parameters())
    }


def _blocks(
    found: Mapping[str, nn.Module],
    children: Mapping[str, Mapping[str, str]],
    chosen: Mapping[str, Style],
    regions: list[Region],
    styles: Mapping[str, Style],
) -> dict[str, Style]:
    """What dividing the sequence between regions adds: norms, entries of regions, and blocks."""
    if not regions:
        raise LayoutError(
            "sequence=True is a part of the built-in layouts, and they recognise nothing here. In "
            "your own, give norms 'sequence', and torch's RowwiseParallel(output_layouts=Shard(1)) "
            "and PrepareModuleInput to what is around them"
        )
    added: dict[str, Style] = {}
    blocks = dict.fromkeys(region.name.rpartition(".")[0] for region in regions)
    for block in blocks:
        added[block] = Block()
        added |= {n: "sequence" for key, n in children[block].items() if key in _NORMS}
    added |= {region.name: Entry() for region in regions}
    covered = {**styles, **added}
    for name, module in found.items():
        inside = any(name == block or below(name, block) for block in blocks)
        if not inside or not any(True for _ in module.parameters(recurse=False)):
            continue
        if isinstance(chosen.get(name), str) or (name not in covered and name not in chosen):
            raise LayoutError(
                f"sequence=True divides all activations of a layer, and module {name!r} is not one "
                f"that the built-in layouts know how to give a part to; leave sequence=False, or "
                "give it a torch.distributed.tensor.parallel.ParallelStyle in layouts"
            )
    return added
