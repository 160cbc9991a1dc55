"""The client of a server, against the real guard over a real socket, and against bad servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from parallelkit import errors
from parallelkit.errors import (
    EngineCommitError,
    EngineError,
    EngineTokenError,
    PeerLostError,
    ProtocolError,
    StateError,
    UnguardedEngineError,
    UnsupportedFeatureError,
    UpdateTimeoutError,
    VersionError,
)
from parallelkit.plugin import EngineClient

sys.path.insert(0, str(Path(__file__).parent))

from fake_server import TOKEN, Guarded, Web
from parallelkit_vllm import wire
from parallelkit_vllm.clients import web
from parallelkit_vllm.clients.http import connect

sys.path.pop(0)


@pytest.fixture
def serve() -> Iterator[Callable[..., Any]]:
    """Start a server with the guard, or with a function that answers."""
    made: list[Web] = []

    def make(handle: Callable[..., tuple[int, bytes]] | None = None, **kwargs: Any) -> Web:
        made.append(Guarded(**kwargs) if handle is None else Web(handle))
        return made[-1]

    yield make
    for server in made:
        server.close()


def json_of(value: Any) -> bytes:
    return json.dumps(value).encode()


def test_a_whole_life(serve):
    server = serve(members=2)
    engine = connect(server.url, {"token": TOKEN, "pause": "wait"})
    assert isinstance(engine, EngineClient)
    assert engine.members == 2
    assert server.url in engine.name
    assert (engine.handle.state, engine.handle.version) == ("serving", 0)
    assert engine.handle.url == server.url
    assert engine.version(timeout=5) == 0
    engine.init("pk1:ticket", timeout=10)
    assert server.engine.arguments["init_weight_transfer_engine"]["ticket"] == "pk1:ticket"
    engine.begin(1, timeout=10)
    done = engine.commit(1, timeout=10)
    assert done.cache == "reset"
    assert done.weight_version == "1"
    assert 0 < done.pause_seconds < 10
    assert server.engine.arguments["pause_generation"]["mode"] == "wait"
    assert engine.version(timeout=5) == engine.handle.version == 1
    engine.begin(2, timeout=10)
    engine.abort(2, "a member failed", timeout=10)
    engine.begin(2, timeout=10)
    engine.quarantine("rank 1 is gone")
    assert engine.handle.state == "quarantined"
    assert engine.handle.reason == "rank 1 is gone"
    assert "quarantined" in repr(engine.handle)
    answer = server.handle("POST", "/v1/completions", {}, b'{"count": 1}')
    assert answer[0] == 503
    engine.begin(3, timeout=10)
    engine.commit(3, timeout=10)
    assert (engine.handle.state, engine.handle.version) == ("serving", 3)
    engine.close()
    engine.close()


def test_the_token_may_be_in_the_environment(serve, monkeypatch):
    server = serve()
    monkeypatch.setenv(wire.TOKEN_VARIABLE, TOKEN)
    assert connect(server.url, {}).version(timeout=5) == 0


@pytest.mark.parametrize(("token", "what"), [(None, "is missing"), ("wrong" * 6, "is not the one")])
def test_the_token_is_missing_or_wrong(serve, token, what):
    server = serve()
    with pytest.raises(EngineTokenError, match=what) as caught:
        connect(server.url, {"token": token})
    assert wire.TOKEN_VARIABLE in str(caught.value)
    assert TOKEN not in str(caught.value)
    assert "wrongwrong" not in str(caught.value)


def test_errors_keep_their_class_and_the_engines_name(serve):
    server = serve()
    engine = connect(server.url, {"token": TOKEN, "name": "actor"})
    other = connect(server.url, {"token": TOKEN, "name": "other"})
    with pytest.raises(StateError, match="actor.*no publisher"):
        engine.begin(1, timeout=5)
    engine.init("pk1:ticket", timeout=5)
    with pytest.raises(StateError, match="other.*another publisher"):
        other.begin(1, timeout=5)
    engine.commit(5, timeout=10)
    with pytest.raises(VersionError, match="actor.*version 5"):
        engine.commit(4, timeout=10)
    server.on_loop(lambda: server.engine.fail.update({"update_weights": RuntimeError("torn")}))
    with pytest.raises(EngineCommitError, match="actor.*torn") as caught:
        engine.commit(6, timeout=10)
    assert caught.value.step == "update_weights"
    server.engine.sleeping = True
    with pytest.raises(StateError, match="actor.*asleep"):
        engine.begin(7, timeout=5)
    server.engine.errored = True
    with pytest.raises(PeerLostError, match="actor.*dead") as lost:
        engine.begin(7, timeout=5)
    assert lost.value.peers == ("actor",)


def test_a_commit_that_hangs_ends_within_the_clients_deadline(serve, monkeypatch):
    monkeypatch.setattr("parallelkit_vllm.clients.http.RECOVERY_SECONDS", 0.5)
    monkeypatch.setattr("parallelkit_vllm.commit.RECOVERY_SECONDS", 0.2)
    server = serve()
    engine = connect(server.url, {"token": TOKEN})
    engine.init("pk1:ticket", timeout=5)
    gate = server.on_loop(asyncio.Event)
    server.on_loop(lambda: server.engine.hang.update({"update_weights": gate}))
    began = time.monotonic()
    with pytest.raises(UpdateTimeoutError, match="update_weights") as caught:
        engine.commit(1, timeout=3.0)
    assert time.monotonic() - began < 3.5
    assert caught.value.missing == (engine.name,)
    server.on_loop(gate.set)


def test_several_engines(serve):
    """One is gone: named, within the deadline; the others are as they were."""
    servers = [serve() for _ in range(3)]
    engines = [connect(s.url, {"token": TOKEN}) for s in servers]
    assert len({engine.name for engine in engines}) == 3
    for engine in engines:
        engine.init("pk1:ticket", timeout=5)
        engine.commit(1, timeout=10)
    gone = socket_of(servers[1])
    servers[1].close()
    servers[1].close = lambda: None  # type: ignore[method-assign]
    assert gone
    for call in (
        lambda: engines[1].begin(2, timeout=5),
        lambda: engines[1].commit(2, timeout=5),
        lambda: engines[1].version(timeout=5),
    ):
        began = time.monotonic()
        with pytest.raises(PeerLostError, match="gone, or not reached") as caught:
            call()
        assert time.monotonic() - began < 5
        assert caught.value.peers == (engines[1].name,)
        assert servers[1].url in str(caught.value)
    engines[1].quarantine("gone")
    assert "could not be told" in engines[1].handle.reason
    for engine in (engines[0], engines[2]):
        engine.begin(2, timeout=5)
        assert engine.commit(2, timeout=10).weight_version == "2"


def socket_of(server: Web) -> bool:
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), 5):
        return True


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.5:8000",
        "http://engine.example:8000",
        "http://0.0.0.0:8000",
        "http://[::]:8000",
        "http://[2001:db8::1]:8000",
        "http://127.0.0.1.example.org:8000",
        "http://localhost.example.org",
        "http://0x7f000001.example",
    ],
)
@pytest.mark.parametrize("insecure", [False, True])
def test_plain_http_to_another_host_is_refused(url, insecure, monkeypatch):
    monkeypatch.setattr(socket, "create_connection", lambda *a, **k: pytest.fail("it connected"))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: pytest.fail("it looked it up"))
    with pytest.raises(UnguardedEngineError, match="in the clear"):
        connect(url, {"token": TOKEN, "insecure": insecure})


@pytest.mark.parametrize(
    ("url", "host", "port", "prefix", "secure"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1", 8000, "", False),
        ("http://127.3.2.1", "127.3.2.1", 80, "", False),
        ("http://localhost:8000/", "localhost", 8000, "", False),
        ("http://[::1]:8000/a/b/", "::1", 8000, "/a/b", False),
        ("https://engine.example", "engine.example", 443, "", True),
        ("https://10.0.0.5:8443/e", "10.0.0.5", 8443, "/e", True),
    ],
)
def test_addresses(url, host, port, prefix, secure):
    address = web.Address.of(url)
    assert (address.host, address.port) == (host, port)
    assert (address.prefix, address.secure) == (prefix, secure)
    assert address.url == url.rstrip("/")


@pytest.mark.parametrize(
    "url",
    [
        "ftp://127.0.0.1",
        "127.0.0.1:8000",
        "http://",
        "http://127.0.0.1:99999",
        "http://127.0.0.1:x",
        "http://user:secret@127.0.0.1:8000",
        "http://127.0.0.1:8000/?a=1",
        "http://127.0.0.1:8000/#a",
        "http://127.0.0.1:8000/a b",
        "http://127.0.0.1:8000/\r\nX: y",
    ],
)
def test_bad_addresses(url):
    with pytest.raises(EngineError, match="attach") as caught:
        web.Address.of(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "error", "what"),
    [
        ({"tokens": "x"}, UnsupportedFeatureError, "tokens"),
        ({"loop": None}, UnsupportedFeatureError, "loop"),
        ({"token": 5}, EngineError, "token"),
        ({"token": "a\nb"}, EngineTokenError, "printable"),
        ({"insecure": "yes"}, EngineError, "insecure"),
        ({"cache": "drop"}, EngineError, "cache"),
        ({"pause": "stop"}, EngineError, "pause"),
        ({"name": "a\nb"}, EngineError, "name"),
    ],
)
def test_bad_options(options, error, what, monkeypatch):
    monkeypatch.setattr(socket, "create_connection", lambda *a, **k: pytest.fail("it connected"))
    with pytest.raises(error, match=what):
        connect("http://127.0.0.1:9", options)


def test_nobody_listens():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(PeerLostError, match="refused"):
            connect(url, {"token": TOKEN})


@contextlib.contextmanager
def sockets(talk: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that says what it likes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    talk(connection)

        thread = threading.Thread(target=accept)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(10)
        assert not thread.is_alive()


def silent(connection: socket.socket) -> None:
    while connection.recv(4096):
        pass


def dripping(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    with contextlib.suppress(OSError):
        for _ in range(500):
            connection.sendall(b"X-Header: 1\r\n")
            time.sleep(0.02)


@pytest.mark.parametrize("talk", [silent, dripping])
def test_a_slow_server_is_cut_off_at_the_deadline(talk, monkeypatch):
    monkeypatch.setattr("parallelkit_vllm.clients.http.STATUS_SECONDS", 0.5)
    with sockets(talk) as url:
        began = time.monotonic()
        with pytest.raises(UpdateTimeoutError, match="no answer within 0.5 s") as caught:
            connect(url, {"token": TOKEN, "name": "slow"})
        assert time.monotonic() - began < 2
        assert caught.value.missing == ("slow",)
        end = time.monotonic() + 5
        while any(t.name == "parallelkit-http" for t in threading.enumerate()):
            assert time.monotonic() < end  # its thread ends too
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", ProtocolError),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab", PeerLostError),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{]", ProtocolError),
        (b'HTTP/1.1 200 OK\r\ncontent-length: 13\r\n\r\n{"guard": "1"}', ProtocolError),
        (b"", PeerLostError),
    ],
)
def test_nonsense(said, error):
    def talk(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(said)

    with sockets(talk) as url, pytest.raises(error):
        connect(url, {"token": TOKEN})


def test_answers_are_bounded(serve):
    server = serve(lambda *a: (200, b"x" * (web.MAX_ANSWER + 1)))
    with pytest.raises(ProtocolError, match="more than"):
        connect(server.url, {"token": TOKEN})


@pytest.mark.parametrize("status", [301, 307, 500, 418])
def test_other_answers(serve, status):
    """Redirects are not followed: the token goes to nobody else."""
    server = serve(lambda *a: (status, b"go\x1b[2J away"))
    with pytest.raises(EngineError, match=f"HTTP {status}") as caught:
        connect(server.url, {"token": TOKEN})
    assert "\x1b" not in str(caught.value)
    assert len(server.requests) == 1


def test_another_protocol_of_the_guard(serve):
    told = {"guard": 99, "parallelkit": "9.0", "members": 1, "state": "serving"}
    server = serve(lambda *a: (200, json_of(told)))
    with pytest.raises(ProtocolError, match="protocol 99.*9.0"):
        connect(server.url, {"token": TOKEN})


def test_every_known_error_class_is_one():
    for name in wire._KNOWN:
        error = getattr(errors, name)("x")
        body = json_of({"error": {"message": "x", "type": name}})
        assert type(wire.error_of(body, 500, "n")) is type(error)
    body = json_of({"error": {"message": "x", "type": "SystemExit"}})
    assert type(wire.error_of(body, 500, "n")) is EngineError


# --- a server without a guard -------------------------------------------------------------------


class Raw:
    """vLLM's own routes."""

    def __init__(self, **fail: int) -> None:
        self.fail = fail
        self.paused = False
        self.served = "default"
        self.posts: list[str] = []
        self.bodies: dict[str, Any] = {}

    def __call__(self, method: str, path: str, headers: Any, body: bytes) -> tuple[int, bytes]:
        name = path.partition("?")[0].strip("/")
        if name.startswith("parallelkit"):
            return 404, b'{"detail":"Not Found"}'
        if method == "POST":
            self.posts.append(path)
            self.bodies[name] = json.loads(body) if body else None
        if name in self.fail:
            return self.fail.pop(name), json_of({"error": {"message": "it broke", "type": "x"}})
        gets = {
            "get_world_size": {"world_size": 2},
            "is_sleeping": {"is_sleeping": self.paused},
            "weight_info": {"weight_version": self.served},
        }
        if method == "GET":
            return (200, json_of(gets[name])) if name in gets else (404, b"")
        if name in ("pause", "resume"):
            self.paused = name == "pause"
        if name == "finish_weight_update":
            self.served = self.bodies[name].get("weight_version", self.served)
        return 200, b"" if name == "reset_prefix_cache" else b"{}"


