"""Fixtures of the core's tests: plugins that are made up, and distributions in a folder."""

from __future__ import annotations

import itertools
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from parallelkit.loader import PluginManager

GOOD = """
from parallelkit.plugin import Candidate, hookimpl

parallelkit_api = 1

@hookimpl
def parallelkit_probe(request):
    return Candidate(name="{name}", framework="{name}", score=5, devices=("cpu",),
                     backends={{"cpu": "memory"}}, reason="made up")
"""

_numbers = itertools.count()


class Distributions:
    """Distributions in folders of their own, which are on `sys.path` while the test runs."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.paths: list[str] = []
        self._monkeypatch = monkeypatch

    def add(
        self,
        dist: str,
        entries: str = "",
        *,
        version: str = "1.0",
        modules: dict[str, str] | None = None,
    ) -> str:
        """Add one; `entries` are the lines of its section, or the whole of the file."""
        place = self.folder / str(next(_numbers))
        info = place / f"{dist.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n")
        text = entries if "[" in entries else f"[parallelkit.plugins]\n{entries}\n"
        (info / "entry_points.txt").write_text(text)
        for name, source in (modules or {}).items():
            (place / f"{name}.py").write_text(textwrap.dedent(source))
        self.paths.append(str(place))
        self._monkeypatch.syspath_prepend(str(place))
        return str(place)

    def good(self, dist: str, name: str, *, version: str = "1.0", framework: str = "") -> str:
        """Add a distribution with one plugin that works; returns its module's name."""
        module = f"pk_test_{name.replace('-', '_')}_{next(_numbers)}"
        source = GOOD.format(name=framework or name)
        self.add(dist, f"{name} = {module}", version=version, modules={module: source})
        return module

    def manager(self, **environ: str) -> PluginManager:
        """Return a manager that sees these distributions only."""
        return PluginManager(path=self.paths, environ=environ, builtin=False)


@pytest.fixture
def distributions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Distributions]:
    before = set(sys.modules)
    yield Distributions(tmp_path, monkeypatch)
    for name in set(sys.modules) - before:
        if name.startswith("pk_test_"):
            del sys.modules[name]


@pytest.fixture
def manager() -> PluginManager:
    """A manager without any plugin."""
    return PluginManager(environ={}, scan=False, builtin=False)


@pytest.fixture
def clean_launch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Remove every launcher's variables, and set those given."""
    from parallelkit.spawn import FOREIGN, FOREIGN_PREFIXES

    for name in list(os.environ):
        if name in FOREIGN or name.startswith(FOREIGN_PREFIXES):
            monkeypatch.delenv(name)

    def set_all(**values: str) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_all
