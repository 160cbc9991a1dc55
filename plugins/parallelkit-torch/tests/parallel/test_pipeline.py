"""Cutting models into stages, in one process; and pipelines on real ranks, see `jobs/pipeline*`."""

from __future__ import annotations

import gc
import random
import signal
import sys
import weakref
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from parallelkit_torch.parallel import assign, cutting, pipeline, units
from parallelkit_torch.parallel.activations import Shape, find
from parallelkit_torch.parallel.batches import split_inputs
from torch import nn

from parallelkit.errors import DataShardError, PlanError, StageError
from parallelkit.spawn import RankResult

sys.path.insert(0, str(Path(__file__).parents[1] / "jobs"))
from models import DecoderLayer, TinyDecoder, decoder, mlp

sys.path.pop(0)

Job = Callable[..., list[RankResult]]
TOKENS = torch.arange(10).reshape(2, 5)


class Gpt(nn.Module):
    """GPT-2's names; the embedding's dropout and the positions belong to the first stage."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(32, 8),
                "wpe": nn.Embedding(16, 8),
                "drop": nn.Dropout(0.5),
                "h": nn.ModuleList(nn.Linear(8, 8) for _ in range(layers)),
                "ln_f": nn.LayerNorm(8),
            }
        )
        self.lm_head = nn.Linear(8, 32, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        parts: Any = self.transformer
        positions = torch.arange(tokens.shape[1])
        x = parts["drop"](parts["wte"](tokens) + parts["wpe"](positions))
        for index in range(len(parts["h"])):
            x = torch.tanh(parts["h"][index](x))
        return self.lm_head(parts["ln_f"](x))  # type: ignore[no-any-return]


class Titan(nn.Module):
    """torchtitan's names: layers in a dict, the head called output, a buffer at the top."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(32, 8)
        self.layers = nn.ModuleDict({str(n): nn.Linear(8, 8) for n in range(3)})
        self.norm, self.output = nn.LayerNorm(8), nn.Linear(8, 32)
        self.register_buffer("scale", torch.full((8,), 0.5), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = x + layer(x) * self.scale
        return self.output(self.norm(x))  # type: ignore[no-any-return]


class Scaled(TinyDecoder):
    """A forward that does more than call its parts."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) / 8


class ByName(TinyDecoder):
    """Hidden states by name, and an output with fields, as in Hugging Face."""

    def forward(  # type: ignore[override]
        self, input_ids: torch.Tensor | None = None, inputs_embeds: torch.Tensor | None = None
    ) -> SimpleNamespace:
        assert (input_ids is None) != (inputs_embeds is None)
        if inputs_embeds is None:
            inputs_embeds = self.model.embed_tokens(input_ids)
        cos, sin = self.model.rotary_emb(torch.arange(inputs_embeds.shape[1]))
        x = inputs_embeds
        for layer in self.model.layers[: len(self.model.layers)]:
            x = layer(x, cos, sin)
        return SimpleNamespace(logits=self.lm_head(self.model.norm(x)), extra=None)


class Two(nn.Module):
    """No form that is known; two tensors between its halves."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Pair(), Sum()

    def forward(self, *x: torch.Tensor) -> Any:
        return self.right(self.left(x))


class Pair(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: Any) -> Any:
        return super().forward(x[0]), x[0].t()


class Sum(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 2)

    def forward(self, x: Any) -> Any:
        return super().forward(x[0] + x[1].t())


def chain(model: nn.Module, stages: Sequence[Sequence[str]], *x: Any) -> Any:
    for index in range(len(stages)):
        x = pipeline.cut(model, stages, index)(*x)
        x = x if isinstance(x, tuple) else (x,)
    return x[0] if len(x) == 1 else x


# --- where a model can be cut


def test_units_of_a_decoder() -> None:
    layers = [f"model.layers.{n}" for n in range(3)]
    assert pipeline.units(decoder(layers=3)) == [
        "model.embed_tokens", *layers, "model.norm", "lm_head"
    ]  # fmt: skip
    assert pipeline.units(decoder(layers=1).model) == ["embed_tokens", "layers.0", "norm"]
    assert pipeline.units(Titan())[-2:] == ["norm", "output"]


def test_positions_and_dropout_go_with_the_embedding() -> None:
    found = units.anatomy(Gpt())
    assert found.units[0] == ("transformer.wte", "transformer.wpe", "transformer.drop")
    assert pipeline.units(Gpt())[1] == "transformer.h.0"


def test_units_of_a_sequential() -> None:
    assert pipeline.units(mlp(depth=3)) == ["0", "2", "4", "6"]
    nested = nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2))
    assert units.anatomy(nested).units == (("0", "1.0", "1.1"), ("2",))
    assert torch.equal(
        chain(nested, pipeline.assign(nested, 2), torch.eye(4)), nested(torch.eye(4))
    )


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.Sequential(nn.Tanh()), "without parameters"),
        (nn.LSTM(4, 4), "LSTM cannot be cut"),
        (nn.ModuleDict({"a": decoder(), "b": decoder()}), "2 decoders"),
    ],
)
def test_what_is_not_recognised_is_said(model: nn.Module, said: str) -> None:
    with pytest.raises(StageError, match=said):
        pipeline.units(model)


