"""What each launcher leaves in the environment: one class for each of four dialects.

`detect` picks the dialect and returns what it says, each fact with where it comes from, not yet
completed or checked across launchers: that is `parallelkit.launch`. Pure: a mapping goes in, and
nothing here looks at `os.environ`.
"""

from __future__ import annotations

import hashlib
from typing import ClassVar

from parallelkit.errors import LaunchError
from parallelkit.nodelist import first_host, tasks_on_node
from parallelkit.reading import Reading

_INTERACTIVE = ("bash", "interactive")
# SLURM numbers its own steps (batch script, interactive, external) downwards from 2^32.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
# Left by a process manager for the ranks it starts; srun alone leaves none of them.
_MPIRUN_MARKS = ("HYDI_CONTROL_FD", "MPIRUN_ID", "OMPI_UNIVERSE_SIZE", "PRTE_LAUNCHED")
_MPI_FAMILIES = (
    ("OMPI_COMM_WORLD", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
_PMIX_URIS = tuple(f"PMIX_SERVER_URI{version}" for version in ("41", "4", "3", "2", "21"))


class Torchrun:
    """torchrun, and whatever sets the same variables: Kubeflow, Ray Train, `parallelkit run`."""

    name: ClassVar[str] = "torchrun"
    framework: ClassVar[str | None] = "torch"

    @staticmethod
    def present(env: Reading) -> tuple[bool, str]:
        names = env.seen("RANK", "WORLD_SIZE")
        if names:
            return True, f"{' and '.join(names)} set"
        marks = env.seen("TORCHELASTIC_RUN_ID")
        return False, f"{marks[0]} without RANK and WORLD_SIZE is no launch" if marks else ""

    @staticmethod
    def read(env: Reading) -> None:
        env.need("rank", "RANK")
        env.need("world_size", "WORLD_SIZE", low=1)
        env.take("local_rank", "LOCAL_RANK")
        env.take("local_world_size", "LOCAL_WORLD_SIZE", low=1)
        env.take("node_rank", *env.seen("GROUP_RANK", "NODE_RANK")[:1])
        env.take("restart_count", "TORCHELASTIC_RESTART_COUNT")
        if env.text("TORCHELASTIC_RUN_ID") != "none":  # what torchrun says without an id
            env.word("job_id", "TORCHELASTIC_RUN_ID")
        store = "TORCHELASTIC_USE_AGENT_STORE"
        if (env.text(store) or "").lower() in ("true", "1"):
            env.put("agent_store", True, f"{store} (torchrun)")
        _check_torchrun(env)


class Msrun:
    """msrun, and MindSpore's dynamic cluster set up by hand."""

    name: ClassVar[str] = "msrun"
    framework: ClassVar[str | None] = "mindspore"

    @staticmethod
    def present(env: Reading) -> tuple[bool, str]:
        names = env.seen("MS_ROLE", "MS_WORKER_NUM", "MS_SCHED_HOST", "MS_SCHED_PORT")
        return bool(names), f"{' and '.join(names)} set" if names else ""

    @staticmethod
    def read(env: Reading) -> None:
        role = env.text("MS_ROLE")
        if role not in ("MS_SCHED", "MS_WORKER"):
            said = f"is not set, but {env.reason}" if role is None else f"is {role!r}"
            raise LaunchError(
                f"MS_ROLE {said} (msrun); allowed are 'MS_WORKER' and 'MS_SCHED': start the "
                "script with msrun, or unset the MS_* variables"
            )
        env.need("world_size", "RANK_SIZE", "MS_WORKER_NUM", low=1)
        env.take("master_port", "MS_SCHED_PORT", low=1, high=65535)
        env.word("master_addr", "MS_SCHED_HOST")
        for field, name in (("master_addr", "MS_SCHED_HOST"), ("master_port", "MS_SCHED_PORT")):
            if field not in env.facts and field not in env.arguments:
                raise env.partial(name)
        if role == "MS_SCHED":  # the same script runs in it, and it is none of the ranks
            env.put("role", "scheduler", "MS_ROLE (msrun)")
            env.put("rank", 0, "MS_ROLE (msrun): the scheduler has no rank")
            return
        env.put("role", "worker", "MS_ROLE (msrun)")
        env.need("rank", "RANK_ID", "MS_NODE_ID")
        env.take("local_rank", *env.seen("LOCAL_RANK", "DEVICE_ID")[:1])


class Slurm:
    """A step of srun. SLURM_* is in every process of an allocation, so they alone say nothing."""

    name: ClassVar[str] = "slurm"
    framework: ClassVar[str | None] = None

    @staticmethod
    def present(env: Reading) -> tuple[bool, str]:
        if not any(name.startswith("SLURM_") for name in env.environ):
            return False, ""
        step = env.number("SLURM_STEP_ID")
        in_step = step is not None and step < _FIRST_SPECIAL_STEP
        tasks = env.number("SLURM_STEP_NUM_TASKS", low=1) or 0
        job = env.text("SLURM_JOB_NAME")
        if job in _INTERACTIVE and not (in_step and tasks > 1):
            return False, f"SLURM_JOB_NAME={job!r}: an interactive shell is no launch"
        if not in_step and (step is not None or env.text("ENVIRONMENT") == "BATCH"):
            return False, "the batch script itself is no launch: start the script with srun"
        counted = env.seen("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")[:1]
        names = env.seen("SLURM_PROCID") + counted
        if len(names) == 2 or (names and in_step):
            return True, f"{' and '.join(names)} set"
        return False, "SLURM_* without SLURM_PROCID and SLURM_NTASKS is no srun step"

    @staticmethod
    def read(env: Reading) -> None:
        # In a step, SLURM_NTASKS may still be the allocation's.
        count = env.seen("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")[:1] or ["SLURM_NTASKS"]
        env.need("rank", "SLURM_PROCID")
        world = env.need("world_size", *count, low=1)
        per_node = env.number("SLURM_NTASKS_PER_NODE", low=1)
        if per_node is not None and world < per_node and "world_size" not in env.arguments:
            raise LaunchError(
                f"{count[0]}={world} is less than SLURM_NTASKS_PER_NODE={per_node} (slurm): "
                f"pass srun an --ntasks that is --nodes times --ntasks-per-node"
            )
        env.take("node_rank", "SLURM_NODEID")
        _slurm_local_size(env, per_node)
        env.take("local_rank", "SLURM_LOCALID")
        env.word("job_id", "SLURM_JOB_ID", "SLURM_JOBID")
        env.take("restart_count", "SLURM_RESTART_COUNT")
        common(env)
        hosts = env.seen("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
        if "master_addr" not in env.arguments and "master_addr" not in env.facts and hosts:
            host = first_host(env.text(hosts[0]) or "")
            env.put("master_addr", host, f"first host of {hosts[0]} (slurm)")
        _slurm_port(env)


class Mpi:
    """mpirun and mpiexec of Open MPI, MPICH, Intel MPI and MVAPICH."""

    name: ClassVar[str] = "mpi"
    framework: ClassVar[str | None] = None

    @staticmethod
    def present(env: Reading) -> tuple[bool, str]:
        for prefix, *_ in _MPI_FAMILIES:
            names = env.seen(f"{prefix}_RANK", f"{prefix}_SIZE")
            if names:
                return True, f"{' and '.join(names)} set"
        return False, ""

    @staticmethod
    def read(env: Reading) -> None:
        prefix, local_rank, local_size = next(
            family for family in _MPI_FAMILIES if env.seen(f"{family[0]}_RANK", f"{family[0]}_SIZE")
        )
        env.need("rank", f"{prefix}_RANK")
        env.need("world_size", f"{prefix}_SIZE", low=1)
        env.take("local_rank", local_rank)
        local = env.take("local_world_size", local_size, low=1)
        env.word("job_id", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "MPIRUN_ID")
        common(env)
        if local is None or local != env.number(f"{prefix}_SIZE"):
            return
        # On one host there is an address, and a file that all ranks can find.
        if "master_addr" not in env.facts and "master_addr" not in env.arguments:
            env.put("master_addr", "127.0.0.1", f"{local_size} equals {prefix}_SIZE: one host")
        has_port = env.facts.get("master_port") or env.arguments.get("master_port")
        if not has_port and "rendezvous_file" not in env.facts and _same_world(env, prefix):
            _rendezvous_file(env)


_DIALECTS: tuple[type[Torchrun | Msrun | Slurm | Mpi], ...] = (Torchrun, Msrun, Slurm, Mpi)


def detect(reading: Reading) -> Reading:
    """Choose the dialect, by precedence, and read it; `reading.reason` says why.

    Raises:
        LaunchError: the chosen dialect's variables are partial, malformed or contradictory.
    """
    chosen: type[Torchrun | Msrun | Slurm | Mpi] | None = None
    passed = []
    for dialect in _DIALECTS:
        # A later dialect is only looked at to say that it was passed over: it need not be valid.
        reading.launcher = dialect.name
        try:
            launch, why = dialect.present(reading)
        except LaunchError as error:
            if chosen is None:
                raise
            launch, why = False, str(error)
        if launch and chosen is None and dialect is Slurm and _mpirun_inside(reading):
            launch, why = False, f"{why}, but mpirun was started inside the SLURM job"
        if launch and chosen is None:
            chosen, reading.reason = dialect, why
        elif why:
            passed.append(f"{dialect.name} ({why})")
    if chosen is not None:
        reading.launcher = chosen.name
        if chosen.framework is not None:
            reading.put("framework", chosen.framework, f"implied by {chosen.name}")
        chosen.read(reading)
    else:
        reading.launcher = "none"
        reading.reason = "no launcher's variables are set: a world of one"
        if reading.take("local_rank", "LOCAL_RANK") is not None and "rank" not in reading.arguments:
            reading.reason = f"LOCAL_RANK={reading.text('LOCAL_RANK')} set"
            raise reading.partial("RANK", "WORLD_SIZE")
    common(reading)
    if passed:
        reading.reason += f"; passed over: {', '.join(passed)}"
    return reading


def common(env: Reading) -> None:
    """Take what may come with any launcher: an address, a port, a file."""
    if "master_addr" not in env.facts:
        env.word("master_addr", "MASTER_ADDR")
    if "master_port" not in env.facts and env.take("master_port", "MASTER_PORT", high=65535) == 0:
        env.facts["master_port"] = None  # rank 0 takes a free one
    if "rendezvous_file" not in env.facts:
        env.word("rendezvous_file", "PARALLELKIT_RENDEZVOUS_FILE")


def _check_torchrun(env: Reading) -> None:
    """Refuse local values that no placement of consecutive ranks on hosts can have."""
    facts = env.facts
    if {"rank", "world_size"} & env.arguments.keys() or "local_rank" not in facts:
        return
    rank, world, local = facts["rank"], facts["world_size"], facts["local_rank"]
    size = facts.get("local_world_size")
    said = f"RANK={rank}, WORLD_SIZE={world}, LOCAL_RANK={local}"
    if size is not None:
        said += f", LOCAL_WORLD_SIZE={size}"
    problem = None
    if rank < world and local > rank:
        problem = "LOCAL_RANK cannot exceed RANK"
    elif size is not None and size > world:
        problem = "LOCAL_WORLD_SIZE cannot exceed WORLD_SIZE"
    elif size is not None and local < size and rank < world and rank - local > world - size:
        problem = "RANK - LOCAL_RANK is the first rank of this host, and its ranks must fit"
    if problem:
        raise LaunchError(
            f"{said} (torchrun) contradict each other: {problem}; start the script with "
            f"torchrun, or correct them"
        )


def _slurm_local_size(env: Reading, per_node: int | None) -> None:
    node = env.facts.get("node_rank")
    for name in env.seen("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")[:1]:
        count = None if node is None else tasks_on_node(env.text(name) or "", node)
        # Without a count of the step's own, the allocation's may be larger than the step.
        if count and (name.startswith("SLURM_STEP") or count <= (env.number("SLURM_NTASKS") or 0)):
            env.put("local_world_size", count, f"{name} (slurm)")
            return
    if per_node is not None:
        env.put("local_world_size", per_node, "SLURM_NTASKS_PER_NODE (slurm)")


def _slurm_port(env: Reading) -> None:
    if {"master_port", "rendezvous_file"} & (env.facts.keys() | env.arguments.keys()):
        return
    names = env.seen("SLURM_JOB_ID", "SLURM_JOBID")[:1]
    if names:
        port = 15000 + (env.number(names[0]) or 0) % 10000
        env.put("master_port", port, f"15000 + last 4 digits of {names[0]} (slurm)")


def _mpirun_inside(env: Reading) -> bool:
    """Tell whether the ranks are mpirun's, which in turn was started in a SLURM job.

    mpirun starts its helpers with srun, so the ranks inherit a step that counts the helpers.
    """
    if not env.seen(*_MPIRUN_MARKS):
        return False
    tasks = env.seen("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")[:1]
    sizes = env.seen(*(f"{prefix}_SIZE" for prefix, *_ in _MPI_FAMILIES))[:1]
    return bool(tasks and sizes) and env.text(tasks[0]) != env.text(sizes[0])


def _same_world(env: Reading, prefix: str) -> bool:
    """Tell whether arguments leave the launcher's world whole, so that one file serves it."""
    size = env.arguments.get("world_size")
    return size is None or size == env.number(f"{prefix}_SIZE")


def _rendezvous_file(env: Reading) -> None:
    """Derive a path that is the same on all ranks of the run, and on no others.

    PMIx's namespace holds the launcher's pid and, together with its port, does not come back
    before the host restarts, in practice. PMI_ID and PMI_FD do not help: they differ by rank.
    """
    name = identity = ""
    if env.text("PMIX_NAMESPACE"):
        uri = env.seen(*_PMIX_URIS)[:1]
        name = "PMIX_NAMESPACE"
        identity = ",".join(env.text(part) or "" for part in (name, *uri))
    elif env.text("MPIRUN_ID"):
        name = "MPIRUN_ID"
        identity = ",".join(env.text(f"MPIRUN_{part}") or "" for part in ("HOST", "PORT", "ID"))
    elif found := env.seen("OMPI_MCA_ess_base_jobid", "PMI_JOBID", "PMI_PORT"):
        name, identity = found[0], env.text(found[0]) or ""
    elif env.run_identity:
        name, identity = "run_identity", env.run_identity
    if identity:
        digest = hashlib.blake2b(f"{name}={identity}".encode(), digest_size=12).hexdigest()
        user = "" if env.uid is None else f"{env.uid}-"
        folder = (env.text("TMPDIR") or "/tmp").rstrip("/")
        path = f"{folder}/parallelkit-{user}{digest}.rendezvous"
        env.put("rendezvous_file", path, f"derived from {name}")
