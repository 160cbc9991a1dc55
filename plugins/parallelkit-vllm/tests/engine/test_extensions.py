"""Worker extensions in real engines: the RLHF example with its import changed, packed layers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_qwen as tiny
from parallelkit_vllm import share_weights
from parallelkit_vllm.errors import ReloadError

from parallelkit.errors import ManifestMismatchError

JOB = Path(__file__).parent / "rlhf.py"
SECONDS = 580.0
LOOPBACK = "0100007F"


def example(how, old, new, workers=1):
    """Run the example in a process of its own, whose engine starts two more."""
    env = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    if workers > 1:
        env["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"  # one core for each
    process = subprocess.Popen(
        [sys.executable, str(JOB), how, str(old), str(new), str(workers)],
        env=env | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # whatever it left
        process.communicate()
    assert process.returncode == 0, errors[-4000:]
    return json.loads(output.splitlines()[-1])


def zeros(*, tied=False):
    given = tiny.tensors(tied=tied)
    return {n: tiny.raw(np.zeros(t.shape, np.float32)) for n, t in given.items()}


def check_example(told, fresh, *, tied):
    assert told["before"] == fresh(tensors=tiny.tensors(0, tied=tied), tied=tied)
    assert told["unchanged"] == [False]
    assert told["changed"] == [True]
    assert told["after"] == fresh(tensors=tiny.tensors(1, tied=tied), tied=tied)
    assert told["after"] != told["before"]
    assert told["zero"] == fresh(tensors=zeros(tied=tied), tied=tied)[:1]


def test_the_example_with_a_group(checkpoint, fresh):
    told = example("broadcast", checkpoint(0), checkpoint(1))
    check_example(told, fresh, tied=False)
    assert told["half"] == told["before"], "five tensors came, and none is in place"
    assert told["half changed"] == [False]
    assert set(told["listens"]) == {LOOPBACK}
    trainer, engine = told["refused"]
    for said in (trainer, engine):
        assert "'model.norm.wieght'" in said
        assert "did you mean 'model.norm.weight'" in said


@pytest.mark.slow  # one more engine; the next tests have the same code in this process
def test_the_example_with_shared_memory(checkpoint, fresh):
    told = example("colocate", checkpoint(0, tied=True), checkpoint(1, tied=True))
    check_example(told, fresh, tied=True)
    assert "Use the newest handles" in told["stale"]


@pytest.mark.slow
def test_the_example_with_two_workers(checkpoint):
    """An error of both is read once, and the calls after it get their own answers."""
    told = example("broadcast", checkpoint(0), checkpoint(1), 2)
    assert told["after"] == told["fresh"] != told["before"]
    assert told["half"] == told["before"]
    assert (told["unchanged"], told["half changed"]) == ([False] * 2, [False] * 2)
    assert told["changed"] == [True] * 2
    trainer, engine = told["refused"]
    assert "rank(s) 1, 2: refuses: " in trainer
    assert "worker 0, 1: ManifestMismatchError" in engine


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def tied(request):
    return request.param


@pytest.fixture(scope="module")
def llm(make_engine, checkpoint, tied):
    return make_engine(
        checkpoint(0, tied=tied),
        worker_extension_cls="parallelkit_vllm.compat.ColocateWorkerExtension",
    )


def live(llm):
    """The model of an engine in this process."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    return worker.model_runner.get_model()


class Sharing:
    def __init__(self, llm, tied):
        self.llm, self.tied = llm, tied

    def send(self, given, aliases=None):
        with share_weights(tiny.Source(given, aliases)) as shared:
            self.llm.collective_rpc("update_weights_from_ipc_handles", args=(shared.handles(),))
        self.llm.reset_prefix_cache()

    @property
    def changed(self):
        (changed,) = self.llm.collective_rpc("check_weights_changed")
        return changed


@pytest.fixture
def sharing(llm, tied):
    """Every test begins and ends with the weights of the engine's checkpoint."""
    sharing = Sharing(llm, tied)
    llm.collective_rpc("report_device_id")
    sharing.send(tiny.tensors(0, tied=tied))
    yield sharing
    sharing.send(tiny.tensors(0, tied=tied))
    assert not sharing.changed


def test_packed_layers_are_put_in_place_and_the_change_is_seen(llm, sharing, tied, fresh):
    assert sharing.changed is False
    for seed in (1, 2):
        given = tiny.tensors(seed, tied=tied)
        sharing.send(given)
        assert sharing.changed is True
        assert tiny.greedy(llm) == fresh(tensors=given, tied=tied)
    sharing.send(zeros(tied=tied))
    assert sharing.changed is True
    assert tiny.greedy(llm) == fresh(tensors=zeros(tied=tied), tied=tied)


def test_one_packed_layer_that_changed_is_seen(llm, sharing, tied, fresh):
    given = dict(tiny.tensors(0, tied=tied))
    name = "model.layers.1.mlp.up_proj.weight"
    assert not live(llm).model.layers[1].mlp.gate_up_proj.weight.numel(), "it is packed away"
    given[name] = tiny.tensors(1, tied=tied)[name]
    sharing.send(given)
    assert sharing.changed is True
    assert tiny.greedy(llm) == fresh(tensors=given, tied=tied)


def test_parts_are_kept_aside(llm, sharing, tied, fresh):
    given = tiny.tensors(1, tied=tied)
    names = list(given)
    sharing.send({n: given[n] for n in names[:-1]})
    assert sharing.changed is False
    assert tiny.greedy(llm) == fresh(tensors=tiny.tensors(0, tied=tied), tied=tied)
    sharing.send({n: given[n] for n in names[-1:]})
    assert sharing.changed is True
    assert tiny.greedy(llm) == fresh(tensors=given, tied=tied)


def test_names_of_a_whole_state_with_its_tie(llm, sharing, tied, fresh):
    """As `state_dict()` has them, and in float32."""
    given = tiny.tensors(1, tied=tied)
    wide = {n: tiny.raw(t.values, "float32") for n, t in given.items()}
    sharing.send(wide, {"lm_head.weight": "model.embed_tokens.weight"} if tied else None)
    assert sharing.changed is True
    assert tiny.greedy(llm) == fresh(tensors=given, tied=tied)


def test_what_does_not_fit_touches_nothing(llm, sharing, tied, fresh):
    given = dict(tiny.tensors(1, tied=tied))
    given["model.norm.wieght"] = given.pop("model.norm.weight")
    with pytest.raises(ManifestMismatchError, match=r"did you mean 'model\.norm\.weight'"):
        sharing.send(given)
    assert sharing.changed is False
    assert tiny.greedy(llm) == fresh(tensors=tiny.tensors(0, tied=tied), tied=tied)


def test_a_loader_that_fails_is_told_and_the_next_update_repairs(llm, sharing, tied, fresh):
    model = live(llm)
    whole = model.load_weights

    def half(pairs):
        pairs = list(pairs)
        whole(pairs[: len(pairs) // 2])
        raise OSError("made to fail half way")

    model.load_weights = half
    try:
        with pytest.raises(ReloadError, match="made to fail half way"):
            sharing.send(tiny.tensors(1, tied=tied))
    finally:
        model.load_weights = whole
    assert sharing.changed is False, "they are of no version"
    sharing.send(tiny.tensors(2, tied=tied))
    assert sharing.changed is True
    assert tiny.greedy(llm) == fresh(tensors=tiny.tensors(2, tied=tied), tied=tied)
