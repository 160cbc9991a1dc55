"""One training script, written for raw torch, Accelerate, Fabric and parallelkit.

Each arm builds the same model from the same values over the same data, in a process whose group is
open already, and gives back a `Trainer`. Only what the library wants written differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

RANKS = 2
#: In this order; the second raw one shows how far the same differs from itself.
ARMS = ("raw", "raw again", "parallelkit", "accelerate", "fabric", "no exchange")
CLASSES = 64


class Size(NamedTuple):
    """A model of `blocks` residual layers of `width`, and a rank's batch."""

    width: int
    blocks: int
    batch: int


#: Small: the step is all overhead. Large: gradients of 25 MB.
SIZES = {"small": Size(64, 8, 16), "large": Size(1024, 6, 16)}


class Case(NamedTuple):
    """What all arms do alike: `strategy` ddp or fsdp2, `mode` eager or graph, and the size."""

    strategy: str
    mode: str
    size: str


class MissingArmError(Exception):
    """An arm that cannot run this case here; says why."""


class Net(nn.Module):
    """Residual layers between an input of `width` and logits of `CLASSES`."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(size.width, size.width) for _ in range(size.blocks))
        self.head = nn.Linear(size.width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.relu(block(x))
        logits: Tensor = self.head(x)
        return logits


class Trainer:
    """A model, its optimiser, a loader that never ends, and a step.

    Args:
        model: what the library made of it, to read weights from.
        forward: what is called: the model, or what was compiled of it.
        backward: what the library wants called with the loss.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        loader: Any,
        *,
        forward: Callable[[Tensor], Tensor] | None = None,
        backward: Callable[[Tensor], object] = torch.autograd.backward,
    ) -> None:
        self.model = model
        self._optimizer = optimizer
        self._batches = _endless(loader)
        self._forward = model if forward is None else forward
        self._backward = backward

    def train(self, steps: int) -> None:
        """Take steps."""
        for _ in range(steps):
            x, y = next(self._batches)
            self._optimizer.zero_grad()
            self._backward(nn.functional.cross_entropy(self._forward(x), y))
            self._optimizer.step()

    def weights(self) -> Tensor:
        """Return all parameters in one vector. Collective where they are sharded."""
        values = [p.detach() for p in self.model.parameters()]
        whole = [v.full_tensor() if hasattr(v, "full_tensor") else v for v in values]
        return torch.cat([v.flatten() for v in whole])


def build(arm: str, case: Case) -> Trainer:
    """Build an arm. Collective.

    Raises:
        MissingArmError: its library is not installed, or does not do this case here.
    """
    torch.manual_seed(0)
    size = SIZES[case.size]
    net = Net(size)
    count = size.batch * RANKS * 8
    data = TensorDataset(torch.randn(count, size.width), torch.randint(CLASSES, (count,)))
    return BUILDERS[arm](net, data, case)


def with_torch(net: nn.Module, data: Any, case: Case) -> Trainer:
    """What a script without a library does."""
    model: nn.Module = net
    if case.strategy == "ddp":
        model = DistributedDataParallel(net)
    else:
        _shard(net)
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=SIZES[case.size].batch, sampler=sampler)
    forward = torch.compile(model) if case.mode == "graph" else model
    return Trainer(model, _sgd(model), loader, forward=forward)


def without_exchange(net: nn.Module, data: Any, case: Case) -> Trainer:
    """The same steps on each rank for itself: the part that no exchange can go below."""
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=SIZES[case.size].batch, sampler=sampler)
    forward = torch.compile(net) if case.mode == "graph" else net
    return Trainer(net, _sgd(net), loader, forward=forward)


def with_parallelkit(net: nn.Module, data: Any, case: Case) -> Trainer:
    import parallelkit as pk

    if case.strategy == "ddp":
        context = pk.parallel_context(data=-1)
    else:
        context = pk.parallel_context(data_shard=-1, blocks=["blocks.*"])
    model = context.parallelize(net)
    loader = context.shard(data, batch_size=SIZES[case.size].batch)
    forward = pk.execution_mode(case.mode).compile(model)
    return Trainer(model, _sgd(model), loader, forward=forward)


def with_accelerate(net: nn.Module, data: Any, case: Case) -> Trainer:
    _require("accelerate")
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = None
    if case.strategy == "fsdp2":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Linear"],
        )
    compiled = "inductor" if case.mode == "graph" else "no"
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, dynamo_backend=compiled)
    loader = DataLoader(data, batch_size=SIZES[case.size].batch)
    model, optimizer, loader = accelerator.prepare(net, _sgd(net), loader)
    if case.strategy == "fsdp2" and not any(isinstance(m, FSDPModule) for m in model.modules()):
        became = type(getattr(model, "_orig_mod", model)).__name__
        raise MissingArmError(
            f"Accelerate {version('accelerate')} leaves its FSDP plugin aside on CPU ranks: it "
            f"says {accelerator.distributed_type}, and makes the model a {became}"
        )
    return Trainer(model, optimizer, loader, backward=accelerator.backward)


def with_fabric(net: nn.Module, data: Any, case: Case) -> Trainer:
    _require("lightning-fabric")
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import TorchElasticEnvironment
    from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy

    def parallelize(module: nn.Module, mesh: Any) -> nn.Module:
        return _shard(module, mesh["data_parallel"])

    if case.strategy == "ddp":
        strategy: Any = DDPStrategy()
    else:
        strategy = ModelParallelStrategy(parallelize, RANKS, 1)
    try:
        fabric = Fabric(
            accelerator="cpu",
            devices=RANKS,
            strategy=strategy,
            plugins=[TorchElasticEnvironment()],
        )
        fabric.launch()
        model = fabric.setup_module(torch.compile(net) if case.mode == "graph" else net)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise MissingArmError(f"Fabric {version('lightning-fabric')}: {error}") from error
    optimizer = fabric.setup_optimizers(_sgd(model))
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=SIZES[case.size].batch, sampler=sampler)
    loader = fabric.setup_dataloaders(loader, use_distributed_sampler=False)
    return Trainer(model, optimizer, loader, backward=fabric.backward)


BUILDERS: dict[str, Callable[[nn.Module, Any, Case], Trainer]] = {
    "raw": with_torch,
    "raw again": with_torch,
    "parallelkit": with_parallelkit,
    "accelerate": with_accelerate,
    "fabric": with_fabric,
    "no exchange": without_exchange,
}


def _shard(net: nn.Module, mesh: Any = None) -> nn.Module:
    for block in net.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def _require(distribution: str) -> None:
    try:
        version(distribution)
    except PackageNotFoundError:
        raise MissingArmError(
            f"{distribution} is not installed: pip install -r requirements/bench.txt"
        ) from None


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader
