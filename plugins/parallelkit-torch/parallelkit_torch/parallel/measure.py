"""What a training step keeps in memory and computes, measured without doing it.

The model is copied with tensors that have sizes and no values (torch's fake tensors); a forward
and a backward pass are run on them, and every storage made on the way is counted while it lives.
Nothing is allocated, no random number is drawn, and the model itself is not touched.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from parallelkit.errors import ExampleError

_OUTPUTS: Final = ("logits", "last_hidden_state")


@attrs.define(kw_only=True)
class Reading:
    """What one unit of a model was seen to need, in bytes and operations for a whole example.

    Attributes:
        kept, kept_divided: bytes kept from its forward pass on; of them, what a tensor axis
            divides.
        working, working_divided: bytes on top of all that is kept up to it, in its backward pass.
        output: bytes it hands to the next unit; of the last one, the model's output.
        reduced, reductions: bytes that row-wise layers put out, and their number.
        flops: of its forward pass.
    """

    kept: int = 0
    kept_divided: int = 0
    working: int = 0
    working_divided: int = 0
    output: int = 0
    reduced: int = 0
    reductions: int = 0
    flops: int = 0


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes of storages that operations make, while they live.

    Attributes:
        total, divided: bytes alive now; of them, what a tensor axis divides.
        flops: floating-point operations so far.
        whole: while set, what is made counts as whole, whatever it is made from.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = self.divided = self.flops = 0
        self.whole = False
        self.peak = (0, 0)
        self._known: dict[int, tuple[int, bool]] = {}
        self._watchers: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operation and count what it made."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.flops += int(count(*args, **kwargs, out_val=out))
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        divided = not self.whole and any(self._is_divided(x) for x in inputs)
        for made in tree_leaves(out):
            if isinstance(made, torch.Tensor):
                self.watch(made, divided=divided)
        return out

    def watch(self, tensor: torch.Tensor, *, divided: bool = False, free: bool = False) -> None:
        """Count a tensor's storage from now on; `free`: as nothing, only whether it is divided."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = 0 if free else storage.nbytes()
        self._known[key] = (size, divided)
        self._watchers[key] = weakref.ref(storage, lambda _: self._gone(key))
        self.total += size
        self.divided += size * divided
        if self.total > self.peak[0]:
            self.peak = (self.total, self.divided)

    def _gone(self, key: int) -> None:
        size, divided = self._known.pop(key)
        del self._watchers[key]
        self.total -= size
        self.divided -= size * divided

    def _is_divided(self, tensor: torch.Tensor) -> bool:
        return self._known.get(tensor.untyped_storage()._cdata, (0, False))[1]


