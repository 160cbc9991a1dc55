"""What vLLM does not check or repair, on a real engine that follows by the native engine.

Each trap has a number: 4, 10 and 11 are about clients and servers, and are tested there.
"""

from __future__ import annotations

import sys
from multiprocessing import resource_tracker

import numpy as np
import pytest
import tiny_qwen as tiny
from parallelkit_vllm import reload
from parallelkit_vllm.errors import ReloadError

from parallelkit.errors import ManifestMismatchError, QuarantinedError, StateError

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
QUERY, KEY = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "qk")
BACKEND = {"weight_transfer_config": {"backend": "parallelkit"}}


@pytest.fixture(scope="module")
def native(make_engine, checkpoint):
    return make_engine(checkpoint(0), **BACKEND)


@pytest.fixture(scope="module")
def tied(make_engine, checkpoint):
    return make_engine(checkpoint(0, tied=True), **BACKEND)


@pytest.fixture
def follow(trainer):
    """Let an engine follow what is published; it stops after the test."""
    followers = []

    def begin(llm, tensors, **told):
        ticket = trainer.publish(tensors, **told)
        followers.append(llm)
        llm.init_weight_transfer_engine({"init_info": {"ticket": ticket, "timeout": 60.0}})

    yield begin
    for llm in followers:
        leave(llm)


def leave(llm):
    """Let an engine follow nobody, by vLLM's call where it has one."""
    if hasattr(worker(llm), "shutdown_weight_transfer_engine"):  # from 0.32
        llm.llm_engine.collective_rpc("shutdown_weight_transfer_engine")
    else:
        transfer(llm).shutdown()


def put_in_place(llm, **info):
    llm.start_weight_update()
    llm.update_weights({"update_info": info})
    llm.finish_weight_update()
    assert llm.reset_prefix_cache()


def worker(llm):
    """The only worker of an in-process engine."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def transfer(llm):
    """The native engine of that worker."""
    return worker(llm).weight_transfer_engine


def model(llm):
    return transfer(llm).model


def refused(follow, llm, tensors, *lines, **told):
    """The engine refuses to follow, says all of why, and generates what it did before."""
    before = tiny.greedy(llm)
    with pytest.raises(ManifestMismatchError) as caught:
        follow(llm, tensors, **told)
    text = "\n".join(caught.value.differences)
    for line in lines:
        assert line in text
    assert tiny.greedy(llm) == before
    return caught.value


def recovers(follow, llm, trainer, fresh, seed=3, **told):
    """A good publisher is followed afterwards."""
    follow(llm, tiny.tensors(0))
    given = tiny.tensors(seed)
    trainer.update(given)
    put_in_place(llm)
    assert tiny.greedy(llm) == fresh(tensors=given)


@pytest.mark.parametrize("named", [False, True], ids=["absent", "alias"])
def test_t01_a_tied_head_follows_its_embedding(tied, follow, trainer, fresh, named):
    follow(tied, tiny.tensors(0, tied=True), aliases={HEAD: EMBEDDING} if named else {})
    for seed in (1, 2):
        given = tiny.tensors(seed, tied=True)
        trainer.update(given)
        put_in_place(tied)
        assert tiny.greedy(tied) == fresh(tensors=given, tied=True)


def test_t01_without_the_refresh_tokens_are_wrong(tied, follow, trainer, fresh, monkeypatch):
    """The trap is there, and the tests above would see it."""
    follow(tied, tiny.tensors(0, tied=True))
    trainer.update(tiny.tensors(1, tied=True))
    put_in_place(tied)
    monkeypatch.setattr(reload, "_refresh", lambda groups, loaded: None)
    given = tiny.tensors(2, tied=True)
    trainer.update(given)
    put_in_place(tied)
    assert tiny.greedy(tied) != fresh(tensors=given, tied=True)


def test_t01_a_tied_head_is_not_published_apart(tied, follow):
    refused(follow, tied, tiny.tensors(0), f"the engine ties {HEAD!r} to its embedding")


def test_t01_a_publisher_may_tie_what_the_engine_does_not(native, follow, trainer, fresh):
    given = tiny.tensors(1, tied=True)
    follow(native, given, aliases={HEAD: EMBEDDING})
    trainer.update()
    put_in_place(native)
    assert tiny.greedy(native) == fresh(tensors=given | {HEAD: given[EMBEDDING]})


def test_t02_packed_layers_are_loaded_anew(native, follow, trainer, fresh):
    weights = dict(model(native).named_parameters())
    packed = [name for name, weight in weights.items() if weight.numel() == 0]
    assert any("qkv_proj" in name for name in packed), "this engine does not pack its layers"
    recovers(follow, native, trainer, fresh)
    after = dict(model(native).named_parameters())
    assert after.keys() == weights.keys()
    assert all(after[name] is weight for name, weight in weights.items())


def test_t03_what_counts_is_the_digest_of_the_staged_bytes(native, follow, trainer):
    """vLLM's own checksums do not see packed layers change."""
    if not hasattr(worker(native), "compute_weight_checksums"):
        pytest.skip("this vLLM has no checksums of its own; they came with 0.32")
    follow(native, tiny.tensors(0))

    def sums():
        (found,) = native.llm_engine.collective_rpc("compute_weight_checksums")
        return {name: value for name, value in found.items() if "qkv_proj.weight" in name}

    trainer.update(tiny.tensors(1))
    put_in_place(native)
    before = sums()
    report = trainer.update(tiny.tensors(2))
    put_in_place(native)
    assert before
    assert sums() == before, "vLLM sees more than it did: say so in the documentation"
    assert report["verify"] == "digest"
    assert report["changed_ratio"] > 0.99
    assert "verified: staged bytes" in transfer(native)._subscriber.explain()


