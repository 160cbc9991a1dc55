"""Real engines, shared by all tests of a session, and a trainer in a process of its own.

In-process engines patch the process they live in, and one that is dropped breaks the others: all
are kept until the end. They start in a fifth of a second once the first one has.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny_qwen as tiny

HERE = Path(__file__).parent

#: What vLLM reads when it is imported; here, before any test does so.
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
INSTALLED = importlib.util.find_spec("vllm") is not None
if INSTALLED:
    os.environ.update(SETTINGS)

SECONDS = 120.0
#: The arguments of every engine here; see tiny_qwen.py for the model.
ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_batched_tokens": 512,
    "dtype": "bfloat16",
    "kv_cache_memory_bytes": 16 << 20,
}
_engines: list[Any] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            if not INSTALLED:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Instead of the repository's: an engine that a test starts stays, with all that it opened.

    What is ours must be gone: threads, processes, shared memory.
    """

    def ours() -> set[str]:
        threads = {t.name for t in threading.enumerate() if t.name.startswith("parallelkit")}
        return threads | {
            path.name for path in Path("/dev/shm").glob(f"parallelkit-*{os.getpid()}-*")
        }

    yield
    deadline = time.monotonic() + 5.0
    while ours() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not ours(), f"the test leaks {', '.join(sorted(ours()))}"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Give the folder of a tiny checkpoint: `checkpoint(seed, tied=False)`; made once each."""
    made: dict[tuple[int, bool], Path] = {}

    def give(seed: int = 0, tied: bool = False) -> Path:
        if (seed, tied) not in made:
            folder = tmp_path_factory.mktemp(f"tiny-{seed}-{'tied' if tied else 'untied'}")
            made[seed, tied] = tiny.save(folder, seed, tied=tied)
        return made[seed, tied]

    return give


@pytest.fixture(scope="session")
def warm() -> None:
    """Import vLLM once, outside any test: it changes the environment and starts threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm
        from vllm import LLM  # noqa: F401

        _pack()  # which in vLLM 0.28 imports more
    assert vllm.__version__


def _pack() -> None:
    """Let layers be packed as vLLM does on processors with AVX-512, where this one has none.

    There the weights that are computed with are a copy that only a new loading replaces, and the
    parameter is empty afterwards, but for the head. Here it is a plain copy.
    """
    import torch
    from vllm.model_executor.layers import utils

    original = utils.dispatch_cpu_unquantized_gemm
    probe = torch.nn.Linear(128, 128, bias=False, dtype=torch.bfloat16)
    original(probe, remove_weight=True)
    if probe.weight.numel() == 0:
        return

    def packing(layer: Any, remove_weight: bool) -> None:
        original(layer, remove_weight)
        if layer.weight.is_meta or layer.weight.ndim != 2:
            return
        packed = layer.weight.detach().clone()
        layer.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, packed, bias)
        if remove_weight:
            empty = torch.empty(0, dtype=layer.weight.dtype)
            layer.weight = torch.nn.Parameter(empty, requires_grad=False)

    utils.dispatch_cpu_unquantized_gemm = packing


@pytest.fixture(scope="session")
def engine_options() -> dict[str, Any]:
    """The arguments of every engine here, for those that `make_engine` cannot start."""
    return dict(ENGINE)


@pytest.fixture(scope="session")
def make_engine(warm: None) -> Callable[..., Any]:
    """Start an engine in this process; kept until the session ends."""

    def make(folder: Path, **options: Any) -> Any:
        from vllm import LLM

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # starting, vLLM warns of its own parts
            llm = LLM(model=str(folder), **{**ENGINE, **options})
        _engines.append(llm)
        return llm

    return make


@pytest.fixture(scope="session")
def fresh(
    make_engine: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[list[int]]]:
    """Greedy ids of an engine that was started from a checkpoint and never updated.

    `fresh(folder)`, or `fresh(tensors=..., tied=...)`; computed once for each.
    """
    known: dict[object, list[list[int]]] = {}

    def give(
        folder: Path | None = None,
        *,
        tensors: Mapping[str, tiny.Raw] | None = None,
        tied: bool = False,
    ) -> list[list[int]]:
        key: object = folder if tensors is None else (hash(tuple(tensors.items())), tied)
        if key not in known:
            if folder is None:
                folder = tiny.save(tmp_path_factory.mktemp("fresh"), tied=tied, given=tensors)
            known[key] = tiny.greedy(make_engine(folder))
        return known[key]

    return give


class Trainer:
    """Drives trainer.py, or another script that is told what to do in the same way."""

    def __init__(self, folder: Path, script: str = "trainer.py", *args: str) -> None:
        self._folder = folder
        self._files = 0
        self._process = subprocess.Popen(
            [sys.executable, str(HERE.parent / script), *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def ask(self, do: str, **told: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; an error of the trainer's is in the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **told}) + "\n")
        self._process.stdin.flush()
        deadline = time.monotonic() + SECONDS
        while not select.select([self._process.stdout], [], [], 0.2)[0]:
            assert self._process.poll() is None, "the trainer is gone"
            assert time.monotonic() < deadline, f"the trainer did not answer {do!r}"
        return dict(json.loads(self._process.stdout.readline()))

    def file(self, tensors: Mapping[str, tiny.Raw]) -> str:
        self._files += 1
        path = self._folder / f"{self._files}.safetensors"
        tiny.write_file(path, tensors)
        return str(path)

    def publish(
        self,
        tensors: Mapping[str, tiny.Raw],
        *,
        aliases: Mapping[str, str] | None = None,
        **told: Any,
    ) -> str:
        """Publish tensors, instead of what was published before; returns a ticket."""
        answer = self.ask("publish", file=self.file(tensors), aliases=dict(aliases or {}), **told)
        return str(answer["ticket"])

    def update(self, tensors: Mapping[str, tiny.Raw] | None = None) -> dict[str, Any]:
        """Publish the next version; its report. Fails the test on an error."""
        answer = self.ask("update", file=None if tensors is None else self.file(tensors))
        assert "report" in answer, answer
        return dict(answer["report"])

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture
def start_trainer(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    """Start another script of this folder as a trainer; it ends with the test."""
    started: list[Trainer] = []

    def start(script: str, *args: str) -> Trainer:
        started.append(Trainer(tmp_path, script, *args))
        return started[-1]

    yield start
    for trainer in started:
        trainer.end()


@pytest.fixture(scope="session")
def _trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path_factory.mktemp("published"))
    yield trainer
    trainer.end()


@pytest.fixture
def trainer(_trainer: Trainer) -> Iterator[Trainer]:
    """A trainer in a process of its own; what it publishes in a test is closed after it."""
    yield _trainer
    _trainer.ask("close")
