"""Which transports a publisher opens, and by which one each member reaches each of its ranks."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from parallelkit import hooks
from parallelkit.errors import TransportError
from parallelkit.specs import HostIdentity, TransportCandidate, TransportRequest
from parallelkit.weights import messages as m
from parallelkit.weights import passes


@attrs.frozen
class Post:
    """One rank that hands parts out.

    Attributes:
        rank: of the publisher; identity: where it runs.
        nbytes: of one slot of its arena.
        offers: by transport, how to reach it.
        encrypted: by transport, whether bytes are encrypted, of those that use a network.
    """

    rank: int
    identity: HostIdentity
    nbytes: int
    offers: Mapping[str, bytes]
    encrypted: Mapping[str, bool] = attrs.field(factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """Plain form, for rank 0."""
        identity = attrs.asdict(self.identity) | {"device_uuids": list(self.identity.device_uuids)}
        return {
            "rank": self.rank,
            "identity": identity,
            "nbytes": self.nbytes,
            "offers": dict(self.offers),
            "encrypted": dict(self.encrypted),
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Post:
        """Read what `to_plain` of another rank gave."""
        identity = plain["identity"]
        return cls(
            rank=plain["rank"],
            identity=HostIdentity(**identity | {"device_uuids": tuple(identity["device_uuids"])}),
            nbytes=plain["nbytes"],
            offers=plain["offers"],
            encrypted=plain["encrypted"],
        )


class Routes:
    """Chooses transports. Rank 0's; `sources` may be called from any thread."""

    def __init__(self, wanted: str, device: str, identity: HostIdentity, host: str) -> None:
        """
        Args:
            wanted: a transport's name, or `"auto"`.
            device: device type of the weights.
            identity: of this process.
            host: address of the interface that the control channel listens on.
        """
        self.posts: dict[int, Post] = {}
        self._secret = secrets.token_bytes(passes.SECRET_BYTES)
        self._wanted = wanted
        self._device = device
        self._host = host
        self.candidates = self._ranked(identity, None)
        self.choice = self._choose()

    @property
    def secret(self) -> bytes:
        """What passes are made of; for the publisher's ranks alone."""
        return self._secret

    def names(self) -> list[str]:
        """The transports to open, the one that makes the arena first.

        By `"auto"` also `tcp`, where the control channel can be reached from other hosts.
        """
        names = [self.choice.name]
        if self._wanted == "auto" and not self._host.startswith(("127.", "[::1]")):
            names += [c.name for c in self.candidates if c.name == "tcp" and c.reach]
        return list(dict.fromkeys(names))

    def sources(self, peer: HostIdentity) -> list[m.Source]:
        """How a peer reaches each rank that hands parts out, with a pass for each.

        Raises:
            TransportError: it does not reach one of them.
        """
        found = []
        for post in self.posts.values():
            name = self._route(post, peer)
            found.append(
                m.Source(
                    rank=post.rank,
                    nbytes=post.nbytes,
                    transport=name,
                    offer=post.offers[name],
                    key=passes.issue(self._secret, post.rank),
                )
            )
        return found

    def encrypted(self, transport: str) -> bool | None:
        """Whether bytes that come so (`tcp`, `shm+tcp`) are encrypted; None: by no network."""
        posts = self.posts.values()
        names = transport.split("+")
        told = [post.encrypted[name] for post in posts for name in names if name in post.encrypted]
        return all(told) if told else None

    def explain(self) -> list[str]:
        """Which transports are open, and why the others are not."""
        opened = self.names()
        lines = [f"transport {self.choice.name}: {self.choice.reason}"]
        return lines + [
            f"  for other members: {c.name}: {c.reason}"
            if c.name in opened
            else f"  not {c.name}: {self._why_closed(c)}"
            for c in self.candidates
            if c is not self.choice
        ]

    def _why_closed(self, candidate: TransportCandidate) -> str:
        if not candidate.reach:
            return candidate.reason
        if self._wanted != "auto":
            return f"transport={self._wanted!r} was asked for"
        if candidate.name == "tcp":
            return "listens on loopback, which is this host; endpoint= takes a network's address"
        return f"{candidate.reason}; {self.choice.name} costs less"

    def _route(self, post: Post, peer: HostIdentity) -> str:
        reasons = []
        for candidate in self._ranked(post.identity, peer):
            if candidate.name not in post.offers:
                continue
            if candidate.reach:
                return candidate.name
            reasons.append(f"{candidate.name}: {candidate.reason}")
        told = "; ".join(reasons) or "none of its transports is there any more"
        raise TransportError(f"rank {post.rank} of the publisher is not reached ({told})")

    def _ranked(self, here: HostIdentity, peer: HostIdentity | None) -> list[TransportCandidate]:
        request = TransportRequest(
            publisher=here,
            subscriber=peer,
            device=self._device,
            requested=self._wanted,
            host=self._host,
        )
        return sorted(hooks.transports(request), key=lambda c: (not c.reach, c.cost, c.name))

    def _choose(self) -> TransportCandidate:
        known = ", ".join(f"{c.name} ({c.reason})" for c in self.candidates) or "none"
        for candidate in self.candidates:
            if candidate.name == self._wanted or (self._wanted == "auto" and candidate.reach):
                return candidate
        raise TransportError(
            f"transport {self._wanted!r:.80} is not to be had here; there are: {known}"
        )


def describe(names: Iterable[str]) -> str:
    """`shm`, or `shm, tcp`, for reports."""
    return ", ".join(sorted({part for name in names for part in name.split("+") if part}))
