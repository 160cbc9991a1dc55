"""Nothing that is received is ever unpickled or evaluated, and the core imports no framework.

The rules are checked on the syntax tree of every module that is installed, and the checker on
examples that break each rule.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CORE = sorted((ROOT / "parallelkit").rglob("*.py"))
PLUGINS = sorted(ROOT.glob("plugins/*/parallelkit_*/**/*.py"))

#: Modules whose reading runs code of whoever wrote the bytes.
UNSAFE_MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "jsonpickle",
    "joblib",
    "multiprocessing",  # its queues, pipes and connections unpickle
    "xmlrpc",
    "runpy",
    "code",
    "codeop",
    "imp",
}
#: Built-in functions that run text.
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__", "types.CodeType"}
#: The same, given away without being called; `compile` is a word of others too.
UNSAFE_NAMES = {"eval", "exec", "__import__", "__builtins__"}
#: Methods and functions, of whatever object, that unpickle what they receive.
UNSAFE_ATTRIBUTES = {
    "send_pyobj",
    "recv_pyobj",
    "allow_pickle",
    "broadcast_object_list",
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
    "ForkingPickler",
    "rebuild_cuda_tensor",
    "ProcessPoolExecutor",
    "read_pickle",
    "to_pickle",
    "UnsafeLoader",
    "FullLoader",
}
#: Functions that unpickle, by the last two parts of their name.
UNSAFE_FUNCTIONS = {
    "torch.load",
    "serialization.load",
    "jit.load",
    "hub.load",
    "mindspore.load",
    "yaml.load",
    "yaml.load_all",
    "yaml.full_load",
    "yaml.unsafe_load",
    "numpy.loads",
    "config.listen",
    "config.fileConfig",
}
LAST_PARTS = UNSAFE_NAMES | {name.rpartition(".")[2] for name in UNSAFE_FUNCTIONS}
#: Arguments that let a decoder call what it is told to.
HOOKS = {"dec_hook", "ext_hook", "object_hook", "object_pairs_hook"}
FRAMEWORKS = {"torch", "mindspore", "vllm", "sglang", "jax", "tensorflow", "transformers"}

#: The only attribute looked up by a name that is computed, in `parallelkit/weights`, and why:
#: names of our own table, checked before, give the public names of the package on first use.
COMPUTED_NAMES = {("parallelkit/weights/__init__.py", "__getattr__")}


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a chain of attributes, or the part of it that can be told."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def aliases(tree: ast.AST) -> dict[str, str]:
    """What a name stands for that an import gave: `np` for `numpy`, `read` for `torch.load`."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.asname: a.name for a in node.names if a.asname}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return found


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and top-level module of every import, those by a literal name included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.lineno, (node.module or "").partition(".")[0]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = dotted(node.func).rpartition(".")[2]
            if name in ("import_module", "__import__", "importorskip", "find_spec"):
                yield node.lineno, str(node.args[0].value).partition(".")[0]


def unsafe(source: str) -> list[str]:
    """What a module has that unpickles or evaluates, as `line: what`."""
    tree = ast.parse(source)
    known = aliases(tree)
    found = [f"{line}: imports {name}" for line, name in imports(tree) if name in UNSAFE_MODULES]
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in UNSAFE_NAMES:
            found.append(f"{node.lineno}: names {node.id}")
        last = getattr(node, "attr", None) or known.get(getattr(node, "id", None), "")
        if last.rpartition(".")[2] in LAST_PARTS:
            first, _, rest = dotted(node).partition(".")
            name = ".".join(filter(None, [known.get(first, first), rest]))
            if name.removeprefix("builtins.") in UNSAFE_NAMES:
                found.append(f"{node.lineno}: names {name}")
            if ".".join(name.split(".")[-2:]) in UNSAFE_FUNCTIONS:
                found.append(f"{node.lineno}: names {name}")
        if isinstance(node, ast.Subscript) and dotted(node.value) == "sys.modules":
            key = node.slice.value if isinstance(node.slice, ast.Constant) else ""
            if str(key).partition(".")[0] in UNSAFE_MODULES | {"builtins"}:
                found.append(f"{node.lineno}: takes {key}")
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            if name in UNSAFE_CALLS or name.removeprefix("builtins.") in UNSAFE_CALLS:
                found.append(f"{node.lineno}: calls {name}")
            if name in ("getattr", "attrgetter") and any(
                isinstance(a, ast.Constant) and a.value in UNSAFE_NAMES | UNSAFE_ATTRIBUTES
                for a in node.args
            ):
                found.append(f"{node.lineno}: looks one of those up")
            found += [
                f"{node.lineno}: passes {k.arg}"
                for k in node.keywords
                if k.arg in UNSAFE_ATTRIBUTES
            ]
        if isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{a.name}": a.name for a in node.names}
            found += [
                f"{node.lineno}: imports {full}"
                for full, name in names.items()
                if ".".join(full.split(".")[-2:]) in UNSAFE_FUNCTIONS
                or name in UNSAFE_ATTRIBUTES
                or (node.module == "builtins" and name in UNSAFE_CALLS)
            ]
        if isinstance(node, ast.Attribute) and node.attr in UNSAFE_ATTRIBUTES:
            found.append(f"{node.lineno}: uses {node.attr}")
    return found


