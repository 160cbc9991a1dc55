"""Order and arguments of MindSpore's calls on Ascend and GPU, by launcher; never on a device."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from parallelkit_mindspore import rendezvous
from parallelkit_mindspore.group import init_process_group
from parallelkit_mindspore.parallel.setup import setup_parallel_context

from parallelkit.errors import DeviceError, UnsupportedFeatureError
from parallelkit.meeting.scheduler import ForeignScheduler
from parallelkit.plan import plan
from parallelkit.specs import ContextSpec, GroupSpec

SpecOf = Callable[..., GroupSpec]
#: MindSpore's start over a store of its own: rank, device first; then the world; then a first sum.
STARTED = ["set_device", "TCPStore", "_init_with_store", "all_reduce", "synchronize"]
ENDED = ["synchronize", "destroy_process_group"]


def torch_like(rank: int, world: int, local: int, here: int, node: int = 0) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(here),
        "GROUP_RANK": str(node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def msrun_like(node: int, world: int, device: int) -> dict[str, str]:
    return {
        "MS_ROLE": "MS_WORKER",
        "MS_NODE_ID": str(node),
        "MS_WORKER_NUM": str(world),
        "MS_SCHED_HOST": "127.0.0.1",
        "MS_SCHED_PORT": "8118",
        "DEVICE_ID": str(device),
    }


# --- one node, several nodes -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "target", "backend"), [("npu", "Ascend", "hccl"), ("cuda", "GPU", "nccl")]
)
def test_one_node(recorder: Any, spec_of: SpecOf, kind: str, target: str, backend: str) -> None:
    group = init_process_group(spec_of(torch_like(3, 8, 3, 8), kind))
    assert recorder.names == STARTED
    device, store, init, first, _ = recorder.calls
    assert device == ("set_device", target, 3)  # before anything else touches a device
    assert store[:3] == ("TCPStore", "10.0.0.1", 40001)  # as rank 0 said
    assert (store[3]["is_master"], store[3]["world_size"], store[3]["timeout"]) == (False, 8, 90.0)
    assert init[1] == {
        "backend": backend,
        "store": "store",
        "rank": 3,
        "world_size": 8,
        "timeout": 90.0,
    }
    assert first == ("all_reduce", "sum", "world")
    assert (group.device, group.backend, group.native) == (f"{kind}:3", backend, "world")
    group.close()
    assert recorder.names == STARTED + ENDED


def test_rank_0_opens_the_store(recorder: Any, spec_of: SpecOf) -> None:
    with init_process_group(spec_of(torch_like(0, 8, 0, 8))):
        store = recorder.calls[1]
    assert store[1] == "127.0.0.1"
    assert store[2] > 0
    assert store[3]["is_master"] is True


def test_the_second_of_two_nodes(recorder: Any, spec_of: SpecOf) -> None:
    """Rank 11 of 16 is the fourth process of its node, and takes that device."""
    with init_process_group(spec_of(torch_like(11, 16, 3, 8, node=1))) as group:
        assert recorder.calls[0] == ("set_device", "Ascend", 3)
        assert recorder.calls[2][1]["rank"] == 11
        assert recorder.calls[2][1]["world_size"] == 16
        assert (group.rank, group.local_rank, group.world_size) == (11, 3, 16)


def test_one_process_opens_nothing(recorder: Any, spec_of: SpecOf) -> None:
    with init_process_group(spec_of({})):
        assert recorder.names == ["set_device"]
    assert "destroy_process_group" not in recorder.names


def test_groups_are_made_on_members_and_freed_before_the_end(
    recorder: Any, spec_of: SpecOf
) -> None:
    """A group of one rank needs no peer, so its calls can be seen here."""
    group = init_process_group(spec_of(torch_like(1, 2, 1, 2)))
    alone = group.partition([[0], [1]])
    assert alone.world_size == 1
    made = [call for call in recorder.calls if call[0] == "create_group"]
    assert made == [("create_group", "world.1", [1])]
    group.close()
    ends = [call for call in recorder.calls if call[0].startswith("destroy")]
    assert ends == [("destroy_group", "world.1"), ("destroy_process_group",)]


# --- launchers ---------------------------------------------------------------------------------


def test_torchrun(recorder: Any, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's store says where to meet; MindSpore's own store is another one."""
    monkeypatch.setattr(rendezvous, "Agent", lambda spec: recorder.note("agent", spec.rank))
    environ = {
        **torch_like(1, 2, 1, 2),
        "TORCHELASTIC_RUN_ID": "run",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    with init_process_group(spec_of(environ)):
        assert recorder.names == ["set_device", "agent", *STARTED[1:]]


def test_msrun(recorder: Any, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our scheduler answers: ranks meet there, and MindSpore starts over a store."""

    class OurScheduler:
        host = "127.0.0.1"

        def leave(self) -> None:
            recorder.note("leave")

    monkeypatch.setattr(rendezvous, "_scheduler", lambda spec: OurScheduler())
    group = init_process_group(spec_of(msrun_like(3, 8, 3)))
    assert recorder.names == STARTED
    assert recorder.calls[0] == ("set_device", "Ascend", 3)
    group.close()
    assert recorder.names == [*STARTED, *ENDED, "leave"]


def test_a_dynamic_cluster_of_mindspores_own(
    recorder: Any, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler that is not ours: MindSpore's public init, within our time limit."""

    def foreign(spec: GroupSpec) -> None:
        raise ForeignScheduler("MindSpore's")

    def connect(spec: GroupSpec) -> Any:
        recorder.note("connect")
        return rendezvous.meet(spec)

    monkeypatch.setattr(rendezvous, "_scheduler", foreign)
    monkeypatch.setattr(rendezvous, "_connect_by_native", connect)
    with init_process_group(spec_of(msrun_like(5, 8, 5))) as group:
        assert recorder.names == ["set_device", "init", "connect"]
        assert recorder.calls[:2] == [("set_device", "Ascend", 5), ("init", "hccl")]
        assert recorder.environs["init"]["MS_TOPO_TIMEOUT"] == "90"
        assert recorder.environs["init"]["HCCL_CONNECT_TIMEOUT"] == "120"
        assert group.rank == 5
    assert "MS_TOPO_TIMEOUT" not in os.environ


# --- what HCCL reads ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("timeout", "connect", "exec_"),
    [(90.0, "120", "90"), (0.5, "120", "1"), (600.5, "601", "601"), (10000.0, "7200", "10000")],
)
def test_time_limits_of_hccl(
    recorder: Any, spec_of: SpecOf, timeout: float, connect: str, exec_: str
) -> None:
    """Set while HCCL starts and for its first operation, then gone."""
    with init_process_group(spec_of(torch_like(1, 2, 1, 2), timeout=timeout)):
        for call in ("_init_with_store", "all_reduce"):
            assert recorder.environs[call] == {
                "HCCL_CONNECT_TIMEOUT": connect,
                "HCCL_EXEC_TIMEOUT": exec_,
            }
    assert not any(name.startswith("HCCL_") for name in os.environ)


def test_the_users_own_limits_stay(
    recorder: Any, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "1800")
    with init_process_group(spec_of(torch_like(1, 2, 1, 2))):
        seen = recorder.environs["_init_with_store"]
    assert seen == {"HCCL_CONNECT_TIMEOUT": "1800", "HCCL_EXEC_TIMEOUT": "90"}
    assert os.environ["HCCL_CONNECT_TIMEOUT"] == "1800"
    assert "HCCL_EXEC_TIMEOUT" not in os.environ


def test_nccl_has_no_limits_of_hccl(recorder: Any, spec_of: SpecOf) -> None:
    with init_process_group(spec_of(torch_like(1, 2, 1, 2), "cuda")):
        assert recorder.environs["_init_with_store"] == {}


@pytest.mark.parametrize("by", ["store", "cluster"])
def test_a_rank_table_is_left_to_mindspore(
    recorder: Any, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, by: str
) -> None:
    """HCCL is told by `RANK_TABLE_FILE` itself, while the ranks start as otherwise."""
    monkeypatch.setenv("RANK_TABLE_FILE", str(tmp_path / "table.json"))
    environ, start = torch_like(1, 2, 1, 2), "_init_with_store"
    if by == "cluster":

        def foreign(spec: GroupSpec) -> None:
            raise ForeignScheduler("MindSpore's")

        monkeypatch.setattr(rendezvous, "_scheduler", foreign)
        monkeypatch.setattr(rendezvous, "_connect_by_native", lambda spec: rendezvous.meet(spec))
        environ, start = msrun_like(1, 2, 1), "init"
    with init_process_group(spec_of(environ)):
        assert recorder.environs[start]["RANK_TABLE_FILE"] == str(tmp_path / "table.json")
        assert start in recorder.names


# --- refusals before anything starts -----------------------------------------------------------


def test_a_device_that_is_in_use_otherwise(recorder: Any, spec_of: SpecOf) -> None:
    recorder.busy = True
    with pytest.raises(DeviceError, match=r"cannot use npu:1: .*can not be modified"):
        init_process_group(spec_of(torch_like(1, 2, 1, 2)))
    assert recorder.names == []


def test_a_group_that_the_user_opened_is_adopted_and_left_open(
    recorder: Any, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_connect_by_native", lambda spec: rendezvous.meet(spec))
    spec = spec_of(torch_like(1, 2, 1, 2))
    recorder.open, recorder.world = True, (1, 2)
    recorder.context |= {"device_target": "Ascend", "device_id": 6}
    group = init_process_group(spec)
    assert group.device == "npu:6"  # the user's choice
    group.close()
    assert recorder.names == ["synchronize"]


def test_a_backend_of_another_device(recorder: Any, spec_of: SpecOf) -> None:
    spec = attrs.evolve(spec_of(torch_like(1, 2, 1, 2)), backend="nccl")
    with pytest.raises(UnsupportedFeatureError, match="there it has 'hccl'"):
        init_process_group(spec)
    assert recorder.names == []


# --- contexts, after init ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "degrees", "options", "expected"),
    [
        (
            "data",
            {},
            {},
            {"parallel_mode": "data_parallel", "gradients_mean": True, "device_num": 8},
        ),
        (
            "semi_auto",
            {"pipeline": 2, "tensor": 2, "data_shard": 2, "data": 1},
            {"api": "context", "dataset_strategy": "full_batch", "optimizer_level": "level2"},
            {
                "parallel_mode": "semi_auto_parallel",
                "device_num": 8,
                "global_rank": 3,
                "gradients_mean": True,
                "pipeline_stages": 2,
                "dataset_strategy": "full_batch",
                "pipeline_config": {"pipeline_interleave": False, "pipeline_scheduler": "1f1b"},
                "enable_parallel_optimizer": True,
                "parallel_optimizer_config": {
                    "optimizer_weight_shard_size": 2,
                    "parallel_optimizer_threshold": 64,
                    "optimizer_level": "level2",
                },
            },
        ),
        (
            "auto",
            {},
            {"api": "context", "search_mode": "sharding_propagation"},
            {
                "parallel_mode": "auto_parallel",
                "search_mode": "sharding_propagation",
                "device_num": 8,
                "global_rank": 3,
                "gradients_mean": True,
                "pipeline_stages": 1,
                "dataset_strategy": "data_parallel",
            },
        ),
    ],
)
def test_contexts_are_set_after_init_and_put_back(
    recorder: Any,
    spec_of: SpecOf,
    mode: str,
    degrees: dict[str, int],
    options: dict[str, Any],
    expected: dict[str, Any],
) -> None:
    group = init_process_group(spec_of(torch_like(3, 8, 3, 8)))
    spread = plan(8, mode, **degrees)
    spec = ContextSpec(plan=spread, mode=mode, pinned=degrees, options=options)
    context = setup_parallel_context(spec, group)
    assert recorder.calls[len(STARTED) :] == [("set_auto_parallel_context", expected)]
    assert context.native == expected
    context.reset()
    assert recorder.names[len(STARTED) + 1] == "reset_auto_parallel_context"
    assert recorder.parallel == {"parallel_mode": "stand_alone", "device_num": 1, "global_rank": 0}
    group.close()


def test_the_newer_api_sets_nothing_for_the_process(recorder: Any, spec_of: SpecOf) -> None:
    group = init_process_group(spec_of(torch_like(3, 8, 3, 8)))
    spec = ContextSpec(plan=plan(8, "auto"), mode="auto")
    context = setup_parallel_context(spec, group)
    assert recorder.names == STARTED
    assert "api: AutoParallel" in context.explain()
    group.close()