def test_parameters_outside_of_units_are_named() -> None:
    model = decoder()
    model.extra = nn.Linear(2, 2)
    with pytest.raises(StageError, match=r"'extra\.weight'.*1 others.*stages="):
        pipeline.assign(model, 2)


# --- the most even cut


def largest(sizes: list[int], cut: list[tuple[int, int]]) -> int:
    return max(sum(sizes[start:stop]) for start, stop in cut)


def test_cuts_are_as_even_as_any() -> None:
    rng = random.Random(0)
    for _ in range(40):
        n = rng.randint(1, 8)
        sizes = [rng.choice((0, 1, 3, 9, 40)) for _ in range(n)]
        for count in range(1, n + 1):
            made = assign._even(sizes, count)
            assert [a for a, _ in made] + [n] == [0] + [b for _, b in made]
            assert all(a < b for a, b in made)
            every = [
                list(zip((0, *inner), (*inner, n), strict=True))
                for inner in combinations(range(1, n), count - 1)
            ]
            least = min(largest(sizes, one) for one in every)
            assert largest(sizes, made) == least
            squares = [
                sum(sum(sizes[a:b]) ** 2 for a, b in one)
                for one in every
                if largest(sizes, one) == least
            ]
            assert sum(sum(sizes[a:b]) ** 2 for a, b in made) == min(squares)


def test_bytes_count_not_layers() -> None:
    heavy = decoder(vocab=4096, layers=4)
    stages = pipeline.assign(heavy, 3)
    assert stages[0] == ["model.embed_tokens"]
    assert stages[2] == ["lm_head"]
    with torch.device("meta"):
        assert pipeline.assign(TinyDecoder(vocab=4096, layers=4), 3) == stages


def test_too_many_stages() -> None:
    with pytest.raises(StageError, match="4 parts.*fewer than the 5 stages"):
        pipeline.assign(mlp(depth=3), 5)
    for count in (0, -1, True, "2"):
        with pytest.raises(StageError, match="positive integer"):
            pipeline.assign(mlp(), count)  # type: ignore[arg-type]


# --- stages that the user names


def test_given_stages() -> None:
    model = decoder(layers=3)
    given = [["model.embed_tokens", "model.layers"], ["model.norm", "lm_head"]]
    made = pipeline.assign(model, 2, given)
    assert made[0][-1] == "model.layers.2"
    assert torch.equal(chain(model, made, TOKENS), model(TOKENS))
    small = mlp()
    assert pipeline.assign(small, 2, [["0", "2", "4"], ["6"]])[0] == ["0", "1", "2", "3", "4", "5"]


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ([["0", "2", "4", "6"]], "has 1 lists, of 4 names; the plan needs 2"),
        ([["0", "2", "4", "6"], []], "of 4, 0 names"),
        ([["0", "2"], ["4", "5", "6", "seven"]], "'seven', which is no module"),
        ([["0", "2"], ["2", "4", "6"]], "names '2' twice"),
        ([["0", "2"], ["6"]], "does not name '4'"),
        ([["0", "4"], ["2", "6"]], "'4' in stage 0, after modules of stage 1"),
    ],
)
def test_given_stages_that_are_wrong(stages: list[list[str]], said: str) -> None:
    with pytest.raises(StageError, match=said):
        pipeline.assign(mlp(), 2, stages)


