"""Tensor parallel on real ranks: loss and gradients are those of one process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parallelkit_torch import names
from parallelkit_torch.parallel import tensor
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import parallelkit as pk
from parallelkit.errors import LayoutError

sys.path.insert(0, str(Path(__file__).parent))
import models

group = pk.init_process_group(device="cpu", timeout=30)
rank, world = group.rank, group.world_size
mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tensor",))
KV_HEADS = 4  # divided by 2 and by 4
tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(1))


def whole(value: torch.Tensor | None) -> torch.Tensor:
    assert value is not None
    return value.full_tensor() if isinstance(value, DTensor) else value


def same_everywhere(value: torch.Tensor) -> bool:
    parts = [torch.empty_like(value) for _ in range(world)]
    dist.all_gather(parts, value.contiguous())
    return all(torch.equal(part, parts[0]) for part in parts)


def decoder(seed: int = 0, *, dtype: torch.dtype = torch.float32, **sizes: Any) -> nn.Module:
    model = models.decoder(seed, kv_heads=KV_HEADS, **sizes)
    with torch.no_grad():  # norms of ones and no biases would hide mistakes
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) / 4)
    return model.to(dtype)


def divide(model: nn.Module, on: DeviceMesh = mesh, **options: Any) -> tuple[dict[str, Any], str]:
    chosen = tensor.styles(model, **options)
    tensor.check(model, chosen, on.size())
    return chosen, "\n".join(tensor.apply(model, on, chosen))


def loss_of(model: nn.Module, inputs: torch.Tensor = tokens) -> torch.Tensor:
    logits = model(inputs)
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), inputs.roll(-1, 1).flatten())


def compare(model: nn.Module, reference: nn.Module, tolerance: float = 1e-5) -> None:
    """One forward and backward, and the names, against one process."""
    mine, theirs = loss_of(model), loss_of(reference)
    logits = model(tokens)
    assert type(logits) is torch.Tensor
    assert logits._base is None  # a view would lose the hooks of FSDP2
    torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    mine.backward()
    theirs.backward()
    expected = dict(reference.named_parameters())
    got = dict(model.named_parameters())
    assert list(got) == list(expected)
    assert names.plain_names(model) == names.plain_names(reference)
    for name, parameter in got.items():
        gradient = parameter.grad
        if isinstance(parameter, DTensor):
            assert isinstance(gradient, DTensor), name
            assert gradient.placements == parameter.placements, (name, gradient.placements)
        if not isinstance(gradient, DTensor) or gradient.placements[0].is_replicate():
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            assert same_everywhere(local), name
        torch.testing.assert_close(
            whole(gradient), expected[name].grad, rtol=tolerance, atol=tolerance, msg=name
        )


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.cells = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2)
        )
        self.norm, self.last = nn.LayerNorm(8), nn.Linear(8, 12)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for cell in self.cells:
            x = x + cell(x)
        return self.last(self.norm(x))  # type: ignore[no-any-return]


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Net()


def check_whole(*, sequence: bool, tied: bool) -> None:
    """Loss and gradients, twice, and a step of the optimiser, which keeps ranks together."""
    reference = decoder(0, tied=tied)
    model = decoder(0, tied=tied)
    buffers = dict(model.named_buffers())
    _, said = divide(model, sequence=sequence)
    assert ("model.layers.* (2): Block" in said) == sequence, said
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    layer = model.get_submodule("model.layers.1")
    assert layer.self_attn.k_proj.weight.to_local().shape == (16 // world, 16)
    assert layer.mlp.down_proj.weight.to_local().shape == (16, 32 // world)
    for norm in (layer.input_layernorm, model.get_submodule("model.norm")):
        assert norm.weight.placements == (Replicate(),)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    table, head = model.get_parameter("model.embed_tokens.weight"), model.lm_head.weight
    assert (table is head) == tied
    assert table.placements == head.placements == (Shard(0),)
    compare(model, reference)
    compare(model, reference)  # gradients add up over micro-batches
    for parameters in (model.parameters(), reference.parameters()):
        torch.optim.AdamW(parameters, lr=0.1, foreach=True).step()  # as on GPUs
    torch.testing.assert_close(loss_of(model), loss_of(reference), rtol=1e-4, atol=1e-4)


def check_first_rank_wins() -> None:
    """Divided parameters get the first rank's values, and whole ones of "sequence" as well."""
    model, reference = decoder(rank), decoder(0)
    named, _ = divide(model, sequence=True)
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[0] in named:
            assert torch.equal(whole(parameter), reference.get_parameter(name)), name


