"""Who am I among how many, and where is rank 0: read once, from values, before any framework."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import attrs

from parallelkit.dialects import detect
from parallelkit.errors import LaunchError
from parallelkit.reading import Reading

_ARGUMENTS = ("rank", "world_size", "master_addr", "master_port")
_MAX_RANKS = 65536  # far above any launch, and low enough to count to
_LOOPBACK = ("localhost", "::1", "[::1]")
_DEFAULT = "default"
_DERIVED = "derived"


@attrs.frozen(kw_only=True)
class LaunchInfo:
    """One process's place in its launch. `LaunchInfo()` is a world of one.

    Equality is by value; how the values came about (`reason`, `provenance`) does not count.

    Attributes:
        rank: number of this process, 0 to `world_size - 1`.
        world_size: number of processes.
        local_rank: number of this process on its host; decides the device.
        local_world_size: number of processes on this host.
        node_rank: number of this host; 0 where the launcher does not say.
        master_addr: host of rank 0, as given; may be None for a world of one.
        master_port: port of the rendezvous; None where rank 0 takes a free one and publishes it
            in `rendezvous_file`.
        rendezvous_file: path, the same on all ranks of this host and run. A derived one lies in
            a folder that others may write to: whoever makes it must do so exclusively and
            owner-only, and whoever reads it must check the owner and that the writer is alive.
        launcher: `"none"`, `"torchrun"`, `"msrun"`, `"slurm"` or `"mpi"`.
        framework: `"torch"` or `"mindspore"` where the launcher implies it.
        role: `"worker"`, or `"scheduler"` for the extra process in which msrun runs the script.
        agent_store: a store already listens at `master_addr:master_port` (torchrun's agent).
        job_id: the launcher's name for the run.
        restart_count: how often the launcher restarted the run.
        reason: why this launcher, and what was passed over.
        provenance: field name to where its value comes from, such as `"RANK (torchrun)"`,
            `"argument"` or `"default"`.

    Raises:
        LaunchError: a value is out of its range.

    Example:
        >>> LaunchInfo.from_environ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1",
        ...     "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}).world_size
        2
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    rendezvous_file: str | None = None
    launcher: str = "none"
    framework: str | None = None
    role: str = "worker"
    agent_store: bool = False
    job_id: str | None = None
    restart_count: int = 0
    reason: str = attrs.field(default="no launcher: a world of one", eq=False, repr=False)
    provenance: Mapping[str, str] = attrs.field(factory=dict, eq=False, repr=False, converter=dict)

    def __attrs_post_init__(self) -> None:
        sizes, ranks = ("world_size", "local_world_size"), ("rank", "local_rank")
        for low, high, names in ((1, _MAX_RANKS, sizes), (0, _MAX_RANKS - 1, ranks)):
            for name in names:
                _integer(name, getattr(self, name), low, self._said(name), high)
        if self.rank >= self.world_size:
            raise LaunchError(
                f"{self._said('rank')} and {self._said('world_size')} contradict each other: the "
                f"ranks of {self.world_size} processes are 0 to {self.world_size - 1}; correct "
                f"them, or start the script with a launcher such as torchrun, which sets both"
            )
        if self.local_rank >= self.local_world_size:
            raise LaunchError(
                f"{self._said('local_rank')} and {self._said('local_world_size')} contradict each "
                f"other: the local ranks of {self.local_world_size} processes on a host are 0 to "
                f"{self.local_world_size - 1}; correct them, or unset both"
            )
        if self.master_port is not None:
            _integer("master_port", self.master_port, 1, self._said("master_port"), 65535)

    @property
    def is_scheduler(self) -> bool:
        """Whether this process is msrun's scheduler, which runs the script but is no rank."""
        return self.role == "scheduler"

    @classmethod
    def from_environ(
        cls,
        environ: Mapping[str, str],
        *,
        rank: int | None = None,
        world_size: int | None = None,
        master_addr: str | None = None,
        master_port: int | None = None,
        uid: int | None = None,
        run_identity: str | None = None,
    ) -> LaunchInfo:
        """Read a launch from environment variables: a pure function of its arguments.

        Precedence: explicit arguments, then torchrun, msrun, SLURM, MPI, a world of one. A
        variable whose fact is given as an argument is not looked at, so arguments also complete
        a partial set. Blank variables count as unset.

        Args:
            environ: such as `os.environ`, which is neither read nor written otherwise.
            rank, world_size, master_addr, master_port: explicit values; `master_port=0` lets
                rank 0 choose.
            uid: effective user id, to keep derived file names of users apart.
            run_identity: a name of this run, equal on its ranks, for launchers that tell none.

        Raises:
            LaunchError: variables are partial, malformed, or contradict each other.

        Example:
            >>> print(LaunchInfo.from_environ({}).reason)
            no launcher's variables are set: a world of one
        """
        arguments = _given(rank, world_size, master_addr, master_port)
        reading = detect(
            Reading(environ=environ, arguments=arguments, uid=uid, run_identity=run_identity)
        )
        return _complete(
            cls, reading.launcher, reading.reason, reading.facts, reading.provenance, arguments
        )

    def with_overrides(
        self,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        master_addr: str | None = None,
        master_port: int | None = None,
    ) -> LaunchInfo:
        """Return this launch with explicit values in place of the launcher's, checked again.

        `local_rank` and `local_world_size` stay the launcher's where it gave them: they say which
        device is this process's, also when several worlds share a host. Where the environment
        alone may be incomplete, give the values to `from_environ` instead.

        Raises:
            LaunchError: the values are malformed or contradict what remains.

        Example:
            >>> LaunchInfo().with_overrides(
            ...     rank=0, world_size=2, master_addr="127.0.0.1", master_port=29500
            ... ).provenance["rank"]
            'argument'
        """
        arguments = _given(rank, world_size, master_addr, master_port)
        if not arguments:
            return self
        facts = {
            field.name: getattr(self, field.name)
            for field in attrs.fields(LaunchInfo)
            if field.eq and self._is_given(field)
        }
        rendezvous = self.provenance.get("rendezvous_file", "")
        resized = "world_size" in arguments and arguments["world_size"] != self.world_size
        if rendezvous.startswith(_DERIVED) and (resized or arguments.get("master_port")):
            facts.pop("rendezvous_file", None)  # it serves the launcher's world, as a whole
        return _complete(
            type(self), self.launcher, self.reason, facts, dict(self.provenance), arguments
        )

    def explain(self) -> str:
        """Return a table of every value and where it comes from.

        Example:
            >>> print(LaunchInfo().explain().splitlines()[0])
            launcher: none (no launcher: a world of one)
        """
        rows = [("field", "value", "from")]
        for field in attrs.fields(LaunchInfo):
            if field.eq and field.name != "launcher":
                value = getattr(self, field.name)
                where = self.provenance.get(field.name, _DEFAULT)
                rows.append((field.name, "-" if value is None else str(value), where))
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows]
        return "\n".join([f"launcher: {self.launcher} ({self.reason})", *lines])

    def _is_given(self, field: attrs.Attribute[Any]) -> bool:
        where = self.provenance.get(field.name)
        if where is None:
            return bool(getattr(self, field.name) != field.default)
        if where.startswith(_DEFAULT):
            return False
        # Local values that follow from rank and world size follow again from the new ones.
        local = field.name in ("local_rank", "local_world_size", "node_rank")
        return not (local and where.startswith(_DERIVED))

    def _said(self, field: str) -> str:
        """Write a value with the name by which it was given: `RANK=1 (torchrun)`."""
        where = self.provenance.get(field, _DEFAULT)
        name, bracket, launcher = where.partition(" (")
        if bracket and name.isupper():
            return f"{name}={getattr(self, field)} ({launcher}"
        return f"{field}={getattr(self, field)!r} ({where})"


