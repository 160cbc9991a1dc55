"""Compile something for a look at it, and leave the process as it was.

Dynamo keeps what it compiled on the code objects themselves, so the same function compiled for a
report and for real would share entries, limits, sizes seen and decisions to skip. Here it gets
entries of its own (`isolate_recompiles`), and everything else that dynamo counts is put back.
"""

from __future__ import annotations

import copy
import inspect
import logging
import random
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch._dynamo import pgo, utils
from torch.nn.parallel import DistributedDataParallel

from parallelkit_torch import names
from parallelkit_torch.graph.watch import Tally, seen_codes, watch

#: Not in torch 2.11: there all compiled code of the process is dropped, before and after.
_ISOLATES: Final = "isolate_recompiles" in inspect.signature(torch.compile).parameters
_TALKERS: Final = ("torch._dynamo", "torch._subclasses", "torch.fx.experimental")


@contextmanager
def apart() -> Iterator[None]:
    """Compile in here, also within an eager block, and nobody else sees any of it.

    Not for use while another thread compiles: what dynamo counts is the process's.
    """
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy

    if not _ISOLATES:
        torch._dynamo.reset()
    as_new = _FrameExecStrategy(_FrameAction.DEFAULT, _FrameAction.DEFAULT)
    for code in _left_to_python():  # or why they were would not be seen again
        torch._C._dynamo.eval_frame.set_code_exec_strategy(code, as_new)
    counted = {name: counter.copy() for name, counter in utils.counters.items()}
    reasons = list(utils.graph_break_reasons)
    sizes = copy.deepcopy(pgo.get_code_state())  # or shapes seen here would be dynamic elsewhere
    warned = set(utils.warn_once_cache)
    levels = {name: logging.getLogger(name).level for name in _TALKERS}
    try:
        with torch.compiler.set_stance("default"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch\._dynamo")
            # dynamo looks at every input's gradient, and torch warns of it where it has none
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            for name in _TALKERS:
                logging.getLogger(name).setLevel(logging.CRITICAL)
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        utils.counters.clear()
        utils.counters.update(counted)
        utils.graph_break_reasons[:] = reasons
        pgo.get_code_state().clear()
        pgo.get_code_state().update(sizes)
        utils.warn_once_cache.clear()
        utils.warn_once_cache.update(warned)
        if not _ISOLATES:
            torch._dynamo.reset()


def compile_apart(function: Any, tally: Tally, **options: Any) -> Callable[..., Any]:
    """`torch.compile(function, **options)`, counted, with compiled code of its own.

    Raises:
        UnsupportedFeatureError: this torch cannot be watched.
    """
    if _ISOLATES:
        options["isolate_recompiles"] = True
    compiled: Callable[..., Any] = torch.compile(function, **options)
    watch(compiled, tally)
    return compiled


def plain(function: Any) -> Any:
    """Return what the user wrote: no `torch.compile` and no data parallel around it."""
    function = names.uncompiled(function)
    while isinstance(function, DistributedDataParallel):
        function = names.uncompiled(function.module)
    return function


@contextmanager
def uncompiled_in_place(function: Any) -> Iterator[None]:
    """Take what `module.compile()` did off a model and its parts, and put it back."""
    parts = list(function.modules()) if isinstance(function, nn.Module) else []
    compiled = [(part, part._compiled_call_impl) for part in parts if part._compiled_call_impl]
    for part, _ in compiled:
        part._compiled_call_impl = None
    try:
        yield
    finally:
        for part, call in compiled:
            part._compiled_call_impl = call


def title(function: Any) -> str:
    """Name a function or a model in reports."""
    if isinstance(function, nn.Module):
        return type(function).__qualname__
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def where(function: Any) -> tuple[str, int]:
    """File and line of a function, or of a model's `forward`; empty and 0 where not Python."""
    if isinstance(function, nn.Module):
        function = type(function).forward
    code = getattr(inspect.unwrap(function), "__code__", None)
    return (code.co_filename, code.co_firstlineno) if code is not None else ("", 0)


@contextmanager
def same_random_state() -> Iterator[Callable[[], None]]:
    """Give a function that sets all random generators to what they are now; done at the end too.

    torch's on the CPU and on every CUDA device in use, Python's, and numpy's if it is loaded.
    """
    numpy = sys.modules.get("numpy")
    cuda = torch.cuda.get_rng_state_all() if cuda_in_use() else None
    on_cpu, in_python = torch.get_rng_state(), random.getstate()
    in_numpy = numpy.random.get_state() if numpy is not None else None

    def restore() -> None:
        torch.set_rng_state(on_cpu)
        random.setstate(in_python)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        if numpy is not None and in_numpy is not None:
            numpy.random.set_state(in_numpy)

    try:
        yield restore
    finally:
        restore()


def _left_to_python() -> Iterator[types.CodeType]:
    """Codes of users that dynamo has tried and has nothing compiled for."""
    count = getattr(torch._C._dynamo.eval_frame, "_get_total_cache_entry_count", None)
    if count is None:
        return
    library = names.torch_folder()
    for code in seen_codes():
        if not code.co_filename.startswith(library) and not count(code):
            yield code


def cuda_in_use() -> bool:
    """Whether CUDA was used in this process; asking does not start it."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
