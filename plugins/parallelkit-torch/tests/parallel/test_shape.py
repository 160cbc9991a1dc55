"""What the search is told about a model: sizes, divisors, and a step measured on no values."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from parallelkit_torch.parallel.shape import describe_model
from torch import nn

from parallelkit.errors import ExampleError, LayoutError
from parallelkit.shapes import ModelShape, Size, Unit

VOCAB, DIM, LENGTH = 64, 16, 8


class Layer(nn.Module):
    """A block with the names of Qwen2's, without attention over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(DIM)
        self.mlp = nn.Module()
        self.mlp.gate_proj = nn.Linear(DIM, 4 * DIM, bias=False)
        self.mlp.up_proj = nn.Linear(DIM, 4 * DIM, bias=False)
        self.mlp.down_proj = nn.Linear(4 * DIM, DIM, bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.input_layernorm(x)
        y = nn.functional.silu(self.mlp.gate_proj(y)) * self.mlp.up_proj(y)
        return x + self.mlp.down_proj(y)  # type: ignore[no-any-return]


class Decoder(nn.Module):
    def __init__(self, layers: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(VOCAB, DIM)
        self.model.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.model.norm = nn.LayerNorm(DIM)
        self.model.register_buffer("scale", torch.ones(1))
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.model.embed_tokens(tokens) * self.model.scale
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(self.model.norm(x))  # type: ignore[no-any-return]


def tokens(items: int = 2, length: int = LENGTH) -> torch.Tensor:
    return torch.zeros(items, length, dtype=torch.long)


def by_name(shape: ModelShape) -> dict[str, Unit]:
    return {unit.name: unit for unit in shape.units}


def test_sizes_of_a_decoder() -> None:
    shape = describe_model(Decoder(), tokens())
    units = by_name(shape)
    assert list(units) == [
        "model.embed_tokens",
        *(f"model.layers.{n}" for n in range(3)),
        "model.norm",
        "lm_head",
    ]
    table = VOCAB * DIM * 4
    assert units["model.embed_tokens"].trainable == Size(table, table)
    assert units["lm_head"].trainable == Size(table, table)
    matrices = 3 * 4 * DIM * DIM * 4
    assert units["model.layers.1"].trainable == Size(matrices + 3 * DIM * 4, matrices)
    assert units["model.norm"].trainable == Size(2 * DIM * 4)
    assert units["model.embed_tokens"].buffers == 4
    assert [unit.block for unit in shape.units] == [False, True, True, True, False, False]
    assert shape.parameter_bytes == sum(p.nbytes for p in Decoder().parameters())
    assert shape.divisors == (64,)  # 4 * DIM, and VOCAB
    assert shape.tied == ()
    assert shape.notes == ()
    # operations: two for each weight and position
    layer = units["model.layers.0"]
    assert layer.flops == 2 * (matrices // 4) * LENGTH
    hidden = LENGTH * DIM * 4
    assert layer.output == hidden
    assert (layer.reduced, layer.reductions) == (hidden, 1)
    # gate, silu(gate), up and their product are divided
    assert layer.activations.divided == 4 * 4 * hidden
    assert units["lm_head"].activations.whole >= 2 * LENGTH * VOCAB * 4  # scores, log-softmax
    assert units["lm_head"].working.whole >= 1.9 * LENGTH * VOCAB * 4  # their gradients


@pytest.mark.parametrize("example", [None, tokens()])
def test_the_model_is_left_alone(example: Any) -> None:
    model = Decoder()
    before = copy.deepcopy(model.state_dict())
    parameters = {name: id(p) for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    describe_model(model, example)
    assert torch.equal(torch.get_rng_state(), state)
    assert {name: id(p) for name, p in model.named_parameters()} == parameters
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_a_model_on_the_meta_device_is_the_same() -> None:
    with torch.device("meta"):
        model = Decoder()
    assert describe_model(model, tokens()) == describe_model(Decoder(), tokens())


def test_items_are_counted_one_by_one() -> None:
    few, many = (by_name(describe_model(Decoder(), tokens(items))) for items in (2, 8))
    for name, unit in few.items():
        assert many[name].activations.whole == pytest.approx(unit.activations.whole, rel=0.05)
        assert many[name].working.whole == pytest.approx(unit.working.whole, rel=0.05, abs=64)
        assert many[name].flops == unit.flops
    long = by_name(describe_model(Decoder(), tokens(2, 4 * LENGTH)))
    assert long["model.layers.0"].flops == 4 * few["model.layers.0"].flops


def test_what_is_kept_is_what_autograd_saves() -> None:
    """Against hooks on a real pass: all that is saved, and little else."""
    model, example = Decoder(), tokens(4)
    saved: dict[int, torch.UntypedStorage] = {}
    own = {p.untyped_storage()._cdata for p in (*model.parameters(), *model.buffers())}

    def save(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage
        return x

    with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
        scores = model(example)
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), example.flatten())
    alive = saved | {x.untyped_storage()._cdata: x.untyped_storage() for x in (scores, loss)}
    real = sum(storage.nbytes() for storage in alive.values())
    shape = describe_model(model, example)
    reckoned = 4 * sum(unit.activations.whole for unit in shape.units)
    assert reckoned == pytest.approx(real, rel=0.03)


def test_tied_and_frozen_parameters() -> None:
    shape = describe_model(Decoder(tied=True))
    assert shape.tied == (("model.embed_tokens", "lm_head"),)
    assert by_name(shape)["lm_head"].trainable == Size()
    assert shape.parameter_bytes == sum(p.nbytes for p in Decoder(tied=True).parameters())
    assert shape.segments() == [(0, 6)]
    model = Decoder()
    model.model.layers[0].requires_grad_(False)
    frozen = by_name(describe_model(model, tokens()))["model.layers.0"]
    assert frozen.trainable == Size()
    assert frozen.frozen == by_name(describe_model(Decoder()))["model.layers.0"].trainable


def test_without_an_example() -> None:
    shape = describe_model(Decoder())
    assert not shape.measured
    assert all(unit.activations == unit.working == Size() for unit in shape.units)
    assert shape.parameter_bytes == describe_model(Decoder(), tokens()).parameter_bytes


def test_a_model_that_cannot_be_cut_is_one_piece() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(8, 8)
            self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for part in self.parts:
                x = torch.relu(part(x))
            return x

    shape = describe_model(Net(), torch.zeros(2, 8))
    assert [unit.name for unit in shape.units] == ["the rest", "parts.0", "parts.1", "parts.2"]
    assert [unit.block for unit in shape.units] == [False, True, True, True]
    assert shape.segments() == [(0, 4)]
    assert shape.divisors == ()
    assert any("no pipeline: " in note and "cannot be cut" in note for note in shape.notes)
    assert any(note.startswith("no tensor axis") for note in shape.notes)
    assert shape.parameter_bytes == 4 * (64 + 8) * 4
    assert all(unit.flops == 2 * 64 for unit in shape.units)


def test_layouts_of_the_users_own() -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    shape = describe_model(model, torch.zeros(2, 8), {"0": "colwise", "2": "rowwise"})
    first, last = shape.units
    assert first.trainable == Size((8 * 32 + 32) * 4, (8 * 32 + 32) * 4)
    assert last.trainable == Size((8 * 32 + 8) * 4, 8 * 32 * 4)
    assert shape.divisors == (32,)
    assert first.activations.divided == 32 * 4  # relu's output
    assert (last.reduced, last.reductions) == (8 * 4, 1)
    with pytest.raises(LayoutError):
        describe_model(model, None, {"nothing": "colwise"})


@pytest.mark.parametrize("example", [(torch.zeros(2, 8),), {"x": torch.zeros(2, 8)}])
def test_examples_as_arguments(example: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"scores": self.linear(x)}

    assert describe_model(Net(), example).units[0].activations.whole > 0


def test_a_loss_of_the_users_own() -> None:
    model = nn.Sequential(nn.Linear(8, 1000))
    plain = describe_model(model, torch.zeros(2, 8), loss=lambda y: y.sum())
    assert plain.units[0].working.whole < 1.5 * 4000
    assert describe_model(model, torch.zeros(2, 8)).units[0].working.whole >= 1.9 * 4000


@pytest.mark.parametrize(
    ("example", "mention"),
    [
        (torch.zeros(2, 7), "does not run through Sequential"),
        ({"nonsense": torch.zeros(2, 8)}, "nonsense"),
        (torch.zeros(0, 8), "sizes [0]"),
        ((torch.zeros(2, 8), torch.zeros(3, 8)), "sizes [2, 3]"),
        ("text", "sizes []"),
    ],
)
def test_examples_that_do_not_run(example: Any, mention: str) -> None:
    model = nn.Sequential(nn.Linear(8, 4))
    with pytest.raises(ExampleError) as caught:
        describe_model(model, example)
    assert mention in str(caught.value)