def check_marks_and_freezing() -> None:
    """Frozen stays frozen, thawed works, marks of the user's stay."""
    model, reference = decoder(), decoder()
    for each in (model, reference):
        each.get_parameter("model.layers.0.mlp.up_proj.weight").requires_grad_(False)
        each.get_parameter("model.layers.0.input_layernorm.weight").requires_grad_(False)
    model.lm_head.weight.mark = "mine"
    divide(model, sequence=True)
    assert model.lm_head.weight.mark == "mine"
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
    assert frozen == [n for n, p in reference.named_parameters() if not p.requires_grad] != []
    for each in (model, reference):
        each.requires_grad_(True)
    compare(model, reference)


def check_low_precision() -> None:
    """bfloat16, as far as its eight bits go."""
    model, reference = decoder(dtype=torch.bfloat16), decoder(dtype=torch.bfloat16)
    divide(model, sequence=True)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    compare(model, reference, tolerance=3e-2)


def check_odd_length() -> None:
    """Refused at the call where the sequence is divided; fine where it is not."""
    odd = tokens[:, :7]
    model = decoder()
    divide(model, sequence=True)
    try:
        loss_of(model, odd)
    except LayoutError as error:
        assert f"tensor={world} got hidden states of shape [2, 7, 16]" in str(error)
    else:
        raise AssertionError("a sequence of 7 was divided")
    model, reference = decoder(), decoder()
    divide(model)
    torch.testing.assert_close(loss_of(model, odd), loss_of(reference, odd))


def check_stage() -> None:
    """A pipeline stage holds some layers only: its ends are those of what is here."""
    model, reference = decoder(layers=3), decoder(layers=3)
    chosen = tensor.styles(model, sequence=True)
    for each in (model, reference):
        del each.get_submodule("model.layers")[0]
    stage = nn.Module()
    stage.model = nn.Module()
    stage.model.layers = nn.ModuleDict({"1": model.model.layers[0]})
    lines = tensor.apply(stage, mesh, chosen)
    assert any("Block(first=True, last=True)" in line for line in lines), lines
    x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(2))
    angles = reference.model.rotary_emb(torch.arange(8))
    torch.testing.assert_close(
        stage.model.layers["1"](x, *angles), reference.model.layers[0](x, *angles)
    )


def check_layouts() -> None:
    """Layouts of the user's, on names that nobody knows."""
    small = tokens % 12
    for layouts in (
        {
            "table": "rowwise",
            "cells.*.0": "colwise",
            "cells.*.2": "rowwise",
            "last": "colwise_gather",
        },
        {"table": "colwise_gather", "last": RowwiseParallel(input_layouts=Replicate())},
        {"cells.0.0": ColwiseParallel(), "cells.0.2": "rowwise", "cells.*.*": "replicate"},
    ):
        model, reference = net(), net()
        divide(model, layouts=layouts, builtin=False)
        loss = loss_of(model, small)
        torch.testing.assert_close(loss, loss_of(reference, small), rtol=1e-5, atol=1e-5)
        compare_with = dict(reference.named_parameters())
        loss.backward()
        loss_of(reference, small).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                whole(parameter.grad), compare_with[name].grad, rtol=1e-5, atol=1e-5, msg=name
            )


def check_shards() -> None:
    """FSDP2 over what is divided: one parameter for tied ones, whole gradients."""
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_shard", "tensor"))
    model, reference = decoder(tied=True), decoder(tied=True)
    divide(model, square["tensor"], sequence=True)
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=square["data_shard"])
    fully_shard(model, mesh=square["data_shard"])
    assert model.lm_head.weight is model.get_parameter("model.embed_tokens.weight")
    batch = torch.cat([tokens, tokens.flip(0, 1)])
    loss_of(model, batch.chunk(2)[square.get_local_rank("data_shard")]).backward()
    loss_of(reference, batch).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            whole(parameter.grad),
            reference.get_parameter(name).grad,
            rtol=1e-5,
            atol=1e-5,
            msg=name,
        )


def check_twice() -> None:
    """What is divided already is refused."""
    model = decoder()
    divide(model)
    try:
        divide(model)
    except LayoutError as error:
        assert "divided already" in str(error)
    else:
        raise AssertionError("divided twice")


if world == 2:
    for sequence, tied in ((False, False), (False, True), (True, False), (True, True)):
        check_whole(sequence=sequence, tied=tied)
    check_first_rank_wins()
    check_marks_and_freezing()
    check_low_precision()
    check_odd_length()
    check_stage()
    check_layouts()
    check_twice()
else:
    check_whole(sequence=False, tied=False)
    check_whole(sequence=True, tied=True)
    check_shards()
group.close()
