"""What a loader does with incoming tensors, noted operation by operation.

Only plain copies from a view of an incoming tensor into a view of a parameter or buffer can be
repeated without the loader. Whatever else happens to the values is noted against their names.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, final

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from parallelkit_torch.placement.boxes import Box

_aten: Any = torch.ops.aten
_EXACT: Final = (_aten.clone.default, _aten._to_copy.default)
#: They make a tensor like another without looking at its values.
_SHAPE_ONLY: Final = (
    *(_aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.rand_like),
    *(_aten.new_empty, _aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.new_empty_strided),
    *(_aten.is_same_size, _aten.sym_size, _aten.sym_stride, _aten.sym_storage_offset),
)
#: They take values to where no operation of torch's shows what becomes of them.
_OUTSIDE: Final = frozenset(
    (
        *(torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__),
        *(torch.Tensor.tolist, torch.Tensor.data_ptr),
        *(torch.Tensor.__repr__, torch.Tensor.__format__, torch.Tensor.__reduce_ex__),
    )
)
#: They write without looking at what was there.
_OVERWRITE: Final = (_aten.fill_, _aten.zero_, _aten.normal_, _aten.uniform_, _aten.random_)
_CONSTANT: Final = ("aten.fill_.Scalar", "aten.zero_")
#: What the first one reads; the others read everything but what they overwrite.
_FROM: Final = (_aten.copy_.default, _aten._foreach_copy_.default)
_UNSEEN: Final = "may be in values that were made where torch does not show how"


@attrs.frozen
class View:
    """Where a strided tensor lies in its memory. Offset and strides in elements."""

    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        return cls(tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())

    def box(self) -> Box:
        """The same in bytes."""
        item = self.dtype.itemsize
        steps = tuple(step * item for step in self.strides)
        return Box(self.offset * item, item, self.shape, steps)


@attrs.frozen
class Copy:
    """Incoming values, element by element, into a view of a parameter's or buffer's memory."""

    name: str
    source: View
    target: View
    memory: int


@attrs.frozen
class Write:
    """Other values written: computed from incoming tensors `names`, or the loader's own."""

    names: frozenset[str]
    target: View
    memory: int
    how: str


@attrs.frozen
class _Exact:
    """A tensor that holds a view of an incoming one, element by element, maybe cast."""

    name: str
    source: View
    result: View


class ValuesNeededError(Exception):
    """Raised inside a loader that works on tensors without data, when it needs their values."""


def memory_of(tensor: torch.Tensor) -> int:
    """Equal for two tensors exactly when they share their storage, data or none."""
    key: int = tensor.untyped_storage()._cdata
    return key


