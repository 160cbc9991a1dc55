"""Our numbers against those that vllm-ascend's binding has.

Written down by hand from `vllm_ascend/distributed/device_communicators/pyhccl_wrapper.py` at commit
2568f30273eca1bdc1b670c33f1fb3a521250dca and `pyhccl.py` at 1e263aec7e32c76187517ba13ad8601d26bd5392
of github.com/vllm-project/vllm-ascend; it cannot be installed here. The runtime's are those of
CANN's `acl/acl_rt.h` and `acl/error_codes/rt_error_codes.h`.
"""

from __future__ import annotations

import ctypes

from parallelkit_hccl import abi, compat

from parallelkit.weights.manifest import DTYPE_BYTES

THEIR_ROOT_INFO_BYTES = 4108
THEIR_DTYPES = {
    "int8": 0,
    "int16": 1,
    "int32": 2,
    "float16": 3,
    "float32": 4,
    "int64": 5,
    "uint64": 6,
    "uint8": 7,
    "uint16": 8,
    "uint32": 9,
    "float64": 10,
    "bfloat16": 11,
}
THEIR_BROADCAST_DTYPES = "int8 uint8 int32 int64 float16 float32 float64 bfloat16"
THEIR_OPERATIONS = {"sum": 0, "product": 1, "max": 2, "min": 3}
#: Bytes of each argument in order: 8 are pointers and counts, 4 are numbers.
THEIR_ARGUMENTS = {
    "HcclGetErrorString": [4],
    "HcclGetRootInfo": [8],
    "HcclCommInitRootInfo": [4, 8, 4, 8],
    "HcclAllReduce": [8, 8, 8, 4, 4, 8, 8],
    "HcclSend": [8, 8, 4, 4, 8, 8],
    "HcclRecv": [8, 8, 4, 4, 8, 8],
    "HcclBroadcast": [8, 8, 4, 4, 8, 8],
    "HcclCommDestroy": [8],
}


def test_sizes_and_numbers():
    assert ctypes.sizeof(abi.RootInfo) == abi.ROOT_INFO_BYTES == THEIR_ROOT_INFO_BYTES
    assert dict(abi.DTYPES) == THEIR_DTYPES
    assert dict(abi.REDUCE_OPS) == THEIR_OPERATIONS
    assert set(THEIR_BROADCAST_DTYPES.split()) == compat.PEER_DTYPES
    assert compat.STORE_KEY == "broadcast_from/0/0"
    assert set(abi.DTYPES) <= set(DTYPE_BYTES)


def test_signatures():
    ours = {name: [ctypes.sizeof(a) for a in args] for name, (_, args) in abi.HCCL.items()}
    assert ours == THEIR_ARGUMENTS
    results = {name for name, (result, _) in abi.HCCL.items() if result is not ctypes.c_int32}
    assert results == {"HcclGetErrorString"}


def test_the_runtimes_numbers():
    assert (abi.ACL_STREAM_TIMEOUT, abi.ACL_REPEATED_INIT, abi.HCCL_TIMEOUT) == (507046, 100002, 9)
    assert (abi.HOST_TO_DEVICE, abi.DEVICE_TO_HOST, abi.DEVICE_TO_DEVICE) == (1, 2, 3)


def test_what_is_optional_exists():
    assert set(abi.HCCL) | set(abi.ACL) > abi.OPTIONAL