def test_given_stages_inside_of_a_unit() -> None:
    stages = [["model.embed_tokens", "model.layers.0.self_attn"], ["model.layers.0.mlp"]]
    with pytest.raises(StageError, match=r"inside of 'model\.layers\.0'"):
        pipeline.assign(decoder(layers=1), 2, stages)
    with pytest.raises(StageError, match=r"both there"):
        pipeline.assign(decoder(layers=1), 2, [["model.layers"], ["model.layers.0"]])


def test_any_model_can_be_cut_by_names() -> None:
    model = Two()
    stages = pipeline.assign(model, 2, [["left"], ["right"]])
    x = torch.arange(16.0).reshape(4, 4)
    between = pipeline.cut(model, stages, 0)(x)
    assert isinstance(between, tuple)
    assert all(part.is_contiguous() for part in between)
    assert torch.equal(pipeline.cut(model, stages, 1)(*between), model(x))
    with pytest.raises(StageError, match="Give example="):
        pipeline.check(model, stages)
    assert pipeline.check(model, stages, x) == "equal to the whole model on the example"
    with pytest.raises(StageError, match=r"'right\.weight' belongs to no part"):
        pipeline.assign(model, 1, [["left"]])


def test_shared_parameters_are_refused_by_name() -> None:
    tied = decoder(tied=True)
    with pytest.raises(
        StageError, match=r"embed_tokens\.weight' \(stage 0\) and 'lm_head\.weight'"
    ):
        pipeline.assign(tied, 2)
    assert len(pipeline.assign(tied, 1)) == 1
    layer = nn.Linear(4, 4)
    with pytest.raises(StageError, match="one parameter"):
        pipeline.assign(nn.Sequential(layer, layer), 2)


# --- one stage


@pytest.mark.parametrize("make", [lambda: decoder(layers=3), Gpt, Titan, lambda: ByName(layers=3)])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_stages_in_a_row_are_the_whole(make: Callable[[], nn.Module], count: int) -> None:
    model = make().eval()
    stages = pipeline.assign(model, count)
    whole = cutting._as_tensors(model, (), model(TOKENS))
    assert torch.equal(chain(model, stages, TOKENS), whole)
    assert "equal to the whole model on 8 tokens" in pipeline.check(model, stages)
    names = [set(pipeline.cut(model, stages, n).state_dict()) for n in range(count)]
    assert set().union(*names) == set(model.state_dict())
    assert sum(map(len, names)) == len(model.state_dict())


def test_a_dropout_beside_the_layers_is_applied_once() -> None:
    model = Gpt()
    stages = pipeline.assign(model, 4)
    parts = [list(pipeline.cut(model, stages, n).modules()) for n in range(4)]
    assert [any(isinstance(m, nn.Dropout) for m in part) for part in parts] == [True] + 3 * [False]


def test_cutting_leaves_the_model_and_frees_what_is_away() -> None:
    model = decoder(layers=3)
    before = model(TOKENS)
    stages = pipeline.assign(model, 2)
    first = pipeline.cut(model, stages, 0)
    assert torch.equal(model(TOKENS), before)
    assert model._forward_hooks == {}
    assert first.model.embed_tokens.weight is model.model.embed_tokens.weight  # type: ignore[union-attr]
    head = weakref.ref(model.lm_head.weight)
    del model, before
    gc.collect()
    assert head() is None
    with pytest.raises(StageError, match="stage 2 was asked for; there are 0 to 1"):
        pipeline.cut(first, stages, 2)


