"""Watch what dynamo compiles for one compiled callable: graphs, recompilations, breaks.

`torch.compile` gives each callable that it makes a frame converter of its own, which dynamo asks
for every Python frame that has no fitting compiled code yet. The converter is where a watch sits:
what it sees belongs to that callable alone, however many others the process has, and a step that
needs no compilation never passes it, so that watching costs nothing then.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any, Final, final

import attrs
import torch
from torch import nn
from torch._dynamo import utils
from torch._dynamo.exc import Unsupported, UserError

from parallelkit.errors import UnsupportedFeatureError
from parallelkit.graphs import GraphBreak
from parallelkit_torch.graph import breaks

#: Failures after which dynamo runs a frame as it is, eagerly.
_SOFT: Final = (Unsupported, UserError)


@attrs.define(eq=False)
class Tally:
    """What was compiled for a target so far.

    Attributes:
        graphs: graphs given to the backend; recompiles: compilations of a piece of code that was
            compiled for this target before.
        places: breaks by file, line and construct, in the order met.
        skipped: why frames were left to Python without anything having gone wrong.
    """

    graphs: int = 0
    recompiles: int = 0
    places: dict[tuple[str, int, str], GraphBreak] = attrs.field(factory=dict)
    skipped: list[str] = attrs.field(factory=list)
    # by identity: code objects that look alike are equal. Held, so that no other gets the number
    _codes: dict[int, types.CodeType] = attrs.field(factory=dict)

    @property
    def breaks(self) -> tuple[GraphBreak, ...]:
        """The breaks, in the order met."""
        return tuple(self.places.values())

    def add_break(self, found: GraphBreak) -> None:
        """Note a break, once for each place and construct."""
        self.places.setdefault((found.file, found.line, found.construct), found)

    def add_frame(self, code: types.CodeType, graphs: int) -> None:
        """Note that `code` was compiled, to `graphs` graphs."""
        self.graphs += graphs
        if id(code) in self._codes:
            self.recompiles += 1
        self._codes[id(code)] = code


def watch(compiled: Callable[..., Any], tally: Tally) -> None:
    """Count into `tally` whatever dynamo compiles for `compiled`, from now on.

    Args:
        compiled: what `torch.compile` returned; not called yet.

    Raises:
        UnsupportedFeatureError: this torch is built otherwise than the versions known.
    """
    entry = _entry(compiled)
    if entry is None:  # a stance, or disable=True: nothing is ever compiled
        return
    try:
        converter = entry._torchdynamo_orig_backend
        entry._torchdynamo_orig_backend = _Converter(converter, tally)
    except AttributeError as error:
        raise UnsupportedFeatureError(
            f"compilations of torch {torch.__version__} cannot be counted: {error}. "
            "Use a version of torch that this parallelkit was tested with"
        ) from error


def _entry(compiled: Callable[..., Any]) -> Any:
    """Find what dynamo calls for each frame of `compiled`; None where it compiles nothing."""
    if isinstance(compiled, nn.Module):
        return getattr(getattr(compiled, "dynamo_ctx", None), "callback", None) or None
    code = getattr(compiled, "__code__", None)
    cells = getattr(compiled, "__closure__", None) or ()
    names = code.co_freevars if code is not None else ()
    for name, cell in zip(names, cells, strict=True):
        if name == "callback":
            return cell.cell_contents or None
    return None


@final
class _Converter:
    """Stands in for a `ConvertFrame` of dynamo, and looks into it."""

    def __init__(self, inner: Any, tally: Tally) -> None:
        # dynamo reads attributes of this from C, while frames of Python are still handed to it:
        # with `__getattr__` or a property it would be called for those, without end
        self.__dict__.update(inner.__dict__)
        self._torchdynamo_orig_backend = inner._torchdynamo_orig_backend
        self._inner = inner
        self._tally = tally
        if hasattr(inner, "_inner_convert"):
            inner._inner_convert = _Attempt(inner._inner_convert, tally)
            self._call = inner
        else:  # fullgraph: the frame is either converted or an error
            self._call = _Attempt(inner, tally)

    @property
    def _clone_with_backend(self) -> Callable[[Any], _Converter]:
        """Inside a `DistributedDataParallel` dynamo works with a copy, with its own backend."""
        clone = self._inner._clone_with_backend
        return lambda backend: _Converter(clone(backend), self._tally)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


@final
class _Attempt:
    """Stands in for a `ConvertFrameAssert`: one call is one attempt to compile a frame."""

    def __init__(self, inner: Any, tally: Tally) -> None:
        self.__dict__.update(inner.__dict__)
        self._inner = inner
        self._tally = tally

    def __call__(self, frame: Any, *args: Any, skip: int = 0) -> Any:
        code = frame.f_code
        reasons = len(utils.graph_break_reasons)
        before = _unique_graphs()
        try:
            result = self._inner(frame, *args, skip=skip + 1)
        except _SOFT as error:
            if not breaks.is_nothing_of_the_users(error, code):
                self._tally.add_break(breaks.from_exception(error, code))
            raise
        finally:
            for reason in utils.graph_break_reasons[reasons:]:
                self._tally.add_break(breaks.from_reason(reason, code))
        if result.guarded_code is not None:
            self._tally.add_frame(code, _unique_graphs() - before)
        else:
            why = getattr(result, "skip_reason", None)  # not in torch 2.11
            if why:
                self._tally.skipped.append(why.splitlines()[0])
        return result


def _unique_graphs() -> int:
    return int(utils.counters["stats"]["unique_graphs"])


def seen_codes() -> Iterator[types.CodeType]:
    """Every code object that dynamo looked at in this process and that is still there."""
    from torch._dynamo import convert_frame

    for reference in list(convert_frame.input_codes.seen):
        code = reference()
        if code is not None:
            yield code
