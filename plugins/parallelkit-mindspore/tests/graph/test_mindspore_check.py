"""`check_graph`: each construct compiled for real, reported by name, file and line, or not."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from mindspore.graph import api
from parallelkit_mindspore.graph import verdict, walk
from parallelkit_mindspore.graph.check import check_graph

from parallelkit.errors import ExecutionModeError, FunctionFailedError, WrongThreadError
from parallelkit.graphs import GraphReport
from parallelkit.specs import GraphSpec

sys.path.insert(0, str(Path(__file__).parent))
import mindspore_constructs as constructs

sys.path.pop(0)

X = ms.Tensor(np.ones(3, np.float32))
ROWS = ms.Tensor(np.ones((2, 3), np.float32))


def look(function: Callable[..., Any], *args: Any, **kwargs: Any) -> GraphReport:
    return check_graph(
        GraphSpec(framework="mindspore", function=function, args=args or (X,), kwargs=kwargs)
    )


def expected(thing: Any) -> tuple[str, int]:
    """What the comment `# break:` in the source says, and its line."""
    lines, first = inspect.getsourcelines(thing)
    for number, text in enumerate(lines, first):
        if "# break: " in text:
            return text.split("# break: ")[1].strip(), number
    raise AssertionError(thing)


def functions(part: str) -> list[str]:
    """Names of the functions in one part of the file, in order."""
    text = inspect.getsource(constructs).split(f"# --- {part} ")[1].split("# --- ")[0]
    return [
        line.split("(")[0].split()[-1]
        for line in text.splitlines()
        if line.startswith(("def ", "async def "))
    ]


REFUSED = [name for name in functions("refused") if not name.startswith(("calls", "several"))]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    function = getattr(constructs, name)
    report = look(function, X.copy())
    words, line = expected(function)
    assert (report.ok, report.graphs) == (False, 0)
    (found,) = report.breaks
    assert (found.construct, found.line) == (words, line)
    assert Path(found.file) == Path(constructs.__file__)
    assert found.reason.startswith("MindSpore: ")
    assert "\n" not in found.reason + found.hint
    assert "# break: " in found.source
    # the table itself knows it, but for what only MindSpore can tell
    known = [finding.line for finding in walk.walk(function, (X,), {})]
    assert known == ([] if words.startswith("call of") else [line])


@pytest.mark.parametrize("name", functions("taken"))
def test_what_is_taken(name: str) -> None:
    report = look(getattr(constructs, name), X.copy())
    assert report.breaks == ()
    assert report.graphs == 1
    assert report.ok
    certain = [f for f in walk.walk(getattr(constructs, name), (X,), {}) if f.certain]
    assert certain == [], "the table would report it, were there an error beside it"


@pytest.mark.parametrize(
    ("thing", "holder"),
    [
        (constructs.calls, constructs.helper),
        (constructs.calls_a_method, constructs.helper),
        (functools.partial(constructs.calls), constructs.helper),
        (constructs.PLAIN.run, constructs.helper),
        (constructs.calls_by_default, constructs.helper),
        (functools.partial(constructs.calls_higher, constructs.helper), constructs.helper),
        (ms.value_and_grad(constructs.calls), constructs.helper),
        (constructs.FromBase(), constructs.helper),
        (constructs.InADict(), constructs.Bad),
        (constructs.Bad(), constructs.Bad),
        (constructs.Outer(), constructs.Bad),
        (constructs.Listed(), constructs.Bad),
        (nn.SequentialCell(nn.Dense(3, 3), constructs.Bad()), constructs.Bad),
        (constructs.Helping(), constructs.helper),
        (constructs.NoSelf(), constructs.NoSelf),
        (constructs.MethodNoSelf(), constructs.MethodNoSelf),
        (constructs.ClassMethod(), constructs.ClassMethod),
        (constructs.BadProperty(), constructs.BadProperty),
        (ms.jit(constructs.calls), constructs.helper),
        (ms.jit(constructs.Outer()), constructs.Bad),
    ],
)
def test_the_line_is_where_it_is_and_not_where_it_is_called(thing: Any, holder: Any) -> None:
    words, line = expected(holder)
    (found,) = look(thing, ROWS).breaks
    at = found.line - ("@classmethod" in inspect.getsource(holder))  # the line of its def
    assert (found.construct, at) == (words, line)


def test_all_are_reported_and_not_the_first_alone() -> None:
    report = look(constructs.several)
    assert [found.construct for found in report.breaks] == [
        "import statement",
        "del statement",
        "set display",
        "try statement",
    ]
    assert report.breaks[0].reason == "MindSpore: Unsupported statement 'Import'."
    assert all("stopped before" in found.reason for found in report.breaks[1:])
    assert "import at the top of the file" in str(report)
    assert look(constructs.several).breaks == report.breaks


def test_a_model_and_keyword_arguments() -> None:
    net = constructs.Fine()
    report = look(net, ROWS, scale=2.0)
    assert (report.function, report.framework, report.ok) == ("Fine", "mindspore", True)
    assert report.operations > 0
    assert look(net.construct, ROWS).ok
    assert look(ms.jit(net), ROWS).ok
    net.construct = ms.jit(net.construct)
    in_place = net.construct
    assert look(net, ROWS).ok
    assert net.construct is in_place


def test_lambdas_and_functions_without_source() -> None:
    (found,) = look((lambda: lambda x: x + 1)()).breaks
    assert found.construct == "lambda inside a call"
    assert found.file == __file__
    scope: dict[str, Any] = {}
    exec("def nowhere(x):\n    return x + 1\n", scope)
    (found,) = look(scope["nowhere"]).breaks
    assert found.construct == "function without source"
    module = types.ModuleType("nowhere")
    exec("def nowhere(x):\n    return x + 1\n", module.__dict__)
    assert look(module.nowhere).breaks[0].construct == "function without source"


def wrong_shapes(x: Any) -> Any:
    return x @ ms.Tensor(np.ones((7, 7), np.float32))


def missing(x: Any) -> Any:
    return {}["missing"]


def two(x: Any, y: Any) -> Any:
    return x


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (wrong_shapes, "must be equal to"),
        (missing, "KeyError: 'missing'"),
        (two, "missing 1 required positional argument"),
    ],
)
def test_what_the_function_raises_is_no_break(function: Any, said: str) -> None:
    with pytest.raises(FunctionFailedError, match="itself raised") as caught:
        look(function)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is not None


def test_what_cannot_be_compiled_at_all() -> None:
    for thing in (len, nn.Dense):
        with pytest.raises(ExecutionModeError, match="cannot be compiled"):
            look(thing)


def test_the_process_is_left_as_it_was(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    compiled = ms.jit(constructs.fine)
    compiled(X)
    phases, environ, names = set(api.ms_compile_cache), dict(os.environ), dict(api.function_phases)
    mode = ms.get_context("mode")
    assert look(constructs.fine).ok
    assert not look(constructs.calls).ok
    with pytest.raises(FunctionFailedError):
        look(missing)
    assert set(api.ms_compile_cache) == phases
    assert dict(os.environ) == environ
    assert api.function_phases == names
    assert ms.get_context("mode") == mode
    assert list(tmp_path.iterdir()) == []
    compiled(X)
    assert set(api.ms_compile_cache) == phases
    assert "compiled again" not in capfd.readouterr().err


def test_in_graph_mode_and_inside_an_eager_block(monkeypatch: pytest.MonkeyPatch) -> None:
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        assert look(constructs.Fine(), ROWS).ok
        assert look(constructs.Outer(), ROWS).breaks
        assert ms.get_context("mode") == ms.GRAPH_MODE
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)
    monkeypatch.setenv("MS_JIT", "0")
    assert look(constructs.fine).ok
    assert os.environ["MS_JIT"] == "0"


def test_another_thread_is_refused() -> None:
    look(constructs.fine)
    caught: list[BaseException] = []

    def other() -> None:
        try:
            look(constructs.fine)
        except WrongThreadError as error:
            caught.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert "check_graph was called in thread" in str(caught[0])


@pytest.mark.parametrize(
    ("text", "kind", "line"),
    [
        ("Unsupported statement 'Try'.\n# In file /a b.py:9~14\ndef f(x):\n", "Try", 9),
        ("Unsupported statement 'New'.\n# 0 In file /a.py:3, 4~17\n    x\n", "", 3),
        ("Unsupported expression 'Yield'.\n# In file /a.py:1~9\n\n# In file /a.py:7\n", "Yield", 7),
        ("something else", "", 0),
    ],
)
def test_verdicts(text: str, kind: str, line: int) -> None:
    said = verdict.read(RuntimeError(text))
    assert (said.kind, said.line, said.reason) == (kind, line, text.splitlines()[0])


def test_an_error_without_a_known_construct_is_reported_where_mindspore_says() -> None:
    said = verdict.read(RuntimeError("Something new.\n# 0 In file /nowhere.py:3, 4~17\n"))
    (found,) = verdict.breaks(said, [], ("/other.py", 1))
    assert (found.construct, found.place) == (
        "code that MindSpore cannot compile",
        "/nowhere.py:3",
    )
    (found,) = verdict.breaks(verdict.read(RuntimeError("?")), [], ("/other.py", 1))
    assert found.place == "/other.py:1"
