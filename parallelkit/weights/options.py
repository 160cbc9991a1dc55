"""Options of `publish_weights` and `subscribe_weights` that are for transports."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from parallelkit import hooks
from parallelkit.errors import TransportError
from parallelkit.specs import TransportCandidate, TransportRequest
from parallelkit.weights.identity import host_identity


def check_publish_options(options: Iterable[str]) -> None:
    """Raise `TransportError` for options of `publish_weights` that no transport here has."""
    _check("publish_weights", options, lambda candidate: candidate.publish_options)


def check_subscribe_options(options: Iterable[str]) -> None:
    """Raise `TransportError` for options of `subscribe_weights` that no transport here has."""
    _check("subscribe_weights", options, lambda candidate: candidate.subscribe_options)


def _check(
    function: str,
    given: Iterable[str],
    told: Callable[[TransportCandidate], tuple[str, ...] | None],
) -> None:
    wanted = set(given)
    if not wanted:
        return
    known: dict[str, list[str]] = {}
    for candidate in hooks.transports(TransportRequest(publisher=host_identity())):
        names = told(candidate)
        if names is None:  # a plugin's, which may have any
            return
        for name in names:
            known.setdefault(name, []).append(candidate.name)
    unknown = sorted(wanted - known.keys())
    if unknown:
        raise TransportError(
            f"{function} has no argument {', '.join(unknown)}, and no transport such an option; "
            f"its arguments are in help(parallelkit.{function}), options are: "
            + ", ".join(f"{name} ({', '.join(of)})" for name, of in known.items())
        )
