"""A real server behind the guard, attached by its URL from this process as the trainer."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_qwen as tiny
from parallelkit_vllm.clients.http import RawServer
from parallelkit_vllm.clients.options import AttachOptions
from parallelkit_vllm.clients.web import Address
from parallelkit_vllm.clients.web import Server as Routes

import parallelkit as pk
from parallelkit.errors import (
    EngineTokenError,
    PartialCommitError,
    StateError,
    UpdateAbortedError,
)

sys.path.insert(0, str(Path(__file__).parent))

from servers import API_KEY, DTYPE, LENGTH, TOKEN, Server, Stream

sys.path.pop(0)

TIMEOUT = 60.0
#: Tokens of a request that is to be in flight during an update.
COUNT = 200


@pytest.fixture(scope="module")
def server(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    server = Server(checkpoint(0), tmp_path_factory.mktemp("server") / "log")
    try:
        server.wait()
        yield server
    finally:
        server.end()


class Trainer:
    """What is published here, and what the engine should say then."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.source = tiny.Source(tiny.tensors(0))
        self.publisher = pk.publish_weights(self.source, timeout=TIMEOUT)

    def attach(self, **options: Any) -> Any:
        return self.publisher.attach(self.server.url, token=TOKEN, **options)

    def update(self, seed: int) -> Any:
        self.source.put(tiny.tensors(seed))
        return self.publisher.update()


@pytest.fixture
def trainer(server: Server) -> Iterator[Trainer]:
    trainer = Trainer(server)
    yield trainer
    trainer.publisher.close()


@pytest.fixture(scope="module")
def alone(
    make_engine: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[int]]:
    """Greedy ids of a fresh engine of the weights of a seed, one request at a time; made once."""
    engines: dict[int, Any] = {}
    known: dict[tuple[int, tuple[int, ...], int], list[int]] = {}

    def give(seed: int, prompt: list[int], count: int = 16) -> list[int]:
        if seed not in engines:
            folder = tiny.save(tmp_path_factory.mktemp(f"alone-{seed}"), seed)
            engines[seed] = make_engine(folder, dtype=DTYPE, max_model_len=LENGTH)
        key = (seed, tuple(prompt), count)
        if key not in known:
            known[key] = tiny.greedy(engines[seed], count, [prompt])[0]
        return known[key]

    return give


def all_alone(alone: Callable[..., list[int]], seed: int) -> list[list[int]]:
    return [alone(seed, prompt) for prompt in tiny.prompts()]


def test_it_follows(server, trainer, alone):
    """Tokens equal a fresh engine's, cached prefixes included, and the version is ours."""
    handle = trainer.attach(name="actor")
    assert (handle.url, handle.version, handle.state) == (server.url, 0, "serving")
    assert server.greedy_all() == all_alone(alone, 0)
    for seed, version in ((1, 1), (2, 2)):
        report = trainer.update(seed)
        (engine,) = report.engines
        assert (engine.name, engine.state, engine.version) == ("actor", "committed", version)
        assert (engine.cache, engine.weight_version) == ("reset", str(version))
        assert 0 < engine.pause_seconds < TIMEOUT
        assert server.greedy_all() == all_alone(alone, seed)
        assert server.admin("GET", "/weight_info") == (200, {"weight_version": str(version)})
        assert handle.version == version
    status, told = server.admin("GET", "/parallelkit/status")
    assert status == 200
    assert (told["state"], told["version"], told["members"]) == ("serving", 2, 1)


def test_a_wrong_token_attaches_nothing(server, trainer):
    with pytest.raises(EngineTokenError, match="is not the one"):
        trainer.publisher.attach(server.url, token="x" * 32)
    with pytest.raises(EngineTokenError, match="is missing"):
        trainer.publisher.attach(server.url)
    with pytest.raises(EngineTokenError):
        trainer.publisher.attach(server.url, token=API_KEY)
    assert trainer.publisher.engines == []


def split(alone: Any, old: int, new: int, prompt: list[int], tokens: list[int]) -> int:
    """Where a sequence goes over from one version to the next: so many tokens are of the old."""
    count = len(tokens)
    first = alone(old, prompt, count)
    same = next((i for i in range(count) if tokens[i] != first[i]), count)
    for at in range(same, -1, -1):
        if at == count or alone(new, prompt + tokens[:at], count - at) == tokens[at:]:
            return at
    raise AssertionError(f"of neither version nor both: {tokens}")


