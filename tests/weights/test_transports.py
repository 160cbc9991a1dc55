"""The transports that the core brings, under the contract that every transport is tested with."""

from __future__ import annotations

from typing import ClassVar

from parallelkit.testing.conformance.transports import TransportSuite


class TestShm(TransportSuite):
    name = "shm"


class TestNamedShm(TransportSuite):
    name = "shm"
    options: ClassVar = {"named": True}
    needs_pass = False  # the file's mode decides


class TestTcp(TransportSuite):
    name = "tcp"


class TestTcpWithoutEncryption(TransportSuite):
    name = "tcp"
    options: ClassVar = {"encrypt": False}
