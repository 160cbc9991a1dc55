"""The native engine, driven by vLLM's own calls, on a real in-process engine."""

from __future__ import annotations

import pytest
import tiny

BACKEND = {"weight_transfer_config": {"backend": "parallelkit"}}


@pytest.fixture(scope="module")
def native(make_engine, checkpoint):
    """An engine that vLLM made with our weight-transfer engine."""
    return make_engine(checkpoint(0), **BACKEND)


@pytest.fixture
def follow(native, trainer):
    """Let the engine follow what is published, and stop after the test."""

    def begin(tensors, **told):
        ticket = trainer.publish(tensors, **told)
        native.init_weight_transfer_engine({"init_info": {"ticket": ticket, "timeout": 60.0}})

    yield begin
    native.llm_engine.collective_rpc("shutdown_weight_transfer_engine")


def put_in_place(llm, **info):
    llm.start_weight_update()
    llm.update_weights({"update_info": info})
    llm.finish_weight_update()
    assert llm.reset_prefix_cache()


def test_the_engine_follows(native, follow, trainer, fresh):
    follow(tiny.tensors(0))
    for version, seed in ((1, 1), (2, 2), (3, 1)):
        given = tiny.tensors(seed)
        report = trainer.update(given)
        assert report["version"] == version
        put_in_place(native, version=version)
        assert tiny.greedy(native) == fresh(tensors=given)
