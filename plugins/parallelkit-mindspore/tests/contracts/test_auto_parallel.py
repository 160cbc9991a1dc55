"""What MindSpore's `AutoParallel` is told, and when."""

from __future__ import annotations

import sys
import types
from typing import Any

import mindspore as real
import pytest
from parallelkit_mindspore.parallel import auto_native
from parallelkit_mindspore.parallel.auto_settings import AutoSettings

from parallelkit.errors import LayoutError, UnsupportedFeatureError
from parallelkit.plan import plan


class Wrapper:
    """Notes every call of a method."""

    def __init__(self, recorder: Any, cell: Any, **options: Any) -> None:
        recorder.note("AutoParallel", type(cell).__name__, **options)
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: self._recorder.note(name, *args, **options)


@pytest.fixture
def wrapped(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that wraps a cell with options, on rank `rank` of 8, and gives the calls."""
    module = types.ModuleType("mindspore.parallel.auto_parallel")
    vars(module)["AutoParallel"] = lambda cell, **options: Wrapper(recorder, cell, **options)
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def wrap(mode: str, rank: int = 0, reduce: str = "mean", **options: Any) -> list[Any]:
        axes = ("pipeline", "data", "data_shard", "tensor")
        degrees = {axis: options.pop(axis) for axis in axes if axis in options}
        spread = plan(8, mode, **degrees)
        settings = AutoSettings.of(options, spread, mode, degrees)
        cell = real.nn.Dense(2, 2).set_train()
        auto_native.wrap(cell, settings, spread, rank, reduce)
        return list(recorder.calls)

    return wrap


def test_semi_auto(wrapped: Any) -> None:
    assert wrapped("semi_auto", data=2, tensor=4) == [
        ("AutoParallel", "Dense", {"parallel_mode": "semi_auto"}),
        ("dataset_strategy", "data_parallel"),
        ("enable_gradients_mean",),
        ("set_train", True),
    ]


def test_a_sum_of_gradients(wrapped: Any) -> None:
    calls = wrapped("auto", reduce="sum", dataset_strategy="full_batch")
    assert calls == [
        ("AutoParallel", "Dense", {"parallel_mode": "recursive_programming"}),
        ("dataset_strategy", "full_batch"),
        ("set_train", True),
    ]


def test_stages_and_optimizer_sharding(wrapped: Any) -> None:
    calls = wrapped(
        "semi_auto",
        pipeline=2,
        data=1,
        data_shard=2,
        tensor=2,
        pipeline_scheduler="gpipe",
        optimizer_level="level3",
        optimizer_threshold=0,
    )
    assert calls[3:5] == [
        ("pipeline", {"stages": 2, "scheduler": "gpipe"}),
        ("hsdp", 2, 0, "level3"),
    ]


@pytest.mark.parametrize(("rank", "saves"), [(0, "0"), (3, None), (4, "1"), (7, None)])
def test_the_first_rank_of_each_stage_saves(
    wrapped: Any, tmp_path: Any, rank: int, saves: str | None
) -> None:
    path = str(tmp_path / "plan.json")
    calls = wrapped("semi_auto", rank, pipeline=2, tensor=4, strategy_save=path, strategy_load=path)
    saved = [call[1] for call in calls if call[0] == "save_param_strategy_file"]
    loaded = [call[1] for call in calls if call[0] == "load_param_strategy_file"]
    assert saved == ([] if saves is None else [str(tmp_path / f"plan-stage{saves}.json")])
    assert loaded == [str(tmp_path / f"plan-stage{rank // 4}.json")]


class Failing:
    """A cell whose compilation fails as MindSpore's does."""

    def __init__(self, text: str) -> None:
        self.text = text

    def compile(self, *inputs: Any) -> None:
        raise RuntimeError(self.text)

    def cells_and_names(self) -> Any:
        return iter([("", real.nn.Dense(2, 2))])


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ("Invalid backend: CPU", UnsupportedFeatureError, "for Ascend and GPU only"),
        (
            "Invalid communication backend: CPU for semi_auto_parallel/auto_parallel mode, ...",
            UnsupportedFeatureError,
            "data and hybrid run",
        ),
        ("Failure:operator Gather init failed\n", LayoutError, "a place that MindSpore does not"),
        ("Failure:operator MatMul init failed\n", LayoutError, "none was given"),
        ("something else", RuntimeError, "something else"),
    ],
)
def test_errors_of_a_compilation(
    recorder: Any, text: str, kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        auto_native.compile_cell(Failing(text), ())
    assert "reset_auto_parallel_context" not in recorder.names  # nothing had changed
