"""The layer-wise reload by itself, without a publisher: what it notices, and what is left after."""

from __future__ import annotations

import pytest
import tiny_qwen as tiny
import torch
from parallelkit_vllm import reload
from parallelkit_vllm.errors import ReloadError

KEY = "model.layers.0.self_attn.k_proj.weight"
NORM = "model.norm.weight"
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def llm(make_engine, checkpoint):
    return make_engine(checkpoint(0))


def worker(llm):
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def pairs(tensors):
    """Tensors of torch's own, by checkpoint names."""
    for name, tensor in tensors.items():
        raw = torch.frombuffer(bytearray(tensor.data), dtype=torch.uint8)
        yield name, raw.view(getattr(torch, tensor.dtype)).reshape(tensor.shape)


def rows(tensor, count):
    return tiny.raw(tensor.values[:count])


def load(llm, tensors, **options):
    runner = worker(llm).model_runner
    reload.load(runner.model, llm.model_config, worker(llm).vllm_config, pairs(tensors), **options)
    assert llm.reset_prefix_cache()


def test_a_bare_loader_cannot_write_into_packed_layers(llm):
    """Trap 2: the layers have no room any more."""
    with pytest.raises((AssertionError, AttributeError)):
        worker(llm).model_runner.model.load_weights(pairs(tiny.tensors(1)))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.pop(KEY), r"layers\.0\.self_attn\.qkv_proj\.weight \(without k\)"),
        (lambda t: t.pop(UP), r"layers\.1\.mlp\.gate_up_proj\.weight \(without 1\)"),
        (lambda t: [t.pop(n) for n in [*t] if ".layers.1.self_attn.o_proj" in n], r"1.*o_proj"),
        (lambda t: t.pop("model.norm.weight"), r"values for model\.norm\."),
        (lambda t: t.pop("lm_head.weight"), r"values for lm_head\."),
        (lambda t: t.clear(), "values for model.embed_tokens, .* more"),
        (
            lambda t: t.update({KEY: rows(t[KEY], 32)}),
            "loader failed with RuntimeError",
        ),
        (lambda t: t.update({"else.weight": t[KEY]}), "no module or parameter named 'else'"),
        (
            lambda t: t.update({NORM: tiny.raw(t[NORM].values[0])}),
            "AssertionError",
        ),
    ],
    ids=["shard", "other-shard", "layer", "norm", "head", "nothing", "shape", "name", "scalar"],
)
def test_what_is_wrong_is_noticed_and_leaves_nothing_behind(llm, fresh, change, text):
    """Traps 5 and 6: else the next good update fails too, or shards are not initialised."""
    given = tiny.tensors(1)
    change(given)
    with pytest.raises(ReloadError, match=text):
        load(llm, given)
    assert not reload.opened(worker(llm).model_runner.model)
    assert tiny.greedy(llm)  # of no version, and alive
    good = tiny.tensors(2)
    load(llm, good)
    assert tiny.greedy(llm) == fresh(tensors=good)


def test_layers_that_the_checkpoint_does_not_have_keep_what_they_have(llm, fresh):
    given = tiny.tensors(1)
    load(llm, given)
    del given["model.norm.weight"]
    load(llm, given, whole=False)
    assert tiny.greedy(llm) == fresh(tensors=tiny.tensors(1))


def test_a_shard_is_missed_whether_or_not_names_were_compared(llm, fresh):
    given = tiny.tensors(1)
    del given[KEY]
    with pytest.raises(ReloadError, match="without k"):
        load(llm, given, whole=False)
    load(llm, tiny.tensors(1))
    assert tiny.greedy(llm) == fresh(tensors=tiny.tensors(1))


def test_a_padded_vocabulary_is_complete(make_engine, fresh, tmp_path):
    """201 words in an embedding of 256 rows, which is never loaded in full."""
    given = tiny.tensors(1)
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        given[name] = rows(given[name], 201)
    asked = [[i % 200 + 1 for i in range(9)]]
    old = {n: tiny.raw(t.values * 0.5) for n, t in given.items()}
    engine = make_engine(tiny.save(tmp_path / "old", given=old, words=201))
    another = make_engine(tiny.save(tmp_path / "new", given=given, words=201))
    expected = tiny.greedy(another, asked=asked)
    load(engine, given)
    assert tiny.greedy(engine, asked=asked) == expected


def test_clearing_the_caches(llm):
    caches = worker(llm).model_runner.kv_caches
    for cache in caches:
        cache.fill_(float("nan"))
    assert reload.clear_kv(worker(llm).vllm_config) == len(caches) == tiny.LAYERS
    assert all(bool((cache == 0).all()) for cache in caches)
