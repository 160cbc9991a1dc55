"""Capture by trace, in a script: under pytest MindSpore finds callers without source text."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import ops
from parallelkit_mindspore.execution import set_execution_mode

from parallelkit.specs import ExecutionSpec


def ones(size: int) -> Any:
    return ms.Tensor(np.ones(size, np.float32))


def step(x: Any) -> Any:
    return ops.relu(x) * 3


def fails(x: Any) -> Any:
    raise KeyError(x.shape)


def main() -> None:
    spec = ExecutionSpec(mode="graph", framework="mindspore", options={"capture_mode": "trace"})
    graph = set_execution_mode(spec)
    compiled = graph.compile(step)
    for size in (2, 2, 3, 2):
        assert compiled(ones(size)).asnumpy().tolist() == [3.0] * size
    assert (graph.graphs, graph.recompiles, graph.graph_breaks) == (2, 1, 0)
    with set_execution_mode(ExecutionSpec(mode="eager", framework="mindspore")):
        compiled(ones(7))
    assert graph.graphs == 2
    try:
        graph.compile(fails)(ones(2))
    except KeyError:
        pass
    else:
        raise AssertionError("it did not fail")
    # MindSpore alone would take this one for a trace within a trace, and refuse it
    assert compiled(ones(5)).asnumpy().tolist() == [3.0] * 5
    assert [target.graphs for target in graph.targets] == [3, 0]


main()