def _integer(name: str, value: object, low: int, said: str, high: int | None = None) -> int:
    allowed = f"at least {low}" if high is None else f"{low} to {high}"
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = low - 1
    if isinstance(value, bool) or number < low or (high is not None and number > high):
        raise LaunchError(f"{said} is not valid: {name} is an integer, {allowed}")
    return number


def _given(
    rank: int | None, world_size: int | None, master_addr: str | None, master_port: int | None
) -> dict[str, Any]:
    """Collect and check explicit arguments; 0 is a value, None is none."""
    values = dict(zip(_ARGUMENTS, (rank, world_size, master_addr, master_port), strict=True))
    given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    for name, low, high in (
        ("rank", 0, _MAX_RANKS - 1),
        ("world_size", 1, _MAX_RANKS),
        ("master_port", 0, 65535),
    ):
        if name in given:
            said = f"{name}={given[name]!r} (argument)"
            given[name] = _integer(name, given[name], low, said, high)
    if "master_addr" in given:
        address = given["master_addr"]
        if not isinstance(address, str) or not address.strip():
            raise LaunchError(f"master_addr={address!r} (argument) is not a host name or address")
    return given


def _complete(
    cls: type[LaunchInfo],
    launcher: str,
    reason: str,
    facts: dict[str, Any],
    provenance: dict[str, str],
    arguments: dict[str, Any],
) -> LaunchInfo:
    """Add explicit arguments and what follows from the facts, then check the whole."""
    facts = facts | arguments
    provenance = provenance | dict.fromkeys(arguments, "argument")
    if facts.get("world_size", 1) > 1 and "rank" not in facts:
        raise LaunchError(
            f"world_size={facts['world_size']} was given but no rank; give both rank= and "
            f"world_size=, or start the script with a launcher such as torchrun"
        )
    if facts.get("master_port") == 0:
        facts["master_port"] = None
    if {"master_addr", "master_port"} & arguments.keys() and facts.pop("agent_store", False):
        provenance["agent_store"] = "default: the agent's store is at the launcher's address"
    if facts.get("rendezvous_file") is not None and facts.get("master_addr") is None:
        facts["master_addr"] = "127.0.0.1"
        provenance["master_addr"] = f"{_DERIVED}: a rendezvous file serves one host"
    _derive_local(facts, provenance)
    for field in attrs.fields(cls):
        if field.eq and field.name not in facts:
            where = provenance.get(field.name, _DEFAULT)
            provenance[field.name] = where if where.startswith(_DEFAULT) else _DEFAULT
    provenance["launcher"] = reason
    info = cls(**facts | {"launcher": launcher, "reason": reason, "provenance": provenance})
    if info.world_size > 1 and not info.is_scheduler:
        _check_rendezvous(info)
    return info