def test_t05_a_wrong_shape_is_refused_and_forgotten(native, follow, trainer, fresh):
    given = tiny.tensors(1)
    short = given[QUERY].values[:64]
    refused(follow, native, given | {QUERY: tiny.raw(short)}, QUERY, "64 rows too few")
    recovers(follow, native, trainer, fresh)


def test_t05_more_rows_are_refused_too(native, follow):
    given = tiny.tensors(1)
    long = np.concatenate([given[QUERY].values, given[QUERY].values[:2]])
    refused(follow, native, given | {QUERY: tiny.raw(long)}, QUERY, "2 rows too many")


def test_t05_an_unknown_name_is_refused(native, follow, trainer, fresh):
    given = tiny.tensors(1)
    given["module." + QUERY] = given.pop(QUERY)
    error = refused(
        follow, native, given, f"needs {QUERY!r}", f"unknown: the publisher sends 'module.{QUERY}'"
    )
    assert "did you mean" in str(error)
    recovers(follow, native, trainer, fresh)


def test_t05_a_failed_loader_is_quarantine_and_the_same_version_comes_again(
    native, follow, trainer, fresh, monkeypatch
):
    follow(native, tiny.tensors(0))
    given = tiny.tensors(4)
    trainer.update(given)
    load = model(native).load_weights

    def breaks(weights):
        found = list(weights)
        load(iter(found[: len(found) // 2]))
        raise ValueError("in the middle")

    monkeypatch.setattr(model(native), "load_weights", breaks)
    native.start_weight_update()
    with pytest.raises(QuarantinedError, match="in the middle"):
        native.update_weights({"update_info": {"version": 1}})
    assert transfer(native)._subscriber.state == "quarantined"
    monkeypatch.undo()
    put_in_place(native, version=1)
    assert transfer(native)._subscriber.state == "current"
    assert tiny.greedy(native) == fresh(tensors=given)


def test_t06_a_missing_layer_is_refused(native, follow):
    given = {n: t for n, t in tiny.tensors(1).items() if ".layers.1." not in n}
    error = refused(follow, native, given, f"missing: the engine needs {QUERY!r}")
    assert len(error.differences) == 12


def test_t06_a_missing_shard_of_a_fused_layer_is_refused(native, follow, trainer, fresh):
    given = tiny.tensors(1)
    del given[KEY]
    refused(follow, native, given, f"missing: the engine needs {KEY!r}")
    recovers(follow, native, trainer, fresh)


def test_t07_values_that_are_not_finite_do_not_stay_in_the_caches(native, follow, trainer, fresh):
    follow(native, tiny.tensors(0))
    given = tiny.tensors(1)
    bad = given[KEY].values.copy()
    bad[::3] = np.nan
    bad = given | {KEY: tiny.raw(bad)}
    sink, caches = transfer(native)._sink, worker(native).model_runner.kv_caches
    sink._look = None  # what looks while the engine stands still is not needed
    trainer.update(bad)
    assert transfer(native)._subscriber._placement._staged_finite is False, "seen as it arrived"
    put_in_place(native)
    tiny.greedy(native)
    assert any(bool(cache.isnan().any()) for cache in caches), "nothing bad got into the caches"
    assert sink.cleared == 0
    trainer.update(given)
    put_in_place(native)
    assert sink.cleared == 1
    assert not any(bool(cache.isnan().any()) for cache in caches)
    assert tiny.greedy(native) == fresh(tensors=given)
    trainer.update(tiny.tensors(2))
    put_in_place(native)
    assert sink.cleared == 1


def test_t07_one_value_that_is_not_finite_is_refused_on_request(native, follow, trainer, fresh):
    follow(native, tiny.tensors(0), options={"check_finite": True})
    given = tiny.tensors(1)
    trainer.update(given)
    put_in_place(native)
    bad = given[KEY].values.copy()
    bad[3, 5] = np.nan
    answer = trainer.ask("update", file=trainer.file(given | {KEY: tiny.raw(bad)}))
    assert answer["error"] == "NonFiniteError"
    assert f"{KEY!r} (1 of them)" in answer["text"]
    assert transfer(native)._subscriber.staged == transfer(native).version == 1
    assert tiny.greedy(native) == fresh(tensors=given)
    other = tiny.tensors(2)
    trainer.update(other)
    put_in_place(native, version=2)
    assert tiny.greedy(native) == fresh(tensors=other)


def test_t09_the_engine_keeps_no_view_of_the_staging_memory(native, follow, trainer, fresh):
    follow(native, tiny.tensors(0))
    given = tiny.tensors(1)
    trainer.update(given)
    put_in_place(native)
    for seed in (2, 3, 4):  # all staging memory is written anew
        trainer.update(tiny.tensors(seed))
    assert tiny.greedy(native) == fresh(tensors=given)
    put_in_place(native, version=4)
    assert tiny.greedy(native) == fresh(tensors=tiny.tensors(4))


def test_t12_shared_memory_is_nobodys_to_unlink(native, follow, trainer, capfd):
    known = getattr(resource_tracker._resource_tracker, "_pid", None)
    for seed in (1, 2):  # the reader leaves, and the next one finds the memory
        follow(native, tiny.tensors(0))
        trainer.update(tiny.tensors(seed))
        put_in_place(native)
        leave(native)
        assert trainer.update(tiny.tensors(seed + 1))["version"] == 2
    assert getattr(resource_tracker._resource_tracker, "_pid", None) == known
    assert "resource_tracker" not in capfd.readouterr().err


def test_t13_engines_of_one_process_follow_each_for_itself(native, tied, follow, trainer, fresh):
    follow(native, tiny.tensors(0))
    given = tiny.tensors(2)
    trainer.update(given)
    put_in_place(native)
    follow(tied, tiny.tensors(0, tied=True))  # the first one's publisher closes
    other = tiny.tensors(1, tied=True)
    trainer.update(other)
    put_in_place(tied)
    assert tiny.greedy(tied) == fresh(tensors=other, tied=True)
    assert tiny.greedy(native) == fresh(tensors=given)
    assert "torch.distributed" in sys.modules


def test_duplicates_are_refused(native, follow):
    given = tiny.tensors(1)
    fused = "model.layers.1.self_attn.qkv_proj.weight"
    parts = [f"model.layers.1.self_attn.{n}_proj.weight" for n in "qkv"]
    rows = np.concatenate([given[name].values for name in parts])
    refused(follow, native, given | {fused: tiny.raw(rows)}, f"twice: {KEY!r}")


def test_fused_names_are_taken_if_they_are_complete(native, follow, trainer, fresh):
    given = tiny.tensors(2)
    fused = dict(given)
    for i in range(tiny.LAYERS):
        for kind in ("weight", "bias"):
            parts = [f"model.layers.{i}.self_attn.{n}_proj.{kind}" for n in "qkv"]
            rows = np.concatenate([fused.pop(name).values for name in parts])
            fused[f"model.layers.{i}.self_attn.qkv_proj.{kind}"] = tiny.raw(rows)
        parts = [f"model.layers.{i}.mlp.{n}_proj.weight" for n in ("gate", "up")]
        rows = np.concatenate([fused.pop(name).values for name in parts])
        fused[f"model.layers.{i}.mlp.gate_up_proj.weight"] = tiny.raw(rows)
    follow(native, fused)
    trainer.update()
    put_in_place(native)
    assert tiny.greedy(native) == fresh(tensors=given)
    short = dict(fused)
    name = "model.layers.0.mlp.gate_up_proj.weight"
    short[name] = tiny.raw(fused[name].values[:300])
    refused(follow, native, short, f"shape of {name!r}", "make [512, 128]")


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_other_dtypes_are_refused(native, follow, dtype):
    given = tiny.tensors(1)
    other = tiny.raw(given[QUERY].values, dtype)
    line = f"dtype of {QUERY!r}: the publisher has {dtype}, the engine needs bfloat16"
    refused(follow, native, given | {QUERY: other}, line)


def test_order_of_calls(native, follow, trainer, fresh):
    with pytest.raises(StateError, match="before a publisher is followed"):
        native.start_weight_update()
    follow(native, tiny.tensors(0))
    ticket = trainer.ask("ticket")["ticket"]
    with pytest.raises(StateError, match="follows a publisher already"):
        native.init_weight_transfer_engine({"init_info": {"ticket": ticket}})
    given = tiny.tensors(1)
    trainer.update(given)
    with pytest.raises(RuntimeError, match="must be called before"):
        native.update_weights({"update_info": {}})
    put_in_place(native, version=1)
    put_in_place(native, version=1)  # it is in place
    trainer.update(tiny.tensors(2))
    put_in_place(native)
    native.start_weight_update()
    with pytest.raises(StateError, match="versions do not go back"):
        native.update_weights({"update_info": {"version": 1}})
    assert tiny.greedy(native) == fresh(tensors=tiny.tensors(2))


def test_an_update_that_is_open_elsewhere_is_not_joined(native, follow, trainer, fresh):
    follow(native, tiny.tensors(0))
    trainer.update(tiny.tensors(1))
    layerwise = reload.functions()
    layerwise.initialize_layerwise_reload(model(native))
    with pytest.raises(StateError, match="open for another update"):
        native.start_weight_update()
    with pytest.raises(ReloadError, match="open already"):
        reload.load(model(native), None, None, [])
    reload.roll_back(model(native), layerwise)
    put_in_place(native)
    assert tiny.greedy(native) == fresh(tensors=tiny.tensors(1))
