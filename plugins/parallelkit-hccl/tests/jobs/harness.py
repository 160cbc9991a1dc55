"""What every job needs: who it is, a way to leave notes for the others, tensors in plain memory."""

from __future__ import annotations

import ctypes
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parallelkit_hccl import (
    DeviceTensor,
    Exchange,
    HcclCommunicator,
    RootInfoServer,
    RootInfoTicket,
)

from parallelkit.weights.manifest import TensorSpec

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FOLDER, ARGS = Path(sys.argv[1]), sys.argv[2:]
SECONDS = 100.0


def note(name: str, text: str) -> None:
    """Leave a note for the others, whole or not at all."""
    part = FOLDER / f"{name}.part"
    part.write_text(text)
    part.rename(FOLDER / name)


def read(name: str) -> str:
    """Wait for a note."""
    deadline = time.monotonic() + SECONDS
    while not (FOLDER / name).exists():
        assert time.monotonic() < deadline, f"nobody left the note {name}"
        time.sleep(0.01)
    return (FOLDER / name).read_text()


def exchange(label: str = "ticket") -> Exchange:
    """This rank's end of the rendezvous."""
    if RANK == 0:
        server = RootInfoServer(WORLD)
        note(label, server.ticket)

        def serve(root_info: bytes | None, seconds: float) -> bytes:
            with server:
                return server(root_info, seconds)

        return serve
    return RootInfoTicket(read(label), RANK, WORLD)


def opened(label: str = "ticket", timeout: float = SECONDS) -> HcclCommunicator:
    """A communicator of all ranks."""
    return HcclCommunicator(RANK, WORLD, exchange(label), device=RANK, timeout=timeout)


class Memory:
    """Tensors in buffers of this process, which the fake library takes for device memory."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self.buffers = [ctypes.create_string_buffer(max(1, spec.nbytes)) for spec in specs]
        self.tensors = [
            DeviceTensor(spec, ctypes.addressof(buffer) if spec.nbytes else 0)
            for spec, buffer in zip(specs, self.buffers, strict=True)
        ]

    def fill(self, seed: int) -> None:
        for tensor, buffer in zip(self.tensors, self.buffers, strict=True):
            size = tensor.spec.nbytes
            data = random.Random(f"{seed} {tensor.spec.name}").randbytes(size)
            ctypes.memmove(buffer, data, size)

    def bytes(self) -> list[bytes]:
        pairs = zip(self.tensors, self.buffers, strict=True)
        return [buffer.raw[: tensor.spec.nbytes] for tensor, buffer in pairs]


def spec(name: str, dtype: str, *shape: int) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def live() -> int:
    """What the fake library gave and did not get back."""
    library: Any = ctypes.CDLL(os.environ["HCCL_SO_PATH"])
    return int(library.fakehccl_live())
