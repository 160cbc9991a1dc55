"""The demo's reader against a server that is made up, and the command that starts a real one."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
from parallelkit_vllm.demo.engine import follow
from parallelkit_vllm.demo.reading import Reader
from parallelkit_vllm.demo.server import DemoServer, command, environment

from parallelkit.demo import events
from parallelkit.demo.config import GREEDY, PROMPT, TEMPERATURE, Settings
from parallelkit.demo.events import Likeliest
from parallelkit.demo.text import vocabulary_of
from parallelkit.errors import EngineError


class Fake(BaseHTTPRequestHandler):
    """Streams what `script` says: lists of tokens, seconds to wait, or bytes as they are."""

    script: ClassVar[list[list[int] | float | bytes]] = []
    status: ClassVar[int] = 200
    asked: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.asked.append(json.loads(self.rfile.read(length)) | {"path": self.path})
        self.send_response(self.status)
        self.end_headers()
        for item in self.script:
            if isinstance(item, float):
                time.sleep(item)
                continue
            data = item
            if isinstance(item, list):
                logprobs = {"token_logprobs": [-float(token) for token in item]}
                choice = {"index": 0, "text": "", "token_ids": item, "logprobs": logprobs}
                event = {"choices": [choice]}
                data = b"data: " + json.dumps(event).encode() + b"\n\n"
            self.wfile.write(data)  # type: ignore[arg-type]
            self.wfile.flush()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def reader() -> Iterator[Reader]:
    Fake.script, Fake.status, Fake.asked = [], 200, []
    with ThreadingHTTPServer(("127.0.0.1", 0), Fake) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield Reader(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
        thread.join()


def test_tokens_are_read_as_they_come(reader: Reader) -> None:
    Fake.script = [[], [4, 5], 0.15, [6], b"data: [DONE]\n\n"]
    found = reader.complete([1, 2], 3, temperature=0.0, seed=7)
    assert found == Likeliest([4, 5, 6], [-4.0, -5.0, -6.0])
    assert reader.written == 3
    assert 0.14 < reader.gap < 5
    (asked,) = Fake.asked
    assert asked["path"] == "/v1/completions"
    wanted = {"prompt": [1, 2], "max_tokens": 3, "temperature": 0.0, "seed": 7, "stream": True}
    assert {name: asked[name] for name in wanted} == wanted
    assert asked["return_token_ids"] is True
    reader.complete([1], 3)
    assert reader.written == 6
    reader.reset()
    assert (reader.written, reader.gap) == (0, 0.0)


def test_time_between_requests_is_no_gap(reader: Reader) -> None:
    Fake.script = [0.3, [4]]
    reader.complete([1], 1)
    reader.complete([1], 1)
    assert reader.gap == 0.0


@pytest.mark.parametrize(
    ("script", "status", "told"),
    [
        ([b'{"error": "quarantined"}'], 503, "HTTP 503.*quarantined"),
        ([[4]], 200, "ended after 1 of 2 tokens"),
        ([[4], b'data: {"error": {"message": "gone"}}\n\n'], 200, "failed: .*gone"),
        ([b"data: {broken\n\n"], 200, "broke off"),
        ([b'data: {"choices": [{"token_ids": [4]}]}\n\n'], 200, "broke off: KeyError"),
    ],
)
def test_what_is_no_whole_text_is_an_error(
    reader: Reader, script: list[Any], status: int, told: str
) -> None:
    Fake.script, Fake.status = script, status
    with pytest.raises(EngineError, match=told):
        reader.complete([1], 2)


def test_nobody_there_is_an_error() -> None:
    with pytest.raises(EngineError, match="broke off"):
        Reader("http://127.0.0.1:9").complete([1], 2)


def test_a_text_that_an_update_came_into_is_not_shown(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's version before and after each round of two texts, by hand."""
    versions = iter([0, 0, 1, 1, 1, 2, 2, 2])
    vocabulary = vocabulary_of(PROMPT)
    settings = Settings(steps=1, sample=5, seed=3, engine="vllm")
    asked: list[tuple[int, dict[str, Any]]] = []
    said: list[Any] = []

    class Server:
        url = reader._address.url

        @property
        def version(self) -> int:
            return next(versions)

    def complete(self: Reader, prompt: list[int], length: int, **sampling: Any) -> Likeliest:
        assert vocabulary.decode(prompt) == PROMPT
        asked.append((length, sampling))
        self.written += length
        return Likeliest([len(asked) % 5] * length, [-1.0] * length)

    monkeypatch.setattr(Reader, "complete", complete)
    monkeypatch.setattr("parallelkit_vllm.demo.engine.say", said.append)
    follow(Server(), settings, vocabulary)  # type: ignore[arg-type]
    assert asked[:2] == [
        (GREEDY, {"temperature": 0.0}),
        (5, {"temperature": TEMPERATURE, "seed": 3}),
    ]
    # rounds: at 0, seen already; 0, then 1; at 1, shown; 1, then 2; at 2, shown
    assert [(event.version, event.written) for event in said] == [
        (1, 3 * (GREEDY + 5)),
        (2, 2 * (GREEDY + 5)),
    ]
    assert all(isinstance(event, events.Followed) for event in said)
    assert said[0].likeliest == Likeliest([5 % 5] * GREEDY, [-1.0] * GREEDY)
    assert said[0].sample == PROMPT + vocabulary.decode([6 % 5] * 5)


def test_the_server_is_on_loopback_with_a_guard() -> None:
    words = command("/a/checkpoint", 1234, 512)
    pairs = dict(itertools.pairwise(words))
    assert pairs["--host"] == "127.0.0.1"
    assert pairs["--middleware"] == "parallelkit_vllm.Guard"
    assert json.loads(pairs["--weight-transfer-config"]) == {"backend": "parallelkit"}
    assert "secret-of-the-test" not in " ".join(words)
    assert environment("secret-of-the-test")["PARALLELKIT_ENGINE_TOKEN"] == "secret-of-the-test"


def test_a_server_that_cannot_start_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    failing = ["false"]
    monkeypatch.setattr("parallelkit_vllm.demo.server.command", lambda *args: failing)
    with DemoServer(str(tmp_path), 512) as server:
        with pytest.raises(EngineError, match="ended with status 1"):
            server.wait(lambda seconds: None)
