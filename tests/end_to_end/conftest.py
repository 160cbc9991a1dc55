"""What the end-to-end tests share."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

from parallelkit.demo.config import PYTHON_VARIABLE

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """A Python that has vLLM and parallelkit: the variable's, or the repository's `.venv-vllm`.

    Tests that need it are skipped where there is none.
    """
    python = os.environ.get(PYTHON_VARIABLE) or str(ROOT / ".venv-vllm" / "bin" / "python")
    if not Path(python).exists():
        pytest.skip(f"no {python}; name a Python with vLLM: {PYTHON_VARIABLE}")
    code = (
        "from importlib.util import find_spec; "
        "print(*[n for n in ('vllm', 'parallelkit', 'parallelkit_vllm') if not find_spec(n)])"
    )
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=120)
    missing = found.stdout.split() if found.returncode == 0 else [found.stderr[-200:]]
    if missing:
        pytest.skip(f"{python} lacks {', '.join(missing)}")
    return python


@pytest.fixture(scope="session")
def mindspore() -> None:
    """Skip where MindSpore is not installed; it is not imported here."""
    if importlib.util.find_spec("mindspore") is None:
        pytest.skip("MindSpore is not installed")
