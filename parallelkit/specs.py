"""What hooks are given and what they answer: frozen values, validated where they are built.

A new setting is a new field with a default, never a new hook argument, so a plugin written for
an older core keeps working.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

import attrs

from parallelkit.errors import (
    DeviceError,
    ExecutionModeError,
    GroupError,
    PluginContractError,
    UnknownBackendError,
)
from parallelkit.launch import LaunchInfo

if TYPE_CHECKING:
    from parallelkit.plan import ParallelPlan
    from parallelkit.protocols import DeviceSource
    from parallelkit.weights.manifest import Manifest

Reduce = Literal["mean", "sum"]

#: Longest timeout in seconds, a year: what backends count in still holds it.
MAX_TIMEOUT: Final = 366 * 86400.0


def _tuple(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(values)


def _names(value: Any) -> frozenset[str]:
    return frozenset(value)


def check_timeout(value: Any) -> None:
    """Raise `GroupError` unless `value` is a number of seconds that a group can wait."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= MAX_TIMEOUT:
        raise GroupError(
            f"timeout is {value!r}; it is a positive, finite number of seconds, at most a year"
        )


def device_name(value: Any) -> str:
    """Return a device as text; a framework's own device object, which has a `type`, is taken.

    Raises:
        DeviceError: it is neither.
    """
    if isinstance(value, str):
        return value
    if isinstance(getattr(value, "type", None), str):
        return str(value)
    raise DeviceError(f"device is {value!r}; it is a name, such as 'cpu' or 'cuda:0', or 'auto'")


def _is_name(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, str):
        raise UnknownBackendError(f"{attribute.name} is {value!r}; it is a name, or 'auto'")


@attrs.frozen(kw_only=True)
class ProbeRequest:
    """What the caller wants, as far as said; `"auto"` leaves it to the plugin.

    Attributes:
        framework: `"torch"`, `"mindspore"`, a third party's name, or `"auto"`.
        backend: `"gloo"`, `"nccl"`, `"hccl"`, `"mccl"`, ..., or `"auto"`.
        device: `"cpu"`, `"cuda"`, `"npu"`, ..., with or without an index, or `"auto"`.
        launch: what the launcher said.
        features: capability strings the caller needs, such as `"context.data"`.
    """

    framework: str = attrs.field(default="auto", validator=_is_name)
    backend: str = attrs.field(default="auto", validator=_is_name)
    device: str = attrs.field(default="auto", converter=device_name)
    launch: LaunchInfo = attrs.field(factory=LaunchInfo)
    features: frozenset[str] = attrs.field(default=frozenset(), converter=_names)


@attrs.frozen(kw_only=True)
class Candidate:
    """One plugin's answer to a probe.

    Attributes:
        name: unique name of the backend family, usually the framework's name.
        framework: the framework it serves; candidates for one framework compete.
        devices: device types that it can run on here, best first; empty if none.
        backends: communication backends by device type, `{"cpu": "gloo", "cuda": "nccl"}`.
        features: capability strings: `"group.cpu"`, `"context.data"`, `"execution.graph"`, ...
        score: 0 means installed but not usable here; higher is better; finite.
        reason: one sentence for `explain()`: why this score.
    """

    name: str
    framework: str
    devices: tuple[str, ...] = attrs.field(converter=_tuple, default=())
    backends: Mapping[str, str] = attrs.field(factory=dict)
    features: frozenset[str] = attrs.field(default=frozenset(), converter=_names)
    score: float = attrs.field(default=0.0)
    reason: str = ""

    @score.validator
    def _finite(self, attribute: object, value: float) -> None:
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise PluginContractError(
                f"candidate {self.name!r} has score {value!r}; a score is a finite number"
            )


@attrs.frozen(kw_only=True)
class GroupSpec:
    """A process group to be opened, every choice made.

    Attributes:
        framework, backend, device: as chosen; device with its index where the type has one.
        rank, world_size, local_rank, local_world_size: this process's place.
        master_addr, master_port: where rank 0 listens; None for a world of one. Port None or 0:
            rank 0 takes a free port and publishes it through `launch.rendezvous_file`.
        timeout: seconds, for the rendezvous and for each collective.
        launch: the frozen launch facts with their provenance.
    """

    framework: str
    backend: str
    device: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str | None = None
    master_port: int | None = None
    timeout: float = attrs.field(default=60.0)
    launch: LaunchInfo = attrs.field(factory=LaunchInfo, eq=False, repr=False)

    @timeout.validator
    def _positive(self, attribute: object, value: float) -> None:
        check_timeout(value)