def test_a_forward_that_does_more_is_found() -> None:
    model = Scaled(layers=2)
    stages = pipeline.assign(model, 2)
    with pytest.raises(StageError, match="differs by.*scaling"):
        pipeline.check(model, stages)
    model.train()
    with pytest.raises(StageError):
        pipeline.check(model, stages)
    assert all(module.training for module in model.modules())


def test_a_forward_that_needs_tokens_is_found() -> None:
    class Counts(TinyDecoder):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            batch, length = tokens.shape
            return super().forward(tokens).view(batch, length, -1)

    model = Counts(layers=2)
    with pytest.raises(StageError, match="stage 1 does not run on what stage 0 gives"):
        pipeline.check(model, pipeline.assign(model, 2))


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (SimpleNamespace(last_hidden_state=torch.ones(1)), torch.ones(1)),
        ({"first": torch.ones(2), "cache": None}, torch.ones(2)),
        ((torch.ones(3), None), torch.ones(3)),
        ([torch.ones(1), torch.ones(2)], (torch.ones(1), torch.ones(2))),
    ],
)
def test_outputs_become_tensors(output: Any, expected: Any) -> None:
    got = cutting._as_tensors(nn.Identity(), (), output)
    assert type(got) is type(expected)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("output", [None, "text", (), {"a": 1}])
def test_outputs_that_are_no_tensors(output: Any) -> None:
    with pytest.raises(StageError, match="Identity gave a"):
        cutting._as_tensors(nn.Identity(), (), output)


# --- the stages of one rank


def held(count: int = 4, mine: Sequence[int] = (0, 2)) -> tuple[nn.Module, pipeline.PipelineModule]:
    model = decoder(layers=4)
    stages = pipeline.assign(model, count)
    parts = [pipeline.cut(model, stages, index) for index in mine]
    return model, pipeline.PipelineModule(parts, stages=stages, indices=mine)


@pytest.mark.parametrize("mine", [(0,), (3,), (0, 2), (1, 3)])
def test_names_are_those_of_the_whole(mine: tuple[int, ...]) -> None:
    model, rank = held(mine=mine)
    whole = dict(model.named_parameters())
    names = dict(rank.named_parameters())
    assert set(names) == {
        n for n in whole for i in mine for unit in rank.stages[i] if n.startswith(f"{unit}.")
    }
    assert all(parameter is whole[name] for name, parameter in names.items())
    assert list(rank.state_dict()) == list(names)
    assert len(list(rank.parameters())) == len(names)
    for name in names:
        assert rank.get_parameter(name) is whole[name]
    before = {name: value.clone() for name, value in rank.state_dict().items()}
    rank.load_state_dict({name: value + 1 for name, value in before.items()})
    for name, value in before.items():
        torch.testing.assert_close(whole[name].detach(), value + 1)


def test_modes_devices_and_replaced_parameters_reach_the_stages() -> None:
    _, rank = held()
    rank.eval()
    assert not any(m.training for stage in rank.stage_modules for m in stage.modules())
    assert not rank.training
    rank.train()
    assert all(m.training for stage in rank.stage_modules for m in stage.modules())
    rank.to(torch.float64)
    for stage in rank.stage_modules:
        assert {p.dtype for p in stage.parameters()} == {torch.float64}
        assert {b.dtype for b in stage.buffers()} == {torch.float64}
    layer = next(m for m in rank.stage_modules[1].modules() if isinstance(m, DecoderLayer))
    layer.mlp.up_proj.weight = nn.Parameter(torch.zeros(3))  # as FSDP2 does
    assert sum(p.shape == (3,) for p in rank.parameters()) == 1
    assert "stages 0, 2 of 4" in repr(rank)
    assert rank.explain()[0] == "stage 0 (here): model.embed_tokens to model.layers.0, 2 modules"


def test_a_pipeline_is_not_called() -> None:
    _, rank = held()
    with pytest.raises(StageError, match=r"context\.train_step"):
        rank(TOKENS)


# --- running, as far as one process can


def group(size: int = 1, rank: int = 0) -> Any:
    return SimpleNamespace(
        world_size=size, rank=rank, device="cpu", broadcast_object=lambda obj, src=0: obj
    )


