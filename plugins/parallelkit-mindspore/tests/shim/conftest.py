"""The library that stands in for a device's backend: built once, in a folder of the tests' own."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

DEADLINE = 180.0  # seconds; a busy machine needs some of them


@pytest.fixture(scope="session")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of the built library; skips where it cannot be built."""
    spec = importlib.util.find_spec("mindspore")
    assert spec is not None
    assert spec.origin is not None
    wheel = Path(spec.origin).parent
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++, to build a stand-in of a device's communicator")
    include = wheel / "include" / "mindspore"
    if not (include / "ccsrc" / "include" / "utils" / "comm_manager.h").exists():
        pytest.skip("needs MindSpore's C++ headers, which this wheel does not have")
    folder = tmp_path_factory.mktemp("planned")
    stub = folder / "stub" / "include"  # a header that the wheel's own include and lack
    stub.mkdir(parents=True)
    (stub / "securec.h").touch()
    library = folder / "libplanned.so"
    roots = ("ccsrc", "core/include", "core", "..", ".")
    command = [
        compiler,
        *("-std=c++17", "-shared", "-fPIC", "-O1"),
        "-D_GLIBCXX_USE_CXX11_ABI=0",  # as the wheel was built
        f"-I{stub.parent}",
        *(f"-I{include / root}" for root in roots),
        str(Path(__file__).parent / "planned.cc"),
        f"-L{wheel / 'lib'}",
        *("-l:libmindspore_common.so", "-l:libmindspore_core.so"),
        f"-Wl,-rpath,{wheel / 'lib'}",
        *("-o", str(library)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return library