@attrs.frozen(kw_only=True)
class ContextSpec:
    """A parallel context to be set up: a plan, and how gradients combine over the data axes.

    Attributes:
        plan: validated degrees and coordinates.
        mode: `"standalone"`, `"data"`, `"hybrid"`, `"semi_auto"` or `"auto"`.
        pinned: the degrees that the user gave, by axis; with `"auto"` the others are free.
        reduce: `"mean"` or `"sum"` of the ranks' gradients, the same on every framework.
        fallback: take the nearest mode that can run, and say so, instead of an error.
        options: framework-specific options, refused by name when unknown.
    """

    plan: ParallelPlan
    mode: str
    pinned: Mapping[str, int] = attrs.field(factory=dict)
    reduce: Reduce = "mean"
    fallback: bool = False
    options: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class ExecutionSpec:
    """An execution mode to be prepared.

    Attributes:
        mode: `"eager"` or `"graph"`.
        framework: whose mode; `"torch"`, `"mindspore"`, `"vllm"`.
        fallback: take eager, and say so, where graph cannot run, instead of an error.
        options: framework-specific options, refused by name when unknown.
    """

    mode: str = attrs.field()
    framework: str = "auto"
    fallback: bool = False
    options: Mapping[str, Any] = attrs.field(factory=dict)

    @mode.validator
    def _known(self, attribute: object, value: str) -> None:
        if value not in ("eager", "graph"):
            raise ExecutionModeError(f"execution mode is {value!r}; it is 'eager' or 'graph'")


@attrs.frozen(kw_only=True, eq=False)
class GraphSpec:
    """A function whose way into a graph is to be checked.

    Attributes:
        framework: whose graph mode.
        function: a function or a model; args, kwargs: what to call it with, once.
    """

    framework: str
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True, eq=False)
class ComparisonSpec:
    """A function to be run in both modes.

    Attributes:
        framework: whose modes.
        function: a function or a model; args, kwargs: what to call it with.
        repeat: timed pairs of calls, at least 1.
        gradients: compare gradients too.
        options: options of graph mode, refused by name when unknown.
    """

    framework: str
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    repeat: int = 10
    gradients: bool = False
    options: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Accelerator:
    """What one end knows of the device that its weights are on. Devices go by UUID, never by index.

    Attributes:
        device: the one that the weights are on; `""`: none that could be used.
        reads: those whose memory it can read, itself among them.
        sees: those that the process sees.
        fused: whether copies go by one kernel.
        obstacles: why other processes cannot read its memory, nor it theirs; empty if they can.
    """

    device: str = ""
    reads: tuple[str, ...] = ()
    sees: tuple[str, ...] = ()
    fused: bool = False
    obstacles: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class HostIdentity:
    """Where a process runs, as far as it decides which memory another process can reach.

    Attributes:
        boot_id: identity of the running kernel, equal for all processes of one machine.
        uid: effective user id.
        pid: process id in its own namespace.
        pid_namespace, net_namespace, ipc_namespace: inode numbers, 0 where unknown.
        accelerator: of its weights; None where they are in host memory, or come and go by it.
    """

    boot_id: str
    uid: int
    pid: int
    pid_namespace: int = 0
    net_namespace: int = 0
    ipc_namespace: int = 0
    accelerator: Accelerator | None = None


@attrs.frozen(kw_only=True)
class TransportRequest:
    """Two ends that want to move weights.

    Attributes:
        publisher, subscriber: identities of both ends; subscriber None while only listing.
        device: device type of the weights, `"cpu"` or `"cuda"`, ...
        requested: a transport's name, or `"auto"`.
        host: address of the interface that the publisher's control channel listens on, IPv6 in
            brackets; loopback reaches processes of the same host (and network) only.
    """

    publisher: HostIdentity
    subscriber: HostIdentity | None = None
    device: str = "cpu"
    requested: str = "auto"
    host: str = "127.0.0.1"


