"""Parallel contexts: a world of one, and data parallel over `DistributedDataParallel`."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any, ClassVar, Final, final

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from parallelkit.errors import (
    ExecutionModeError,
    PlanError,
    RankMismatchError,
    UnsupportedFeatureError,
)
from parallelkit.plan import ParallelPlan
from parallelkit.protocols import Plain, ProcessGroup
from parallelkit.specs import ContextSpec
from parallelkit_torch import names
from parallelkit_torch import options as opts
from parallelkit_torch.loader import ShardLoader

_MODES: Final = ("standalone", "data")
#: Set by us, or of no use in a context of one group.
_OURS: Final = frozenset(
    {"module", "device_ids", "output_device", "dim", "process_group", "device_mesh"}
    | {"check_reduction"}
)


def setup_parallel_context(spec: ContextSpec, group: ProcessGroup) -> TorchParallelContext:
    """Make the context that `spec` asks for. Collective in name: nothing is sent yet.

    Raises:
        UnsupportedFeatureError: a mode, an axis or an option that is not supported, by name.
        PlanError: the plan is for another world size, or `reduce` is unknown.
    """
    plan = spec.plan
    if plan.world_size != group.world_size:
        raise PlanError(
            f"the plan is for {plan.world_size} ranks and the group has {group.world_size}"
        )
    if spec.reduce not in ("mean", "sum"):
        raise PlanError(f"reduce is {spec.reduce!r}; it is 'mean' or 'sum'")
    wide = [axis for axis, degree in plan.degrees.items() if degree > 1 and axis != "data"]
    if wide:
        raise UnsupportedFeatureError(
            f"the torch plugin cannot divide a model over the axis {wide[0]!r} "
            f"({wide[0]}={plan.degree(wide[0])}) yet; it has the axis 'data'"
        )
    effective = spec.mode
    if effective not in _MODES:
        if not spec.fallback:
            raise UnsupportedFeatureError(
                f"the torch plugin has no mode {spec.mode!r} yet; it has {', '.join(_MODES)}. "
                "With fallback=True it takes the nearest"
            )
        effective = "data" if plan.world_size > 1 else "standalone"
    allowed = opts.accepted(DistributedDataParallel.__init__, ours=_OURS)
    options = opts.check(spec.options, allowed, what="mode 'data' (DistributedDataParallel)")
    return TorchParallelContext(spec, group, effective, options)


@final
class TorchParallelContext:
    """A `parallelkit.protocols.ParallelContext` over the data axis.

    Order of what is done to a model, always: move to the device, replicate; compiling comes
    after that, by `ExecutionMode.compile`. `explain()` shows what was done.
    """

    framework: ClassVar[str] = "torch"

    def __init__(
        self, spec: ContextSpec, group: ProcessGroup, effective: str, options: dict[str, Any]
    ) -> None:
        self._spec = spec
        self._group = group
        self._effective = effective
        self._options = options
        self._mesh: DeviceMesh | None = None
        self._steps: list[str] = []

    @property
    def plan(self) -> ParallelPlan:
        return self._spec.plan

    @property
    def group(self) -> ProcessGroup:
        return self._group

    @property
    def mode(self) -> str:
        return self._spec.mode

    @property
    def effective(self) -> str:
        return self._effective

    @property
    def reduce(self) -> str:
        return self._spec.reduce

    @property
    def native(self) -> DeviceMesh:
        """A `DeviceMesh` of one dimension, `data`, over the group; made on first use."""
        if self._mesh is None:
            kind = torch.device(self._group.device).type
            self._mesh = DeviceMesh.from_group(self._group.native, kind, mesh_dim_names=("data",))
        return self._mesh

    def parallelize(self, model: nn.Module) -> nn.Module:
        """Move `model` to the group's device and replicate it over the data axis.

        Collective, in the same order on every rank; rank 0's values win. In a world of one, and
        for a model without trainable parameters, the model itself comes back.

        Raises:
            ExecutionModeError: the model is compiled already; compiling comes after.
            UnsupportedFeatureError: it is wrapped already, or not an `nn.Module`.
            RankMismatchError: ranks gave different models.
        """
        self._refuse(model)
        model = model.to(self._group.device)
        self._steps = [f"move to {self._group.device}"]
        trainable = any(p.requires_grad for p in model.parameters())
        if self._group.world_size == 1 or not trainable:
            why = "a world of one" if trainable else "no trainable parameters"
            self._steps.append(f"nothing to replicate: {why}")
            return model
        self._check_same(model)
        wrapped = DistributedDataParallel(model, process_group=self._group.native, **self._options)
        if self.reduce == "sum":
            wrapped.register_comm_hook(self._group.native, _sum_gradients)
        self._steps.append(f"replicate {self.plan.data} times, gradients by {self.reduce}")
        return wrapped

    def shard(
        self,
        dataset: Any,
        *,
        batch_size: int = 1,
        mode: str = "pad",
        shuffle: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> ShardLoader:
        """Make a loader over this rank's part of `dataset`. Not collective.

        Args:
            dataset: map-style, the same on every rank.
            batch_size: items in a batch of this rank.
            mode: `"pad"`, `"drop"` or `"uneven"`; see `parallelkit.data.shard_indices`.
            shuffle: permute by `seed` and epoch; call `loader.set_epoch` each epoch.
            options: `num_workers`, `drop_last`, `collate_fn`, ... of `DataLoader`.

        Raises:
            DataShardError, UnsupportedFeatureError: as `ShardLoader` says.
        """
        return ShardLoader(
            dataset,
            index=self.plan.data_shard_index(self._group.rank),
            count=self.plan.data_shard_count,
            batch_size=batch_size,
            mode=mode,
            shuffle=shuffle,
            seed=seed,
            **options,
        )

    def weighted_mean(self, total: torch.Tensor, weight: float) -> torch.Tensor:
        """Turn this rank's total loss into the loss to call `backward` on, weighted globally.

        Ranks have different numbers of tokens, so a mean of the ranks' means is not the mean
        over tokens. The gradients after `backward` are those of the sum of all ranks' totals
        over the sum of all weights, whichever `reduce` the context has. Collective.

        Args:
            total: this rank's summed loss, with its graph.
            weight: this rank's number of tokens or items; 0 is fine on some ranks.

        Raises:
            RankMismatchError: the weights of all ranks add up to nothing.
        """
        mine = torch.tensor(float(weight), dtype=torch.float64)
        if torch.device(self._group.device).type != "cpu":
            mine = mine.to(self._group.device)
        everyone = float(self._group.all_reduce(mine))
        if not everyone > 0:
            raise RankMismatchError(f"the weights of all ranks add up to {everyone}, not above 0")
        return total * ((self._group.world_size if self.reduce == "mean" else 1) / everyone)

    def reset(self) -> None:
        """Undo what the context changed globally: nothing, with torch."""

    def explain(self) -> str:
        """Say what runs, why, and what was done to the model, in order."""
        lines = [
            f"mode {self.mode!r}"
            + (f", effective {self.effective!r}" if self.effective != self.mode else "")
            + f" on {self._group.device} with {self._group.backend}",
            f"gradients: {self.reduce} over {self.plan.data} replica(s)",
            f"data: part {self.plan.data_shard_index(self._group.rank)} of "
            f"{self.plan.data_shard_count}",
        ]
        if self._options:
            shown = ", ".join(f"{k}={v!r}" for k, v in sorted(self._options.items()))
            lines.append(f"options: {shown}")
        lines += [f"step {number}: {step}" for number, step in enumerate(self._steps, 1)]
        return "\n".join(lines)

    def _refuse(self, model: object) -> None:
        if not isinstance(model, nn.Module):
            raise UnsupportedFeatureError(
                f"parallelize got a {type(model).__qualname__}; it takes a torch.nn.Module"
            )
        if isinstance(model, DistributedDataParallel):
            raise UnsupportedFeatureError("parallelize got a model that is replicated already")
        if names.is_compiled(model):
            raise ExecutionModeError(
                "parallelize got a compiled model; parallelize first, then compile: "
                "pk.execution_mode('graph').compile(context.parallelize(model))"
            )

    def _check_same(self, model: nn.Module) -> None:
        """Compare names, shapes and dtypes across ranks; a difference would end in a hang."""
        tensors = [*model.named_parameters(), *model.named_buffers()]
        mine: list[Plain] = [f"{n}: {t.dtype} {list(t.shape)}" for n, t in tensors]
        first = self._group.broadcast_object(mine, 0)
        differ = torch.tensor([int(first != mine)], device=self._group.device)
        if not int(self._group.all_reduce(differ, "max")):
            return
        what = "another rank's differs from rank 0's"
        if isinstance(first, list) and first != mine:
            pairs = zip_longest(mine, first, fillvalue="nothing")
            here, there = next((a, b) for a, b in pairs if a != b)
            what = f"rank {self._group.rank} has {here!r} where rank 0 has {there!r}"
        raise RankMismatchError(
            f"parallelize got different models: {what}. Every rank must build the same one"
        )


def _sum_gradients(
    group: dist.ProcessGroup, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Sum a bucket over ranks; without a hook of its own DDP divides by the world size."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    future: torch.futures.Future[Any] = work.get_future()
    return future.then(lambda done: done.value()[0])


_sum_gradients.__annotations__.clear()  # DDP compares them with types, and these are strings
