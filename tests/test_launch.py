"""Five dialects of launch environments, as tables of mappings; nothing here starts a process."""

from __future__ import annotations

import doctest
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import parallelkit.environ
import parallelkit.launch
import parallelkit.nodelist
from parallelkit.environ import launcher_identity, scoped_environ
from parallelkit.errors import LaunchError
from parallelkit.launch import LaunchInfo
from parallelkit.nodelist import expand_nodelist, first_host, tasks_on_node

Env = dict[str, str]

TORCHRUN: Env = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job7",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
MSRUN: Env = {
    "MS_ROLE": "MS_WORKER",
    "MS_NODE_ID": "1",
    "MS_WORKER_NUM": "2",
    "MS_SCHED_HOST": "127.0.0.1",
    "MS_SCHED_PORT": "8118",
    "MS_TOPO_TIMEOUT": "600",
    "RANK_ID": "1",
    "RANK_SIZE": "2",
    "DEVICE_ID": "1",
}
SLURM: Env = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_JOB_NAME": "train",
    "SLURM_JOB_NODELIST": "node[003-005,7]",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "4",
    "SLURM_NTASKS": "8",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
}
OPENMPI: Env = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-vm-6456@1",
    "PMIX_SERVER_URI41": "prterun-vm-6456@0.0;tcp4://127.0.0.1:36111",
    "PMIX_RANK": "1",
}
HYDRA: Env = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PMI_FD": "11",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "HYDI_CONTROL_FD": "7",
}
MVAPICH: Env = {
    "MV2_COMM_WORLD_RANK": "1",
    "MV2_COMM_WORLD_SIZE": "2",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
    "MPIRUN_ID": "77",
    "MPIRUN_HOST": "vm",
    "MPIRUN_PORT": "40123",
}
HAND: Env = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
MASTER: Env = {"MASTER_ADDR": "head", "MASTER_PORT": "1234"}
DIALECTS = {"torchrun": TORCHRUN, "msrun": MSRUN, "slurm": SLURM, "mpi": OPENMPI}


def read(*envs: Mapping[str, str], drop: str = "", **arguments: Any) -> LaunchInfo:
    merged: Env = {}
    for env in envs:
        merged |= env
    for name in drop.split():
        del merged[name]
    return LaunchInfo.from_environ(merged, **arguments)


@pytest.fixture(autouse=True)
def environment_is_left_alone() -> Iterator[None]:
    def environment() -> Env:  # pytest itself keeps a variable about the phase of the test
        return {name: value for name, value in os.environ.items() if name[:7] != "PYTEST_"}

    before = environment()
    yield
    assert environment() == before


# --- a world of one ------------------------------------------------------------------------------


def test_no_arguments_is_a_world_of_one() -> None:
    info = LaunchInfo()
    assert (info.rank, info.world_size, info.local_rank, info.local_world_size) == (0, 1, 0, 1)
    assert (info.master_addr, info.master_port, info.launcher) == (None, None, "none")
    assert not info.is_scheduler
    assert info == LaunchInfo.from_environ({})
    assert hash(info) == hash(LaunchInfo.from_environ({}))


def test_equality_is_by_value() -> None:
    assert read(TORCHRUN) == read(TORCHRUN)
    assert read(TORCHRUN) != read(TORCHRUN, {"RANK": "4", "LOCAL_RANK": "0"})
    assert attrs.evolve(LaunchInfo(), reason="other") == LaunchInfo()


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"PATH": "/bin"},
        {"RANK": "", "WORLD_SIZE": " "},
        {"TORCHELASTIC_RUN_ID": "leftover"},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "n[1-2]"},
        {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        {**SLURM, "SLURM_JOB_NAME": "bash", "SLURM_STEP_NUM_TASKS": "1"},
        {**SLURM, "SLURM_JOB_NAME": "interactive", "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_JOB_NAME": "bash", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
        {"SLURM_JOB_NAME": "interactive", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "ENVIRONMENT": "BATCH"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "4294967290"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "4294967291"},
    ],
)
def test_not_a_launch(env: Env) -> None:
    info = read(env)
    assert (info.launcher, info.rank, info.world_size) == ("none", 0, 1)
    assert "world of one" in info.reason


