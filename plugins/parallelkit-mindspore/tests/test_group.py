"""Groups of one rank, in this process: the contract that needs no peer; and its pure parts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore.communication.management import GlobalComm
from parallelkit_mindspore import devices, life, native, reductions, rendezvous
from parallelkit_mindspore.group import MindSporeProcessGroup, init_process_group

from parallelkit.errors import (
    AlreadyInitializedError,
    CollectiveError,
    DeviceError,
    GroupClosedError,
    GroupError,
    NotPlainError,
    UnsupportedFeatureError,
)
from parallelkit.plugin import GroupSpec, LaunchInfo
from parallelkit.protocols import ProcessGroup

Make = Callable[..., GroupSpec]


@pytest.fixture
def spec() -> Make:
    def make(rank: int = 0, world_size: int = 1, **changes: object) -> GroupSpec:
        values: dict[str, Any] = {
            "framework": "mindspore",
            "backend": "mccl",
            "device": "cpu",
            "rank": rank,
            "world_size": world_size,
            "local_rank": rank,
            "local_world_size": world_size,
            "master_addr": "127.0.0.1",
            "timeout": 10.0,
            "launch": LaunchInfo(),
        }
        return GroupSpec(**(values | changes))

    return make


@pytest.fixture
def group(spec: Make) -> Iterator[MindSporeProcessGroup]:
    with init_process_group(spec()) as opened:
        yield opened


def test_facts(group: MindSporeProcessGroup) -> None:
    assert isinstance(group, ProcessGroup)
    facts = (group.rank, group.world_size, group.local_rank, group.device, group.backend)
    assert facts == (0, 1, 0, "cpu", "mccl")
    assert (group.framework, group.timeout, group.closed) == ("mindspore", 10.0, False)
    assert group.native is None
    assert "rank 0 of 1" in repr(group)


def test_alone_nothing_of_mindspore_is_opened(group: MindSporeProcessGroup) -> None:
    group.barrier()
    assert not GlobalComm.INITED
    assert life.state() == "none"


@pytest.mark.parametrize("op", reductions.OPS)
def test_alone_everything_is_the_input_copied(group: MindSporeProcessGroup, op: str) -> None:
    x = ms.Tensor(np.arange(6.0, dtype=np.float32).reshape(2, 3)).t()
    kept = x.asnumpy().copy()
    for out in (
        group.all_reduce(x, op),
        group.broadcast(x),
        group.all_gather(x)[0],
        group.reduce_scatter(x, op),
    ):
        assert (out.asnumpy() == kept).all()
        assert out.is_contiguous()
        out.add_(1)
    assert (x.asnumpy() == kept).all()
    assert group.broadcast_object({"a": [1, None, b"x"]}) == {"a": [1, None, b"x"]}


def test_parameters_give_plain_tensors(group: MindSporeProcessGroup) -> None:
    parameter = ms.Parameter(ms.Tensor([1.0, 2.0]), name="w")
    out = group.all_reduce(parameter)
    assert not isinstance(out, ms.Parameter)
    assert out.asnumpy().tolist() == [1, 2]


def test_wrong_arguments(group: MindSporeProcessGroup) -> None:
    x = ms.Tensor([1.0, 2.0])
    whole = ms.Tensor([1, 2])
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: group.all_reduce(x, "avg"), "op is 'avg'; allowed are sum, mean"),
        (lambda: group.all_reduce(whole, "mean"), "mean of integers"),
        (lambda: group.all_reduce(x, None), "op is None"),
        (lambda: group.reduce_scatter(x, None), "op is None"),
        (lambda: group.all_reduce(x, ["sum"]), "op is .'sum'"),
        (lambda: group.all_reduce(x, np.ones(2)), "op is array"),
        (lambda: group.all_reduce(x.astype(ms.bool_), "mean"), "mean of integers"),
        (lambda: group.all_reduce(x.astype(ms.complex64), "max"), "complex"),
        (lambda: group.all_reduce([1.0]), "got a list"),
        (lambda: group.all_reduce(np.ones(2)), "got a ndarray"),
        (lambda: group.broadcast(x, 1), "src is 1; .* 0 to 0"),
        (lambda: group.broadcast(x, -1), "src is -1"),
        (lambda: group.broadcast(x, True), "src is True"),
        (lambda: group.reduce_scatter(ms.Tensor(1.0)), "dim 0 must divide"),
        (lambda: group.barrier(timeout=0), "timeout is 0"),
        (lambda: group.barrier(timeout=float("nan")), "timeout is nan"),
    ]
    for call, said in calls:
        with pytest.raises(CollectiveError, match=said):
            call()
    with pytest.raises(GroupError, match="partition got 5; it takes a list of lists"):
        group.partition(5)  # type: ignore[arg-type]
    with pytest.raises(NotPlainError):
        group.broadcast_object((1,))  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [[], [0, 0], [1], [-1], [True], ["0"]])
def test_wrong_subgroups(group: MindSporeProcessGroup, ranks: list[int]) -> None:
    with pytest.raises(GroupError, match="each once"):
        group.subgroup(ranks)
    with pytest.raises(GroupError):
        group.partition([ranks, ranks])


def test_subgroup_of_one(group: MindSporeProcessGroup) -> None:
    child = group.subgroup([0])
    assert child is not None
    assert child.native is None
    assert child.all_reduce(ms.Tensor([1.0])).asnumpy().tolist() == [1]
    assert group.partition([[0]]).world_size == 1
    group.close()
    assert child.closed


def test_after_close(spec: Make) -> None:
    group = init_process_group(spec())
    group.close()
    group.close()
    assert group.closed
    for call in (
        group.barrier,
        lambda: group.all_reduce(ms.Tensor([1.0])),
        lambda: group.broadcast_object(1),
        lambda: group.subgroup([0]),
        lambda: group.native,
    ):
        with pytest.raises(GroupClosedError, match="was closed"):
            call()
    init_process_group(spec()).close()


def test_one_group_a_life(spec: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life, "_state", "closed")
    with pytest.raises(AlreadyInitializedError, match="cannot open a second one in a process"):
        init_process_group(spec(0, 2, master_port=1))
    monkeypatch.setattr(life, "_state", "open")
    with pytest.raises(AlreadyInitializedError, match="is open in this process already"):
        init_process_group(spec(0, 2, master_port=1))


def test_a_group_of_the_user_that_differs(spec: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "is_initialized", lambda: True)
    monkeypatch.setattr(native, "rank", lambda: 3)
    monkeypatch.setattr(native, "world_size", lambda: 4)
    monkeypatch.setattr(native, "backend", lambda: "mccl")
    with pytest.raises(AlreadyInitializedError, match=r"rank 3 of 4 and mccl.*rank 0 of 1"):
        init_process_group(spec())


@pytest.mark.parametrize(
    ("device", "local_rank", "expected"),
    [
        ("cpu", 3, ("cpu", 0)),
        ("npu", 3, ("npu", 3)),
        ("npu:1", 3, ("npu", 1)),
        ("cuda:0", 0, ("cuda", 0)),
    ],
)
def test_device_comes_from_the_local_rank(
    spec: Make, device: str, local_rank: int, expected: tuple[str, int]
) -> None:
    found = devices.parse(spec(device=device, local_rank=local_rank, rank=3, world_size=8))
    assert found == expected


@pytest.mark.parametrize("device", ["xpu", "nonsense", "npu:", "npu:-1", "cuda:x"])
def test_unknown_devices(spec: Make, device: str) -> None:
    with pytest.raises(DeviceError, match="device"):
        init_process_group(spec(device=device))


@pytest.mark.parametrize("device", ["npu", "cuda"])
def test_devices_that_are_not_here(spec: Make, device: str) -> None:
    with pytest.raises(DeviceError, match="finds none here"):
        init_process_group(spec(device=device, backend=native.BACKENDS[device]))


def test_a_device_that_mindspore_refuses(spec: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(kind: str, index: int) -> None:
        raise RuntimeError("The 'mindspore.set_device' can not be modified.\nmore")

    monkeypatch.setattr(native, "set_device", refuse)
    init_process_group(spec()).close()  # the CPU is in use already, and it is the CPU
    monkeypatch.setattr(native, "device_target", lambda: "Ascend")
    with pytest.raises(DeviceError, match=r"cannot use cpu:0: The .* can not be modified"):
        init_process_group(spec())


def test_backends_that_do_not_serve_the_device(spec: Make) -> None:
    for backend in ("nccl", "hccl", "gloo", "nonsense"):
        with pytest.raises(UnsupportedFeatureError, match=f"'{backend}' cannot run on cpu.*'mccl'"):
            init_process_group(spec(backend=backend))


def test_time_limits_of_the_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MS_CPU_COMM_OP_TIMEOUT", raising=False)
    before = dict(os.environ)
    assert rendezvous.environment("mccl", 12.3) == {"MS_CPU_COMM_OP_TIMEOUT": "13"}
    assert rendezvous.environment("nccl", 12.3) == {}
    assert rendezvous.environment("hccl", 12.3) == {
        "HCCL_CONNECT_TIMEOUT": "120",
        "HCCL_EXEC_TIMEOUT": "13",
    }
    assert rendezvous.environment("hccl", 1e6)["HCCL_CONNECT_TIMEOUT"] == "7200"
    assert dict(os.environ) == before
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "300")
    assert rendezvous.environment("hccl", 12.3)["HCCL_CONNECT_TIMEOUT"] == "300"
    monkeypatch.setenv("MS_CPU_COMM_OP_TIMEOUT", "7")
    assert rendezvous.environment("mccl", 12.3) == {"MS_CPU_COMM_OP_TIMEOUT": "7"}


# --- combining bytes ---------------------------------------------------------------------------


def combined(op: str, dtype: str, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    pieces = [memoryview(bytearray(row.tobytes())) for row in rows]
    reductions.fold(op, dtype, len(rows))(pieces[0], pieces[1:])
    return np.frombuffer(pieces[0], rows.dtype)


@pytest.mark.parametrize("dtype", [d for d in reductions.DTYPES if d != "bfloat16"])
@pytest.mark.parametrize("op", reductions.OPS)
def test_combining(op: str, dtype: str) -> None:
    rows = np.random.default_rng(0).integers(0, 4, (3, 50)).astype(dtype)
    if op == "mean" and (dtype == "bool" or dtype in reductions.INTEGERS):
        return  # refused before
    expected = {
        "sum": rows.any(0) if dtype == "bool" else rows.sum(0),
        "mean": rows.sum(0) / 3,
        "max": rows.max(0),
        "min": rows.min(0),
        "product": rows.prod(0),
    }[op].astype(dtype)
    found = combined(op, dtype, rows)
    np.testing.assert_allclose(
        found.astype("complex128"), expected.astype("complex128"), rtol=1e-3 if op == "mean" else 0
    )


def test_integers_wrap_and_halves_are_rounded_once() -> None:
    assert combined("sum", "uint8", np.full((2, 1), 200, np.uint8)).tolist() == [144]
    assert combined("product", "int8", np.full((2, 1), 100, np.int8)).tolist() == [16]
    rows = np.array([[2048.0], [1.0], [1.0]], np.float16)  # 2048 + 1 is 2048 in float16
    assert combined("sum", "float16", rows).tolist() == [2050]
    assert combined("mean", "float16", np.full((2, 1), 60000, np.float16)).tolist() == [60000]
    assert np.isinf(combined("sum", "float16", np.full((2, 1), 60000, np.float16)))


def test_bfloat16_rounds_as_mindspore_does() -> None:
    values = np.random.default_rng(1).standard_normal((2, 1000)).astype(np.float32)
    values[:, :4] = [[np.inf, np.nan, -np.inf, 0.0], [1.0, 1.0, np.inf, -0.0]]
    rows = [ms.Tensor(row).astype(ms.bfloat16) for row in values]
    expected = (rows[0].astype(ms.float32) + rows[1].astype(ms.float32)).astype(ms.bfloat16)
    raw = np.stack([row.asnumpy().view(np.uint16) for row in rows])
    found = (combined("sum", "bfloat16", raw).astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(found, expected.astype(ms.float32).asnumpy())


def test_nan_wins() -> None:
    rows = np.array([[1.0, np.nan], [np.nan, 1.0]], np.float32)
    for op in ("max", "min"):
        assert np.isnan(combined(op, "float32", rows)).all()