def measure(
    model: nn.Module,
    example: Any,
    units: Sequence[Sequence[str]],
    *,
    device: torch.device,
    loss: Callable[[Any], torch.Tensor] | None = None,
    divided: frozenset[str] = frozenset(),
    summed: Mapping[str, float] | None = None,
) -> list[Reading]:
    """Run one training step on nothing and say what each unit needs.

    Args:
        model: on any device, also meta; left as it is.
        example: a tensor, a tuple of arguments or a dict of them by name; values do not matter.
        units: names of modules, in forward order. All that happens from the call of one's first
            module to that of the next belongs to it.
        device: where training will run; which kernels keep what depends on it.
        loss: of the model's output; None: a cross-entropy over the last dim.
        divided: names of parameters that a tensor axis divides.
        summed: modules whose output is whole although their parameters are divided, by name,
            with the share of an all-reduce that making it whole costs.

    Raises:
        ExampleError: the example does not run through the model.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device(device):
        twin = _twin(model, device)
        inputs = tree_map_only(torch.Tensor, lambda x: _fake(x, device), example)
        run = _Run(twin, units, divided, summed or {})
        try:
            with run.live:
                for leaf in tree_leaves(inputs):
                    if isinstance(leaf, torch.Tensor):
                        run.live.watch(leaf)
                run.forward(inputs, loss or _cross_entropy)
                run.backward()
        except Exception as error:
            raise ExampleError(
                f"the example does not run through {type(model).__qualname__} with sizes alone: "
                f"{type(error).__name__}: {error!s:.300}; give an example that model(example) "
                "takes, or none, and activations count as nothing"
            ) from error
        finally:
            run.close()
    return run.readings


class _Run:
    """One pass through a model, with marks where one unit ends and the next begins."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Sequence[str]],
        divided: frozenset[str],
        summed: Mapping[str, float],
    ) -> None:
        self.model = model
        self.live = Live()
        self.readings = [Reading() for _ in units]
        self.at = 0
        self._last = (0, 0, 0)
        self._loss: torch.Tensor | None = None
        self._output: Any = None
        self._first: list[torch.Tensor] = []  # what the gradient is taken for
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.live.watch(parameter, divided=name in divided, free=True)
        for buffer in model.buffers():
            self.live.watch(buffer, free=True)
        self._hooks = [
            model.get_submodule(names[0]).register_forward_pre_hook(
                self._enter(number), with_kwargs=True
            )
            for number, names in enumerate(units)
            if names and names[0]
        ]
        for name, share in summed.items():
            module = model.get_submodule(name)
            self._hooks.append(module.register_forward_pre_hook(self._begin_whole))
            self._hooks.append(module.register_forward_hook(self._end_whole(share)))

    def forward(self, inputs: Any, loss: Callable[[Any], torch.Tensor]) -> None:
        """Run to the loss; what is alive then is what the backward pass needs."""
        leaves = [x for x in tree_leaves(inputs) if isinstance(x, torch.Tensor)]
        self._first = [x.requires_grad_() for x in leaves if x.is_floating_point()]
        if isinstance(inputs, Mapping):
            output = self.model(**inputs)
        else:
            output = self.model(*inputs) if isinstance(inputs, tuple) else self.model(inputs)
        self._output = output  # the caller's loop has it too, which `output` tells
        self.readings[-1].output = result(output).nbytes
        self._loss = loss(output)
        self._note()

    def backward(self) -> None:
        """Take the gradient of activations only, so that parameters' gradients do not mix in."""
        assert self._loss is not None
        kept = [(r.kept, r.kept_divided) for r in self.readings]
        self._below = [
            tuple(sum(column) for column in zip(*kept[: n + 1], strict=True))
            for n in range(len(kept))
        ]
        self.at = len(self.readings) - 1
        self.live.peak = (self.live.total, self.live.divided)
        if self._loss.requires_grad and self._first:
            torch.autograd.backward(self._loss, inputs=self._first)
        self._leave(-1)

    def close(self) -> None:
        """Let go of everything that would keep tensors without values alive."""
        for hook in self._hooks:
            hook.remove()
        self._loss = self._output = None
        self._first = []

    def _enter(self, number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if number < self.at:  # called again
                return
            self._note()
            handed = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            floating = [x for x in handed if x.requires_grad]
            if number > 0:
                self.readings[number - 1].output = sum(x.nbytes for x in floating)
            if floating:
                if not self._first:
                    self._first = floating[:1]
                floating[0].register_hook(  # type: ignore[no-untyped-call]
                    lambda _: self._leave(number - 1)
                )
            self.at = number

        return hook

    def _note(self) -> None:
        """Book what came since the last mark on the unit that ran."""
        now = (self.live.total, self.live.divided, self.live.flops)
        reading = self.readings[self.at]
        reading.kept += now[0] - self._last[0]
        reading.kept_divided += now[1] - self._last[1]
        reading.flops += now[2] - self._last[2]
        self._last = now

    def _leave(self, number: int) -> None:
        """Book the peak of the backward pass that ended here; the one of `number` begins."""
        below, below_divided = self._below[self.at]
        peak, divided = self.live.peak
        reading = self.readings[self.at]
        reading.working = max(reading.working, peak - below, 0)
        reading.working_divided = max(reading.working_divided, divided - below_divided, 0)
        self._output = None
        self.at = max(number, 0)
        self.live.peak = (self.live.total, self.live.divided)

    def _begin_whole(self, module: nn.Module, args: Any) -> None:
        self.live.whole = True

    def _end_whole(self, share: float) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.live.whole = False
            reading = self.readings[self.at]
            reading.reduced += int(share * sum(x.nbytes for x in tree_leaves(output)))
            reading.reductions += 1

        return hook


def _twin(model: nn.Module, device: torch.device) -> nn.Module:
    """Copy a model's structure; its tensors get sizes and no values."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        made = nn.Parameter(_fake(parameter, device), requires_grad=parameter.requires_grad)
        memo[id(parameter)] = made
    for buffer in model.buffers():
        memo[id(buffer)] = _fake(buffer, device)
    return copy.deepcopy(model, memo)


def _fake(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def _cross_entropy(output: Any) -> torch.Tensor:
    scores = result(output)
    if not scores.is_floating_point():
        raise TypeError(f"the model's output is {scores.dtype}; give loss= for it")
    if scores.dim() < 2:
        return scores.float().sum()
    rows = scores.reshape(-1, scores.shape[-1])
    return nn.functional.cross_entropy(rows, torch.zeros(len(rows), dtype=torch.long))


def result(output: Any) -> torch.Tensor:
    """Return the tensor that a loss is taken of: logits, the last hidden state, or the first."""
    for name in _OUTPUTS:
        found = getattr(output, name, None)
        if isinstance(found, torch.Tensor):
            return found
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            return leaf
    raise TypeError(f"the model's output has no tensor: {type(output).__qualname__}")