def computed_names(source: str) -> list[tuple[int, str]]:
    """Line and enclosing function of each attribute or global looked up by a computed name."""
    found = []

    def walk(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.Call):
            name = dotted(node.func).rpartition(".")[2]
            names_one = name in (
                "getattr",
                "setattr",
                "attrgetter",
                "methodcaller",
                "import_module",
            )
            arguments = node.args[1:2] if name in ("getattr", "setattr") else node.args[:1]
            if names_one and not all(isinstance(a, ast.Constant) for a in arguments):
                found.append((node.lineno, function))
        if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Constant):
            target = node.value
            tables = ("globals", "vars", "locals")
            if isinstance(target, ast.Call) and dotted(target.func) in tables:
                found.append((node.lineno, function))
            if dotted(target) == "sys.modules" or dotted(target).endswith("__dict__"):
                found.append((node.lineno, function))
        if isinstance(node, ast.Attribute) and node.attr in ("__getattribute__", "__getattr__"):
            found.append((node.lineno, function))
        given = [*node.args, *node.keywords] if isinstance(node, ast.Call) else []
        values = [getattr(a, "value", a) if isinstance(a, ast.keyword) else a for a in given]
        if any(isinstance(v, ast.Name) and v.id in ("getattr", "setattr") for v in values):
            found.append((node.lineno, function))
        for child in ast.iter_child_nodes(node):
            walk(child, function)

    walk(ast.parse(source), "")
    return found


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_there_is_something_to_check():
    assert len(CORE) > 40
    assert {relative(p).split("/")[1] for p in PLUGINS} >= {
        "parallelkit-hccl",
        "parallelkit-mindspore",
        "parallelkit-torch",
        "parallelkit-vllm",
    }
    assert ROOT / "parallelkit/weights/control.py" in CORE


def test_nothing_is_unpickled_or_evaluated():
    found = [f"{relative(p)}:{what}" for p in CORE + PLUGINS for what in unsafe(p.read_text())]
    assert found == []


def test_the_core_imports_no_framework():
    found = [
        f"{relative(path)}:{line}: imports {name}"
        for path in CORE
        if "testing" not in path.relative_to(ROOT).parts  # it may look for one to test a plugin
        for line, name in imports(ast.parse(path.read_text()))
        if name in FRAMEWORKS
    ]
    assert found == []


WEIGHTS = [p for p in CORE if p.parent.name == "weights"]


def test_the_weight_modules_look_nothing_up_by_a_name_that_may_come_from_a_peer():
    found = {
        (relative(path), function)
        for path in WEIGHTS
        for _, function in computed_names(path.read_text())
    }
    assert found == COMPUTED_NAMES, "and each exception is needed"


def test_the_weight_modules_decode_without_hooks():
    found = [
        f"{relative(path)}:{node.lineno}: passes {keyword.arg}"
        for path in WEIGHTS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg in HOOKS
    ]
    assert found == []


