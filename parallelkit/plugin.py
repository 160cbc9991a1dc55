"""The one import of plugin authors.

A plugin is a module or an instance with hook implementations, named by an entry point in the
group `parallelkit.plugins`, that states the API version it was written for:

    from parallelkit.plugin import Candidate, hookimpl

    parallelkit_api = 1

    @hookimpl
    def parallelkit_probe(request):
        return Candidate(name="mine", framework="mine", score=10, reason="installed")

Compatibility: within one `API_VERSION`, hooks and spec fields are only added, each with a
default. What is to go is announced in the changelog and warned about for two minor releases. A
plugin that states another major version is not called at all; the report shows both numbers.
"""

from __future__ import annotations

from parallelkit import errors
from parallelkit.graphs import Difference, GraphBreak, GraphReport, ModeComparison
from parallelkit.hookspecs import hookimpl
from parallelkit.launch import LaunchInfo
from parallelkit.protocols import (
    DeviceCopier,
    DevicePublisher,
    DeviceSink,
    DeviceSource,
    DeviceSubscriber,
    EngineClient,
    ExecutionMode,
    FiniteSink,
    LoaderSink,
    LocatedSink,
    NetworkTransport,
    ParallelContext,
    ProcessGroup,
    PublisherTransport,
    SubscriberTransport,
    ThreadBoundClient,
    WeightSink,
    WeightSource,
)
from parallelkit.specs import (
    Accelerator,
    Candidate,
    ComparisonSpec,
    ContextSpec,
    DemoSpec,
    DeviceSpec,
    EngineCommit,
    ExecutionSpec,
    GraphSpec,
    GroupSpec,
    HostIdentity,
    LaunchSpec,
    ProbeRequest,
    Section,
    TransportCandidate,
    TransportRequest,
    TransportSpec,
)
from parallelkit.weights.manifest import Manifest, TensorSpec

API_VERSION = 1

__all__ = [
    "API_VERSION",
    "Accelerator",
    "Candidate",
    "ComparisonSpec",
    "ContextSpec",
    "DemoSpec",
    "DeviceCopier",
    "DevicePublisher",
    "DeviceSink",
    "DeviceSource",
    "DeviceSpec",
    "DeviceSubscriber",
    "Difference",
    "EngineClient",
    "EngineCommit",
    "ExecutionMode",
    "ExecutionSpec",
    "FiniteSink",
    "GraphBreak",
    "GraphReport",
    "GraphSpec",
    "GroupSpec",
    "HostIdentity",
    "LaunchInfo",
    "LaunchSpec",
    "LoaderSink",
    "LocatedSink",
    "Manifest",
    "ModeComparison",
    "NetworkTransport",
    "ParallelContext",
    "ProbeRequest",
    "ProcessGroup",
    "PublisherTransport",
    "Section",
    "SubscriberTransport",
    "TensorSpec",
    "ThreadBoundClient",
    "TransportCandidate",
    "TransportRequest",
    "TransportSpec",
    "WeightSink",
    "WeightSource",
    "errors",
    "hookimpl",
]
