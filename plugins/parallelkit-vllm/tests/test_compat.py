"""The extensions' methods on a worker that is made up, with real groups and shared memory.

The engine's loader is made up too; engine/test_extensions.py has the real one.
"""

from __future__ import annotations

import logging
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import tiny_qwen as tiny

torch = pytest.importorskip("torch")

import parallelkit_vllm
from parallelkit_vllm import answering, checkpoint, compat, receiving
from parallelkit_vllm.compare import Needed, compare
from parallelkit_vllm.compat import ColocateWorkerExtension, WorkerExtension
from parallelkit_vllm.errors import EngineVersionError, ReloadError, WorkerError
from parallelkit_vllm.sharing import share_weights
from parallelkit_vllm.stateless import stateless_init_process_group

from parallelkit.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    CorruptionError,
    ManifestError,
    ManifestMismatchError,
    NonFiniteError,
    RendezvousTimeoutError,
    StateError,
    UnsupportedFeatureError,
)

SECONDS = 60.0
SHAPES = {"a": (4, 3), "b": (3,), "model.embed_tokens.weight": (5, 3)}


class Sink:
    """Instead of `EngineSink`: loads into plain parameters."""

    fails = False

    def __init__(self, model, vllm_config):
        self._model, self._config = model, vllm_config

    def learn(self, published):
        self._published = published
        compare(published, checkpoint.needed(self._config.model_config, None), {})

    def begin(self):
        self._written = {}

    def write(self, index, data):
        self._written[index] = data

    def finish(self):
        if Sink.fails:
            raise ReloadError("made to fail")
        for index, spec in enumerate(self._published.unique):
            values = torch.frombuffer(bytearray(self._written[index]), dtype=torch.bfloat16)
            self._model.values[spec.name.replace(".", "/")].data = values.reshape(spec.shape)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.values = torch.nn.ParameterDict(
            {n.replace(".", "/"): torch.ones(s, dtype=torch.bfloat16) for n, s in SHAPES.items()}
        ).requires_grad_(False)


class Worker(WorkerExtension, ColocateWorkerExtension):
    def __init__(self, rank=0, size=1):
        model = Model()
        self.device = torch.device("cpu")
        self.model_runner = SimpleNamespace(get_model=lambda: model)
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(),
            load_config=None,
            cache_config=SimpleNamespace(enable_prefix_caching=True),
            parallel_config=SimpleNamespace(rank=rank, world_size=size, data_parallel_index=0),
        )

    @property
    def now(self):
        """The first value of every tensor."""
        values = self.model_runner.get_model().values
        return {n: float(values[n.replace(".", "/")].reshape(-1)[0]) for n in SHAPES}


@pytest.fixture(autouse=True)
def made_up(monkeypatch):
    needed = Needed({n: ("bfloat16", s) for n, s in SHAPES.items()}, "made up", "bfloat16")
    monkeypatch.setattr(checkpoint, "needed", lambda *_: needed)
    monkeypatch.setattr(receiving, "EngineSink", Sink)
    monkeypatch.setattr(compat, "check_version", lambda: "0.32.0")
    monkeypatch.setattr(Sink, "fails", False)


@pytest.fixture
def tied(monkeypatch):
    needed = Needed({n: ("bfloat16", s) for n, s in SHAPES.items()}, "made up", "bfloat16", True)
    monkeypatch.setattr(checkpoint, "needed", lambda *_: needed)


def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Trainer:
    """The trainer's side; the workers' methods run in threads, as they would in workers."""

    def __init__(self, workers, timeout=SECONDS):
        self._workers = workers
        self._pool = ThreadPoolExecutor(len(workers))
        at, size = port(), len(workers) + 1
        calls = self.rpc("init_weight_update_group", "127.0.0.1", at, 1, size)
        self.group = stateless_init_process_group("127.0.0.1", at, 0, size, "cpu", timeout=timeout)
        self.results(calls)

    def rpc(self, method, *args):
        return [self._pool.submit(getattr(w, method), *args) for w in self._workers]

    @staticmethod
    def results(calls):
        return [call.result(SECONDS) for call in calls]

    def send(self, name, value=2.0, dtype="bfloat16", shape=None):
        shape = SHAPES[name] if shape is None else shape
        calls = self.rpc("update_weight", name, dtype, shape)
        self.group.broadcast(torch.full(shape, value, dtype=getattr(torch, dtype)), src=0)
        self.results(calls)

    def end(self):
        self.group.close()
        self._pool.shutdown()
        for worker in self._workers:
            compat._leave(worker)


