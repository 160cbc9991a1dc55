"""The built-in plan, what is refused before any change, and, in `jobs/tensor.py`, real ranks."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from parallelkit_torch.parallel import tensor
from parallelkit_torch.parallel.sequence import Block, Entry, Sequence
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from parallelkit.errors import LayoutError
from parallelkit.spawn import RankResult

Job = Callable[..., list[RankResult]]
ATTENTION = {"q_proj": 16, "k_proj": 8, "v_proj": 8}


class Bag(nn.Module):
    """A module that holds what it is given under these names."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def attention(head_dim: int = 4, **more: nn.Module) -> Bag:
    made = {name: linear(16, width) for name, width in ATTENTION.items()}
    bag = Bag(**made, o_proj=linear(16, 16), **more)
    bag.head_dim = head_dim
    return bag


def mlp(**more: nn.Module) -> Bag:
    return Bag(gate_proj=linear(16, 24), up_proj=linear(16, 24), down_proj=linear(24, 16), **more)


def layer(**more: nn.Module) -> Bag:
    parts: dict[str, nn.Module] = {
        "self_attn": attention(),
        "mlp": mlp(),
        "input_layernorm": nn.LayerNorm(16),
        "post_attention_layernorm": nn.LayerNorm(16),
    }
    return Bag(**(parts | more))


def llama(*layers: Bag, tied: bool = False) -> Bag:
    body = Bag(
        embed_tokens=nn.Embedding(32, 16),
        layers=nn.ModuleList(layers or [layer(), layer()]),
        norm=nn.LayerNorm(16),
    )
    model = Bag(model=body, lm_head=linear(16, 32))
    if tied:
        model.lm_head.weight = body.embed_tokens.weight
    return model


def titan() -> Bag:
    block = Bag(
        attention=Bag(wq=linear(16, 16), wk=linear(16, 8), wv=linear(16, 8), wo=linear(16, 16)),
        feed_forward=Bag(w1=linear(16, 24), w3=linear(16, 24), w2=linear(24, 16)),
        attention_norm=nn.RMSNorm(16),
        ffn_norm=nn.RMSNorm(16),
    )
    return Bag(
        tok_embeddings=nn.Embedding(32, 16),
        layers=nn.ModuleDict({"0": block}),
        norm=nn.RMSNorm(16),
        output=linear(16, 32),
    )


def checked(model: nn.Module, degree: int = 2, **options: Any) -> dict[str, Any]:
    styles = tensor.styles(model, **options)
    tensor.check(model, styles, degree)
    return styles


def two(first: nn.Linear, second: nn.Linear, *more: nn.Module) -> nn.Sequential:
    return nn.Sequential(first, nn.ReLU(), second, *more)


W123 = {"w1": "colwise", "w3": "colwise", "w2": "rowwise"}
COLUMN_ROW = {"0": "colwise", "2": "rowwise"}


