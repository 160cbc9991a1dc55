"""`import parallelkit` costs nothing and touches nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import parallelkit

HEAVY = ("torch", "mindspore", "vllm", "numpy", "zmq", "rich", "pluggy", "attrs", "msgspec")
PACKAGE = Path(parallelkit.__file__).parent


def run(code: str, *flags: str) -> str:
    result = subprocess.run(
        [sys.executable, *flags, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_no_framework_no_library_no_scan():
    code = f"""
import importlib.metadata, sys
def scanned(*a, **k):
    raise AssertionError("entry points were scanned")
importlib.metadata.entry_points = importlib.metadata.distributions = scanned
importlib.metadata.Distribution.discover = scanned
import parallelkit
print([m for m in {HEAVY!r} if m in sys.modules])
print([m for m in sys.modules if m.startswith("parallelkit_")])
print(sorted(m for m in sys.modules if m.startswith("parallelkit")))
"""
    assert run(code).splitlines() == ["[]", "[]", "['parallelkit']"]


def test_every_public_name_without_a_framework():
    code = """
import sys, parallelkit
for name in parallelkit.__all__:
    assert getattr(parallelkit, name) is not None, name
print([m for m in ("torch", "mindspore", "vllm") if m in sys.modules])
print([m for m in sys.modules if m.startswith("parallelkit_")])
"""
    assert run(code).splitlines() == ["[]", "[]"]


def test_plugins_load_without_a_framework():
    code = """
import sys, parallelkit
print({p.name: p.state for p in parallelkit.plugins()})
print([m for m in ("torch", "mindspore", "vllm") if m in sys.modules])
"""
    states, frameworks = run(code).splitlines()
    assert "'torch': 'loaded'" in states
    assert frameworks == "[]"


def test_selection_imports_no_framework():
    code = """
import sys
from parallelkit.plugin import ProbeRequest
from parallelkit.selection import select
select(ProbeRequest(framework="torch"))
print([m for m in ("torch", "mindspore", "vllm") if m in sys.modules])
"""
    assert run(code).strip() == "[]"


def test_import_time():
    """Under 100 ms on an idle machine; the cap is wide, since a test machine is not."""
    code = """
import time
start = time.perf_counter()
import parallelkit
print(time.perf_counter() - start)
"""
    best = min(float(run(code)) for _ in range(5))
    assert best < 0.1, f"import parallelkit takes {best * 1000:.0f} ms"


def test_a_submodule_never_hides_a_public_name():
    code = """
import parallelkit as pk
import parallelkit.plan, parallelkit.explain
from parallelkit.plan import ParallelPlan
assert callable(pk.plan) and callable(pk.explain)
assert isinstance(pk.plan(4), ParallelPlan)
"""
    run(code)


def test_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'init'"):
        parallelkit.init  # noqa: B018
    with pytest.raises(AttributeError, match="errors are in parallelkit.errors"):
        parallelkit.PeerLostError  # noqa: B018


def test_names_are_sorted_and_complete():
    assert parallelkit.__all__ == sorted(parallelkit.__all__)
    assert set(parallelkit.__all__) == set(parallelkit._WHERE) | {"__version__"}
    assert set(parallelkit.__all__) <= set(dir(parallelkit))


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(parallelkit.__file__).read_text())
    (block,) = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    seen = {
        alias.name: statement.module.removeprefix("parallelkit.")
        for statement in block.body
        if isinstance(statement, ast.ImportFrom) and statement.module
        for alias in statement.names
    }
    assert seen == parallelkit._WHERE


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.stem)
def test_the_core_names_no_framework_in_an_import(path):
    """Not even inside a function; the testing helpers included."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        roots = {name.partition(".")[0] for name in names}
        assert not roots & {"torch", "mindspore", "vllm", "pickle", "cloudpickle", "dill"}


@pytest.mark.parametrize("plugin", ["torch", "mindspore", "vllm"])
def test_entry_modules_import_no_framework(plugin):
    module = pytest.importorskip(f"parallelkit_{plugin}").__name__
    code = f"""
import sys, {module}.plugin
print([m for m in ("torch", "mindspore", "vllm") if m in sys.modules])
"""
    assert run(code).strip() == "[]"
