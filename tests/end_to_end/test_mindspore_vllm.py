"""A MindSpore trainer, and a live vLLM engine that follows it from another Python.

MindSpore needs numpy<2 and vLLM numpy 2. So the engine runs in the Python that
`PARALLELKIT_VLLM_PYTHON` names, else in the repository's `.venv-vllm`; without one all is skipped.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import pytest

from parallelkit.decoder import ModelConfig
from parallelkit.demo.checkpoint import save_random_checkpoint

HERE = Path(__file__).parent
SECONDS = 300.0
VERSIONS = 3

#: What the trainer runs as, and what it publishes.
RUNS = [("eager", "bfloat16"), ("graph", "float32")]
MORE = [("eager", "float32"), ("graph", "bfloat16")]


pytestmark = [pytest.mark.ranks, pytest.mark.vllm]


class Script:
    """A running script of this folder that prints JSON lines and reads lines."""

    def __init__(self, argv: list[str], folder: Path, env: dict[str, str]) -> None:
        self._errors = folder / f"{Path(argv[1]).stem}-{id(self)}.txt"
        with self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            )
        self._lines: SimpleQueue[str] = SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self, field: str) -> dict[str, Any]:
        """Return the next object that has `field`; others are passed over."""
        while True:
            try:
                line = self._lines.get(timeout=SECONDS)
            except Empty:
                pytest.fail(f"{self.process.args} said no {field!r} within {SECONDS:g} s")
            if not line:
                pytest.fail(f"{self.process.args} ended:\n{self._errors.read_text()[-4000:]}")
            if line.startswith("{") and field in (found := json.loads(line)):
                return found

    def ask(self, field: str, **command: Any) -> dict[str, Any]:
        self.send(json.dumps(command))
        return self.hear(field)

    def close(self) -> None:
        self.process.kill()  # nothing is lost: what it had to say was heard
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")


@pytest.fixture(scope="module")
def engines(
    vllm_python: str, mindspore: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Script]:
    """One process with vLLM in it, for all tests: importing it is most of the time."""
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    script = Script(
        [vllm_python, str(HERE / "vllm_engine.py")], tmp_path_factory.mktemp("vllm"), env
    )
    yield script
    script.close()


class Run:
    """A MindSpore trainer that an engine followed, then a Torch one that published the same.

    Attributes:
        folder: of the checkpoints `v1`, ... that the MindSpore trainer saved.
        mindspore, torch: by version, what the engine generated as it followed; at 0, before it.
        reports: of the MindSpore trainer, by version.
    """

    def __init__(self, engines: Script, mode: str, dtype: str, folder: Path) -> None:
        self.folder = folder
        self._engines, self._words = engines, 0
        self.reports: list[dict[str, Any]] = []
        self.mindspore = self._follow("train", mode, dtype)
        self.torch = self._follow("replay", "-", dtype)

    def _follow(self, role: str, mode: str, dtype: str) -> list[dict[str, Any]]:
        script = str(HERE / "vllm_trainer.py")
        argv = [sys.executable, script, role, mode, dtype, str(self.folder)]
        trainer = Script(argv, self.folder, {"GLOG_v": "3"})
        try:
            offer = trainer.hear("ticket")
            config, start = ModelConfig(**offer["config"]), self.folder / "start"
            save_random_checkpoint(start, config, seed=9, dtype=dtype, positions=256)
            self._engines.send(
                json.dumps(
                    {
                        "do": "follow",
                        "checkpoint": str(start),
                        "ticket": offer["ticket"],
                        "versions": VERSIONS,
                    }
                )
            )
            seen = [self._engines.hear("tokens") for _ in range(VERSIONS + 1)]
            reports = [trainer.hear("version") for _ in range(VERSIONS)]
            trainer.send("the engine has seen them all")
            assert trainer.process.wait(60) == 0
        finally:
            trainer.close()
        self.reports = self.reports or reports
        return seen


@pytest.fixture(scope="module")
def runs(engines: Script, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Make each run once."""
    made: dict[tuple[str, str], Run] = {}

    def run(mode: str, dtype: str) -> Run:
        if (mode, dtype) not in made:
            folder = tmp_path_factory.mktemp(f"{mode}-{dtype}")
            made[mode, dtype] = Run(engines, mode, dtype, folder)
        return made[mode, dtype]

    return run


def each(test: Any) -> Any:
    """Every mode and every dtype, and with `--full` every mode with every dtype."""
    slow = [pytest.param(*run, marks=pytest.mark.slow) for run in MORE]
    return pytest.mark.parametrize(("mode", "dtype"), [*RUNS, *slow])(test)


@each
def test_a_followed_engine_is_a_new_one_at_every_version(
    engines: Script, runs: Any, mode: str, dtype: str
) -> None:
    run = runs(mode, dtype)
    for version in range(1, VERSIONS + 1):
        saved = engines.ask("tokens", do="fresh", checkpoint=str(run.folder / f"v{version}"))
        assert run.mindspore[version] == {"version": version, **saved}


@each
def test_a_torch_trainer_with_the_same_weights_gives_the_same_tokens(
    runs: Any, mode: str, dtype: str
) -> None:
    run = runs(mode, dtype)
    assert run.torch == run.mindspore


@each
def test_every_version_is_another_one_and_arrives_over_shm(
    runs: Any, mode: str, dtype: str
) -> None:
    run = runs(mode, dtype)
    assert len({json.dumps(seen["logprobs"]) for seen in run.mindspore}) == VERSIONS + 1
    assert [report["transport"] for report in run.reports] == ["shm"] * VERSIONS
    assert [report["states"] for report in run.reports] == [["committed"]] * VERSIONS
    assert all(report["changed"] > 0.5 for report in run.reports[1:])


def test_graph_mode_writes_more_than_one_letter(runs: Any) -> None:
    """So the tokens that are compared above are not one token, whatever the weights."""
    run = runs("graph", "float32")
    assert len({token for tokens in run.mindspore[-1]["tokens"] for token in tokens}) > 3
    assert run.mindspore[-1]["tokens"] != run.mindspore[1]["tokens"]


def test_three_implementations_give_the_same_logits(engines: Script, runs: Any) -> None:
    run = runs("graph", "float32")
    probe = np.load(run.folder / "probe.npy")
    save = str(run.folder / "hugging-face.npy")
    last = str(run.folder / f"v{VERSIONS}")
    said = engines.ask("kind", do="logits", checkpoint=last, tokens=probe.tolist(), save=save)
    assert said["kind"] == "Qwen2ForCausalLM"
    theirs = np.load(save)
    assert np.abs(theirs).max() > 1
    for framework in ("mindspore", "torch"):
        ours = np.load(run.folder / f"{framework}-{VERSIONS}.npy")
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5, err_msg=framework)