class TestBuiltin:
    def test_llama_names(self) -> None:
        styles = checked(llama())
        assert styles["model.embed_tokens"] == "rowwise"
        assert styles["lm_head"] == "colwise_gather"
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
            assert styles[f"model.layers.1.{name}"] == "colwise"
        assert styles["model.layers.1.self_attn.o_proj"] == "rowwise"
        assert styles["model.layers.0.mlp.gate_proj"] == "colwise"
        assert styles["model.layers.0.mlp.down_proj"] == "rowwise"
        assert len(styles) == 2 * 7 + 2

    def test_torchtitan_names(self) -> None:
        styles = checked(titan())
        assert styles["tok_embeddings"] == "rowwise"
        assert styles["output"] == "colwise_gather"
        assert styles["layers.0.attention.wo"] == styles["layers.0.feed_forward.w2"] == "rowwise"
        assert styles["layers.0.feed_forward.w3"] == "colwise"
        assert len(styles) == 7 + 2

    def test_a_linear_called_output_elsewhere_is_left_alone(self) -> None:
        model = Bag(body=llama(), output=linear(16, 7))
        assert "output" not in checked(model)

    @pytest.mark.parametrize("make", [llama, titan])
    def test_sequence(self, make: Callable[[], Bag]) -> None:
        model = make()
        styles = checked(model, sequence=True)
        kinds = [type(style) for style in styles.values()]
        blocks = 2 if make is llama else 1
        assert kinds.count(Block) == blocks
        assert kinds.count(Entry) == kinds.count(RowwiseParallel) == 2 * blocks
        assert list(styles.values()).count("sequence") == 2 * blocks
        assert not any(name.endswith(("model.norm", "embed_tokens.norm")) for name in styles)

    def test_order_is_that_of_the_model(self) -> None:
        names = list(checked(llama()))
        assert names[0] == "model.embed_tokens"
        assert names[-1] == "lm_head"
        assert names.index("model.layers.0.mlp.up_proj") < names.index(
            "model.layers.1.self_attn.q_proj"
        )

    def test_yours_go_before(self) -> None:
        model = llama()
        styles = checked(model, layouts={"lm_head": "replicate", "model.embed_tokens": "replicate"})
        assert styles["lm_head"] == styles["model.embed_tokens"] == "replicate"
        assert styles["model.layers.0.mlp.up_proj"] == "colwise"
        style = ColwiseParallel()
        assert checked(model, layouts={"**.up_proj": style})["model.layers.1.mlp.up_proj"] is style

    def test_norms_of_heads(self) -> None:
        heads = layer(self_attn=attention(q_norm=nn.RMSNorm(4), k_norm=nn.RMSNorm(4)))
        for sequence in (False, True):
            style = checked(llama(heads), sequence=sequence)["model.layers.0.self_attn.q_norm"]
            assert isinstance(style, Sequence)
            assert style.dim == 2

    def test_norms_over_all_heads_are_refused(self) -> None:
        model = llama(layer(self_attn=attention(q_norm=nn.RMSNorm(16))))
        with pytest.raises(LayoutError, match=r"self_attn\.q_norm' has parameters of its own"):
            checked(model)

    def test_nothing_recognised(self) -> None:
        with pytest.raises(LayoutError, match=r"nothing here is; the model has '\*'\. Write"):
            tensor.styles(two(linear(4, 8), linear(8, 4)))

    def test_nothing_to_divide(self) -> None:
        for layouts in ({"**": "replicate"}, {}):
            with pytest.raises(LayoutError, match="the layouts divide nothing"):
                tensor.styles(llama(), layouts, builtin=False)

    @pytest.mark.parametrize("name", ["qkv_proj", "c_attn", "query_key_value"])
    def test_fused_projections_are_refused_by_name(self, name: str) -> None:
        fused = Bag(**{name: linear(16, 48)}, o_proj=linear(16, 16))
        model = llama(layer(self_attn=fused))
        with pytest.raises(LayoutError, match=rf"self_attn\.{name}' holds several projections"):
            tensor.styles(model)
        styles = checked(model, layouts={f"**.{name}": "replicate"})
        assert "model.layers.0.self_attn.o_proj" not in styles

    def test_a_layer_that_is_no_linear_is_refused_by_name(self) -> None:
        model = llama(layer(mlp=Bag(up_proj=nn.Conv1d(16, 24, 1), down_proj=linear(24, 16))))
        with pytest.raises(LayoutError, match=r"module '.*mlp\.up_proj' is a Conv1d"):
            tensor.styles(model)

    @pytest.mark.parametrize(
        ("model", "layouts"),
        [
            (llama(layer(extra=nn.Linear(16, 16))), {}),
            (llama(layer(mlp=Bag(gate=linear(16, 2), shared=mlp()))), {}),
            (llama(), {"model.layers.0.mlp": "replicate"}),
            (llama(), {"**.input_layernorm": "replicate"}),
        ],
        ids=["unknown layer", "experts", "mlp kept whole", "norm kept whole"],
    )
    def test_sequence_wants_to_know_all_of_a_block(
        self, model: Bag, layouts: dict[str, Any]
    ) -> None:
        with pytest.raises(LayoutError, match="sequence=True divides all activations of a layer"):
            tensor.styles(model, layouts, sequence=True)
        tensor.styles(model, layouts)

    def test_sequence_is_of_the_built_in_plan(self) -> None:
        with pytest.raises(LayoutError, match="only yours are asked for"):
            tensor.styles(llama(), {"**.up_proj": "colwise"}, builtin=False, sequence=True)
        with pytest.raises(LayoutError, match="they recognise nothing here"):
            tensor.styles(two(linear(4, 8), linear(8, 4)), COLUMN_ROW, sequence=True)


