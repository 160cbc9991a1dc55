"""What vllm-ascend's side expects, and what it cannot take, told before anything is sent."""

from __future__ import annotations

import ctypes
import pickle
import pickletools
import random
import socket
import sys
import types

import pytest
from parallelkit_hccl import abi, compat
from parallelkit_hccl.errors import HcclArgumentError, HcclTimeoutError, PackingError, RootInfoError
from parallelkit_hccl.packing import Packing

from parallelkit.weights.manifest import TensorSpec

INFO = random.Random(3).randbytes(4108)


@pytest.fixture
def their_class(monkeypatch):
    """A class of their name, defined as theirs is."""
    module, name = compat.STRUCTURE
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        monkeypatch.setitem(sys.modules, path, types.ModuleType(path))
    fields = {"_fields_": [("internal", ctypes.c_byte * 4108)], "__module__": module}
    made = type(name, (ctypes.Structure,), fields)
    setattr(sys.modules[module], name, made)
    return made


def test_the_message_becomes_their_structure(their_class):
    made = pickle.loads(compat.root_info_message(INFO))  # noqa: S301 - what their side does
    assert type(made) is their_class
    assert bytes(made) == INFO
    assert vars(made) == {}


def test_the_message_says_what_pickling_theirs_says(their_class):
    """The same instructions as Python's own, those for remembering objects left out."""

    def instructions(data: bytes) -> list[tuple[str, object]]:
        remembering = {"BINPUT", "LONG_BINPUT", "MEMOIZE", "PUT"}
        steps = pickletools.genops(data)
        return [(op.name, arg) for op, arg, _ in steps if op.name not in remembering]

    theirs = pickle.dumps(their_class.from_buffer_copy(INFO), protocol=3)
    assert instructions(compat.root_info_message(INFO)) == instructions(theirs)


def test_the_message_names_two_globals_and_no_more():
    found = [
        arg
        for op, arg, _ in pickletools.genops(compat.root_info_message(INFO))
        if "GLOBAL" in op.name
    ]
    assert found == ["_ctypes _unpickle", " ".join(compat.STRUCTURE)]


@pytest.mark.parametrize("info", [b"", bytes(4107), bytes(4109), bytearray(4108), None, "x" * 4108])
def test_a_root_info_of_another_size_is_refused(info):
    with pytest.raises(RootInfoError, match="4108"):
        compat.root_info_message(info)


def test_the_exchange_writes_one_key():
    class Store(dict):
        def set(self, key: str, value: bytes) -> None:
            self[key] = value

    store = Store()
    give = compat.exchange(store)
    assert give(INFO, 1.0) == INFO
    assert store == {"broadcast_from/0/0": compat.root_info_message(INFO)}
    with pytest.raises(RootInfoError, match="only rank 0"):
        give(None, 1.0)


def spec(name: str, dtype: str, *shape: int) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def test_update_info():
    specs = [spec("a", "bfloat16", 2, 3), spec("b", "float32", 4)]
    plain = {
        "names": ["a", "b"],
        "dtype_names": ["bfloat16", "float32"],
        "shapes": [[2, 3], [4]],
        "packed": False,
    }
    assert compat.update_info(specs) == plain
    assert compat.update_info(specs, Packing(buffer_bytes=5, buffers=3)) == {
        **plain,
        "packed": True,
        "packed_buffer_size_bytes": 5,
        "packed_num_buffers": 3,
    }
    assert compat.init_info("10.0.0.1", 4000, 3) == {
        "master_address": "10.0.0.1",
        "master_port": 4000,
        "rank_offset": 1,
        "world_size": 3,
    }


@pytest.mark.parametrize("dtype", ["bool", "float8_e4m3fn", "uint16", "complex64"])
def test_dtypes_that_travel_packed_only(dtype):
    specs = [spec("odd one", dtype, 4)]
    with pytest.raises(PackingError, match=rf"'odd one' \({dtype}\).*Send them packed"):
        compat.update_info(specs)
    assert compat.update_info(specs, Packing())["packed"]


def test_scalars_travel_unpacked_only():
    specs = [spec("temperature", "float32")]
    with pytest.raises(PackingError, match="'temperature'.*scalars.*unpacked"):
        compat.update_info(specs, Packing())
    assert not compat.update_info(specs)["packed"]


def test_what_would_be_misaligned_is_refused_and_named():
    specs = [spec("odd", "uint8", 3), *(spec(f"w{i}", "float32", 2) for i in range(7))]
    with pytest.raises(PackingError, match=r"'w0'.*'w4' and 2 more: they begin in a buffer where"):
        compat.update_info(specs, Packing())
    assert compat.update_info([*specs[1:], specs[0]], Packing())["packed"]


def test_why_their_side_cannot_take_these():
    """The reasons are torch's, on any device."""
    torch = pytest.importorskip("torch")
    _, shifted = torch.zeros(11, dtype=torch.uint8).split([3, 8])
    with pytest.raises(RuntimeError, match="storage_offset"):
        shifted.contiguous().view(torch.float32)
    scalar = torch.zeros(4, dtype=torch.uint8).view(torch.float32)
    with pytest.raises(TypeError):
        scalar.view(*[])


@pytest.mark.parametrize("port", [0, -1, 65536, "4000", None, True, 1.5])
def test_a_port_that_cannot_be(port):
    with pytest.raises(HcclArgumentError, match="port is"):
        compat.open_store("127.0.0.1", port, 2)


def test_an_address_that_is_not_here():
    pytest.importorskip("torch")
    with pytest.raises(HcclArgumentError, match="cannot listen at 192.0.2.1:4000"):
        compat.open_store("192.0.2.1", 4000, 2)


def test_their_dtypes_are_a_part_of_ours():
    assert set(abi.DTYPES) > compat.PEER_DTYPES


def test_workers_that_do_not_connect():
    pytest.importorskip("torch")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(
        HcclTimeoutError, match=f"not all of 2 workers connected to 127.0.0.1:{port}"
    ):
        compat.open_store("127.0.0.1", port, 3, timeout=0.5)
