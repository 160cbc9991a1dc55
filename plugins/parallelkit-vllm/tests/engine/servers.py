"""A vLLM server in a process group of its own, and requests of it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import tiny_qwen as tiny

TOKEN = "0123456789abcdef0123456789abcdef"
API_KEY = "users-have-this-one"
#: Requests that come together are computed with other sums than one alone. In bfloat16 that chooses
#: another token now and then, among 200 of four streams often.
DTYPE = "float32"
#: Of a sequence: a request for as many tokens is there still when an update comes to the engine.
LENGTH = 512
#: A machine with other work may need minutes to start one.
START_SECONDS = 400.0
SECONDS = 120.0

ARGUMENTS = [
    "--host=127.0.0.1",
    "--served-model-name=tiny",
    "--skip-tokenizer-init",
    "--enforce-eager",
    f"--max-model-len={LENGTH}",
    "--max-num-batched-tokens=512",
    f"--dtype={DTYPE}",
    f"--kv-cache-memory-bytes={16 << 20}",
    '--weight-transfer-config={"backend": "parallelkit"}',
    f"--api-key={API_KEY}",
    "--middleware=parallelkit_vllm.Guard",
]


class Server:
    """Started at once; `wait` until it is up."""

    def __init__(self, model: Path, log: Path, **environ: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        env = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
        env |= {"VLLM_SERVER_DEV_MODE": "1", "PARALLELKIT_ENGINE_TOKEN": TOKEN}
        env |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | environ
        module = "vllm.entrypoints.openai.api_server"
        command = [sys.executable, "-m", module, f"--model={model}", f"--port={self.port}"]
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [*command, *ARGUMENTS],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Until it answers; its log is in the error if it does not."""
        end = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.ask("GET", "/health")[0] == 200:
                    return
            text = self.log.read_text(errors="replace")
            assert self.process.poll() is None, f"the server ended:\n{text[-4000:]}"
            assert time.monotonic() < end, f"the server is not up:\n{text[-4000:]}"
            time.sleep(0.3)

    def kill(self) -> None:
        """kill -9 of the server alone, as an accident would."""
        self.process.kill()
        self.process.wait(SECONDS)

    def end(self) -> None:
        """End it and whatever it started."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(SECONDS)

    def ask(
        self, method: str, path: str, body: Any = None, *, token: str | None = None
    ) -> tuple[int, Any]:
        """One request; the status and the JSON (or text) of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        try:
            connection.request(method, path, _json(body), _headers(token, body))
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        try:
            return response.status, json.loads(data) if data else None
        except ValueError:
            return response.status, data.decode(errors="replace")

    def admin(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """One request with the guard's token."""
        return self.ask(method, path, body, token=TOKEN)

    def greedy(self, prompt: list[int], count: int = 16) -> list[int]:
        """Token ids of a request by the users' route."""
        status, answer = self.ask("POST", "/v1/completions", asking(prompt, count), token=API_KEY)
        assert status == 200, answer
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "length", choice
        return list(choice["token_ids"])

    def greedy_all(self, count: int = 16) -> list[list[int]]:
        """Of every prompt of `tiny`, one after the other."""
        return [self.greedy(prompt, count) for prompt in tiny.prompts()]


class Stream(threading.Thread):
    """A request whose tokens are collected as they come."""

    def __init__(self, server: Server, prompt: list[int], count: int) -> None:
        super().__init__(name=f"stream-{count}")
        self.server, self.prompt, self.count = server, prompt, count
        self.tokens: list[int] = []
        self.finish = ""
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        body = asking(self.prompt, self.count) | {"stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=SECONDS)
        try:
            headers = _headers(API_KEY, body)
            connection.request("POST", "/v1/completions", _json(body), headers)
            response = connection.getresponse()
            assert response.status == 200, response.read()
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                (choice,) = json.loads(line[6:])["choices"]
                self.tokens += choice.get("token_ids") or []
                self.finish = choice.get("finish_reason") or self.finish
        except BaseException as error:
            self.error = error
        finally:
            connection.close()

    def reach(self, count: int) -> None:
        """Wait until so many tokens have come."""
        end = time.monotonic() + SECONDS
        while len(self.tokens) < count:
            assert self.is_alive(), (self.error, self.tokens, self.finish)
            assert time.monotonic() < end
            time.sleep(0.002)

    def done(self) -> list[int]:
        """Wait for its end; its tokens."""
        self.join(SECONDS)
        assert not self.is_alive()
        assert self.error is None, self.error
        return self.tokens


def asking(prompt: list[int], count: int) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "detokenize": False,
    }


def _json(body: Any) -> bytes | None:
    return None if body is None else json.dumps(body).encode()


def _headers(token: str | None, body: Any) -> dict[str, str]:
    headers = {"Content-Type": "application/json"} if body is not None else {}
    return headers | ({"Authorization": f"Bearer {token}"} if token is not None else {})