class TestCheck:
    def test_all_offenders_are_listed_with_shapes(self) -> None:
        with pytest.raises(LayoutError) as caught:
            checked(llama(), degree=3)
        said = str(caught.value)
        assert "tensor=3" in said
        assert "'model.embed_tokens' has 32 rows of vocabulary (weight [32, 16])" in said
        assert "'model.layers.*.self_attn.k_proj' has 2 heads of 4 (weight [8, 16])" in said
        assert "does not divide (2 times)" in said
        assert "'lm_head' has 32 output features" in said
        assert "up_proj" not in said  # 24 is divided by 3
        assert said.count("\n") == 6

    def test_heads_decide_not_features(self) -> None:
        with pytest.raises(LayoutError, match=r"k_proj' has 2 heads of 4.*4 does not divide"):
            checked(llama(), degree=4)

    @pytest.mark.parametrize("where", ["attention", "model", "text", "count"])
    def test_where_the_width_of_a_head_is_said(self, where: str) -> None:
        block = layer()
        del block.self_attn.head_dim
        model = llama(block)
        config = SimpleNamespace(hidden_size=16, num_attention_heads=4)
        if where == "attention":
            block.self_attn.config = config
        elif where == "model":
            model.config = config
        elif where == "text":
            model.config = SimpleNamespace(text_config=config)
        else:
            block.self_attn.num_heads = 4
        assert tensor.limits(model, tensor.styles(model))["model.layers.0.self_attn.k_proj"] == 2

    def test_limits(self) -> None:
        limits = tensor.limits(llama(), tensor.styles(llama()))
        assert limits["model.embed_tokens"] == limits["lm_head"] == 32
        assert limits["model.layers.0.self_attn.q_proj"] == 4
        assert limits["model.layers.0.self_attn.k_proj"] == 2
        assert limits["model.layers.1.self_attn.o_proj"] == 4
        assert limits["model.layers.1.mlp.down_proj"] == 24
        table = nn.Sequential(nn.Embedding(32, 6))
        assert tensor.limits(table, {"0": "colwise_gather"}) == {"0": 6}
        assert tensor.limits(table, {"0": RowwiseParallel()}) == {"0": 32}

    @pytest.mark.parametrize("sequence", [False, True])
    def test_every_degree_that_limits_allow_passes(self, sequence: bool) -> None:
        model = llama(tied=True)
        styles = tensor.styles(model, sequence=sequence)
        allowed = []
        for degree in range(1, 33):
            fits = all(limit % degree == 0 for limit in tensor.limits(model, styles).values())
            try:
                tensor.check(model, styles, degree)
            except LayoutError:
                assert not fits, degree
            else:
                assert fits, degree
                allowed.append(degree)
        assert allowed == [1, 2]

    @pytest.mark.parametrize(
        ("model", "layouts", "said"),
        [
            (two(linear(4, 8), linear(8, 4)), {"0": "colwise"}, r"'\*' is 'colwise' \(8 outputs"),
            (two(linear(4, 8), linear(8, 4)), {"2": "rowwise"}, r"'\*' is 'rowwise' \(8 inputs"),
            (two(linear(4, 16), linear(8, 4)), COLUMN_ROW, "several projections in one weight"),
            (
                two(linear(4, 8), linear(8, 4), linear(4, 8)),
                {**COLUMN_ROW, "3": "colwise"},
                "make the layer that follows 'rowwise', or this one 'colwise_gather'",
            ),
            (
                nn.Sequential(linear(4, 8), nn.LayerNorm(8), linear(8, 4)),
                COLUMN_ROW,
                "has parameters of its own between divided layers",
            ),
            (
                nn.Sequential(Bag(a=linear(4, 8), b=linear(8, 4), c=Bag(d=nn.LayerNorm(8)))),
                {"0.a": "colwise", "0.b": "rowwise"},
                r"'\*\.c\.d' has parameters of its own",
            ),
            (nn.Sequential(nn.Embedding(8, 4, max_norm=1.0)), {"0": "rowwise"}, r"max_norm=1\.0"),
            (nn.Sequential(nn.Embedding(8, 4, sparse=True)), {"0": "rowwise"}, "sparse=True"),
        ],
    )
    def test_mistakes(self, model: nn.Module, layouts: dict[str, Any], said: str) -> None:
        with pytest.raises(LayoutError, match=said):
            checked(model, layouts=layouts, builtin=False)

    @pytest.mark.parametrize(
        ("model", "layouts"),
        [
            (two(linear(4, 8), linear(8, 4), linear(4, 3)), COLUMN_ROW),
            (two(linear(4, 8), linear(8, 4)), {"0": "colwise_gather"}),
            (two(linear(4, 8), linear(8, 4)), {"0": ColwiseParallel()}),
            (Bag(w1=linear(4, 8), w2=linear(8, 4), w3=linear(4, 8)), {"w?": "replicate", **W123}),
            (two(linear(4, 16), linear(8, 4)), {"0": ColwiseParallel(), "2": RowwiseParallel()}),
            (
                nn.Sequential(linear(4, 8), nn.LayerNorm(8), linear(8, 4)),
                {**COLUMN_ROW, "1": "replicate"},
            ),
            (llama(), {"model.layers.*.mlp": "replicate"}),
        ],
    )
    def test_what_is_allowed(self, model: nn.Module, layouts: dict[str, Any]) -> None:
        checked(model, layouts=layouts)

    def test_tied_parameters_are_divided_alike_or_refused(self) -> None:
        checked(llama(tied=True))
        for layouts in (
            {"lm_head": "replicate"},
            {"model.embed_tokens": "colwise_gather"},
            {"lm_head": RowwiseParallel()},
        ):
            with pytest.raises(LayoutError, match=r"'model\.embed_tokens'.*share one parameter"):
                checked(llama(tied=True), layouts=layouts)
            checked(llama(), layouts=layouts)
        both = {"lm_head": "replicate", "model.embed_tokens": "replicate"}
        checked(llama(tied=True), layouts=both)

    def test_nothing_is_changed(self) -> None:
        model = llama(tied=True)
        before = {name: id(value) for name, value in model.named_parameters()}
        styles = checked(model, sequence=True)
        tensor.limits(model, styles)
        assert before == {name: id(value) for name, value in model.named_parameters()}
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4])
def test_loss_and_gradients_equal_one_process(job: Job, ranks: int) -> None:
    job("tensor.py", ranks=ranks, timeout=240.0)
