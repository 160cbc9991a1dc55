"""vllm-ascend's side of the engine `hccl`, played by a process of torch and ctypes alone.

What rank 1 does was read in its sources: the store, the key, the pickled structure, the order of
calls of its binding, the buffers of a packed update. It cannot be installed here.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import sys
import types
from datetime import timedelta
from typing import Any

import harness as h
from parallelkit_hccl import HcclCommunicator, Packing, compat

PORT = int(h.ARGS[0])
SPECS = [
    h.spec("wide", "float32", 50, 3),
    h.spec("a", "bfloat16", 33, 7),
    h.spec("b", "bfloat16", 129),
    h.spec("bytes", "uint8", 77),
]
SMALL = Packing(buffer_bytes=700)


def trainer() -> None:
    store = compat.open_store("127.0.0.1", PORT, 2, timeout=h.SECONDS)
    memory = h.Memory(SPECS)
    with HcclCommunicator(0, 2, compat.exchange(store), timeout=h.SECONDS) as communicator:
        for number, packing in enumerate((None, SMALL, Packing())):
            memory.fill(number)
            update = compat.update_info([t.spec for t in memory.tensors], packing)
            h.note(f"update{number}", json.dumps(update))
            compat.sender(communicator, packing).send(memory.tensors)
        h.read("done")


class Structure(ctypes.Structure):
    """Stands for their class; found by the name in the message."""

    _fields_ = (("internal", ctypes.c_byte * 4108),)


def worker() -> None:
    import torch
    from torch.distributed import TCPStore

    module, name = compat.STRUCTURE
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        sys.modules[path] = types.ModuleType(path)
    setattr(sys.modules[module], name, Structure)

    wait = timedelta(seconds=h.SECONDS)
    store = TCPStore("127.0.0.1", PORT, 2, is_master=False, timeout=wait, use_libuv=False)
    info = pickle.loads(store.get("broadcast_from/0/0"))  # noqa: S301 - as they do
    assert type(info) is Structure

    lib: Any = ctypes.CDLL(os.environ["HCCL_SO_PATH"])
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    lib.HcclAllReduce.argtypes = [pointer, pointer, size, *[ctypes.c_int] * 2, pointer, pointer]
    lib.HcclBroadcast.argtypes = [pointer, size, *[ctypes.c_int] * 2, pointer, pointer]
    assert lib.aclInit(None) == 0
    assert lib.aclrtSetDevice(1) == 0
    comm = pointer()
    assert lib.HcclCommInitRootInfo(2, ctypes.byref(info), 1, ctypes.byref(comm)) == 0
    data, out = torch.zeros(1), torch.empty(1)
    assert lib.HcclAllReduce(data.data_ptr(), out.data_ptr(), 1, 4, 0, comm, None) == 0
    numbers = {torch.uint8: 7, torch.float32: 4, torch.bfloat16: 11}

    def broadcast(x: torch.Tensor) -> None:
        assert lib.HcclBroadcast(x.data_ptr(), x.numel(), numbers[x.dtype], 0, comm, None) == 0

    def single(update: dict[str, Any]) -> list[torch.Tensor]:
        rows = zip(update["dtype_names"], update["shapes"], strict=True)
        got = [torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in rows]
        for x in got:
            broadcast(x)
        return got

    def packed(update: dict[str, Any]) -> list[torch.Tensor]:
        rows = list(zip(update["dtype_names"], update["shapes"], strict=True))
        got = []
        while rows:
            taken, total = [], 0
            while rows and total <= update["packed_buffer_size_bytes"]:
                dtype, shape = getattr(torch, rows[0][0]), rows.pop(0)[1]
                taken.append((dtype, shape, dtype.itemsize * torch.Size(shape).numel()))
                total += taken[-1][2]
            buffer = torch.empty(total, dtype=torch.uint8)
            broadcast(buffer)
            parts = buffer.split([size for *_, size in taken])
            pairs = zip(taken, parts, strict=True)
            got += [part.view(dtype).view(*shape) for (dtype, shape, _), part in pairs]
        return got

    expected = h.Memory(SPECS)
    for number, receive in enumerate((single, packed, packed)):
        update = json.loads(h.read(f"update{number}"))
        assert update["names"] == [spec.name for spec in SPECS]
        assert update["packed"] == (receive is packed)
        expected.fill(number)
        got = [x.reshape(-1).view(torch.uint8).numpy().tobytes() for x in receive(update)]
        assert got == expected.bytes(), number
    assert lib.HcclCommDestroy(comm) == 0
    h.note("done", "")


trainer() if h.RANK == 0 else worker()
assert h.live() == 0
