"""Compile something for a look at it, and leave the process as it was."""

from __future__ import annotations

import contextlib
import importlib
import random
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn

from parallelkit.environ import scoped_environ
from parallelkit_mindspore import runtime
from parallelkit_mindspore.graph.switch import switched


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Compile in here, also within an eager block; graphs made here are dropped at the end.

    Mode: PyNative, so that only what is given to `mindspore.jit` is compiled. What MindSpore
    writes when it fails (`rank_0/om/analyze_fail.ir`) goes to a folder that is removed.
    """
    from mindspore.graph import api

    before = phases()
    # MindSpore warns of code that it compiles a second time, by this record
    compiled = dict(api.function_phases)
    api.function_phases.clear()
    with (
        tempfile.TemporaryDirectory(prefix="parallelkit-") as folder,
        switched("eager", MS_OM_PATH=folder),
    ):
        try:
            yield
        finally:
            runtime.synchronize()
            drop(phases() - before)
            api.function_phases.clear()
            api.function_phases.update(compiled)


def compiling() -> contextlib.AbstractContextManager[None]:
    """Within `apart`: here what is compiled runs compiled."""
    return scoped_environ(MS_JIT=None)


@contextlib.contextmanager
def cells_kept(cells: list[Any]) -> Iterator[None]:
    """Put back what compiling notes on cells."""
    every = [part for cell in cells for _, part in cell.cells_and_names()]
    kept = [(part, dict(part.phase_cache)) for part in every]
    try:
        yield
    finally:
        for part, cache in kept:
            part.phase_cache.clear()
            part.phase_cache.update(cache)


def phases() -> set[str]:
    """Keys of all graphs that `mindspore.jit` has compiled in the process, a copy."""
    from mindspore.graph import api

    return set(api.ms_compile_cache)


def operations(keys: set[str]) -> int:
    """How many operations the graphs have, constants not counted.

    Those of loops and branches included, except where a graph has pieces that Python interprets:
    MindSpore exports such a graph without its inner graphs.
    """
    from mindspore._c_expression import JitExecutor_
    from mindspore.train import anf_ir_pb2, mind_ir_pb2

    executor = JitExecutor_.get_instance()
    count = 0
    for key in keys:
        try:
            exported = executor.get_func_graph_proto(key, "mind_ir", False)
            model = mind_ir_pb2.ModelProto.FromString(exported)
            graphs = [model.graph, *model.functions]
        except RuntimeError:  # "Cannot export a PyExecute CNode in MindIR"
            exported = executor.get_func_graph_proto(key, "anf_ir", False)
            graphs = [anf_ir_pb2.ModelProto.FromString(exported).graph]
        names = [node.op_type for graph in graphs for node in graph.node]
        count += sum(name not in ("", "Constant") for name in names)
    return count


@contextlib.contextmanager
def same_random_state() -> Iterator[Callable[[], None]]:
    """Give a function that sets all random generators to what they are now; done at the end too.

    MindSpore's generator and its seeds, Python's, NumPy's. Not what MindSpore's kernels keep to
    themselves (that of `nn.Dropout` on the CPU): nothing can set that.
    """
    seed: Any = importlib.import_module(
        "mindspore.common.seed"
    )  # the package has a function so named
    generator = ms.get_rng_state().copy()
    in_python, in_numpy = random.getstate(), np.random.get_state()
    kernels, base = dict(seed._KERNEL_SEED), seed._GLOBAL_SEED

    def restore() -> None:
        ms.set_rng_state(generator)
        random.setstate(in_python)
        np.random.set_state(in_numpy)
        seed._KERNEL_SEED.clear()
        seed._KERNEL_SEED.update(kernels)
        seed._GLOBAL_SEED = base

    try:
        yield restore
    finally:
        restore()


def cells_of(*things: Any) -> list[Any]:
    """The cells among `things`, each once."""
    found = {id(thing): thing for thing in things if isinstance(thing, nn.Cell)}
    return list(found.values())


def drop(keys: set[str]) -> None:
    """Free graphs as `mindspore.ms_memory_recycle` does, but these alone."""
    from mindspore._c_expression import JitExecutor_
    from mindspore.graph import api

    if keys:
        api._cell_graph_executor.del_net_res(None, keys)
        JitExecutor_.get_instance().del_net_res(None, keys)
        api.ms_compile_cache.difference_update(keys)