@pytest.mark.parametrize(
    ("schedule", "virtual", "size", "items", "asked", "cuts"),
    [
        ("1f1b", 1, 2, 8, 4, 4),
        ("1f1b", 1, 2, 7, 4, 1),
        ("1f1b", 1, 2, 6, 4, 3),
        ("1f1b", 1, 4, 8, None, 4),
        ("gpipe", 1, 2, 3, 100, 3),
        ("interleaved", 2, 2, 8, 5, 4),
        ("interleaved", 2, 4, 9, 9, 3),  # nine are no whole number of rounds of four
        ("interleaved", 2, 2, 1, 2, 1),
    ],
)
def test_microbatches(
    schedule: str, virtual: int, size: int, items: int, asked: int | None, cuts: int
) -> None:
    runner = pipeline.Runner(group(size), schedule=schedule, virtual_stages=virtual)
    assert runner.fitting(items, asked) == cuts


def test_settings_of_a_pipeline() -> None:
    with pytest.raises(PlanError, match="schedule is 'zero'"):
        pipeline.Runner(group(), schedule="zero")
    for schedule, virtual in (("1f1b", 2), ("interleaved", 1)):
        with pytest.raises(PlanError, match=f"virtual_stages={virtual}"):
            pipeline.Runner(group(), schedule=schedule, virtual_stages=virtual)
    for count in (0, True, 1.5):
        with pytest.raises(PlanError, match="positive integer"):
            pipeline.Runner(group()).fitting(4, count)  # type: ignore[arg-type]
    with pytest.raises(StageError, match="2 stages for a pipeline of 1"):
        pipeline.cut_for(mlp(), pipeline.assign(mlp(), 2), group=group())
    with pytest.raises(StageError, match="got a TinyMlp"):
        pipeline.step(mlp(), TOKENS, TOKENS, loss=nn.functional.mse_loss)


def test_inputs_of_a_batch() -> None:
    x, cpu = torch.ones(2), torch.device("cpu")
    assert split_inputs(x, cpu) == ((x,), {})
    assert split_inputs((x, x), cpu) == ((x, x), {})
    assert split_inputs({"input_ids": x, "mask": x}, cpu) == ((x,), {"mask": x})
    bad: list[tuple[Any, str]] = [
        ((), "empty"), ([x], "hold a list"), ((x, None), "hold a NoneType"), ({}, "hold a dict"),
        ({"x": x, "target": x}, "cannot be called target"),
    ]  # fmt: skip
    for inputs, said in bad:
        with pytest.raises(DataShardError, match=said):
            split_inputs(inputs, cpu)


def test_shapes_between_stages() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2))
    stages = pipeline.assign(model, 3)
    parts = {index: pipeline.cut(model, stages, index) for index in range(3)}
    x = (torch.ones(5, 4),)
    state, mean = torch.get_rng_state(), model.get_buffer("1.running_mean").clone()
    found = find(parts, 3, group(), x, {}, backward=True)
    assert found == [(Shape((5, 3), "float32", True),)] * 2
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model.get_buffer("1.running_mean"), mean)
    model[0].requires_grad_(False)
    assert [s[0].trained for s in find(parts, 3, group(), x, {}, backward=True)] == [False, True]
    with torch.autocast("cpu", torch.bfloat16):
        assert find(parts, 3, group(), x, {}, backward=False)[0][0].dtype == "bfloat16"


# --- real ranks


@pytest.mark.ranks
def test_schedules_equal_one_process(job: Job) -> None:
    job("pipeline.py", ranks=2, timeout=240.0)


@pytest.mark.ranks
def test_sharded_stages_add_up_batches(job: Job) -> None:
    job("pipeline_shards.py", ranks=4, timeout=240.0)


@pytest.mark.ranks
@pytest.mark.parametrize("case", ["killed", "raises"])
def test_failing_stage_is_named(job: Job, case: str) -> None:
    job("pipeline_failures.py", case, ranks=2, ends={1: -signal.SIGKILL if case == "killed" else 0})
