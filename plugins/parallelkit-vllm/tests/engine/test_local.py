"""`pk.subscribe_weights(llm, ticket)` with an engine of this process."""

from __future__ import annotations

import threading

import pytest
import tiny_qwen as tiny

import parallelkit as pk
from parallelkit.errors import QuarantinedError, StateError, UnsupportedFeatureError

KEY = "model.layers.1.self_attn.k_proj.weight"
SECONDS = 60.0


@pytest.fixture(scope="module")
def llm(make_engine, checkpoint):
    return make_engine(checkpoint(0))


@pytest.fixture
def member(llm, trainer):
    """The engine as a subscriber that stages every version in a thread."""
    with pk.subscribe_weights(llm, trainer.publish(tiny.tensors(0)), timeout=SECONDS) as found:
        found.serve()
        yield found


def test_it_follows(llm, member, trainer, fresh):
    for version, seed in ((1, 1), (2, 2)):
        given = tiny.tensors(seed)
        trainer.update(given)
        assert member.step(SECONDS) == version
        assert tiny.greedy(llm) == fresh(tensors=given)
    assert "27 tensors by the engine's loader" in member.explain()
    assert "verified: staged bytes" in member.explain()


def test_using_it_brings_the_version_that_was_staged(llm, member, trainer, fresh):
    with pytest.raises(StateError, match="no version has arrived"), member.use():
        pass
    given = tiny.tensors(1)
    trainer.update(given)
    with member.use() as engine:
        assert engine is llm
        assert tiny.greedy(engine) == fresh(tensors=given)


def test_t08_the_prefix_cache_is_emptied(llm, member, trainer, fresh):
    (prompt,) = (p for p in tiny.prompts() if len(p) > 128)

    def cached():
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=2, detokenize=False)
        (output,) = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        return output.num_cached_tokens

    trainer.update(tiny.tensors(1))
    member.step(SECONDS)
    assert [cached(), cached()] == [0, 128]
    given = tiny.tensors(2)
    trainer.update(given)
    member.step(SECONDS)
    assert cached() == 0
    assert tiny.greedy(llm) == fresh(tensors=given)


def test_t08_requests_that_are_under_way_are_computed_anew(llm, member, trainer):
    """A request half done goes on with the new weights as if they had always been there."""
    from vllm import SamplingParams

    trainer.update(tiny.tensors(1))
    member.step(SECONDS)
    prompt = tiny.prompts()[2]
    engine = llm.llm_engine
    sampling = SamplingParams(temperature=0.0, max_tokens=20, detokenize=False, ignore_eos=True)
    engine.add_request("under way", {"prompt_token_ids": prompt}, sampling)
    so_far = []
    while len(so_far) < 8:
        for output in engine.step():
            so_far = list(output.outputs[0].token_ids)
    given = tiny.tensors(2)
    trainer.update(given)
    member.step(SECONDS)
    done = so_far
    while engine.has_unfinished_requests():
        for output in engine.step():
            done = list(output.outputs[0].token_ids)
    assert done[: len(so_far)] == so_far
    rest = tiny.greedy(llm, 20 - len(so_far), [prompt + so_far])
    assert [done[len(so_far) :]] == rest


def test_t14_in_quarantine_nothing_is_generated(llm, member, trainer, fresh, monkeypatch):
    """An exception inside `generate` would leave a request that never ends."""
    given = tiny.tensors(1)
    trainer.update(given)
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    load = runner.model.load_weights

    def breaks(weights):
        load(list(weights)[:5])
        raise MemoryError("no more")

    monkeypatch.setattr(runner.model, "load_weights", breaks)
    with pytest.raises(QuarantinedError, match="loader failed with MemoryError: no more"):
        member.step(SECONDS)
    assert member.state == "quarantined"
    with pytest.raises(QuarantinedError), member.use():
        pytest.fail("the engine was given out")
    monkeypatch.undo()
    with member.use() as engine:  # the same version, once more
        assert tiny.greedy(engine) == fresh(tensors=given)
    assert member.state == "current"


def test_an_engine_that_sleeps_is_not_updated(llm, member, trainer, fresh):
    trainer.update(tiny.tensors(1))
    member.step(SECONDS)
    llm.sleep(level=1)
    answer = trainer.ask("update")
    assert answer["error"] == "UpdateAbortedError"
    assert "asleep" in answer["text"]
    llm.wake_up()
    given = tiny.tensors(2)
    trainer.update(given)
    assert member.step(SECONDS) == 2
    assert tiny.greedy(llm) == fresh(tensors=given)


def test_t13_leaving_harms_no_engine(llm, trainer, fresh, make_engine, checkpoint):
    other = make_engine(checkpoint(0))
    ticket = trainer.publish(tiny.tensors(0), members=2)
    members = [
        pk.subscribe_weights(engine, ticket, member=rank, timeout=SECONDS)
        for rank, engine in enumerate((llm, other))
    ]
    for member in members:
        member.serve()
    given = tiny.tensors(2)
    trainer.update(given)
    assert [member.step(SECONDS) for member in members] == [1, 1]
    members[0].close()
    assert tiny.greedy(llm) == tiny.greedy(other) == fresh(tensors=given)
    members[1].close()
    assert tiny.greedy(llm) == fresh(tensors=given)


def test_a_loader_is_refused(llm, trainer):
    with pytest.raises(UnsupportedFeatureError, match="own loader"):
        pk.subscribe_weights(llm, trainer.publish(tiny.tensors(0)), loader=lambda pairs: None)


def test_a_follower_that_does_not_serve(llm, trainer, fresh):
    """One thread, which takes part itself: bytes are read where the publisher has them."""
    given = tiny.tensors(1)
    with pk.subscribe_weights(llm, trainer.publish(given), timeout=SECONDS) as member:
        reports = []
        updates = threading.Thread(target=lambda: reports.append(trainer.update()))
        updates.start()
        try:
            assert member.step(SECONDS) == 1
        finally:
            updates.join()
    assert reports[0]["members"][0]["state"] == "committed"
    assert tiny.greedy(llm) == fresh(tensors=given)
