"""libhccl and libascendcl by ctypes: found, typed, and every returned code checked."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection, Mapping
from typing import Any, Final

from parallelkit_hccl import abi
from parallelkit_hccl.errors import HcclError, HcclTimeoutError, HcclUnavailableError

#: Variable that holds a library's path, and its name where the variable is not set.
HCCL_PATH: Final = ("HCCL_SO_PATH", "libhccl.so")
ACL_PATH: Final = ("ASCENDCL_SO_PATH", "libascendcl.so")

_TIMEOUTS: Final = frozenset({abi.HCCL_TIMEOUT, abi.ACL_STREAM_TIMEOUT})


class Library:
    """The functions of both libraries. Calls block as C does, and release the interpreter's lock.

    Attributes:
        hccl_path, acl_path: where they were loaded from.
    """

    def __init__(self, hccl_path: str, acl_path: str) -> None:
        """Load both; see `load` for the usual places.

        Raises:
            HcclUnavailableError: a library cannot be loaded, or a function is not in it.
        """
        self.hccl_path, self.acl_path = hccl_path, acl_path
        self._functions = {
            **_functions(hccl_path, HCCL_PATH[0], abi.HCCL),
            **_functions(acl_path, ACL_PATH[0], abi.ACL),
        }

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None) -> Library:
        """Load what `HCCL_SO_PATH` and `ASCENDCL_SO_PATH` name, else what the loader finds.

        Raises:
            HcclUnavailableError: a library cannot be loaded, or a function is not in it.
        """
        return cls(path_of(HCCL_PATH, environ), path_of(ACL_PATH, environ))

    def has(self, name: str) -> bool:
        """Whether an optional function is there."""
        return name in self._functions

    def call(self, name: str, *args: Any, accept: Collection[int] = ()) -> None:
        """Call a function that returns a code.

        Args:
            accept: codes that are no failure, besides 0.

        Raises:
            HcclTimeoutError: the code says that it took too long.
            HcclError: any other code; with its text.
        """
        code = int(self._functions[name](*args))
        if code == 0 or code in accept:
            return
        kind = HcclTimeoutError if code in _TIMEOUTS else HcclError
        raise kind(
            f"{name} failed with code {code} ({self._text(name, code)})", function=name, code=code
        )

    def root_info(self) -> bytes:
        """Make the bytes that name a new communicator, of which this process is rank 0."""
        made = abi.RootInfo()
        self.call("HcclGetRootInfo", ctypes.byref(made))
        return bytes(made)

    def join(self, world_size: int, root_info: bytes, rank: int) -> int:
        """Make a communicator; blocks until every rank calls it. Returns its handle."""
        info, made = abi.RootInfo.from_buffer_copy(root_info), ctypes.c_void_p()
        self.call("HcclCommInitRootInfo", world_size, ctypes.byref(info), rank, ctypes.byref(made))
        return _handle("HcclCommInitRootInfo", made)

    def stream(self) -> int:
        """Make a stream on this thread's device. Returns its handle."""
        made = ctypes.c_void_p()
        self.call("aclrtCreateStream", ctypes.byref(made))
        return _handle("aclrtCreateStream", made)

    def allocate(self, nbytes: int) -> int:
        """Allocate device memory. Returns its address."""
        made = ctypes.c_void_p()
        self.call("aclrtMalloc", ctypes.byref(made), nbytes, abi.HUGE_FIRST)
        return _handle("aclrtMalloc", made)

    def synchronize(self, stream: int, milliseconds: int) -> None:
        """Wait until the stream is done; without end where the library knows no timeout."""
        if self.has("aclrtSynchronizeStreamWithTimeout"):
            self.call("aclrtSynchronizeStreamWithTimeout", stream, milliseconds)
        else:
            self.call("aclrtSynchronizeStream", stream)

    def _text(self, name: str, code: int) -> str:
        explain = "HcclGetErrorString" if name in abi.HCCL else "aclGetRecentErrMsg"
        args = (code,) if name in abi.HCCL else ()
        said = self._functions[explain](*args) if self.has(explain) else None
        return said.decode(errors="replace").strip() if said else "the library says no more"


def path_of(place: tuple[str, str], environ: Mapping[str, str] | None = None) -> str:
    """Where a library is taken from; `place` is `HCCL_PATH` or `ACL_PATH`."""
    variable, name = place
    return (os.environ if environ is None else environ).get(variable) or name


def _functions(
    path: str, variable: str, signatures: Mapping[str, tuple[Any, tuple[Any, ...]]]
) -> dict[str, Any]:
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise HcclUnavailableError(
            f"{path} cannot be loaded: {error}. On a machine with an Ascend NPU source CANN's "
            f"set_env.sh, or set {variable} to the library's path"
        ) from error
    found = {}
    for name, (result, arguments) in signatures.items():
        try:
            function = library[name]
        except AttributeError:
            if name in abi.OPTIONAL:
                continue
            raise HcclUnavailableError(
                f"{path} has no function {name}: it is another library, or one of an older CANN. "
                f"Set {variable} to the right one",
                function=name,
            ) from None
        function.restype, function.argtypes = result, list(arguments)
        found[name] = function
    return found


def _handle(function: str, made: ctypes.c_void_p) -> int:
    if made.value is None:
        raise HcclError(f"{function} returned success and no handle", function=function)
    return made.value