@final
class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is done to `incoming` while it is active, by torch operations of this thread.

    Attributes:
        copies: plain copies into `targets`, in order.
        writes: everything else that was written into `targets`.
        reasons: for names whose values went other ways, the first such way.
        ways: for those names, every such way, with the numbers that took part.
        cannot: why a run without data proves nothing; empty as long as it does.
    """

    def __init__(
        self,
        incoming: Mapping[str, torch.Tensor],
        targets: Iterable[torch.Tensor],
        *,
        forbidden: Iterable[torch.Tensor] = (),
    ) -> None:
        """Begin to watch.

        Args:
            incoming: by name; two names may share a tensor, then the first is noted.
            targets: parameters and buffers.
            forbidden: tensors that may not even be read: the live ones, in a trial on a copy.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: list[Copy] = []
        self.writes: list[Write] = []
        self.reasons: dict[str, str] = {}
        self.ways: dict[str, list[str]] = {}
        self.cannot = ""
        self._incoming: dict[int, str] = {}
        self._content: dict[int, frozenset[str]] = {}
        self._exact: dict[int, _Exact] = {}
        self._left: frozenset[str] = frozenset()
        # Memories of which every value was made in sight, and those with values of others.
        self._seen: dict[int, StorageWeakRef] = {}
        self._unseen: set[int] = set()
        self._strange = False  # whether the operation at hand reads the latter
        # A weak reference lets the data go, and keeps the number from being used again.
        self._refs: dict[int, StorageWeakRef] = {}
        for name, tensor in incoming.items():
            self._incoming.setdefault(memory_of(tensor), name)
            self._fill(tensor, frozenset([self._incoming[memory_of(tensor)]]))
        # So do these for targets that are given other memory.
        self._targets = {
            memory_of(tensor): StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            for tensor in targets
        }
        self._forbidden = {memory_of(tensor) for tensor in forbidden}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler for it, which takes seconds, at the first call."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        inputs = list(_tensors((args, kwargs)))
        self._refuse(func, inputs)
        if func in _EXACT and inputs[0].is_meta and "device" in kwargs:
            kwargs["device"] = inputs[0].device  # where to does not matter, only what
        known = {memory_of(tensor) for tensor in inputs}
        written = _written(func, args, kwargs)
        self._strange = self._reads_unseen(func, args, inputs, written)
        out = func(*args, **kwargs)
        outputs = list(_tensors(out))
        self._see(func, known, [*written, *outputs])
        if func.overloadpacket in _SHAPE_ONLY:
            return out
        if func is _aten.copy_.default:
            self._copied(args[0], args[1])
        elif func is _aten._foreach_copy_.default:
            for target, source in zip(args[0], args[1], strict=True):
                self._copied(target, source)
        elif func is _aten.index_copy_.default and not args[2].is_meta:
            self._copied_rows(args[0].transpose(0, args[1]), args[2], args[3].transpose(0, args[1]))
        elif func is _aten.index_put_.default and _is_rows(args, kwargs):
            self._copied_rows(args[0], args[1][0], args[2])
        elif func in _EXACT:
            self._derived(args[0], out, func)
        else:
            fresh = [tensor for tensor in outputs if memory_of(tensor) not in known]
            if fresh or written or not outputs:  # else they are views
                self._other(func, inputs, written, fresh)
            numbers = [x for x in (*args, *kwargs.values()) if isinstance(x, int | float | complex)]
            for name in frozenset().union(*(self.holds(memory_of(t)) for t in inputs)):
                self.ways.setdefault(name, []).append(f"{func} {numbers}")
        return out

    def outside(self) -> TorchFunctionMode:
        """A second context for the run: notes values that leave torch, as to NumPy.

        What is written from then on without a known origin counts as theirs.
        """
        return _Outside(self)

    def left(self, tensor: torch.Tensor, how: str) -> None:
        """Values of a tensor leave torch."""
        names = self.holds(memory_of(tensor))
        if names and tensor.is_meta:
            self.cannot = f"it takes values{_of(sorted(names))} out of torch ({how})"
            raise ValuesNeededError(self.cannot)
        self._touch(names, f"leaves torch ({how})")
        self._left |= names

    def retained(self) -> set[str]:
        """Names whose values are still held somewhere else than in a target.

        To be asked when the loader has returned and the caller has dropped the tensors too.
        """
        held = self._alive()
        if held:
            gc.collect()
            held = self._alive()
        return held

    def holds(self, memory: int) -> frozenset[str]:
        """Names whose values are in a memory, in whatever form."""
        return self._content.get(memory, frozenset())

    def knows(self, value: Any) -> bool:
        """Whether a value has tensors in it, with values of incoming ones."""
        return any(self.holds(memory_of(tensor)) for tensor in _tensors(value))

    def _alive(self) -> set[str]:
        return {
            name
            for memory, ref in self._refs.items()
            if memory not in self._targets and not ref.expired()  # type: ignore[no-untyped-call]
            for name in self._content[memory]
        }

    def _refuse(self, func: Any, inputs: Sequence[torch.Tensor]) -> None:
        if self._forbidden and any(memory_of(t) in self._forbidden for t in inputs):
            self.cannot = "it uses tensors of the live module, not of the one it is called on"
            raise ValuesNeededError(self.cannot)
        if func is _aten._local_scalar_dense.default and inputs[0].is_meta:
            names = sorted(self.holds(memory_of(inputs[0])))
            self.cannot = f"it looks at values{_of(names)}"
            raise ValuesNeededError(self.cannot)

    def _copied(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if not target.numel():
            return
        names = self.holds(memory_of(source))
        origin = self._origin(source.expand(target.shape), target)
        if isinstance(origin, str) or memory_of(target) not in self._targets:
            if isinstance(origin, str) and origin:
                self._touch(names, origin)
            elif names:
                names |= self.holds(memory_of(target))
                self._touch(names, "is copied into memory that is no parameter and no buffer")
            self._write(target, names, "a copy")
            return
        memory = memory_of(target)
        self.copies.append(Copy(origin.name, origin.source, View.of(target), memory))
        self._fill(target, self.holds(memory) | {origin.name})

    def _copied_rows(self, target: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> None:
        rows = source.expand(len(index), *target.shape[1:])
        for place, row in enumerate(index.tolist()):
            self._copied(target[row], rows[place])

    def _origin(self, source: torch.Tensor, target: torch.Tensor) -> _Exact | str:
        """Which view of which incoming tensor is copied; or why that cannot be said."""
        memory, view = memory_of(source), View.of(source)
        if not self.holds(memory):
            return ""
        if source.is_conj() or source.is_neg() or target.is_conj() or target.is_neg():
            return "is conjugated or negated"
        name, exact = self._incoming.get(memory), self._exact.get(memory)
        if name is not None:
            return _Exact(name, view, view)
        if exact is None:
            return "is written after other operations"
        made, given = exact.result, exact.source
        if view.dtype != made.dtype:
            return "is cast and then seen as another dtype"
        if made.dtype not in (given.dtype, target.dtype):
            return f"is cast twice, {given.dtype} to {made.dtype} to {target.dtype}"
        if view == made:
            return attrs.evolve(exact, result=view)
        if given.strides != made.strides:
            return "is written in part from a copy in another order"
        offset = given.offset + view.offset - made.offset
        return _Exact(exact.name, View(given.dtype, offset, view.shape, view.strides), view)

    def _derived(self, source: torch.Tensor, out: torch.Tensor, func: Any) -> None:
        names = self.holds(memory_of(source))
        if not names or not out.numel():
            return
        origin = self._origin(source, out)
        if isinstance(origin, str):
            self._touch(names, origin)
        else:
            self._exact[memory_of(out)] = attrs.evolve(origin, result=View.of(out))
        self._fill(out, names)

    def _other(
        self,
        func: Any,
        inputs: Sequence[torch.Tensor],
        written: Sequence[torch.Tensor],
        fresh: Sequence[torch.Tensor],
    ) -> None:
        read = _read(func, inputs, written)
        names = frozenset().union(*(self.holds(memory_of(tensor)) for tensor in read))
        looked = func is _aten._local_scalar_dense.default
        self._touch(names, "has its values looked at" if looked else f"goes through {func}")
        if names:
            for tensor in fresh:
                self._fill(tensor, names)
        for tensor in written:
            self._write(tensor, names, str(func))

    def _write(self, target: torch.Tensor, names: frozenset[str], how: str) -> None:
        memory = memory_of(target)
        self._exact.pop(memory, None)
        changed = self._incoming.pop(memory, None)
        if changed is not None:
            self._touch([changed], "is changed by the loader")
        if not names and not how.startswith(_CONSTANT):
            names = self._left
        if not names and self._strange and memory in self._targets and target.numel():
            names = frozenset(self._incoming.values())
            self._touch(names, _UNSEEN)
        if memory in self._targets and target.numel():
            self.writes.append(Write(names, View.of(target), memory, how))
        if names:
            self._fill(target, names | self.holds(memory))

    def _reads_unseen(
        self,
        func: Any,
        args: Sequence[Any],
        inputs: Sequence[torch.Tensor],
        written: Sequence[torch.Tensor],
    ) -> bool:
        """Whether an operation reads values that were not made in sight: in another thread, by a
        library, or before the run, by whom it is not known."""
        if func is _aten.lift_fresh.default or func.overloadpacket in _SHAPE_ONLY:
            return False  # numbers of Python's: `left` tells where those may come from
        read = _tensors(args[1]) if func in _FROM else _read(func, inputs, written)
        return any(self._is_unseen(tensor) for tensor in read)

    def _is_unseen(self, tensor: torch.Tensor) -> bool:
        memory = memory_of(tensor)
        known = memory in self._seen or memory in self._content or memory in self._targets
        return tensor.numel() > 0 and (memory in self._unseen or not known)

    def _see(self, func: Any, known: set[int], results: Iterable[torch.Tensor]) -> None:
        for tensor in results:
            memory = memory_of(tensor)
            if self._strange:
                self._unseen.add(memory)
            elif memory not in known and func.overloadpacket is not _aten.set_:
                self._unseen.discard(memory)
            else:
                continue
            if memory not in self._seen:
                self._seen[memory] = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    def _fill(self, tensor: torch.Tensor, names: frozenset[str]) -> None:
        memory = memory_of(tensor)
        self._content[memory] = names
        if memory not in self._refs:
            self._refs[memory] = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    def _touch(self, names: Iterable[str], reason: str) -> None:
        for name in names:
            self.reasons.setdefault(name, reason)


@final
class _Outside(TorchFunctionMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OUTSIDE:
            self._recorder.left(args[0], func.__name__)
        return func(*args, **(kwargs or {}))


def _tensors(thing: Any) -> Iterator[torch.Tensor]:
    """Tensors that have a storage, in arguments and results of operations."""
    if isinstance(thing, torch.Tensor):
        if thing.layout is torch.strided:
            yield thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from _tensors(value)
    elif isinstance(thing, (list, tuple)):
        for value in thing:
            yield from _tensors(value)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The arguments that an operation changes, by its schema."""
    found: list[torch.Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += _tensors(value)
    return found


def _read(
    func: Any, inputs: Sequence[torch.Tensor], written: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Those inputs of an operation whose values matter."""
    blind = _blind(func, written)
    return [t for t in inputs if t.numel() and not any(t is other for other in blind)]


def _blind(func: Any, written: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Those of the written tensors whose values before do not matter."""
    outs = any(a.name == "out" and a.alias_info is not None for a in func._schema.arguments)
    return written if outs or func.overloadpacket in _OVERWRITE else ()


def _is_rows(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether `index_put_` writes whole rows by a list of their numbers."""
    index = args[1][0] if len(args[1]) == 1 else None
    return (
        isinstance(index, torch.Tensor)
        and not index.is_meta
        and index.dim() == 1
        and index.dtype in (torch.int32, torch.int64)
        and not (args[3] if len(args) > 3 else kwargs.get("accumulate", False))
    )


def _of(names: Sequence[str]) -> str:
    return f" of {', '.join(repr(name) for name in names[:3])}" if names else ""
