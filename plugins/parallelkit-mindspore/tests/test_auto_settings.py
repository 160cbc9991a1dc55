"""Options of modes semi_auto and auto, by name and value; and layouts of operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mindspore as ms
import pytest
from mindspore import nn
from parallelkit_mindspore.parallel import operator_layouts
from parallelkit_mindspore.parallel.auto_settings import AutoSettings
from parallelkit_mindspore.parallel.setup import setup_parallel_context

import parallelkit as pk
from parallelkit.errors import LayoutError, StrategyError, UnsupportedFeatureError
from parallelkit.launch import LaunchInfo
from parallelkit.plan import plan
from parallelkit.specs import ContextSpec, GroupSpec
from parallelkit.testing.fake import FakeGroup


def settings(mode: str, options: dict[str, Any] | None = None, **degrees: int) -> AutoSettings:
    return AutoSettings.of(options or {}, plan(8, mode, **degrees), mode, degrees)


def group(device: str = "cpu", ranks: int = 8) -> FakeGroup:
    return FakeGroup(
        GroupSpec(
            framework="mindspore",
            backend="mccl",
            device=device,
            rank=0,
            world_size=ranks,
            local_rank=0,
            local_world_size=ranks,
            launch=LaunchInfo(),
        )
    )


# --- options -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "options", "degrees", "says"),
    [
        ("auto", {"serch_mode": "x"}, {}, "did you mean 'search_mode'"),
        ("auto", {"search_mode": "magic"}, {}, "one of 'recursive_programming'"),
        ("semi_auto", {"search_mode": "recursive_programming"}, {}, "searches nothing"),
        ("semi_auto", {"model": None}, {}, "no option 'model'"),
        ("auto", {}, {"tensor": 2}, "tensor=2 was given with mode 'auto'"),
        ("auto", {"api": "old"}, {}, "'AutoParallel', 'context'"),
        (
            "auto",
            {"api": "AutoParallel", "search_mode": "dynamic_programming"},
            {},
            "use api='context'",
        ),
        ("auto", {"layouts": {"a": "colwise"}}, {}, "search_mode='sharding_propagation' keeps"),
        ("semi_auto", {"layouts": "colwise"}, {}, "a mapping"),
        ("semi_auto", {"dataset_strategy": "half"}, {}, "'data_parallel' or 'full_batch'"),
        ("semi_auto", {"dataset_strategy": ()}, {}, "for each input"),
        ("semi_auto", {"dataset_strategy": ((2, 0),)}, {}, "for each input"),
        ("semi_auto", {"dataset_strategy": ((3, 1),)}, {}, "divides the 8 ranks"),
        ("semi_auto", {"strategy_save": "plan.ckpt"}, {}, r"ends in \.json"),
        ("semi_auto", {"strategy_save": 3}, {}, r"ends in \.json"),
        ("semi_auto", {"strategy_save": "no/plan.json"}, {}, "folder that exists"),
        ("semi_auto", {"pipeline_scheduler": "gpipe"}, {}, "give pipeline=2 or more"),
        ("semi_auto", {"pipeline_scheduler": "fast"}, {"pipeline": 2}, "'1f1b'"),
        ("semi_auto", {"optimizer_level": "level1"}, {}, "give data_shard=2 or more"),
        ("semi_auto", {"optimizer_level": "level4"}, {"data_shard": 2}, "'level1'"),
        ("semi_auto", {"optimizer_threshold": -1}, {"data_shard": 2}, "KiB, 0 or more"),
        ("semi_auto", {"optimizer_threshold": True}, {"data_shard": 2}, "KiB, 0 or more"),
    ],
)
def test_wrong_options(
    mode: str, options: dict[str, Any], degrees: dict[str, int], says: str
) -> None:
    with pytest.raises(UnsupportedFeatureError, match=says):
        settings(mode, options, **degrees)


def test_apis_are_chosen_by_what_they_have() -> None:
    assert settings("auto").api == "AutoParallel"
    assert settings("auto", {"search_mode": "dynamic_programming"}).api == "context"
    assert settings("semi_auto", {"api": "context"}).api == "context"


def test_options_of_other_frameworks_searches_are_shown_as_unused() -> None:
    found = settings("auto", {"model": object(), "example": None})
    assert "not used here: example, model" in found.lines()


@pytest.mark.parametrize(
    ("strategy", "parts"), [("data_parallel", 4), ("full_batch", 1), (((2, 1), (2,)), 2)]
)
def test_parts_of_a_batch_in_each_of_two_stages(strategy: Any, parts: int) -> None:
    found = settings("semi_auto", {"dataset_strategy": strategy}, pipeline=2)
    assert found.data_parts(plan(8, "semi_auto", pipeline=2)) == parts


def test_paths_are_absolute(tmp_path: Path) -> None:  # which is the working folder
    found = settings("semi_auto", {"strategy_save": "plan.json"})
    assert found.files(plan(8), 0) == (str(tmp_path / "plan.json"), None)
    assert found.files(plan(8), 1) == (None, None)


# --- on a CPU ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["semi_auto", "auto"])
def test_a_cpu_is_refused_with_what_runs_it(mode: str) -> None:
    spec = ContextSpec(plan=plan(8, mode), mode=mode)
    with pytest.raises(UnsupportedFeatureError, match=r"for Ascend and GPU only.*fallback=True"):
        setup_parallel_context(spec, group())


@pytest.mark.parametrize(
    ("mode", "ranks", "degrees", "effective", "option"),
    [
        ("auto", 1, {}, "standalone", {"search_mode": "sharding_propagation"}),
        ("auto", 8, {}, "data", {"model": None}),
        ("semi_auto", 8, {}, "data", {"strategy_save": "plan.json"}),
        ("semi_auto", 8, {"tensor": 2}, "hybrid", {"dataset_strategy": "full_batch"}),
    ],
)
def test_a_cpu_falls_back_and_says_so(
    mode: str, ranks: int, degrees: dict[str, int], effective: str, option: dict[str, Any]
) -> None:
    layouts = {"layouts": {"**.up": "colwise", "x.mul": ((2, 1),)}} if degrees else {}
    spec = ContextSpec(
        plan=plan(ranks, mode, **degrees),
        mode=mode,
        pinned=degrees,
        fallback=True,
        options={**option, **layouts},
    )
    context = setup_parallel_context(spec, group(ranks=ranks))
    try:
        assert (context.mode, context.effective) == (mode, effective)
        assert context.plan.degrees == plan(ranks, **degrees).degrees
        shown = context.explain()
        assert "for Ascend and GPU only" in shown
        assert f"not used by it: {next(iter(option))}" in shown
        assert ("{'**.up': 'colwise'}" in shown) == bool(degrees)
    finally:
        context.reset()


def test_the_core_says_what_runs_it() -> None:
    with pk.init_process_group(framework="mindspore", device="cpu"):
        with pytest.raises(
            UnsupportedFeatureError, match="no modes semi_auto and auto.*fallback=True"
        ):
            pk.parallel_context("auto")
        context = pk.parallel_context("auto", fallback=True)
        assert context.effective == "standalone"
        context.reset()


class Net(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Dense(4, 8), nn.Dense(8, 4)

    def construct(self, x: Any) -> Any:
        return self.down(self.up(x))


def test_a_script_for_a_device_runs_with_a_fallback() -> None:
    x = ms.Tensor([[1.0, 2.0, 3.0, 4.0]])
    layouts = {"**.up": "colwise", "**.down.matmul": ((1, 1), (1, 1))}
    with pk.init_process_group(framework="mindspore", device="cpu"):
        context: Any = pk.parallel_context("semi_auto", layouts=layouts, fallback=True)
        try:
            net = Net()
            before = net.up.weight.asnumpy().copy()
            optimizer = nn.SGD(net.trainable_params(), 0.1)
            step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer).set_train()
            step = context.parallelize(step)
            assert context.compile(step, x, x) is step
            found = context.strategies(step).parameters
            assert {name for name in found if "weight" in name} >= {"up.weight", "down.weight"}
            assert not any(layout.pieces for layout in found.values())
            assert context.found_plan(step).degrees == context.plan.degrees
            step(x, x)
            assert (net.up.weight.asnumpy() != before).any()
            shown = context.explain()
            assert "compile() does nothing here" in shown
            assert "not used by it: layouts" in shown
            for call in (context.compile, context.strategies, context.found_plan):
                with pytest.raises(UnsupportedFeatureError, match="not given back by parallelize"):
                    call(Net())
        finally:
            context.reset()


@pytest.mark.parametrize(
    ("layouts", "said"),
    [
        ({"**.up": "diag"}, "the style 'diag'"),
        ({"nothing": "colwise"}, "fits no cell or operator"),
        ({"up.matmul": ((2, 1),)}, "cannot be divided"),
        ({"up.matmul": "x"}, "the style 'x'"),
    ],
)
def test_a_fallback_is_as_strict_about_layouts(layouts: dict[str, Any], said: str) -> None:
    spec = ContextSpec(
        plan=plan(1, "semi_auto"), mode="semi_auto", fallback=True, options={"layouts": layouts}
    )
    context = setup_parallel_context(spec, group(ranks=1))
    try:
        with pytest.raises(LayoutError, match=said):
            context.parallelize(Net())
    finally:
        context.reset()


def test_strategies_of_operators_alone_divide_nothing_in_a_fallback() -> None:
    spec = ContextSpec(
        plan=plan(8, "semi_auto", tensor=2),
        mode="semi_auto",
        pinned={"tensor": 2},
        fallback=True,
        options={"layouts": {"up.matmul": ((4, 1), (2, 1))}},
    )
    context = setup_parallel_context(spec, group())
    try:
        with pytest.raises(LayoutError, match="add styles: layouts="):
            context.parallelize(Net())
    finally:
        context.reset()


def test_a_fallback_reads_the_strategy_file_too(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("{")
    for given, said in ((path, "is no JSON"), (tmp_path / "none.json", "cannot be read")):
        spec = ContextSpec(
            plan=plan(1, "auto"),
            mode="auto",
            fallback=True,
            options={"strategy_load": str(given)},
        )
        with pytest.raises(StrategyError, match=said):
            setup_parallel_context(spec, group(ranks=1))


def test_a_fallback_is_as_strict_about_options() -> None:
    spec = ContextSpec(plan=plan(1, "auto"), mode="auto", fallback=True, options={"nonsense": 1})
    with pytest.raises(UnsupportedFeatureError, match="no option 'nonsense'"):
        setup_parallel_context(spec, group(ranks=1))


def test_a_strategy_file_is_read_before_anything_is_set(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("{}")
    spec = ContextSpec(
        plan=plan(8, "semi_auto"), mode="semi_auto", options={"strategy_load": str(path)}
    )
    with pytest.raises(StrategyError, match=r"plan\.json' is damaged"):
        setup_parallel_context(spec, group("npu:0"))
    assert ms.get_auto_parallel_context("parallel_mode") == "stand_alone"


def test_a_group_that_is_not_the_whole_world() -> None:
    spec = ContextSpec(plan=plan(8, "auto"), mode="auto")
    with pytest.raises(UnsupportedFeatureError, match="MindSpore's world has rank 0 of 1"):
        setup_parallel_context(spec, group("npu:0"))


# --- layouts of operators ----------------------------------------------------------------------


class Block(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Dense(8, 16)
        self.act = nn.ReLU()
        self.down = nn.Dense(16, 8, has_bias=False)

    def construct(self, x: Any) -> Any:
        return self.down(self.act(self.up(x)))


SPREAD = plan(8, "semi_auto", data=2, tensor=4)


def test_styles_become_strategies() -> None:
    model = Block()
    said = operator_layouts.apply(model, {"up": "colwise", "down": "rowwise"}, SPREAD)
    assert operator_layouts.divided(model) == {
        "up.matmul": ((2, 1), (4, 1)),
        "up.bias_add": ((2, 4), (4,)),
        "down.matmul": ((2, 4), (1, 4)),
    }
    assert "up.matmul by ((2, 1), (4, 1))" in said


def test_strategies_and_layouts_of_mindspores_own() -> None:
    model = Block()
    layout = ms.Layout((2, 4), ("dp", "mp"))
    strategy = (layout("dp", "None"), layout(("mp",), "None"))
    wanted = {"up.*": "replicate", "up.matmul": strategy}
    said = operator_layouts.apply(model, wanted, SPREAD)
    assert list(operator_layouts.divided(model)) == ["up.matmul"]
    assert said == ["up.matmul by ('dp', 'None'), (('mp',), 'None')"]


@pytest.mark.parametrize(
    ("layouts", "says"),
    [
        ({"top": "colwise"}, r"'top', which fits no cell or operator .* 'up', 'down'"),
        ({"up": "diagonal"}, "the style 'diagonal'"),
        ({"act": "colwise"}, "'act' is a ReLU"),
        ({"up": ((2, 1), (4, 1))}, "strategies are for operators, such as 'up."),
        ({"up.matmul": [[2, 1]]}, "a tuple for each input"),
        ({"up.matmul": ((2, "a"),)}, "a tuple for each input"),
        ({"up.matmul": ((3, 1), (4, 1))}, "in 3 x 1; the 8 ranks"),
    ],
)
def test_wrong_layouts_change_nothing(layouts: dict[str, Any], says: str) -> None:
    model = Block()
    with pytest.raises(LayoutError, match=says):
        operator_layouts.apply(model, {"down.matmul": ((1, 1), (1, 1)), **layouts}, SPREAD)
    assert operator_layouts.divided(model) == {}


def test_a_layer_that_does_not_divide() -> None:
    odd = plan(6, "semi_auto", data=2, tensor=3)
    with pytest.raises(LayoutError, match=r"cell 'up' \(colwise\), and its 16 outputs .*tensor=3"):
        operator_layouts.apply(Block(), {"up": "colwise"}, odd)
