"""`check_graph`: real constructs by name, file and line, and a process left as it was."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parallelkit_torch.graph import apart, check
from parallelkit_torch.graph.breaks import construct
from torch import nn
from torch._dynamo import utils
from torch._dynamo.testing import CompileCounter
from torch.nn.parallel import DistributedDataParallel

from parallelkit.errors import FunctionFailedError
from parallelkit.graphs import GraphReport
from parallelkit.specs import GraphSpec

sys.path.insert(0, str(Path(__file__).parent))
import constructs

sys.path.pop(0)

X = torch.ones(3)


def look(function: Callable[..., Any], *args: Any, **kwargs: Any) -> GraphReport:
    return check.check_graph(
        GraphSpec(framework="torch", function=function, args=args or (X,), kwargs=kwargs)
    )


def expected(name: str) -> tuple[str, int]:
    """What the comment `# break:` in the function says, and its line."""
    function = getattr(constructs, name)
    lines, first = inspect.getsourcelines(inspect.unwrap(function))
    for number, text in enumerate(lines, first):
        if "# break: " in text:
            return text.split("# break: ")[1].strip(), number
    raise AssertionError(name)


NAMES = [
    *("prints", "branches", "loops", "items", "lists", "generates", "tries", "locks"),
    *("breaks_inside_with", "shapes", "calls_kept_out", "logs", "opens"),
    *("goes_back", "no_tensor"),
]


@pytest.mark.parametrize("name", NAMES)
def test_construct_file_and_line(name: str) -> None:
    report = look(getattr(constructs, name))
    words, line = expected(name)
    assert not report.ok
    first = report.breaks[0]
    assert (first.construct, first.line) == (words, line)
    assert Path(first.file) == Path(constructs.__file__)
    assert first.reason
    assert "\n" not in first.reason + first.hint
    assert look(getattr(constructs, name)).breaks == report.breaks, "the second look differs"


def test_the_line_is_where_it_happens_and_not_where_it_is_called() -> None:
    words, line = expected("helper")
    first = look(constructs.called).breaks[0]
    assert (first.construct, first.line) == (words, line)


def test_one_graph() -> None:
    report = look(constructs.fine)
    assert report.ok
    assert (report.graphs, report.operations, report.breaks) == (1, 2, ())
    assert (report.function, report.framework) == ("fine", "torch")


def test_a_model_and_keyword_arguments() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
            return self.layer(x) * scale  # type: ignore[no-any-return]

    net = Net()
    assert look(net, X, scale=2.0).ok
    assert look(torch.compile(net, backend="eager"), X, scale=2.0).ok
    net.layer.compile(backend="eager")
    in_place = net.layer._compiled_call_impl
    assert look(net, X, scale=2.0).ok
    assert net.layer._compiled_call_impl is in_place
    assert look(nn.Sequential(nn.Linear(3, 3), nn.ReLU())).ok


def test_it_runs_once() -> None:
    seen: list[int] = []

    def counted(x: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return x * 2

    assert look(counted).ok
    assert seen == [1]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: {}["missing"], "KeyError: 'missing'"),
        (lambda x: x @ torch.ones(7, 7), "must have same reduction dim"),
        (lambda x, y: x, "missing 1 required positional argument"),
    ],
)
def test_what_the_function_raises_is_no_break(function: Callable[..., Any], said: str) -> None:
    with pytest.raises(FunctionFailedError, match="itself raised") as caught:
        look(function)
    assert said in str(caught.value)
    assert caught.value.__cause__ is not None


def test_what_others_compiled_stays_compiled() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return constructs.fine(x) + 1

    counter = CompileCounter()
    compiled = torch.compile(step, backend=counter)
    compiled(X)
    assert counter.frame_count == 1
    assert look(step).ok
    assert look(step, torch.ones(5)).ok
    compiled(X)
    assert counter.frame_count == 1


def test_sizes_seen_are_forgotten() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    for size in (2, 3, 4):
        look(step, torch.ones(size))
    counter = CompileCounter()
    compiled = torch.compile(step, backend=counter)
    for size in (5, 6, 7):  # static first, dynamic at the second size, as without the looks
        compiled(torch.ones(size))
    assert counter.frame_count == 2


def test_a_function_that_others_gave_up_on_is_looked_at_again() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        try:
            print("here")
            return x * 2
        finally:
            x.add_(1)

    torch.compile(step, backend="eager")(X.clone())
    report = look(step, X.clone())
    assert report.breaks[0].construct == "call of print() inside a try block"


def test_what_dynamo_counts_and_says_is_as_before(capfd: pytest.CaptureFixture[str]) -> None:
    counters = {name: dict(counter) for name, counter in utils.counters.items()}
    reasons, warned = list(utils.graph_break_reasons), set(utils.warn_once_cache)
    look(constructs.items)
    look(constructs.breaks_inside_with)
    assert {name: dict(counter) for name, counter in utils.counters.items()} == counters
    assert list(utils.graph_break_reasons) == reasons
    assert set(utils.warn_once_cache) == warned
    assert capfd.readouterr().err == ""


def test_inside_an_eager_block() -> None:
    with torch.compiler.set_stance("force_eager"):
        assert look(constructs.fine).ok
        assert torch._dynamo.eval_frame._stance.stance == "force_eager"


def test_without_entries_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "_ISOLATES", False)
    assert look(constructs.fine).ok
    assert look(constructs.tries).breaks == look(constructs.tries).breaks != ()


def test_a_replicated_model_is_looked_at_without_the_wrapper() -> None:
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapped)
    inner = nn.Linear(3, 3)
    wrapped.module = inner
    assert apart.plain(wrapped) is inner
    assert apart.plain(torch.compile(constructs.fine, backend="eager")) is constructs.fine


@pytest.mark.parametrize(
    ("reason", "source", "words"),
    [
        ("generic_jump TensorVariable()", "while x > 0:", "while loop on a tensor's value"),
        ("Something new.\n  Explanation: x", "", "something new"),
        ("Dynamo recompile limit exceeded\n", "", "too many recompilations"),
        ("x\n context: module: _warnings, qualname: warn, skip reason: y", "", "warnings.warn()"),
    ],
)
def test_words(reason: str, source: str, words: str) -> None:
    assert construct(reason, source).endswith(words)


def test_no_thread_is_left() -> None:
    before = threading.active_count()
    look(constructs.fine)
    assert threading.active_count() == before