def test_requests_in_flight_lose_nothing(server, trainer, alone):
    """T4: an update under load. Every stream ends whole, and goes over from old to new at one
    place, where the update was; one that comes later is of the new version alone."""
    trainer.attach()
    trainer.update(1)
    prompts = tiny.prompts()[:2]
    streams = [Stream(server, prompt, COUNT) for prompt in prompts * 2]
    for stream in streams:
        stream.reach(4)
    before = [len(stream.tokens) for stream in streams]
    report = trainer.update(2)
    after = [len(stream.tokens) for stream in streams]
    assert report.engines[0].state == "committed"
    late = server.greedy(prompts[0])
    assert late == alone(2, prompts[0])
    moved = 0
    for stream, low, high in zip(streams, before, after, strict=True):
        tokens = stream.done()
        assert stream.finish == "length"
        assert len(tokens) == COUNT
        at = split(alone, 1, 2, stream.prompt, tokens)
        # those that had come before the update are old; what came after it is new, but for what
        # was on its way
        assert low <= at <= high + 10
        moved += at < COUNT
    assert moved  # else this showed nothing: the update came too late
    assert server.greedy_all() == all_alone(alone, 2)


@pytest.mark.parametrize("pause", ["wait", "abort"])
def test_the_other_pauses(server, trainer, alone, pause):
    trainer.attach(pause=pause)
    trainer.update(1)
    prompt = tiny.prompts()[0]
    count = COUNT if pause == "wait" else LENGTH - len(prompt)
    stream = Stream(server, prompt, count)
    stream.reach(4)
    trainer.update(2)
    tokens = stream.done()
    assert tokens == alone(1, prompt, len(tokens))
    if pause == "wait":
        assert (len(tokens), stream.finish) == (count, "length")
    else:
        assert stream.finish == "abort"
        assert 4 <= len(tokens) < count
    assert server.greedy_all() == all_alone(alone, 2)


def test_the_api_key_opens_no_admin_route(server):
    """T11: every route that the server has, by its own list, but for those of users."""
    status, told = server.admin("GET", "/openapi.json")
    assert status == 200
    routes = {(m.upper(), p) for p, item in told["paths"].items() for m in item}
    assert ("POST", "/pause") in routes
    assert ("POST", "/update_weights") in routes
    routes |= {("GET", "/metrics"), ("GET", "/docs"), ("POST", "/parallelkit/commit")}
    tried = 0
    for method, path in sorted(routes):
        if path in ("/health", "/ping", "/version") or path.startswith(
            ("/v1/", "/v2/", "/inference/", "/cohere/")
        ):
            continue
        for token in (None, API_KEY, TOKEN + "x"):
            body = {} if method == "POST" else None
            assert server.ask(method, path, body, token=token)[0] == 401, (method, path, token)
        tried += 1
    assert tried > 25
    assert server.ask("POST", "/v1/completions", {"prompt": [1]})[0] == 401  # vLLM's own
    assert server.admin("GET", "/is_paused") == (200, {"is_paused": False})


def test_asleep_it_is_refused(server, trainer, alone):
    trainer.attach()
    trainer.update(1)
    assert server.admin("POST", "/sleep?level=1")[0] == 200
    with pytest.raises(UpdateAbortedError, match="asleep") as caught:
        trainer.update(2)
    assert isinstance(caught.value.__cause__, StateError)
    assert server.admin("POST", "/wake_up")[0] == 200
    assert server.greedy_all() == all_alone(alone, 1)
    trainer.update(2)
    assert server.greedy_all() == all_alone(alone, 2)


def test_while_an_update_is_open_it_is_refused(server, trainer, alone):
    trainer.attach()
    trainer.update(1)
    assert server.admin("POST", "/start_weight_update")[0] == 200
    with pytest.raises(UpdateAbortedError, match="an update is open"):
        trainer.update(2)
    assert server.admin("POST", "/finish_weight_update", {})[0] == 200
    assert server.greedy_all() == all_alone(alone, 1)
    trainer.update(2)
    assert server.greedy_all() == all_alone(alone, 2)