@pytest.mark.parametrize("name", ["bash", "interactive"])
def test_an_interactive_shell_says_why_it_is_no_launch(name: str) -> None:
    reason = read({"SLURM_JOB_NAME": name, "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}).reason
    assert "passed over: slurm" in reason
    assert "SLURM_JOB_NAME" in reason
    assert "interactive shell" in reason


def test_srun_inside_an_interactive_allocation_is_a_launch() -> None:
    assert read(SLURM, {"SLURM_JOB_NAME": "interactive"}).launcher == "slurm"


# --- what each dialect says ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "want"),
    [
        pytest.param(
            TORCHRUN,
            {
                "launcher": "torchrun",
                "framework": "torch",
                "rank": 5,
                "world_size": 8,
                "local_rank": 1,
                "local_world_size": 4,
                "node_rank": 1,
                "master_addr": "node0",
                "master_port": 29500,
                "agent_store": True,
                "job_id": "job7",
                "restart_count": 2,
                "rendezvous_file": None,
            },
            id="torchrun",
        ),
        pytest.param(
            HAND,
            {
                "launcher": "torchrun",
                "rank": 1,
                "local_rank": 1,
                "local_world_size": 2,
                "agent_store": False,
            },
            id="by hand",
        ),
        pytest.param({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}, {"job_id": None}, id="no run id"),
        pytest.param(
            {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"},
            {"agent_store": False},
            id="no agent store",
        ),
        pytest.param(
            {"RANK": "3", "WORLD_SIZE": "4", **MASTER},
            {"rank": 3, "local_rank": 0, "local_world_size": 1, "node_rank": 3},
            id="one process a pod",
        ),
        pytest.param(
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", **MASTER},
            {"local_rank": 1, "local_world_size": 2, "node_rank": 1},
            id="local rank from local size",
        ),
        pytest.param(
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "NODE_RANK": "1", **MASTER},
            {"local_rank": 1, "local_world_size": 2, "node_rank": 1},
            id="Ray",
        ),
        pytest.param(
            {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            {"local_rank": 3, "local_world_size": 4, "node_rank": 0},
            id="loopback is one host",
        ),
        pytest.param({"RANK": "0", "WORLD_SIZE": "1"}, {"world_size": 1}, id="one by hand"),
        pytest.param(
            {"RANK": " 1 ", "WORLD_SIZE": "+2", **MASTER}, {"rank": 1, "world_size": 2}, id="spaces"
        ),
        pytest.param(
            {
                "RANK": "1",
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "1",
                "PARALLELKIT_RENDEZVOUS_FILE": "/run/x",
            },
            {
                "master_port": None,
                "master_addr": "127.0.0.1",
                "rendezvous_file": "/run/x",
                "local_world_size": 2,
            },
            id="own launcher",
        ),
        pytest.param(
            {**HAND, "MASTER_PORT": "0", "PARALLELKIT_RENDEZVOUS_FILE": "/run/x"},
            {"master_port": None, "rendezvous_file": "/run/x"},
            id="port zero with a file",
        ),
        pytest.param(
            MSRUN,
            {
                "launcher": "msrun",
                "framework": "mindspore",
                "rank": 1,
                "world_size": 2,
                "local_rank": 1,
                "local_world_size": 2,
                "node_rank": 0,
                "master_addr": "127.0.0.1",
                "master_port": 8118,
                "role": "worker",
                "is_scheduler": False,
            },
            id="msrun worker",
        ),
        pytest.param(
            {k: v for k, v in MSRUN.items() if k not in ("RANK_ID", "RANK_SIZE", "DEVICE_ID")},
            {"rank": 1, "world_size": 2, "local_rank": 1},
            id="dynamic cluster",
        ),
        pytest.param(
            {**MSRUN, "MS_ROLE": "MS_SCHED", "RANK_ID": "0", "MS_NODE_ID": "0", "DEVICE_ID": "0"},
            {"role": "scheduler", "is_scheduler": True, "rank": 0, "world_size": 2},
            id="msrun scheduler",
        ),
        pytest.param(
            {**MSRUN, "MS_SCHED_HOST": "10.0.0.1", "RANK_ID": "9", "MS_NODE_ID": "9"}
            | {"RANK_SIZE": "16", "MS_WORKER_NUM": "16"},
            {"rank": 9, "local_rank": 1, "node_rank": 0},
            id="msrun on two hosts",
        ),
        pytest.param(
            SLURM,
            {
                "launcher": "slurm",
                "framework": None,
                "rank": 3,
                "world_size": 8,
                "local_rank": 1,
                "local_world_size": 2,
                "node_rank": 1,
                "master_addr": "node003",
                "master_port": 19567,
                "job_id": "1234567",
            },
            id="slurm",
        ),
        pytest.param(
            {**SLURM, **MASTER},
            {"master_addr": "head", "master_port": 1234},
            id="slurm with master",
        ),
        pytest.param(
            {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1,3(x2),1"},
            {"local_world_size": 3},
            id="slurm uneven",
        ),
        pytest.param(
            {**SLURM, "SLURM_STEP_NODELIST": "node7"}, {"master_addr": "node7"}, id="step's nodes"
        ),
        pytest.param(
            {**SLURM, "SLURM_NTASKS": "99"}, {"world_size": 8}, id="step's count, not the job's"
        ),
        pytest.param({**SLURM, "SLURM_JOB_ID": "9"}, {"master_port": 15009}, id="short job id"),
        pytest.param(
            {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "70001"}
            | {"SLURM_NODELIST": "solo", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "2"},
            {"launcher": "slurm", "master_addr": "solo", "master_port": 15001, "local_rank": 1},
            id="slurm without step id",
        ),
        pytest.param(
            OPENMPI,
            {
                "launcher": "mpi",
                "framework": None,
                "rank": 1,
                "world_size": 2,
                "local_rank": 1,
                "local_world_size": 2,
                "node_rank": 0,
                "master_addr": "127.0.0.1",
                "master_port": None,
                "job_id": "prterun-vm-6456@1",
            },
            id="Open MPI",
        ),
        pytest.param(
            {**HYDRA, "MASTER_PORT": "29500"},
            {
                "launcher": "mpi",
                "rank": 1,
                "local_rank": 1,
                "master_addr": "127.0.0.1",
                "master_port": 29500,
            },
            id="MPICH",
        ),
        pytest.param(
            MVAPICH,
            {"launcher": "mpi", "rank": 1, "local_world_size": 2, "job_id": "77"},
            id="MVAPICH",
        ),
        pytest.param(
            {**OPENMPI, "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", **MASTER},
            {
                "rank": 3,
                "node_rank": 1,
                "master_addr": "head",
                "master_port": 1234,
                "rendezvous_file": None,
            },
            id="Open MPI on two hosts",
        ),
        pytest.param(
            {"PMI_RANK": "1", "PMI_SIZE": "2", **MASTER},
            {"rank": 1, "local_rank": 0, "local_world_size": 1, "node_rank": 1},
            id="PMI without local values",
        ),
        pytest.param(
            {**OPENMPI, "PMI_RANK": "0", "PMI_SIZE": "9"},
            {"rank": 1, "world_size": 2},
            id="Open MPI under a PMI step",
        ),
    ],
)
def test_dialect(env: Env, want: dict[str, Any]) -> None:
    info = read(env)
    assert {name: getattr(info, name) for name in want} == want


# --- precedence ----------------------------------------------------------------------------------


@pytest.mark.parametrize("first", DIALECTS)
@pytest.mark.parametrize("second", DIALECTS)
def test_precedence(first: str, second: str) -> None:
    order = list(DIALECTS)
    winner, loser = sorted((first, second), key=order.index)
    # without the marks that mpirun leaves, its variables say nothing against SLURM
    info = read(DIALECTS[loser], DIALECTS[winner], {"OMPI_UNIVERSE_SIZE": ""})
    assert info.launcher == winner
    if winner != loser:
        assert f"passed over: {loser} (" in info.reason


def test_torchrun_inside_slurm_is_torchrun_and_says_why() -> None:
    info = read(SLURM, TORCHRUN)
    assert info.launcher == "torchrun"
    assert info.reason.startswith("RANK and WORLD_SIZE set; passed over: slurm (SLURM_PROCID and")


def test_a_dialect_passed_over_need_not_be_valid() -> None:
    info = read(TORCHRUN, {"SLURM_STEP_ID": "x", "OMPI_COMM_WORLD_RANK": "x"})
    assert info.launcher == "torchrun"


def test_mpirun_inside_a_slurm_job_is_mpi() -> None:
    # mpirun starts its helpers by srun: the ranks inherit a step of two helpers
    info = read(SLURM, {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, OPENMPI, MASTER)
    assert info.launcher == "slurm"  # equal sizes do not contradict
    info = read(SLURM, OPENMPI, MASTER)
    assert (info.launcher, info.world_size) == ("mpi", 2)
    assert "mpirun was started inside the SLURM job" in info.reason


# --- errors --------------------------------------------------------------------------------------


def bad(case: str, *mentions: str, **env: str) -> Any:
    return pytest.param(env, mentions, id=case)


WRONG = [
    bad("RANK alone", "WORLD_SIZE", "torchrun", RANK="0"),
    bad("WORLD_SIZE alone", "RANK", "WORLD_SIZE", WORLD_SIZE="2"),
    bad("LOCAL_RANK alone", "LOCAL_RANK", "WORLD_SIZE", LOCAL_RANK="1"),
    bad("LOCAL_RANK 0 alone", "LOCAL_RANK", "WORLD_SIZE", LOCAL_RANK="0"),
    bad("blank RANK", "RANK is not set", RANK="", WORLD_SIZE="2"),
    bad("rank = size", "RANK=2", "WORLD_SIZE=2", "0 to 1", **(HAND | {"RANK": "2"})),
    bad("no master", "MASTER_ADDR", "MASTER_PORT", RANK="0", WORLD_SIZE="2"),
    bad("no address", "MASTER_ADDR", RANK="0", WORLD_SIZE="2", MASTER_PORT="1"),
    bad("no port", "MASTER_PORT", RANK="0", WORLD_SIZE="2", MASTER_ADDR="h"),
    bad("port zero", "MASTER_PORT", **(HAND | {"MASTER_PORT": "0"})),
    bad("port large", "MASTER_PORT='65536'", "65535", **(HAND | {"MASTER_PORT": "65536"})),
    bad("port word", "MASTER_PORT='http'", **(HAND | {"MASTER_PORT": "http"})),
    bad(
        "local >= local size",
        "LOCAL_RANK=4",
        "LOCAL_WORLD_SIZE=4",
        **(TORCHRUN | {"LOCAL_RANK": "4"}),
    ),
    bad("local > rank", "LOCAL_RANK=1", "RANK=0", **(TORCHRUN | {"RANK": "0"})),
    bad(
        "local size > size",
        "LOCAL_WORLD_SIZE=9",
        "WORLD_SIZE=8",
        **(TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}),
    ),
    bad(
        "ranks do not fit",
        "RANK=7",
        "LOCAL_RANK=0",
        **(TORCHRUN | {"RANK": "7", "LOCAL_RANK": "0"}),
    ),
    bad(
        "one host, other local rank",
        "LOCAL_RANK=0",
        RANK="1",
        WORLD_SIZE="2",
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="2",
        **MASTER,
    ),
    bad("no role", "MS_ROLE", MS_WORKER_NUM="2"),
    bad("odd role", "MS_ROLE is 'MS_PSERVER'", "MS_WORKER", **(MSRUN | {"MS_ROLE": "MS_PSERVER"})),
    bad("ranks differ", "RANK_ID=0", "MS_NODE_ID=1", **(MSRUN | {"RANK_ID": "0"})),
    bad("sizes differ", "RANK_SIZE=3", "MS_WORKER_NUM=2", **(MSRUN | {"RANK_SIZE": "3"})),
    bad(
        "msrun rank = size",
        "RANK_ID=2",
        "RANK_SIZE=2",
        **(MSRUN | {"RANK_ID": "2", "MS_NODE_ID": "2"}),
    ),
    bad("scheduler word", "MS_SCHED_PORT", **(MSRUN | {"MS_SCHED_PORT": "x"})),
    bad(
        "tasks below tasks per node",
        "SLURM_NTASKS=1",
        "SLURM_NTASKS_PER_NODE=2",
        "--ntasks",
        SLURM_PROCID="0",
        SLURM_NTASKS="1",
        SLURM_NTASKS_PER_NODE="2",
    ),
    bad(
        "slurm rank = size",
        "SLURM_PROCID=8",
        "SLURM_STEP_NUM_TASKS=8",
        **(SLURM | {"SLURM_PROCID": "8"}),
    ),
    bad(
        "slurm local",
        "SLURM_LOCALID=2",
        "SLURM_NTASKS_PER_NODE=2",
        **(SLURM | {"SLURM_LOCALID": "2"}),
    ),
    bad("slurm nodes", "node[", "MASTER_ADDR", **(SLURM | {"SLURM_JOB_NODELIST": "node["})),
    bad("slurm counts", "2(x", **(SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x"})),
    bad("slurm step", "SLURM_STEP_ID='a'", "slurm", **(SLURM | {"SLURM_STEP_ID": "a"})),
    bad("mpi rank alone", "OMPI_COMM_WORLD_SIZE", "mpirun", OMPI_COMM_WORLD_RANK="0"),
    bad("pmi size alone", "PMI_RANK", PMI_SIZE="2"),
    bad("mpi rank = size", "OMPI_COMM_WORLD_RANK=2", **(OPENMPI | {"OMPI_COMM_WORLD_RANK": "2"})),
    bad(
        "mpi on two hosts",
        "MASTER_ADDR",
        "MASTER_PORT",
        "mpirun -x",
        "-genv",
        **(OPENMPI | {"OMPI_COMM_WORLD_SIZE": "4"}),
    ),
    bad("pmi, hosts unknown", "MASTER_ADDR", "MASTER_PORT", PMI_RANK="0", PMI_SIZE="2"),
    bad("hydra without identity", "MASTER_PORT", "-genv", **HYDRA),
    bad(
        "mpi local",
        "OMPI_COMM_WORLD_LOCAL_RANK=2",
        **(OPENMPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "2"}),
    ),
]


@pytest.mark.parametrize(("env", "mentions"), WRONG)
def test_contradictions_and_partial_sets(env: Env, mentions: tuple[str, ...]) -> None:
    with pytest.raises(LaunchError) as caught:
        read(env)
    for mention in mentions:
        assert mention in str(caught.value)


def test_words_about_partial_sets() -> None:
    with pytest.raises(LaunchError) as caught:
        read({"LOCAL_RANK": "1"})
    assert "RANK and WORLD_SIZE not set" in str(caught.value)
    assert "none" not in str(caught.value)
    with pytest.raises(LaunchError, match="MS_ROLE is 'foo' .*allowed are 'MS_WORKER' and 'MS_S"):
        read({"MS_ROLE": "foo"})


def test_values_that_are_no_strings() -> None:
    with pytest.raises(LaunchError, match="RANK=0: a variable's value is a string"):
        LaunchInfo.from_environ({"RANK": 0})  # type: ignore[dict-item]


@pytest.mark.parametrize("size", [65537, 10**30])
def test_world_sizes_that_nobody_has(size: int) -> None:
    with pytest.raises(LaunchError, match=r"world_size.*1 to 65536"):
        read({}, rank=0, world_size=size, **{k.lower(): v for k, v in MASTER.items()})
    with pytest.raises(LaunchError, match="WORLD_SIZE"):
        read({"RANK": "0", "WORLD_SIZE": str(size), **MASTER})


NUMBERS = {
    "torchrun": "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_PORT "
    "TORCHELASTIC_RESTART_COUNT",
    "msrun": "MS_NODE_ID MS_WORKER_NUM MS_SCHED_PORT RANK_ID RANK_SIZE DEVICE_ID",
    "slurm": "SLURM_LOCALID SLURM_NODEID SLURM_NTASKS_PER_NODE SLURM_PROCID SLURM_STEP_ID "
    "SLURM_STEP_NUM_TASKS SLURM_JOB_ID",
    "mpi": "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK "
    "OMPI_COMM_WORLD_LOCAL_SIZE",
}
CELLS = [(dialect, name) for dialect, names in NUMBERS.items() for name in names.split()]
MALFORMED = ["abc", "-1", "1.0", "1e3", "0x1", "1_0", "١", "1 2", "None", "9" * 40]


@pytest.mark.parametrize("value", MALFORMED)
@pytest.mark.parametrize(("dialect", "name"), CELLS)
def test_malformed_numbers_name_variable_and_value(dialect: str, name: str, value: str) -> None:
    with pytest.raises(LaunchError) as caught:
        read(DIALECTS[dialect], {name: value})
    assert f"{name}={value!r} ({dialect})" in str(caught.value)
    assert "allowed is" in str(caught.value)


@pytest.mark.parametrize(
    ("dialect", "name"),
    [
        ("torchrun", "RANK"),
        ("torchrun", "WORLD_SIZE"),
        ("torchrun", "MASTER_ADDR"),
        ("torchrun", "MASTER_PORT"),
        ("msrun", "MS_ROLE"),
        ("msrun", "RANK_SIZE MS_WORKER_NUM"),
        ("msrun", "RANK_ID MS_NODE_ID"),
        ("msrun", "MS_SCHED_HOST"),
        ("msrun", "MS_SCHED_PORT"),
        ("slurm", "SLURM_PROCID"),
        ("slurm", "SLURM_NTASKS SLURM_STEP_NUM_TASKS"),
        ("slurm", "SLURM_JOB_NODELIST"),
        ("slurm", "SLURM_JOB_ID"),
        ("mpi", "OMPI_COMM_WORLD_RANK"),
        ("mpi", "OMPI_COMM_WORLD_SIZE"),
    ],
)
def test_one_variable_missing(dialect: str, name: str) -> None:
    with pytest.raises(LaunchError) as caught:
        read(DIALECTS[dialect], drop=name)
    expected = {"SLURM_JOB_NODELIST": "MASTER_ADDR", "SLURM_JOB_ID": "MASTER_PORT"}
    assert expected.get(name, name.split()[0]) in str(caught.value)


@pytest.mark.parametrize(
    ("values", "mention"),
    [
        ({"rank": 1}, "rank=1"),
        ({"rank": -1, "world_size": 2}, "rank=-1"),
        ({"world_size": 0}, "world_size=0"),
        ({"rank": True, "world_size": 2}, "rank=True"),
        ({"rank": "1", "world_size": 2}, "rank='1'"),
        ({"rank": 1.0, "world_size": 2}, "rank=1.0"),
        ({"local_rank": 1}, "local_rank=1"),
        ({"master_port": 0}, "master_port=0"),
        ({"master_port": 65536}, "master_port=65536"),
    ],
)
def test_direct_construction_is_checked(values: dict[str, Any], mention: str) -> None:
    with pytest.raises(LaunchError, match=mention):
        LaunchInfo(**values)


# --- the rendezvous file -------------------------------------------------------------------------


def test_all_ranks_of_a_run_derive_one_file_and_other_runs_another() -> None:
    one = read(OPENMPI)
    zero = read(OPENMPI, {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"})
    again = read(OPENMPI, {"PMIX_SERVER_URI41": "prterun-vm-6456@0.0;tcp4://127.0.0.1:40000"})
    files = [info.rendezvous_file for info in (one, zero, again)]
    assert files[0] == files[1] != files[2]
    assert one.provenance["rendezvous_file"] == "derived from PMIX_NAMESPACE"


@pytest.mark.parametrize(
    ("env", "source"),
    [
        (OPENMPI, "PMIX_NAMESPACE"),
        (MVAPICH, "MPIRUN_ID"),
        ({**HYDRA, "PMI_PORT": "vm:40001"}, "PMI_PORT"),
        ({**HYDRA, "PMI_JOBID": "4"}, "PMI_JOBID"),
    ],
)
def test_identity_of_a_run(env: Env, source: str) -> None:
    info = read(env, {"TMPDIR": "/scratch/"}, uid=1000)
    assert info.rendezvous_file is not None
    assert info.rendezvous_file.startswith("/scratch/parallelkit-1000-")
    assert info.provenance["rendezvous_file"] == f"derived from {source}"


def test_old_open_mpi_is_told_by_its_job_number() -> None:
    env = {k: v for k, v in OPENMPI.items() if not k.startswith("PMIX")}
    info = read(env, {"OMPI_MCA_ess_base_jobid": "3141"})
    assert info.provenance["rendezvous_file"] == "derived from OMPI_MCA_ess_base_jobid"
    assert info.rendezvous_file is not None
    assert info.rendezvous_file.startswith("/tmp/parallelkit-")


def test_identity_can_be_given_where_no_variable_has_it() -> None:
    files = {read(HYDRA, run_identity=name).rendezvous_file for name in ("a", "b")}
    assert len(files) == 2
    assert read(HYDRA, run_identity="a").rendezvous_file in files


def test_a_port_makes_the_derived_file_needless() -> None:
    assert read(OPENMPI, {"MASTER_PORT": "5"}).rendezvous_file is None
    assert read(OPENMPI, {"MASTER_PORT": "5"}).master_port == 5
    assert read(OPENMPI).with_overrides(master_port=5).rendezvous_file is None


def test_the_users_own_file_goes_first() -> None:
    info = read(OPENMPI, {"PARALLELKIT_RENDEZVOUS_FILE": "/run/mine"})
    assert info.rendezvous_file == "/run/mine"


# --- explicit arguments --------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("way", ["environ", "overrides"])
def test_arguments_beat_the_environment(dialect: str, way: str) -> None:
    arguments = {"rank": 0, "world_size": 3, "master_addr": "other", "master_port": 7}
    if way == "environ":
        info = read(DIALECTS[dialect], **arguments)
    else:
        info = read(DIALECTS[dialect]).with_overrides(**arguments)  # type: ignore[arg-type]
    assert {name: getattr(info, name) for name in arguments} == arguments
    assert {info.provenance[name] for name in arguments} == {"argument"}
    assert info.launcher == dialect
    assert info.local_rank == 1  # still the launcher's: it decides the device
    assert not info.agent_store


@pytest.mark.parametrize("dialect", DIALECTS)
def test_both_ways_agree(dialect: str) -> None:
    arguments = {"rank": 0, "master_addr": "other", "master_port": 7}
    one = read(DIALECTS[dialect], **arguments)
    two = read(DIALECTS[dialect]).with_overrides(**arguments)  # type: ignore[arg-type]
    assert one == two


def test_explicit_rank_zero_is_a_value() -> None:
    info = read(HAND).with_overrides(rank=0)
    assert (info.rank, info.world_size, info.provenance["rank"]) == (0, 2, "argument")
    assert info.provenance["world_size"] == "WORLD_SIZE (torchrun)"


def test_no_override_changes_nothing() -> None:
    info = read(TORCHRUN)
    assert info.with_overrides() is info


def test_arguments_complete_a_partial_environment() -> None:
    info = read({"RANK": "1"}, world_size=2, master_addr="127.0.0.1", master_port=9)
    assert (info.rank, info.world_size, info.local_rank) == (1, 2, 1)
    info = read({"RANK": "junk", "WORLD_SIZE": "2", **MASTER}, rank=1)
    assert info.rank == 1
    info = read({"LOCAL_RANK": "3"}, rank=3, world_size=9, master_addr="h", master_port=9)
    assert (info.local_rank, info.launcher) == (3, "none")
    assert read(MASTER, rank=0, world_size=2).master_addr == "head"


def test_local_values_follow_new_arguments() -> None:
    base = LaunchInfo.from_environ({})
    two = base.with_overrides(rank=1, world_size=2, master_addr="127.0.0.1", master_port=9)
    assert (two.local_rank, two.local_world_size) == (1, 2)
    three = two.with_overrides(rank=2, world_size=3)
    assert (three.local_rank, three.local_world_size) == (2, 3)
    assert three.master_port == 9


def test_a_world_within_a_launch_keeps_the_device() -> None:
    info = read(TORCHRUN, rank=0, world_size=1)
    assert (info.rank, info.world_size, info.local_rank, info.local_world_size) == (0, 1, 1, 4)


def test_a_smaller_world_does_not_use_the_launchers_file() -> None:
    env = OPENMPI | {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    assert read(env, rank=3, world_size=4).rendezvous_file is not None
    for attempt in (
        lambda: read(env, rank=0, world_size=2),
        lambda: read(env).with_overrides(rank=0, world_size=2),
    ):
        with pytest.raises(LaunchError, match="MASTER_PORT"):
            attempt()


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        ({"rank": -1}, ["rank=-1", "argument"]),
        ({"rank": True}, ["rank=True"]),
        ({"rank": "0"}, ["rank='0'"]),
        ({"rank": 0.0}, ["rank=0.0"]),
        ({"world_size": 0}, ["world_size=0"]),
        ({"rank": 2}, ["rank=2 (argument)", "WORLD_SIZE=2 (torchrun)"]),
        ({"world_size": 1}, ["RANK=1 (torchrun)", "world_size=1 (argument)"]),
        ({"master_port": 65536}, ["master_port=65536"]),
        ({"master_port": -1}, ["master_port=-1"]),
        ({"master_port": 0}, ["MASTER_PORT"]),
        ({"master_addr": ""}, ["master_addr=''"]),
        ({"master_addr": 7}, ["master_addr=7"]),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], mentions: list[str]) -> None:
    for attempt in (
        lambda: read(HAND).with_overrides(**arguments),
        lambda: read(HAND, **arguments),
    ):
        with pytest.raises(LaunchError) as caught:
            attempt()
        for mention in mentions:
            assert mention in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "mention"),
    [
        ({"world_size": 2}, "no rank"),
        ({"rank": 1}, "rank=1 (argument)"),
        ({"rank": 0, "world_size": 2}, "MASTER_ADDR (master_addr=) and MASTER_PORT (master_port=)"),
        ({"rank": 0, "world_size": 2, "master_addr": "h"}, "MASTER_PORT (master_port=)"),
    ],
)
def test_incomplete_arguments(arguments: dict[str, Any], mention: str) -> None:
    for attempt in (
        lambda: read({}, **arguments),
        lambda: read({}).with_overrides(**arguments),
        lambda: LaunchInfo().with_overrides(**arguments),
    ):
        with pytest.raises(LaunchError) as caught:
            attempt()
        assert mention in str(caught.value)


# --- provenance ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_field_has_a_provenance(dialect: str) -> None:
    info = read(DIALECTS[dialect])
    assert {field.name for field in attrs.fields(LaunchInfo) if field.eq} == set(info.provenance)
    text = info.explain()
    assert text.startswith(f"launcher: {dialect} (")
    for name, where in info.provenance.items():
        assert name == "launcher" or (name in text and where in text)


def test_provenance_names_variable_and_launcher() -> None:
    info = read(SLURM)
    assert info.provenance["rank"] == "SLURM_PROCID (slurm)"
    assert info.provenance["master_addr"] == "first host of SLURM_JOB_NODELIST (slurm)"
    assert info.provenance["master_port"] == "15000 + last 4 digits of SLURM_JOB_ID (slurm)"
    assert info.provenance["agent_store"] == "default"
    assert read(HAND).provenance["local_world_size"].startswith("derived: ")


@given(
    st.dictionaries(
        st.sampled_from(sorted({*TORCHRUN, *MSRUN, *SLURM, *OPENMPI, *HYDRA, *MVAPICH})),
        st.sampled_from(["0", "1", "2", "4", "-1", "x", "", "MS_WORKER", "bash", "n[1-2]"]),
        max_size=9,
    )
)
def test_any_environment_is_a_valid_launch_or_a_launch_error(env: Env) -> None:
    frozen = dict(env)
    info, said = None, ""
    try:
        info = LaunchInfo.from_environ(env)
    except LaunchError as error:
        said = str(error)
    if info is None:
        assert any(name in said for name in env)
    else:
        assert 0 <= info.rank < info.world_size
        assert 0 <= info.local_rank < info.local_world_size
        assert info == LaunchInfo.from_environ(env)
        if info.world_size > 1 and not info.is_scheduler:
            assert info.master_addr
            assert info.master_port or info.rendezvous_file
    assert env == frozen


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_any_even_torchrun_launch(hosts: int, local: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, hosts * local - 1))
    env = {
        "RANK": str(rank),
        "WORLD_SIZE": str(hosts * local),
        "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(local),
        **MASTER,
    }
    info = LaunchInfo.from_environ(env)
    assert (info.node_rank, info.local_rank) == divmod(rank, local)
    del env["LOCAL_RANK"]
    assert LaunchInfo.from_environ(env) == info


# --- SLURM's short forms -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1 node2"),
        ("node[003-005,7]", "node003 node004 node005 node7"),
        ("node[1-2,09],gpu1", "node1 node2 node09 gpu1"),
        ("a[1-2]b[3-4]", "a1b3 a1b4 a2b3 a2b4"),
        ("a[1-2]-ib, c", "a1-ib a2-ib c"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("10.0.0.[1-2]", "10.0.0.1 10.0.0.2"),
        ("rack-1.example.com", "rack-1.example.com"),
    ],
)
def test_expand_nodelist(text: str, hosts: str) -> None:
    assert list(expand_nodelist(text)) == hosts.split()
    assert first_host(text) == hosts.split()[0]


@pytest.mark.parametrize(
    "text", ["", ",", "a[", "a]", "a[]", "a[x]", "a[3-1]", "a[1-2", "a[[1]]", "a b", "a[1--2]"]
)
def test_malformed_nodelist(text: str) -> None:
    with pytest.raises(LaunchError, match="host list"):
        list(expand_nodelist(text))


def test_nodelist_cannot_exhaust_memory() -> None:
    with pytest.raises(LaunchError):
        first_host("n[0-999999999999]")


@pytest.mark.parametrize(
    ("text", "counts"),
    [("2", [2, None]), ("2(x3),1", [2, 2, 2, 1, None]), ("1, 4(x2)", [1, 4, 4, None])],
)
def test_tasks_on_node(text: str, counts: list[int | None]) -> None:
    assert [tasks_on_node(text, node) for node in range(len(counts))] == counts


# --- the environment of the process --------------------------------------------------------------


def test_scoped_environ_restores_also_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELKIT_A", "old")
    monkeypatch.delenv("PARALLELKIT_B", raising=False)
    before = dict(os.environ)
    seen: list[str | None] = []

    def fail() -> None:
        seen.extend(map(os.environ.get, ("PARALLELKIT_A", "PARALLELKIT_B")))
        os.environ["PARALLELKIT_A"] = "inner"
        raise KeyError

    with pytest.raises(KeyError), scoped_environ(PARALLELKIT_A=None, PARALLELKIT_B="new"):
        fail()
    assert seen == [None, "new"]
    assert dict(os.environ) == before


def test_scoped_environ_nests() -> None:
    with scoped_environ(PARALLELKIT_A="1"):
        with scoped_environ(PARALLELKIT_A="2"):
            assert os.environ["PARALLELKIT_A"] == "2"
        assert os.environ["PARALLELKIT_A"] == "1"


def test_scoped_environ_refuses_other_types_before_it_changes_anything() -> None:
    with pytest.raises(TypeError, match="PARALLELKIT_B=1"):
        with scoped_environ(PARALLELKIT_A="1", PARALLELKIT_B=1):  # type: ignore[arg-type]
            pass
    assert "PARALLELKIT_A" not in os.environ


def _process(proc: Path, pid: int, name: str, parent: int, started: int) -> None:
    (proc / str(pid)).mkdir()
    fields = ["S", str(parent), *["0"] * 17, str(started), "0"]
    (proc / str(pid) / "stat").write_text(f"{pid} ({name}) {' '.join(fields)}\n")


def test_launcher_identity_looks_past_wrappers(tmp_path: Path) -> None:
    _process(tmp_path, 50, "hydra_pmi_proxy", 1, 777)
    _process(tmp_path, 60, "a) (b", 50, 800)
    _process(tmp_path, 61, "python", 60, 900)
    _process(tmp_path, 62, "python", 50, 901)
    _process(tmp_path, 70, "python", 1, 902)
    names = [launcher_identity(str(tmp_path), pid) for pid in (61, 62, 70, 99)]
    assert names == ["hydra_pmi_proxy-50-777", "hydra_pmi_proxy-50-777", None, None]


@pytest.mark.parametrize(
    "module",
    [parallelkit.launch, parallelkit.nodelist, parallelkit.environ],
    ids=["launch", "nodelist", "environ"],
)
def test_examples_run(module: Any) -> None:
    failed, attempted = doctest.testmod(module)
    assert attempted > 0
    assert failed == 0
