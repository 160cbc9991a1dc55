"""Live weight hand-over: a publisher, its subscribers, and a two-phase commit between them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallelkit.weights.joining import subscribe_weights
    from parallelkit.weights.manifest import Manifest, TensorSpec
    from parallelkit.weights.outcome import WeightsUnchangedWarning
    from parallelkit.weights.plan import TransferPlan, plan_transfer
    from parallelkit.weights.publisher import WeightPublisher
    from parallelkit.weights.publishing import publish_weights
    from parallelkit.weights.report import EngineReport, MemberReport, TransferReport
    from parallelkit.weights.subscriber import WeightSubscriber

# Resolved on first use: a manifest needs neither numpy nor ZeroMQ.
_HOMES = {
    "EngineReport": "report",
    "Manifest": "manifest",
    "MemberReport": "report",
    "TensorSpec": "manifest",
    "TransferPlan": "plan",
    "TransferReport": "report",
    "WeightPublisher": "publisher",
    "WeightSubscriber": "subscriber",
    "WeightsUnchangedWarning": "outcome",
    "plan_transfer": "plan",
    "publish_weights": "publishing",
    "subscribe_weights": "joining",
}

__all__ = [
    "EngineReport",
    "Manifest",
    "MemberReport",
    "TensorSpec",
    "TransferPlan",
    "TransferReport",
    "WeightPublisher",
    "WeightSubscriber",
    "WeightsUnchangedWarning",
    "plan_transfer",
    "publish_weights",
    "subscribe_weights",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
