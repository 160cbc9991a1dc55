"""Between frameworks, and to a peer that acts as vllm-ascend's worker does."""

from __future__ import annotations

import socket
from importlib.util import find_spec

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