def test_quarantine_and_back(server, trainer, alone):
    """An update that somebody opens in between, unseen by the guard, so that the commit fails."""
    trainer.attach()
    trainer.update(1)
    rpc = {"method": "start_weight_update", "timeout": None}
    assert server.admin("POST", "/collective_rpc", rpc)[0] == 200
    with pytest.raises(PartialCommitError, match="start_weight_update") as caught:
        trainer.update(2)
    (engine,) = caught.value.report.engines  # type: ignore[attr-defined]
    assert engine.state == "quarantined"
    assert engine.name in caught.value.report.quarantined  # type: ignore[attr-defined]
    status, told = server.ask(
        "POST", "/v1/completions", {"model": "tiny", "prompt": [5]}, token=API_KEY
    )
    assert status == 503
    assert "quarantined" in told["error"]["message"]
    assert server.ask("GET", "/health")[0] == 200
    assert server.admin("GET", "/parallelkit/status")[1]["state"] == "quarantined"
    trainer.update(3)
    assert server.greedy_all() == all_alone(alone, 3)
    assert server.admin("GET", "/weight_info") == (200, {"weight_version": "3"})


def test_a_second_trainer_waits_for_the_first_to_go(server, trainer, alone):
    trainer.attach()
    trainer.update(1)
    second = Trainer(server)
    try:
        with pytest.raises(pk.errors.WeightTransferError, match="follows a publisher already"):
            second.attach()
        trainer.update(2)
        assert server.greedy_all() == all_alone(alone, 2)
        trainer.publisher.close()
        second.attach()
        second.update(1)
        assert server.greedy_all() == all_alone(alone, 1)
        assert server.admin("GET", "/weight_info") == (200, {"weight_version": "1"})
    finally:
        second.publisher.close()


def test_by_vllms_own_routes(server, trainer, alone):
    """What `insecure=True` does, step by step; here the guard lets it, by the token."""
    address = Address.of(server.url)
    options = AttachOptions.of({}, what="attach", also={})
    client = RawServer(Routes(address, token=TOKEN, name="raw"), options)
    handle = trainer.publisher.attach(client)
    report = trainer.update(1)
    (engine,) = report.engines
    assert (engine.name, engine.state, engine.weight_version) == ("raw", "committed", "1")
    assert server.greedy_all() == all_alone(alone, 1)
    assert handle.version == client.version(timeout=TIMEOUT) == 1
    assert server.admin("GET", "/is_paused") == (200, {"is_paused": False})
    client.quarantine("for a try")
    assert "no guard" in handle.reason
    trainer.update(2)
    assert server.greedy_all() == all_alone(alone, 2)
    assert handle.state == "serving"


class Kept:
    """A target of bytes, in this process."""

    device = "cpu"

    def __init__(self, given: tiny.Tensors) -> None:
        self._needs = tiny.manifest(given)
        self.module = [bytearray(len(tensor.data)) for tensor in given.values()]

    def needs(self) -> Any:
        return self._needs

    def check(self) -> None:
        """It is as it was."""

    begin = finish = check

    def destination(self, index: int) -> memoryview:
        return memoryview(self.module[index])

    host_bytes = destination

    def write(self, index: int, data: memoryview) -> None:
        raise NotImplementedError


def test_it_is_killed(server, trainer):
    """Named within the deadline; a member elsewhere goes on with the next update. The last test:
    the server is gone."""
    trainer.attach(name="actor")
    other = Kept(tiny.tensors(0))
    with pk.subscribe_weights(other, trainer.publisher.ticket, timeout=TIMEOUT) as subscriber:
        subscriber.serve()
        trainer.update(1)
        assert subscriber.step(0) == 1
        server.kill()
        began = time.monotonic()
        try:
            report = trainer.update(2)
        except UpdateAbortedError as error:
            assert "actor" in str(error)
            assert subscriber.step(0) == 1
            report = trainer.update(2)
        else:  # its workers had ended too, which was noticed before
            assert any(note.startswith("actor: lost") for note in report.notes)
        assert time.monotonic() - began < TIMEOUT + 10
        assert report.engines == ()
        assert [m.state for m in report.members] == ["staged"]
        assert subscriber.step(0) == 2
        assert [bytes(b) for b in other.module] == [t.data for t in tiny.tensors(2).values()]
        (engine,) = trainer.publisher.engines
        assert (engine.name, engine.state) == ("actor", "lost")
