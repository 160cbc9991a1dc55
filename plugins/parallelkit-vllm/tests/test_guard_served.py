"""The guard in a real ASGI server, with the framework that vLLM's server is made of."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

TOKEN = "0123456789abcdef0123456789abcdef"
OWNER = "ab" * 16
SERVER = Path(__file__).parent / "served.py"


def start(port: int, **environ: str) -> subprocess.Popen[str]:
    env = {k: v for k, v in os.environ.items() if k != "PARALLELKIT_ENGINE_TOKEN"} | environ
    return subprocess.Popen(
        [sys.executable, str(SERVER), str(port)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def port() -> Iterator[int]:
    number = free_port()
    process = start(number, PARALLELKIT_ENGINE_TOKEN=TOKEN)
    try:
        end = time.monotonic() + 60
        while True:
            try:
                assert ask(number, "GET", "/health")[0] == 200
                break
            except OSError:
                assert process.poll() is None, process.communicate()[0]
                assert time.monotonic() < end
                time.sleep(0.05)
        yield number
    finally:
        process.kill()
        process.communicate()


def ask(
    port: int, method: str, path: str, body: Any = None, token: str | None = None
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, path, body=data, headers=headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read() or b"null")
    finally:
        connection.close()


def own(port: int, name: str, **fields: Any) -> tuple[int, Any]:
    return ask(port, "POST", f"/parallelkit/{name}", {"owner": OWNER, **fields}, TOKEN)


def test_without_a_token_it_does_not_start():
    port = free_port()
    process = start(port)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "parallelkit_vllm.Guard: no token: set PARALLELKIT_ENGINE_TOKEN" in output
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), 1)


def test_a_commit_and_the_token(port):
    assert ask(port, "POST", "/pause")[0] == 401
    assert ask(port, "POST", "/pause", token=TOKEN)[0] == 200
    assert ask(port, "POST", "/pause?x=1", token=TOKEN[::-1])[0] == 401
    assert ask(port, "POST", "/pause/", token=None)[0] == 401
    assert ask(port, "POST", "/%70ause")[0] == 401
    assert own(port, "init", ticket="pk1:x", timeout=5.0)[0] == 200
    assert own(port, "begin", version=1, lease=5.0)[0] == 200
    status, told = own(port, "commit", version=1, timeout=5.0)
    assert (status, told["weight_version"]) == (200, "1")
    status, told = ask(port, "POST", "/v1/completions", {"count": 2})
    assert (status, told) == (200, [[0, 1], [1, 1]])


def test_a_stream_that_is_cut_off_looks_cut_off(port):
    assert own(port, "init", ticket="pk1:x", timeout=5.0)[0] == 200
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("POST", "/v1/stuck")
    response = connection.getresponse()
    assert response.status == 200
    assert response.readline() == b"0\n"
    assert own(port, "quarantine", reason="torn")[0] == 200
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        response.read()
    connection.close()
    status, told = ask(port, "POST", "/v1/completions", {"count": 2})
    assert status == 503
    assert "torn" in told["error"]["message"]
    assert own(port, "commit", version=1, timeout=5.0)[0] == 200
    assert ask(port, "POST", "/v1/completions", {"count": 1})[0] == 200


def test_a_caller_that_hangs_up_in_a_commit(port):
    """It goes on to its end, whoever asked for it."""
    assert own(port, "init", ticket="pk1:x", timeout=5.0)[0] == 200
    body = json.dumps({"owner": OWNER, "version": 1, "timeout": 5.0})
    head = (
        "POST /parallelkit/commit HTTP/1.1\r\nHost: x\r\n"
        f"Authorization: Bearer {TOKEN}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", port), 5) as caller:
        caller.sendall((head + body).encode())
        end = time.monotonic() + 10
        while "commit" not in status(port).get("under_way", ""):
            assert time.monotonic() < end
    while status(port).get("under_way"):
        assert time.monotonic() < end
        time.sleep(0.02)
    told = status(port)
    assert (told["state"], told["version"], told["weight_version"]) == ("serving", 1, "1")
    assert ask(port, "POST", "/v1/completions", {"count": 1}) == (200, [[0, 1]])


def status(port: int) -> dict[str, Any]:
    code, told = ask(port, "GET", "/parallelkit/status", token=TOKEN)
    assert code == 200
    return dict(told)
