"""A MindSpore that records who calls it, in which order and with what, and has any device.

It stands where `import mindspore` looks, so that what is proven is what MindSpore would be given.
What it answers is what MindSpore's documentation and source say; no device ever said it.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
import types
from collections.abc import Callable
from typing import Any, Final

import mindspore as real
import msgspec
import parallelkit_mindspore
import pytest
from parallelkit_mindspore import life, native, rendezvous
from parallelkit_mindspore.parallel import existing

from parallelkit.launch import LaunchInfo
from parallelkit.meeting import Place, Star
from parallelkit.specs import GroupSpec

BACKENDS: Final = {"npu": "hccl", "cuda": "nccl"}
#: Variables that a backend reads when it starts.
WATCHED: Final = (
    "HCCL_CONNECT_TIMEOUT",
    "HCCL_EXEC_TIMEOUT",
    "MS_CPU_COMM_OP_TIMEOUT",
    "MS_TOPO_TIMEOUT",
    "RANK_TABLE_FILE",
)
DEFAULTS: Final = {"parallel_mode": "stand_alone", "device_num": 1, "global_rank": 0}


# All modules of the plugin get the real MindSpore: one that came first while the recorder stands
# there would keep it for other tests.
for _found in pkgutil.walk_packages(parallelkit_mindspore.__path__, "parallelkit_mindspore."):
    importlib.import_module(_found.name)


class Recorder:
    """Calls in order: name and arguments; and the watched variables at each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.environs: dict[str, dict[str, str]] = {}
        self.open = False  # the default group
        self.busy = False  # another device is in use
        self.context: dict[str, Any] = {"device_target": "CPU", "device_id": 0, "mode": 0}
        self.parallel: dict[str, Any] = dict(DEFAULTS)
        self.world = (0, 1)

    def note(self, name: str, *args: Any, **options: Any) -> None:
        said = (name, *args, *([options] if options else []))
        self.calls.append(said)
        self.environs.setdefault(name, {n: os.environ[n] for n in WATCHED if n in os.environ})

    @property
    def names(self) -> list[str]:
        return [call[0] for call in self.calls]

    # --- what MindSpore has

    def set_device(self, target: str, index: int = 0) -> None:
        if self.busy:
            raise RuntimeError("The 'mindspore.set_device' can not be modified.")
        self.note("set_device", target, index)
        self.context |= {"device_target": target, "device_id": index}

    def store(self, host: str, port: int, **options: Any) -> str:
        options["timeout"] = options["timeout"].total_seconds()
        self.note("TCPStore", host, port, **options)
        return "store"

    def init_with_store(self, *, timeout: Any, rank: int, world_size: int, **options: Any) -> None:
        options |= {"rank": rank, "world_size": world_size, "timeout": timeout.total_seconds()}
        self.note("_init_with_store", **options)
        self.open, self.world = True, (rank, world_size)

    def init_cluster(self, backend: str) -> None:
        self.note("init", backend)
        self.open = True
        self.world = (int(os.environ["MS_NODE_ID"]), int(os.environ["MS_WORKER_NUM"]))

    def destroy(self) -> None:
        self.note("destroy_process_group")
        self.open = False

    def all_reduce(self, x: Any, op: str, group: str) -> None:
        self.note("all_reduce", op, group)

    def set_parallel(self, **values: Any) -> None:
        self.note("set_auto_parallel_context", values)
        self.parallel |= values

    def reset_parallel(self) -> None:
        self.note("reset_auto_parallel_context")
        self.parallel = dict(DEFAULTS)

    def modules(self) -> dict[str, types.ModuleType]:
        """The modules by name, as `sys.modules` has them."""
        there = types.SimpleNamespace(is_available=lambda: True)
        frozen: dict[str, Any] = {"_GROUP_RANK_CACHE": {}, "_GROUP_SIZE_CACHE": {}}
        management = {
            "_init_with_store": self.init_with_store,
            "init": self.init_cluster,
            "get_rank": lambda *_: self.world[0],
            "get_group_size": lambda *_: self.world[1],
            "create_group": lambda name, ranks: self.note("create_group", name, ranks),
            "destroy_group": lambda name: self.note("destroy_group", name),
            "GlobalComm": types.SimpleNamespace(WORLD_COMM_GROUP="world", BACKEND="hccl"),
            "HCCL_WORLD_COMM_GROUP": "hccl_world_group",
        }
        contents: dict[str, dict[str, Any]] = {
            "mindspore": {
                "__version__": real.__version__,
                "Tensor": real.Tensor,
                "float32": real.float32,
                "int32": real.int32,
                "nn": real.nn,
                "device_context": types.SimpleNamespace(ascend=there, gpu=there, cpu=there),
                "runtime": types.SimpleNamespace(synchronize=lambda: self.note("synchronize")),
                "set_device": self.set_device,
                "get_context": self.context.__getitem__,
                "GRAPH_MODE": 0,
                "set_auto_parallel_context": self.set_parallel,
                "get_auto_parallel_context": self.parallel_value,
                "reset_auto_parallel_context": self.reset_parallel,
            },
            "mindspore.communication": management,
            "mindspore.communication.management": management,
            "mindspore.mint.distributed": {
                "TCPStore": self.store,
                "is_initialized": lambda: self.open,
                "destroy_process_group": self.destroy,
                "all_reduce": self.all_reduce,
            },
            "mindspore.mint.distributed.distributed": frozen,
            "mindspore.ops": {
                "AllReduce": lambda op, group: lambda x: self.all_reduce(x, op, group)
            },
        }
        made = {}
        for name, content in contents.items():
            made[name] = types.ModuleType(name)
            vars(made[name]).update(content)
        return made

    def parallel_value(self, name: str) -> Any:
        return self.parallel.get(name)


class Ranks(Star):
    """The connections to ranks that are not there: all of them agree, and rank 0 says where."""

    def exchange(self, what: str, words: bytes = b"", timeout: float | None = None) -> list[bytes]:
        return [words if rank == self.rank else b"" for rank in range(self.world_size)]

    def send_bytes(self, what: str, data: bytes, src: int, *limits: Any) -> bytes:
        if self.rank == src:
            return data
        return msgspec.msgpack.encode(Place("10.0.0.1", 40001, ""))

    def agree(self, what: str, timeout: float | None = None) -> None: ...
    def leave(self, wait: float = 0.0, *, linger: bool = False) -> None: ...


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """MindSpore is this recorder for the test, and ranks meet nobody."""
    made = Recorder()
    existing.retire_steps()  # other files of tests make steps where they are collected
    for name in WATCHED:
        monkeypatch.delenv(name, raising=False)
    for name, module in made.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(life, "_state", "none")
    monkeypatch.setattr(
        rendezvous,
        "meet",
        lambda spec, **_: Ranks(spec.rank, spec.world_size, spec.timeout, "127.0.0.1:40000"),
    )
    return made


@pytest.fixture
def spec_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., GroupSpec]:
    """What core makes of a launcher's environment, which is also the process's own."""

    def make(environ: dict[str, str], kind: str = "npu", timeout: float = 90.0) -> GroupSpec:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        launch = LaunchInfo.from_environ(environ)
        monkeypatch.setattr(native, "backend", lambda: BACKENDS[kind])
        return GroupSpec(
            framework="mindspore",
            backend=BACKENDS[kind],
            device=f"{kind}:{launch.local_rank}",
            rank=launch.rank,
            world_size=launch.world_size,
            local_rank=launch.local_rank,
            local_world_size=launch.local_world_size,
            master_addr=launch.master_addr,
            master_port=launch.master_port,
            timeout=timeout,
            launch=launch,
        )

    return make