@pytest.fixture
def worker():
    return Worker()


@pytest.fixture
def trainer(worker):
    trainer = Trainer([worker])
    yield trainer
    trainer.end()


def test_the_names_of_the_package():
    for name in ("stateless_init_process_group", "WorkerExtension", "ColocateWorkerExtension"):
        assert getattr(parallelkit_vllm, name) is getattr(compat, name)
    assert parallelkit_vllm.share_weights is share_weights


def test_extensions_have_the_methods_of_the_interface_alone():
    """vLLM refuses an extension that has a name which its worker has."""

    def names(kind):
        return {n for n in dir(kind) if not n.startswith("__")}

    assert names(WorkerExtension) == {
        "init_weight_update_group",
        "update_weight",
        "check_weights_changed",
    }
    assert names(ColocateWorkerExtension) == {
        "report_device_id",
        "update_weights_from_ipc_handles",
        "check_weights_changed",
    }


def test_weights_are_old_until_all_are_there_and_then_new(worker, trainer):
    assert worker.check_weights_changed() is False
    for name in ("b", "a"):
        trainer.send(name)
        assert set(worker.now.values()) == {1.0}
        assert worker.check_weights_changed() is False
    trainer.send("model.embed_tokens.weight")
    assert set(worker.now.values()) == {2.0}
    assert worker.check_weights_changed() is True


def test_the_log_says_what_is_missing(worker, trainer, caplog):
    trainer.send("b")
    with caplog.at_level(logging.INFO, "parallelkit_vllm"):
        worker.check_weights_changed()
        assert "still missing a, model.embed_tokens.weight" in caplog.text
        for name in ("a", "model.embed_tokens.weight"):
            trainer.send(name, 0.0)
        trainer.send("b", 0.0)
        assert "update 1 is in place: 3 tensors" in caplog.text
        assert caplog.text.count("call reset_prefix_cache()") == 1
        assert "an update of 3 tensors begins" in caplog.text


def test_a_name_that_comes_again_replaces(worker, trainer):
    trainer.send("b", 2.0)
    trainer.send("b", 3.0)
    trainer.send("a")
    trainer.send("model.embed_tokens.weight")
    assert worker.now == {"a": 2.0, "b": 3.0, "model.embed_tokens.weight": 2.0}


def test_zero_is_a_change_and_the_same_values_are_none(worker, trainer):
    for value, changed in ((0.0, True), (1.0, False), (0.5, True)):
        for name in SHAPES:
            trainer.send(name, value)
        assert set(worker.now.values()) == {value}
        assert worker.check_weights_changed() is changed


def test_floats_are_cast_and_what_becomes_infinite_is_refused(worker, trainer):
    for name in SHAPES:
        trainer.send(name, 2.0, "float32")
    assert set(worker.now.values()) == {2.0}
    with pytest.raises(NonFiniteError, match=r"3 values of 'b' \(float32\) are too large for bf"):
        trainer.send("b", 3.4e38, "float32")
    trainer.send("b", float("inf"))
    assert set(worker.now.values()) == {2.0}


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "error"),
    [
        ("c", "bfloat16", (3,), ManifestMismatchError),
        ("b", "bfloat16", (4,), ManifestMismatchError),
        ("b", "int8", (3,), ManifestMismatchError),
        ("b", "bf16", (3,), ManifestError),
        (None, "bfloat16", (3,), ManifestError),
        ("b", "bfloat16", "3", ManifestError),
    ],
)
def test_what_the_engine_does_not_have_is_refused_on_both_sides(
    worker, trainer, name, dtype, shape, error
):
    calls = trainer.rpc("update_weight", name, dtype, shape)
    with pytest.raises(CollectiveError, match=r"(?s)nothing was sent.*rank\(s\) 1: refuses: "):
        trainer.group.broadcast(torch.ones(3), src=0)
    with pytest.raises(error):
        trainer.results(calls)
    for good in SHAPES:
        trainer.send(good)
    assert set(worker.now.values()) == {2.0}


def test_a_dtype_of_torch_and_a_size_of_torch(worker, trainer):
    calls = trainer.rpc("update_weight", "b", torch.bfloat16, torch.Size([3]))
    trainer.group.broadcast(torch.ones(3, dtype=torch.bfloat16), src=0)
    trainer.results(calls)
    assert worker.check_weights_changed() is False