def test_without_a_guard_it_is_refused(serve):
    server = serve(Raw())
    with pytest.raises(UnguardedEngineError, match=r"--middleware parallelkit_vllm\.Guard"):
        connect(server.url, {})
    assert [path for _, path, _ in server.requests] == ["/parallelkit/status"]


def test_unless_that_is_asked_for(serve):
    raw = Raw()
    engine = connect(serve(raw).url, {"insecure": True, "pause": "abort"})
    assert isinstance(engine, EngineClient)
    assert engine.members == 2
    engine.init("pk1:ticket", timeout=10)
    assert raw.bodies["init_weight_transfer_engine"]["init_info"]["ticket"] == "pk1:ticket"
    engine.begin(1, timeout=10)
    raw.posts.clear()
    done = engine.commit(1, timeout=10)
    assert raw.posts == [
        "/pause?mode=abort&clear_cache=true",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/reset_prefix_cache?reset_running_requests=true",
        "/resume",
    ]
    assert raw.bodies["update_weights"]["update_info"]["version"] == 1
    assert done.weight_version == "1"
    assert engine.version(timeout=5) == engine.handle.version == 1
    engine.abort(2, "x", timeout=5)
    raw.posts.clear()
    engine.quarantine("torn")
    assert raw.posts == ["/pause?mode=abort&clear_cache=true", "/resume"]
    assert "no guard" in engine.handle.reason
    engine.begin(2, timeout=5)
    engine.commit(2, timeout=10)
    assert engine.handle.state == "serving"
    engine.close()


@pytest.mark.parametrize(
    "step",
    ["pause", "start_weight_update", "update_weights", "finish_weight_update", "weight_info"],
)
def test_without_a_guard_it_resumes_on_every_path_too(serve, step):
    raw = Raw()
    engine = connect(serve(raw).url, {"insecure": True})
    raw.fail[step] = 500
    with pytest.raises(EngineError, match="it broke"):
        engine.commit(1, timeout=10)
    assert not raw.paused
    assert raw.posts[-1] == "/resume"


def test_without_a_guard_and_without_those_routes(serve):
    server = serve(lambda *a: (404, b"{}"))
    with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"):
        connect(server.url, {"insecure": True})


def test_without_a_guard_a_sleeping_engine_is_refused(serve):
    raw = Raw()
    engine = connect(serve(raw).url, {"insecure": True})
    raw.paused = True
    with pytest.raises(StateError, match="asleep or paused"):
        engine.begin(1, timeout=5)
    assert raw.paused
