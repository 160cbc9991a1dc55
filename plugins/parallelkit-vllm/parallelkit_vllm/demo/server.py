"""Start vLLM's own server with a guard, for one process, and leave nothing of it behind."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final

from parallelkit.errors import EngineError, ParallelKitError
from parallelkit_vllm import wire
from parallelkit_vllm.clients.web import Address, Server

#: A cold start on a machine with other work on it takes minutes.
_START_SECONDS: Final = 600.0
_BEAT_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.25
_LEAVE_SECONDS: Final = 10.0
_CALL_SECONDS: Final = 10.0


class DemoServer:
    """A server on a free port of this host. A context manager; at its end it is gone.

    It is in this process's group, as are the processes that vLLM starts: whoever ends the group
    ends them.

    Attributes:
        url: where it is; token: what its guard wants.
    """

    def __init__(self, checkpoint: str, positions: int) -> None:
        """Start it; `wait` until it answers.

        Args:
            checkpoint: a folder with `config.json` and safetensors in float32.
            positions: the longest sequence.
        """
        self.token = secrets.token_urlsafe(32)
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._web = Server(Address.of(self.url), token=self.token, name="the engine")
        self._process = subprocess.Popen(
            command(checkpoint, port, positions),
            env={**os.environ, **environment(self.token)},
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,  # ours is for events
        )

    def wait(self, beat: Callable[[float], None]) -> None:
        """Wait until it answers; `beat` is called with the seconds so far, every ten.

        Raises:
            EngineError: it ended, or does not answer within ten minutes.
        """
        began = time.monotonic()
        said = 0.0
        while (seconds := time.monotonic() - began) < _START_SECONDS:
            if self._process.poll() is not None:
                raise EngineError(
                    f"vLLM's server ended with status {self._process.returncode} as it started; "
                    "what it wrote stands above"
                )
            with contextlib.suppress(ParallelKitError):
                if self._web.request("GET", "/health", timeout=_CALL_SECONDS)[0] == 200:
                    return
            if seconds - said >= _BEAT_SECONDS:
                said = seconds
                beat(seconds)
            time.sleep(_POLL_SECONDS)
        raise EngineError(f"vLLM's server did not answer within {_START_SECONDS:g} s")

    @property
    def version(self) -> int:
        """The version that is committed there; 0 for none.

        Raises:
            EngineError: it is quarantined.
            PeerLostError, UpdateTimeoutError: it does not answer.
        """
        path = wire.PREFIX + "/status"
        code, data = self._web.request("GET", path, timeout=_CALL_SECONDS)
        if code != 200:
            raise wire.error_of(data, code, "the engine")
        status: wire.Status = wire.decode(data, wire.Status, "the engine")
        if status.state != "serving":
            raise EngineError(f"the engine is {status.state}: {status.reason}")
        return status.version

    def __enter__(self) -> DemoServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def command(checkpoint: str, port: int, positions: int) -> list[str]:
    """Return the command line of vLLM's server, with the guard and the native engine."""
    options = {
        "model": checkpoint,
        "served-model-name": "demo",
        "host": "127.0.0.1",
        "port": str(port),
        "dtype": "float32",
        "max-model-len": str(positions),
        "max-num-seqs": "4",
        "kv-cache-memory-bytes": str(64 << 20),
        "weight-transfer-config": '{"backend": "parallelkit"}',
        "middleware": "parallelkit_vllm.Guard",
        "uvicorn-log-level": "warning",
    }
    # not `vllm serve`: the wheel for the CPU has no metadata under the name that it looks for
    start = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    flags = ["--skip-tokenizer-init", "--enforce-eager"]
    return (
        start + flags + [word for name, value in options.items() for word in (f"--{name}", value)]
    )


def environment(token: str) -> dict[str, str]:
    """Return the variables of the server, besides those of this process."""
    return {
        wire.TOKEN_VARIABLE: token,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        # trainers are on the same cores
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
    }


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