def test_a_loader_that_fails_is_told_until_an_update_works(worker, trainer, monkeypatch):
    monkeypatch.setattr(Sink, "fails", True)
    *most, last = SHAPES
    for name in most:
        trainer.send(name)
    with pytest.raises(ReloadError, match="made to fail"):
        trainer.send(last)
    assert worker.check_weights_changed() is False
    monkeypatch.setattr(Sink, "fails", False)
    for name in SHAPES:
        trainer.send(name)
    assert worker.check_weights_changed() is True


@pytest.fixture
def pair(monkeypatch):
    """Two workers of one engine, which tell each other by memory."""
    told, barrier = {}, threading.Barrier(2)
    here = threading.local()

    def exchange(mine):
        told[here.rank] = mine
        barrier.wait(SECONDS)
        texts = [told[0], told[1]]
        barrier.wait(SECONDS)
        return texts

    class Ranked(Worker):
        def __getattribute__(self, name):
            if name == "vllm_config":
                here.rank = self.__dict__["vllm_config"].parallel_config.rank
            return super().__getattribute__(name)

    monkeypatch.setattr(answering, "_exchange", lambda *told: exchange)
    return [Ranked(rank, 2) for rank in range(2)]


def test_several_workers_take_part(pair):
    trainer = Trainer(pair)
    try:
        assert [w.model_update_group.rank for w in pair] == [1, 2]
        for name in SHAPES:
            trainer.send(name)
        assert [set(w.now.values()) for w in pair] == [{2.0}, {2.0}]
        assert trainer.results(trainer.rpc("check_weights_changed")) == [True, True]
    finally:
        trainer.end()


def test_of_several_workers_the_last_says_what_is_wrong(pair):
    trainer = Trainer(pair)
    try:
        first, last = trainer.rpc("update_weight", "c", "bfloat16", (3,))
        with pytest.raises(CollectiveError, match=r"rank\(s\) 1, 2: refuses: "):
            trainer.group.broadcast(torch.ones(3), src=0)
        assert first.result(SECONDS) is None
        with pytest.raises(WorkerError, match="worker 0, 1: ManifestMismatchError: ") as caught:
            last.result(SECONDS)
        assert caught.value.ranks == (0, 1)
        for name in SHAPES:
            trainer.send(name)
        assert [set(w.now.values()) for w in pair] == [{2.0}, {2.0}]
    finally:
        trainer.end()


def test_a_new_group_ends_the_old_and_what_was_half_sent(worker, trainer, caplog):
    trainer.send("a")
    old = worker.model_update_group
    again = Trainer([worker])
    try:
        assert old.closed
        assert "an update is given up, without b, model.embed_tokens.weight" in caplog.text
        for name in ("b", "model.embed_tokens.weight"):
            again.send(name)
        assert set(worker.now.values()) == {1.0}
        again.send("a")
        assert set(worker.now.values()) == {2.0}
    finally:
        again.end()


def test_an_update_before_the_group_is_refused(worker):
    with pytest.raises(StateError, match="before init_weight_update_group"):
        worker.update_weight("a", "bfloat16", (4, 3))


def test_a_trainer_that_does_not_come_says_how_to_call(worker, monkeypatch):
    made = stateless_init_process_group
    monkeypatch.setattr(
        compat, "stateless_init_process_group", lambda *args: made(*args, timeout=0.3)
    )
    with pytest.raises(RendezvousTimeoutError, match="start it in a thread") as caught:
        worker.init_weight_update_group("127.0.0.1", port(), 1, 2)
    assert caught.value.missing == (0,)
    assert getattr(worker, "model_update_group", None) is None


def test_a_tensor_that_does_not_come_says_how_to_call(worker, monkeypatch):
    made = stateless_init_process_group
    monkeypatch.setattr(
        compat, "stateless_init_process_group", lambda *args: made(*args, timeout=1.0)
    )
    trainer = Trainer([worker])
    try:
        with pytest.raises(CollectiveTimeoutError, match="'a' did not come.*in a thread") as caught:
            worker.update_weight("a", "bfloat16", (4, 3))
        assert caught.value.missing == (0,)
    finally:
        trainer.end()


def test_a_trainer_that_is_gone_is_named(worker, trainer):
    trainer.send("a")
    trainer.group.close()
    with pytest.raises(CollectiveError, match=r"rank\(s\) 0 have closed the group"):
        worker.update_weight("b", "bfloat16", (3,))
    assert set(worker.now.values()) == {1.0}


