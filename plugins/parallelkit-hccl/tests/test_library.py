"""Libraries are found, typed and checked; what is missing is named."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest
from parallelkit_hccl.errors import HcclError, HcclTimeoutError, HcclUnavailableError
from parallelkit_hccl.library import ACL_PATH, HCCL_PATH, Library, path_of

from parallelkit.errors import TransportError


@pytest.fixture
def library(fake: str) -> Library:
    return Library(fake, fake)


def test_paths():
    assert path_of(HCCL_PATH, {}) == "libhccl.so"
    assert path_of(ACL_PATH, {"ASCENDCL_SO_PATH": ""}) == "libascendcl.so"
    assert path_of(HCCL_PATH, {"HCCL_SO_PATH": "/x/libhccl.so"}) == "/x/libhccl.so"


def test_load_takes_what_the_variables_name(fake):
    found = Library.load({"HCCL_SO_PATH": fake, "ASCENDCL_SO_PATH": fake})
    assert (found.hccl_path, found.acl_path) == (fake, fake)


def test_a_missing_library_is_named(fake, tmp_path):
    missing = str(tmp_path / "libhccl.so")
    with pytest.raises(HcclUnavailableError, match=r"libhccl.so cannot be loaded.*HCCL_SO_PATH"):
        Library(missing, fake)
    with pytest.raises(HcclUnavailableError, match=r"cannot be loaded.*ASCENDCL_SO_PATH"):
        Library(fake, missing)
    assert issubclass(HcclUnavailableError, TransportError)


def test_a_missing_function_is_named(fake):
    with pytest.raises(HcclUnavailableError, match="no function HcclGetRootInfo") as caught:
        Library("libc.so.6", fake)
    assert caught.value.function == "HcclGetRootInfo"


def test_what_old_libraries_lack(build, library):
    old = build("-DOLD")
    names = ("HcclGetErrorString", "aclGetRecentErrMsg", "aclrtSynchronizeStreamWithTimeout")
    assert [Library(old, old).has(name) for name in names] == [False] * 3
    assert [library.has(name) for name in names] == [True] * 3
    with pytest.raises(HcclError, match=r"code \d+ \(the library says no more\)"):
        Library(old, old).call("HcclBroadcast", None, 1, 0, 0, None, None)


def test_codes_and_their_text(library):
    with pytest.raises(HcclError, match=r"HcclBroadcast failed with code \d+ ") as caught:
        library.call("HcclBroadcast", None, 1, 0, 0, None, None)
    assert caught.value.function == "HcclBroadcast"
    assert caught.value.code in (2, 107002)  # no device in this thread, or no memory
    with pytest.raises(HcclError, match="the last error of the fake runtime"):
        library.call("aclrtSetDevice", -1)
    library.call("aclrtSetDevice", -1, accept=(107000,))


def test_a_code_that_means_too_late(library, monkeypatch):
    library._functions["aclInit"] = lambda config: 9
    with pytest.raises(HcclTimeoutError, match="aclInit failed with code 9"):
        library.call("aclInit", None)
    library._functions["aclInit"] = lambda config: 507046
    with pytest.raises(HcclTimeoutError) as caught:
        library.call("aclInit", None)
    named = caught.value.within("warming up")
    assert str(named).startswith("warming up: aclInit failed")
    assert (type(named), named.code, named.missing) == (HcclTimeoutError, 507046, ())


def test_no_handle_is_no_success(library):
    def nothing(made: object, nbytes: int, policy: int) -> int:
        return 0

    library._functions["aclrtMalloc"] = nothing
    with pytest.raises(HcclError, match="aclrtMalloc returned success and no handle"):
        library.allocate(8)


def test_wrong_types_do_not_reach_c(library):
    with pytest.raises(ctypes.ArgumentError):
        library.call("aclrtSetDevice", "0")


def test_importing_takes_no_framework_nor_numpy():
    """Nor what speaks to vllm-ascend, unless asked for."""
    code = (
        "import sys, parallelkit_hccl as h, parallelkit_hccl.plugin\n"
        "assert not {'zmq', 'parallelkit_hccl.communicator'} & set(sys.modules)\n"
        "for name in h.__all__: getattr(h, name)\n"
        "assert 'parallelkit_hccl.compat' not in sys.modules\n"
        "import parallelkit_hccl.compat\n"
        "print(sorted({'torch', 'mindspore', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
