"""Between frameworks, and to a peer that acts as vllm-ascend's worker does."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks


def need(*frameworks: str) -> None:
    """Skip where one is not installed; none is imported here."""
    for name in frameworks:
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


def test_a_mindspore_cell_arrives_in_torch(job):
    need("mindspore", "torch")
    job("cell.py")


def test_a_peer_like_vllm_ascends(job):
    need("torch")
    with socket.socket() as probe:  # the port is part of what the peer is told beforehand
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job("ascend.py", str(port))


def test_the_two_scripts_of_the_docs(fake, tmp_path):
    need("mindspore", "torch")
    text = (Path(__file__).parents[3] / "docs" / "hccl.md").read_text()
    scripts = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    paths = {"HCCL_SO_PATH": fake, "ASCENDCL_SO_PATH": fake, "GLOG_v": "3"}
    trainer, receiver = (
        subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **paths},
            cwd=tmp_path,
        )
        for script in scripts
    )
    with trainer, receiver:
        try:
            assert trainer.stdout is not None
            said, _ = receiver.communicate(trainer.stdout.readline(), timeout=120)
            report, _ = trainer.communicate(timeout=120)
        finally:
            trainer.kill()
            receiver.kill()
    assert (trainer.returncode, report) == (0, "24960 bytes in 2 broadcasts\n")
    assert (receiver.returncode, said) == (0, "True\n")
