"""The fake library, built once, and real ranks that use it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from parallelkit.spawn import RankResult
from parallelkit.testing.jobs import run_job

HERE = Path(__file__).parent
FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Build the fake library with extra flags; returns its path."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler to build the fake libhccl with")
    folder = tmp_path_factory.mktemp("fakehccl")
    built: dict[tuple[str, ...], str] = {}

    def make(*extra: str) -> str:
        if extra not in built:
            path = folder / f"libfakehccl{len(built)}.so"
            source = str(HERE / "fake" / "fakehccl.c")
            subprocess.run([compiler, *FLAGS, *extra, source, "-o", str(path)], check=True)
            built[extra] = str(path)
        return built[extra]

    return make


@pytest.fixture(scope="session")
def fake(build: Callable[..., str]) -> str:
    return build()


@pytest.fixture
def job(fake: str, tmp_path: Path) -> Callable[..., list[RankResult]]:
    """Run a file of `jobs/` on real ranks with the fake library; every rank must end well."""

    def run(
        name: str,
        *args: str,
        ranks: int = 2,
        ends: dict[int, int] | None = None,
        library: str = fake,
        **env: str,
    ) -> list[RankResult]:
        paths = {"HCCL_SO_PATH": library, "ASCENDCL_SO_PATH": library, "GLOG_v": "3"}
        return run_job(
            HERE / "jobs" / name,
            [str(tmp_path), *args],
            ranks=ranks,
            ends=ends,
            env={**paths, **env},
        )

    return run
