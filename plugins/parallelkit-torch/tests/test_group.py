"""Groups of one rank, in this process: the contract that needs no peer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from parallelkit_torch import devices
from parallelkit_torch.group import TorchProcessGroup, init_process_group

from parallelkit.errors import (
    AlreadyInitializedError,
    CollectiveError,
    DeviceError,
    GroupClosedError,
    GroupError,
    NotPlainError,
    UnsupportedFeatureError,
)
from parallelkit.plugin import GroupSpec
from parallelkit.protocols import ProcessGroup

Make = Callable[..., GroupSpec]


@pytest.fixture
def group(spec: Make) -> Iterator[TorchProcessGroup]:
    with init_process_group(spec()) as opened:
        yield opened


def test_facts(group: TorchProcessGroup) -> None:
    assert isinstance(group, ProcessGroup)
    facts = (group.rank, group.world_size, group.local_rank, group.device, group.backend)
    assert facts == (0, 1, 0, "cpu", "gloo")
    assert (group.framework, group.timeout, group.closed) == ("torch", 10.0, False)
    assert group.native is dist.group.WORLD
    assert "rank 0 of 1" in repr(group)


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min", "product"])
def test_alone_everything_is_the_input_copied(group: TorchProcessGroup, op: str) -> None:
    x = torch.arange(6.0).reshape(2, 3).t().requires_grad_()
    for out in (
        group.all_reduce(x, op),
        group.broadcast(x),
        group.all_gather(x)[0],
        group.reduce_scatter(x, op),
    ):
        assert torch.equal(out, x)
        assert out.is_contiguous()
        assert not out.requires_grad
        out.add_(1)
    assert torch.equal(x, torch.arange(6.0).reshape(2, 3).t())
    group.barrier()
    assert group.broadcast_object({"a": [1, None, b"x"]}) == {"a": [1, None, b"x"]}


def test_wrong_arguments(group: TorchProcessGroup) -> None:
    x = torch.ones(2)
    for call, said in [
        (lambda: group.all_reduce(x, "avg"), "op is 'avg'; allowed are sum, mean"),
        (lambda: group.all_reduce(x, None), "op is None"),  # type: ignore[arg-type]
        (lambda: group.reduce_scatter(x, None), "op is None"),  # type: ignore[arg-type]
        (lambda: group.all_reduce(x, ["sum"]), "op is .'sum'"),  # type: ignore[arg-type]
        (lambda: group.all_reduce(x, torch.ones(2)), "op is tensor"),  # type: ignore[arg-type]
        (lambda: group.all_reduce(torch.ones(2, dtype=torch.int64), "mean"), "mean of integers"),
        (lambda: group.all_reduce(x.to(torch.complex64), "max"), "complex"),
        (lambda: group.all_reduce(x.to(torch.float8_e4m3fn)), "gloo cannot combine"),
        (lambda: group.all_reduce([1.0]), "got a list"),  # type: ignore[arg-type]
        (lambda: group.all_reduce(torch.eye(2).to_sparse()), "sparse"),
        (lambda: group.all_reduce(torch.ones(2, device="meta")), "on meta"),
        (lambda: group.broadcast(x, 1), "src is 1; .* 0 to 0"),
        (lambda: group.broadcast(x, -1), "src is -1"),
        (lambda: group.broadcast(x, True), "src is True"),
        (lambda: group.reduce_scatter(torch.ones(())), "dim 0 must divide"),
        (lambda: group.barrier(timeout=0), "timeout is 0"),
        (lambda: group.barrier(timeout=float("nan")), "timeout is nan"),
        (lambda: group.barrier(timeout="x"), "timeout is 'x'"),  # type: ignore[arg-type]
        (lambda: group.barrier(timeout=1e300), "timeout is 1e"),
    ]:
        with pytest.raises(CollectiveError, match=said):
            call()
    with pytest.raises(GroupError, match="partition got 5; it takes a list of lists"):
        group.partition(5)  # type: ignore[arg-type]
    with pytest.raises(NotPlainError):
        group.broadcast_object((1,))  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [[], [0, 0], [1], [-1], [True], ["0"]])
def test_wrong_subgroups(group: TorchProcessGroup, ranks: list[int]) -> None:
    with pytest.raises(GroupError, match="each once"):
        group.subgroup(ranks)


def test_subgroup_of_no_list(group: TorchProcessGroup) -> None:
    with pytest.raises(GroupError, match="list of ranks"):
        group.subgroup(0)  # type: ignore[arg-type]


def test_subgroup_of_one(group: TorchProcessGroup) -> None:
    child = group.subgroup([0])
    assert child is not None
    assert child.native is not group.native
    assert child.all_reduce(torch.ones(1)).tolist() == [1]
    group.close()
    assert child.closed


def test_after_close(spec: Make) -> None:
    group = init_process_group(spec())
    group.close()
    group.close()
    assert group.closed
    assert not dist.is_initialized()
    for call in (
        group.barrier,
        lambda: group.all_reduce(torch.ones(1)),
        lambda: group.broadcast_object(1),
        lambda: group.subgroup([0]),
    ):
        with pytest.raises(GroupClosedError, match="was closed"):
            call()
    init_process_group(spec()).close()


def test_exception_hook_is_restored(spec: Make) -> None:
    hook = sys.excepthook
    with init_process_group(spec()):
        pass
    assert sys.excepthook is hook


def test_group_the_user_made_is_adopted_and_left_alive(spec: Make) -> None:
    hook = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = init_process_group(spec())
        assert not group.ours
        child = group.subgroup([0])
        group.close()
        assert dist.is_initialized()
        dist.barrier()
        assert child is not None
        assert child.closed
        with pytest.raises(AlreadyInitializedError, match=r"rank 0 of 1 and gloo.*rank 1 of 2"):
            init_process_group(spec(1, 2, master_port=1))
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def test_group_the_user_made_and_destroyed(spec: Make) -> None:
    hook = sys.excepthook
    dist.init_process_group(
        store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=5)
    )
    group = init_process_group(spec())  # "undefined" stands for gloo on the CPU
    dist.destroy_process_group()
    group.close()
    sys.excepthook = hook


def test_nccl_on_the_cpu(spec: Make) -> None:
    with pytest.raises(UnsupportedFeatureError, match=r"'nccl' cannot run on cpu.*gloo"):
        init_process_group(spec(backend="nccl"))
    with pytest.raises(UnsupportedFeatureError, match="'nonsense'"):
        init_process_group(spec(backend="nonsense"))
    assert not dist.is_initialized()


class Cuda:
    """A made-up `torch.cuda` that records what is called."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.calls: list[object] = []

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def set_device(self, device: torch.device) -> None:
        self.calls.append(device)