# --- the checker itself ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "import os, marshal",
        "from pickle import loads",
        "from dill import *",
        "import cloudpickle.cloudpickle",
        "def f():\n    from shelve import open",
        "try:\n    import jsonpickle\nexcept ImportError:\n    pass",
        "import importlib\nimportlib.import_module('pickle')",
        "from importlib import import_module\nimport_module('dill._dill')",
        "__import__('os')",
        "eval(text)",
        "exec('x = 1')",
        "import builtins\nbuiltins.eval(text)",
        "f = lambda text: eval(text)",
        "compile(text, 'x', 'exec')",
        "import torch\ntorch.load(path)",
        "import torch\ntorch.load(path, weights_only=True)",
        "from torch import load",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=flag)",
        "socket.send_pyobj(x)",
        "await socket.recv_pyobj()",
        "receive = socket.recv_pyobj",
        "dist.broadcast_object_list([x], 0)",
        "torch.distributed.all_gather_object(out, x)",
        "from torch.distributed import broadcast_object_list",
        "from multiprocessing.reduction import ForkingPickler",
        "from multiprocessing.connection import Client",
        "import multiprocessing as mp",
        "from concurrent.futures import ProcessPoolExecutor",
        "from builtins import eval",
        "from builtins import exec as run",
        "run = eval",
        "list(map(eval, texts))",
        "functools.partial(exec, text)",
        "__builtins__['eval'](text)",
        "getattr(builtins, 'eval')(text)",
        "import builtins as b\nb.exec(text)",
        "sys.modules['pickle'].loads(data)",
        "sys.modules['builtins'].eval(data)",
        "import torch as t\nt.load(path)",
        "import torch.serialization as s\ns.load(path)",
        "from torch import serialization\nserialization.load(path)",
        "from torch import load as read\nread(path)",
        "read = torch.load",
        "torch.jit.load(path)",
        "yaml.load(text, Loader=yaml.UnsafeLoader)",
        "import yaml as y\ny.full_load(text)",
        "logging.config.listen(port)",
        "import runpy\nrunpy.run_path(path)",
        "types.CodeType(*parts)",
        "pandas.read_pickle(path)",
        "getattr(dist, 'all_gather_object')(out, x)",
    ],
)
def test_a_planted_example_is_found(source):
    assert unsafe(source) != []


@pytest.mark.parametrize(
    "source",
    [
        "import json\njson.loads(text)",
        "import re\nre.compile('x')",
        "model.eval()",
        "self.load(path)",
        "from parallelkit.loader import load",
        "import numpy as np\nnp.load(path)",
        "group.broadcast_object(x, 0)",
        "'import pickle'",
        "# import pickle",
        "from . import pickle_free",
        "import picklebob",
        "import numpy as np\nnp.frombuffer(data)",
        "parallelize = graph.compile",
        "loader.load(path)",
        "sys.modules['torch'].cuda",
        "getattr(group, 'eval_mode', None)",
    ],
)
def test_a_harmless_example_is_not(source):
    assert unsafe(source) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch", ["torch"]),
        ("def f():\n    import torch.nn as nn", ["torch"]),
        ("from vllm.worker import x", ["vllm"]),
        ("import_module('mindspore.nn')", ["mindspore"]),
        ("from importlib.util import find_spec\nfind_spec('jax')", ["importlib", "jax"]),
        ("from parallelkit_torch import x", ["parallelkit_torch"]),
        ("from . import torch", []),
        ("sys.modules.get('torch')", []),
    ],
)
def test_imports_are_found(source, expected):
    assert [name for _, name in imports(ast.parse(source))] == expected


@pytest.mark.parametrize(
    "source",
    [
        "def f(name):\n    return getattr(torch, name)",
        "def f(name):\n    return getattr(torch, f'{name}', None)",
        "def f(name):\n    setattr(x, name, 1)",
        "def f(name):\n    return operator.attrgetter(name)(x)",
        "def f(name):\n    return globals()[name]",
        "def f(name):\n    return vars(errors)[name]",
        "def f(name):\n    return import_module(name)",
        "class C:\n    async def f(self, message):\n        return getattr(m, message.kind)()",
        "def f(name):\n    return sys.modules[name]",
        "def f(name):\n    return m.__dict__[name]",
        "def f(name):\n    return locals()[name]",
        "def f(name):\n    return m.__getattribute__(name)",
        "def f(name):\n    return reduce(getattr, name.split('.'), m)",
        "def f(name):\n    return partial(func=getattr)(m, name)",
    ],
)
def test_a_computed_name_is_found(source):
    assert [function for _, function in computed_names(source)] == ["f"]


def test_a_literal_name_is_not_computed():
    assert computed_names("getattr(x, 'epoch', None)\nglobals()['x']\nsetattr(x, 'y', name)") == []