def test_other_devices_are_refused_by_name(worker):
    worker.device = torch.device("cuda", 0)
    for call in (
        worker.report_device_id,
        worker.check_weights_changed,
        lambda: worker.init_weight_update_group("127.0.0.1", port(), 1, 2),
        lambda: worker.update_weights_from_ipc_handles({}),
    ):
        with pytest.raises(UnsupportedFeatureError, match=r"computes on cuda:0.*publisher\.attach"):
            call()


def test_an_old_vllm_is_refused(worker, monkeypatch):
    def old():
        raise EngineVersionError("vllm 0.24 is installed")

    monkeypatch.setattr(compat, "check_version", old)
    with pytest.raises(EngineVersionError):
        worker.report_device_id()


# --- a head that the engine ties -----------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_tied_head_may_come_anywhere(tied, worker, trainer, place):
    embed = "model.embed_tokens.weight"
    for value in (2.0, 3.0):
        names = list(SHAPES)
        names.insert(place, "lm_head.weight")
        for name in names:
            trainer.send(name, value, shape=SHAPES[embed if name == "lm_head.weight" else name])
        assert set(worker.now.values()) == {value}
        assert worker.check_weights_changed() is True


def test_a_head_that_is_not_the_embedding_is_told(tied, worker, trainer):
    head = {"name": "lm_head.weight", "shape": SHAPES["model.embed_tokens.weight"]}
    for name in SHAPES:
        trainer.send(name)
    trainer.send(value=7.0, **head)
    assert worker.check_weights_changed() is False
    *most, last = SHAPES
    for name in most:
        trainer.send(name, 3.0)
    with pytest.raises(ManifestMismatchError, match="ties 'lm_head.weight' to its embedding"):
        trainer.send(last, 3.0)
    assert set(worker.now.values()) == {2.0}


# --- in shared memory ----------------------------------------------------------------------------


def raws(value, dtype="bfloat16", only=SHAPES):
    import numpy as np

    return {n: tiny.raw(np.full(SHAPES[n], value, np.float32), dtype) for n in only}


@pytest.fixture
def source():
    return tiny.Source(raws(2.0))


@pytest.fixture
def shared(source):
    with share_weights(source) as shared:
        yield shared


def test_handles_bring_a_whole_model(worker, shared, source):
    assert list(shared.handles()) == [worker.report_device_id()]
    assert worker.device_uuid == worker.report_device_id()
    worker.update_weights_from_ipc_handles(shared.handles())
    assert set(worker.now.values()) == {2.0}
    source.put(raws(3.0))
    assert set(worker.now.values()) == {2.0}, "the engine owns what it has"
    worker.update_weights_from_ipc_handles(shared.handles())
    assert set(worker.now.values()) == {3.0}
    assert worker.check_weights_changed() is True


def test_handles_may_bring_parts(worker, shared):
    ((device, table),) = shared.handles().items()
    worker.update_weights_from_ipc_handles({device: {"a": table.pop("a")}})
    assert worker.check_weights_changed() is False
    assert set(worker.now.values()) == {1.0}
    worker.update_weights_from_ipc_handles({device: table, "another device": None})
    assert set(worker.now.values()) == {2.0}


def test_one_bad_handle_of_a_call_and_none_is_taken(worker, shared, source):
    ((device, table),) = shared.handles().items()
    first, *_, last = table
    for bad, error, said in (
        ({**table, last: {**table[last], "digest": "0"}}, CorruptionError, "are others than"),
        ({**table, "c": table[first]}, ManifestMismatchError, "'c'"),
        ({**table, last: (print, (1,))}, ManifestError, "none of parallelkit_vllm.share_weights"),
    ):
        with pytest.raises(error, match=said):
            worker.update_weights_from_ipc_handles({device: bad})
    del table[first]
    worker.update_weights_from_ipc_handles({device: table})
    assert set(worker.now.values()) == {1.0}, f"{first} was never taken"
    assert worker.check_weights_changed() is False


def test_values_that_do_not_fit_are_refused_before_any_is_taken(worker):
    given = raws(2.0, "float32") | raws(3.4e38, "float32", ["model.embed_tokens.weight"])
    with share_weights(tiny.Source(given)) as shared:
        with pytest.raises(NonFiniteError, match="model.embed_tokens.weight"):
            worker.update_weights_from_ipc_handles(shared.handles())
    assert compat._receiver(worker).missing == [], "nothing was begun"


@pytest.mark.parametrize("given", [{}, {"GPU-1": {}}, None, [], {"cpu": 1}])
def test_handles_of_another_device_are_refused(worker, given):
    with pytest.raises(ManifestError, match="there are no handles for 'cpu:"):
        worker.update_weights_from_ipc_handles(given)