@attrs.frozen(kw_only=True)
class TransportCandidate:
    """One way to move the bytes.

    Attributes:
        name: `"shm"`, `"tcp"`, `"cuda_ipc"`, ...
        reach: can it connect the two ends.
        cost: estimated seconds for a gigabyte; lower wins.
        reason: one sentence for `explain()`.
        publish_options: names of the options of `publish_weights` that are for it; None where it
            does not tell, so that none can be refused as unknown.
        subscribe_options: the same of `subscribe_weights`.
        lane: `"host"`: bytes go by way of an arena in host memory; `"device"`: members read the
            publisher's weights where they lie, on a device.
        in_place: whether it is so fast that `commit="auto"` reads straight into live memory.
    """

    name: str
    reach: bool
    cost: float
    reason: str
    publish_options: tuple[str, ...] | None = None
    subscribe_options: tuple[str, ...] | None = None
    lane: Literal["host", "device"] = "host"
    in_place: bool = False


@attrs.frozen(kw_only=True)
class TransportSpec:
    """One publisher rank's end of a transport, to be opened.

    Attributes:
        name: the transport chosen.
        manifest: what will be moved.
        nbytes: bytes of this rank's arena.
        run_id: 16 bytes that name this publisher's life.
        rank: the publisher's rank that opens it.
        secret: 32 bytes that the publisher's ranks share and no subscriber sees; passes for
            connecting are made from it (`parallelkit.weights.passes`).
        host: address of the interface to listen on, where the transport listens at all.
        memory: an arena to serve from, which another transport of this rank has made; None to
            make one.
        options: transport-specific options.
    """

    name: str
    manifest: Manifest
    nbytes: int
    run_id: bytes
    rank: int = 0
    secret: bytes = attrs.field(default=b"", repr=False)
    host: str = "127.0.0.1"
    memory: memoryview | None = attrs.field(default=None, repr=False)
    options: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True, eq=False)
class DeviceSpec:
    """One publisher rank's end of a transport that reads weights where they lie.

    Attributes:
        name: the transport chosen.
        source: what is published; it has been looked at (`begin`, or `look`) already.
        parts: indexes of the unique tensors of which this rank hands its part out, ascending.
        rank: the publisher's rank that opens it.
        secret: as in `TransportSpec`.
    """

    name: str
    source: DeviceSource
    parts: tuple[int, ...]
    rank: int = 0
    secret: bytes = attrs.field(default=b"", repr=False)


@attrs.frozen(kw_only=True)
class EngineCommit:
    """What an inference engine did to put a version in place, as its client measured it.

    Attributes:
        pause_seconds: for how long it generated nothing.
        cache: what became of keys and values computed with the old weights: `reset` or `kept`.
        weight_version: what the engine says that it serves now, as text; "" if it cannot say.
        notes: anything the reader of the report should know.
    """

    pause_seconds: float
    cache: str
    weight_version: str = ""
    notes: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class LaunchSpec:
    """A script to be started on several ranks of this host.

    Attributes:
        framework: whose launcher.
        ranks: how many processes.
        script: path of the script; args: its arguments.
        python: interpreter to use.
    """

    framework: str
    ranks: int
    script: str
    args: tuple[str, ...] = ()
    python: str = "python"


@attrs.frozen(kw_only=True)
class DemoSpec:
    """Settings of `parallelkit demo`.

    Attributes:
        framework: whose demo.
        seed: seeds the model, the data order and the sampling; same seed, same run.
        steps: optimiser steps; every: steps between two updates of the follower.
        ranks: trainer processes.
        output: path of the HTML report.
        engine: what follows: `module`, the same model in a process of its own; `vllm`, a vLLM
            server; `auto`, vLLM where this Python has it or `engine_python` is given, else module.
        engine_python: the Python that runs the engine; empty: this one, or the one that the
            variable `PARALLELKIT_VLLM_PYTHON` names.
    """

    framework: str = "auto"
    seed: int = 0
    steps: int = 300
    every: int = 50
    ranks: int = 2
    output: str = "report.html"
    engine: str = "auto"
    engine_python: str = ""


@attrs.frozen(kw_only=True)
class Section:
    """One section of `parallelkit doctor`.

    Attributes:
        title: heading.
        facts: name to value, shown as a table and exported as JSON.
        ok: False if something here keeps the plugin from working.
    """

    title: str
    facts: Mapping[str, str]
    ok: bool = True