def _derive_local(facts: dict[str, Any], provenance: dict[str, str]) -> None:
    """Fill in local rank, local size and node rank, each with how it came about."""
    rank, world = facts.get("rank", 0), facts.get("world_size", 1)
    address = facts.get("master_addr")
    one_host = address is None or address in _LOOPBACK or address.startswith("127.")
    one_host = one_host or facts.get("rendezvous_file") is not None or world == 1
    local, size = facts.get("local_rank"), facts.get("local_world_size")

    def derive(field: str, value: int, how: str) -> int:
        facts[field], provenance[field] = value, f"{_DERIVED}: {how}"
        return value

    if facts.get("role") == "scheduler":
        return
    if size is None and one_host and (local or 0) < world:
        size = derive("local_world_size", world, "all processes are on one host")
    if size is None:
        if local is not None:
            derive("local_world_size", local + 1, "at least, by the local rank")
            return
        alone = "one process a host is assumed; set LOCAL_RANK otherwise"
        derive("local_world_size", 1, alone)
        derive("local_rank", 0, alone)
        if "node_rank" not in facts:
            derive("node_rank", rank, alone)
        return
    if local is None:
        derive("local_rank", rank % size, "rank modulo local_world_size")
    if "node_rank" not in facts and size < world:
        derive("node_rank", rank // size, "rank divided by local_world_size")


def _check_rendezvous(info: LaunchInfo) -> None:
    """Refuse a launch whose ranks have no way to find rank 0."""
    missing = [
        f"{variable} ({argument}=)"
        for variable, argument, absent in (
            ("MASTER_ADDR", "master_addr", info.master_addr is None),
            ("MASTER_PORT", "master_port", info.master_port is None),
        )
        if absent
    ]
    if info.rendezvous_file is not None and info.master_addr is not None:
        return
    if not missing:
        return
    how = {
        "mpi": "pass both to all ranks: mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 (Open "
        "MPI), mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT 29500 (MPICH, Intel MPI)",
        "slurm": "export both before srun, or run where srun sets SLURM_JOB_ID and a node list",
        "torchrun": "start the script with torchrun, which sets both, or set both on every rank",
    }.get(info.launcher, "give both on every rank, the same ones")
    raise LaunchError(
        f"{' and '.join(missing)} not given, so {info.world_size} processes of "
        f"{info.local_world_size} a host cannot find rank 0 ({info._said('rank')}, "
        f"{info._said('world_size')}); {how}"
    )