def test_device_comes_from_the_local_rank_first(
    spec: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = Cuda(2)
    monkeypatch.setattr(torch, "cuda", cuda)
    assert devices.claim(spec(device="cuda", local_rank=1)) == torch.device("cuda:1")
    assert devices.claim(spec(device="cuda:0")) == torch.device("cuda:0")
    assert cuda.calls == [torch.device("cuda:1"), torch.device("cuda:0")]
    with pytest.raises(DeviceError, match=r"local rank 2 needs cuda:2.*shows 2 cuda"):
        devices.claim(spec(device="cuda", local_rank=2, rank=2, world_size=4))
    assert len(cuda.calls) == 2


def test_device_is_set_before_the_backend_starts(
    spec: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = Cuda(1)
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(devices, "check_backend", lambda *a: cuda.calls.append("backend"))

    def start(*args: object, **options: object) -> None:
        cuda.calls.append(options["device_id"])
        raise RuntimeError("no NCCL here")

    monkeypatch.setattr(dist, "init_process_group", start)
    with pytest.raises(GroupError, match="no NCCL here"):
        init_process_group(spec(device="cuda:0", backend="nccl"))
    assert cuda.calls == [torch.device("cuda:0"), "backend", torch.device("cuda:0")]


@pytest.mark.parametrize("device", ["cuda:0", "xpu", "nonsense"])
def test_devices_that_are_not_here(spec: Make, device: str) -> None:
    if device.startswith("cuda") and torch.cuda.is_available():
        pytest.skip("this host has CUDA")
    with pytest.raises(DeviceError, match="device"):
        init_process_group(spec(device=device))
