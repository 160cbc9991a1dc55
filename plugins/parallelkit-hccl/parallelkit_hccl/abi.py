"""HCCL's and AscendCL's C interface as far as it is used: sizes, numbers, signatures.

Sources: `hccl/hccl.h`, `hccl/hccl_types.h` and `acl/acl_rt.h` of CANN. A test compares them with
what vllm-ascend's own binding (`pyhccl_wrapper.py`) has. Never run on an NPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, Final

#: Bytes of `HcclRootInfo`, which names a communicator that is to be made.
ROOT_INFO_BYTES: Final = 4108

#: `HcclDataType` by our names of dtypes.
DTYPES: Final[Mapping[str, int]] = {
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

#: `HcclReduceOp` by our names of operations.
REDUCE_OPS: Final[Mapping[str, int]] = {"sum": 0, "product": 1, "max": 2, "min": 3}

#: `HcclResult` and `aclError` values that mean "took too long".
HCCL_TIMEOUT: Final = 9
ACL_STREAM_TIMEOUT: Final = 507046
#: `aclError` of a second `aclInit`: a framework in this process was first.
ACL_REPEATED_INIT: Final = 100002

#: `aclrtMemcpyKind`.
HOST_TO_DEVICE: Final = 1
DEVICE_TO_HOST: Final = 2
DEVICE_TO_DEVICE: Final = 3
#: `aclrtMemMallocPolicy`: huge pages where there are any.
HUGE_FIRST: Final = 0


class RootInfo(ctypes.Structure):
    """`HcclRootInfo`: opaque bytes."""

    _fields_ = (("internal", ctypes.c_byte * ROOT_INFO_BYTES),)


_int, _size, _pointer = ctypes.c_int32, ctypes.c_uint64, ctypes.c_void_p
_out = ctypes.POINTER(ctypes.c_void_p)
_root = ctypes.POINTER(RootInfo)
_rank = ctypes.c_uint32
_text = ctypes.c_char_p

#: Functions of libhccl: the type of the result and those of the arguments.
HCCL: Final[Mapping[str, tuple[Any, tuple[Any, ...]]]] = {
    "HcclGetErrorString": (_text, (_int,)),
    "HcclGetRootInfo": (_int, (_root,)),
    # ranks, root info, rank, communicator (out)
    "HcclCommInitRootInfo": (_int, (_rank, _root, _rank, _out)),
    # send, receive, count, dtype, operation, communicator, stream
    "HcclAllReduce": (_int, (_pointer, _pointer, _size, _int, _int, _pointer, _pointer)),
    # buffer, count, dtype, root, communicator, stream
    "HcclBroadcast": (_int, (_pointer, _size, _int, _rank, _pointer, _pointer)),
    # buffer, count, dtype, peer, communicator, stream
    "HcclSend": (_int, (_pointer, _size, _int, _rank, _pointer, _pointer)),
    "HcclRecv": (_int, (_pointer, _size, _int, _rank, _pointer, _pointer)),
    "HcclCommDestroy": (_int, (_pointer,)),
}

#: Functions of libascendcl.
ACL: Final[Mapping[str, tuple[Any, tuple[Any, ...]]]] = {
    "aclInit": (_int, (_text,)),
    "aclGetRecentErrMsg": (_text, ()),
    "aclrtSetDevice": (_int, (_int,)),
    "aclrtCreateStream": (_int, (_out,)),
    "aclrtDestroyStream": (_int, (_pointer,)),
    "aclrtSynchronizeStream": (_int, (_pointer,)),
    # stream, milliseconds
    "aclrtSynchronizeStreamWithTimeout": (_int, (_pointer, _int)),
    # pointer (out), bytes, policy
    "aclrtMalloc": (_int, (_out, _size, _int)),
    "aclrtFree": (_int, (_pointer,)),
    # target, its bytes, source, bytes, kind
    "aclrtMemcpy": (_int, (_pointer, _size, _pointer, _size, _int)),
    "aclrtMemcpyAsync": (_int, (_pointer, _size, _pointer, _size, _int, _pointer)),
}

#: What older libraries may lack, and is done without or in another way.
OPTIONAL: Final = frozenset(
    {
        "HcclGetErrorString",
        "HcclSend",
        "HcclRecv",
        "aclGetRecentErrMsg",
        "aclrtSynchronizeStreamWithTimeout",
    }
)
