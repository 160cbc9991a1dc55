"""An engine runs in the mode that `pk.execution_mode` said, and follows in graph mode too."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_qwen as tiny

import parallelkit as pk
from parallelkit.errors import ExecutionModeError, UnsupportedFeatureError

SECONDS = 60.0


def mode(name: str, **options: Any) -> Any:
    return pk.execution_mode(name, framework="vllm", **options)


@pytest.fixture(scope="module")
def compiled(warm, make_engine, checkpoint):
    """An engine in graph mode. What dynamo makes of the code does not depend on the compiler."""
    return make_engine(checkpoint(0), **mode("graph", backend="eager").engine_args)


def graphs_made() -> int:
    """How many graphs dynamo has made in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def test_eager_is_eager(make_engine, checkpoint):
    eager = mode("eager")
    llm = make_engine(checkpoint(0), **eager.engine_args)
    assert eager.check(llm) == "eager: compilation mode NONE"
    with pytest.raises(ExecutionModeError, match="runs in mode 'eager'"):
        mode("graph").check(llm)


def test_graph_is_a_graph(compiled):
    graph = mode("graph", backend="eager")
    assert graph.effective == "graph"
    assert graph.check(compiled) == "graph: compilation mode DYNAMO_TRACE_ONCE"
    assert compiled.llm_engine.vllm_config.compilation_config.backend == "eager"
    assert "cudagraph" not in str(graph.engine_args)
    with pytest.raises(ExecutionModeError, match="runs in mode 'graph'"):
        mode("eager").check(compiled)


def test_an_engine_in_graph_mode_follows(compiled, trainer, make_engine, tmp_path):
    """Equal to a fresh engine in graph mode; the graph is the one of before, with other weights."""
    published = trainer.publish(tiny.tensors(0))
    with pk.subscribe_weights(compiled, published, timeout=SECONDS) as member:
        member.serve()
        for version, seed in ((1, 1), (2, 2)):
            given = tiny.tensors(seed)
            trainer.update(given)
            before = graphs_made()
            assert member.step(SECONDS) == version
            found = tiny.greedy(compiled)
            assert graphs_made() == before > 0
            fresh = make_engine(
                tiny.save(tmp_path / str(seed), given=given),
                **mode("graph", backend="eager").engine_args,
            )
            assert found == tiny.greedy(fresh)
            assert graphs_made() == before + 1


def test_the_default_compiles_with_inductor(make_engine, checkpoint, trainer, fresh, tmp_path):
    graph = mode("graph")
    assert "inductor" in graph.reason
    llm = make_engine(checkpoint(0), **graph.engine_args)
    config = llm.llm_engine.vllm_config.compilation_config
    assert graph.check(llm) == "graph: compilation mode DYNAMO_TRACE_ONCE"
    assert (config.backend, config.cudagraph_mode.name) == ("inductor", "NONE")
    given = tiny.tensors(1)
    with pk.subscribe_weights(llm, trainer.publish(tiny.tensors(0)), timeout=SECONDS) as member:
        member.serve()
        before = tiny.greedy(llm)
        trainer.update(given)
        member.step(SECONDS)
    other = make_engine(tiny.save(tmp_path, given=given), **graph.engine_args)
    assert tiny.greedy(llm) == tiny.greedy(other) != before


def test_vllms_own_class_checks_options():
    graph = mode("graph", custom_ops=["none"], mode="VLLM_COMPILE")
    assert graph.engine_args["compilation_config"] == {"mode": 3, "custom_ops": ["none"]}
    with pytest.raises(UnsupportedFeatureError, match="did you mean 'custom_ops'"):
        mode("graph", custom_op=["none"])
    with pytest.raises(ExecutionModeError, match="Invalid compilation mode: fast"):
        mode("graph", mode="fast")
    with pytest.raises(ExecutionModeError, match="refuses"):
        mode("graph", cudagraph_mode="SOMETIMES")
    with pytest.raises(UnsupportedFeatureError, match="records no graphs on a cpu device"):
        mode("graph", cudagraph_mode="FULL")


def test_torchs_own_pipeline_compiles_nothing_on_a_cpu(make_engine, checkpoint):
    """So it is refused, or eager is taken: what vLLM does with it is tried here."""
    with pytest.raises(UnsupportedFeatureError, match="compiles nothing"):
        mode("graph", mode="STOCK_TORCH_COMPILE")
    llm = make_engine(checkpoint(0), enforce_eager=False, compilation_config={"mode": 1})
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    assert all(module._compiled_call_impl is None for module in runner.get_model().modules())
    with pytest.raises(ExecutionModeError, match="no part of this model is compiled"):
        mode("graph").check(llm)
