"""`compare_modes`: differences found, state and random numbers given back, times in pairs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parallelkit_torch.execution import cpp_problem
from parallelkit_torch.graph.compare import compare_modes
from parallelkit_torch.graph.differences import compare
from torch import nn
from torch._dynamo.testing import CompileCounter

from parallelkit.errors import ExecutionModeError, FunctionFailedError, UnsupportedFeatureError
from parallelkit.graphs import ModeComparison
from parallelkit.specs import ComparisonSpec

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def run(
    function: Callable[..., Any],
    *args: Any,
    repeat: int = 2,
    gradients: bool = False,
    options: dict[str, Any] | None = None,
) -> ModeComparison:
    return compare_modes(
        ComparisonSpec(
            framework="torch",
            function=function,
            args=args or (X,),
            repeat=repeat,
            gradients=gradients,
            options={"backend": "aot_eager"} if options is None else options,
        )
    )


class Net(nn.Module):
    def __init__(self, *more: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), *more)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.layers(x), "n": torch.tensor(3)}


def net(*more: nn.Module) -> Net:
    torch.manual_seed(0)
    return Net(*more)


def off_by(amount: float) -> Callable[..., Any]:
    """A backend whose graphs return `amount` too much."""

    def backend(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> Callable[..., Any]:
        return lambda *args: tuple(value + amount for value in graph(*args))

    return backend


def test_a_difference_is_found_and_named() -> None:
    def step(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"same": torch.ones(2), "off": x * 2}

    made = run(step, torch.full((3,), 4.0), options={"backend": off_by(0.5)})
    assert made.outputs.max_abs == 0.5
    assert made.outputs.tensors == 2
    assert made.reason == "torch.compile with backend"
    exact = run(step)
    assert (exact.outputs.max_abs, exact.outputs.max_rel, exact.outputs.worst) == (0.0, 0.0, "")


def test_models_arguments_and_random_state_are_given_back() -> None:
    model = net(nn.Dropout(0.5))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    gradient = torch.ones(8, 8)
    model.layers[0].weight.grad = gradient  # type: ignore[union-attr, index]
    x, before = X.clone(), X.clone()
    torch.manual_seed(7)
    random.seed(7)
    first, second = torch.get_rng_state(), random.getstate()
    made = run(model, x, gradients=True)
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), first)
    assert random.getstate() == second
    assert model.layers[0].weight.grad is gradient  # type: ignore[union-attr, index]
    assert model.layers[0].bias.grad is None  # type: ignore[union-attr, index]
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert made.outputs.max_abs < 1e-6  # dropout drew the same numbers in both modes
    assert made.gradients is not None
    assert made.gradients.tensors == 4
    assert made.gradients.max_abs < 1e-5
    assert made.breaks == made.recompiles == 0
    assert any("random numbers" in note for note in made.notes)
    assert (len(made.eager_seconds), len(made.graph_seconds)) == (2, 2)
    assert made.compile_seconds > 0


def test_arguments_that_are_changed_in_place() -> None:
    def step(x: torch.Tensor, same: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return same * 2  # the same tensor under two names stays one

    x = X.clone()
    made = run(step, x, x)
    assert torch.equal(x, X)
    assert made.outputs.max_abs == 0.0


def test_gradients_of_arguments() -> None:
    x = X.clone().requires_grad_()
    made = run(lambda x: (x * x).sum(), x, gradients=True)
    assert made.gradients is not None
    assert made.gradients.tensors == 1
    assert x.grad is None


def test_models_among_the_arguments() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x)["y"].square().mean()  # type: ignore[no-any-return]

    model = net()
    before = model.layers[1].running_mean.clone()  # type: ignore[union-attr, index, operator]
    made = run(loss, model, X, gradients=True)
    assert made.gradients is not None
    assert made.gradients.tensors == 4
    assert torch.equal(model.layers[1].running_mean, before)  # type: ignore[union-attr, index, arg-type]


def test_in_parts() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(net() for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)["y"]
            return x

    model = Stack()
    made = run(model, options={"backend": "aot_eager", "regions": "blocks"})
    assert (made.graphs, made.recompiles, made.breaks) == (2, 0, 0)
    assert made.outputs.max_abs < 1e-6
    assert all(part._compiled_call_impl is None for part in model.modules())


def test_what_others_compiled_stays_compiled() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * 5

    counter = CompileCounter()
    compiled = torch.compile(step, backend=counter)
    compiled(X)
    run(compiled)
    compiled(X)
    assert counter.frame_count == 1


def test_nothing_to_compile_is_noted() -> None:
    made = run(lambda x: 3)
    assert made.graphs == 0
    assert any("nothing was compiled" in note for note in made.notes)


def test_errors() -> None:
    with pytest.raises(FunctionFailedError, match="raised KeyError in mode 'eager'") as caught:
        run(lambda x: {}["missing"])
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(ExecutionModeError, match="no output needs a gradient"):
        run(lambda x: x * 2, gradients=True)
    optimiser = torch.optim.SGD(net().parameters())
    with pytest.raises(UnsupportedFeatureError, match="an optimiser"):
        run(lambda x, o: x, X, optimiser)
    with pytest.raises(UnsupportedFeatureError, match="no option 'speed'"):
        run(lambda x: x, options={"speed": 2})


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.skipif(cpp_problem() is not None, reason=str(cpp_problem()))
def test_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "")  # inductor writes it
    import torch._inductor.config

    # With more, inductor starts threads that it keeps.
    monkeypatch.setattr(torch._inductor.config, "compile_threads", 1)
    made = run(net(nn.Dropout(0.5)), gradients=True, options={}, repeat=1)
    assert made.reason == "torch.compile with inductor"
    assert made.outputs.max_abs < 1e-5
    assert made.gradients is not None
    assert made.gradients.max_abs < 1e-4


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("one", "other", "absolute", "relative"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0, 0.0),
        ([1.0, 4.0], [1.5, 4.0], 0.5, 0.125),
        ([INF, NAN, -INF], [INF, NAN, -INF], 0.0, 0.0),
        ([1.0], [NAN], INF, INF),
        ([INF, 1.0], [-INF, 1.0], INF, INF),
        ([0.0], [1.0], 1.0, INF),
        ([], [], 0.0, 0.0),
    ],
)
def test_differences(
    one: list[float], other: list[float], absolute: float, relative: float
) -> None:
    made = compare({"a": torch.tensor(one)}, {"a": torch.tensor(other)})
    assert (made.max_abs, made.max_rel) == (absolute, relative)
    assert made.worst == ("a" if absolute else "")


def test_differences_of_other_kinds() -> None:
    big = 2**60
    assert compare([torch.tensor(big)], [torch.tensor(big + 1)]).tensors == 1
    assert compare([torch.tensor(True)], [torch.tensor(False)]).max_abs == 1.0
    assert compare([1 + 1j], [1 + 3j]).max_abs == 2.0
    assert compare(["text", None, 2.0], ["other", None, 2.5]) == compare([2.0], [2.5]).__class__(
        tensors=1, max_abs=0.5, max_rel=0.25, worst="[2]"
    )
    half = torch.ones(3, dtype=torch.bfloat16)
    assert compare(half, half * 2).max_rel == 1.0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([torch.ones(2)], [torch.ones(3)]),
        ([torch.ones(2)], [torch.ones(2, dtype=torch.float64)]),
        ([torch.ones(2)], (torch.ones(2),)),
        ({"a": 1}, {"b": 1}),
    ],
)
def test_what_is_not_alike(one: Any, other: Any) -> None:
    with pytest.raises(ExecutionModeError, match="graph mode gives"):
        compare(one, other)
