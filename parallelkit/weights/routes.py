"""Which transports a publisher opens, and by which one each member reaches each of its ranks."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import attrs

from parallelkit import hooks
from parallelkit.errors import TransportError
from parallelkit.specs import Accelerator, HostIdentity, TransportCandidate, TransportRequest
from parallelkit.weights import messages as m
from parallelkit.weights import passes
from parallelkit.weights.lanes import DEVICE, HOST

#: Fields of an accelerator that are tuples, which no plain form has.
_LISTS: Final = ("reads", "sees", "obstacles")


@attrs.frozen
class Post:
    """One rank that hands parts out.

    Attributes:
        rank: of the publisher; identity: where it runs.
        nbytes: of one slot of its arena.
        offers: by transport, how to reach it.
        encrypted: by transport, whether bytes are encrypted, of those that use a network.
        obstacle: why there is no way by a device, where one was to be opened.
    """

    rank: int
    identity: HostIdentity
    nbytes: int
    offers: Mapping[str, bytes]
    encrypted: Mapping[str, bool] = attrs.field(factory=dict)
    obstacle: str = ""

    def to_plain(self) -> dict[str, Any]:
        """Plain form, for rank 0."""
        identity = attrs.asdict(self.identity)
        if identity["accelerator"] is not None:
            identity["accelerator"] |= {
                name: list(identity["accelerator"][name]) for name in _LISTS
            }
        return {
            "rank": self.rank,
            "identity": identity,
            "nbytes": self.nbytes,
            "offers": dict(self.offers),
            "encrypted": dict(self.encrypted),
            "obstacle": self.obstacle,
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Post:
        """Read what `to_plain` of another rank gave."""
        identity, found = plain["identity"], plain["identity"]["accelerator"]
        if found is not None:
            found = Accelerator(**found | {name: tuple(found[name]) for name in _LISTS})
        return cls(
            rank=plain["rank"],
            identity=HostIdentity(**identity | {"accelerator": found}),
            nbytes=plain["nbytes"],
            offers=plain["offers"],
            encrypted=plain["encrypted"],
            obstacle=plain["obstacle"],
        )


@attrs.frozen
class Way:
    """How a member gets its bytes.

    Attributes:
        sources: how it reaches each rank that hands parts out, with a pass for each.
        lane: `"host"` or `"device"`, the same for all ranks.
        in_place: whether `commit="auto"` means in place for it.
        instead: why it is not by the lane `device`, where that is open.
    """

    sources: list[m.Source] = attrs.field(factory=list)
    lane: str = HOST
    in_place: bool = False
    instead: str = ""


class Routes:
    """Chooses transports. Rank 0's; `way` may be called from any thread.

    Attributes:
        posts: the ranks that hand parts out.
        open_host: opens the lane `host` at rank 0, where that was left for when a member needs it.
    """

    def __init__(
        self, wanted: str, device: str, identity: HostIdentity, host: str, staged: str = ""
    ) -> None:
        """
        Args:
            wanted: a transport's name, or `"auto"`.
            device: device type of the weights.
            identity: of this process.
            host: address of the interface that the control channel listens on.
            staged: why weights have to be in host memory; empty where they need not.

        Raises:
            TransportError: there is no such transport.
        """
        self.posts: dict[int, Post] = {}
        self.open_host: Callable[[], None] | None = None
        self._secret = secrets.token_bytes(passes.SECRET_BYTES)
        self._wanted = wanted
        self._device = device
        self._host = host
        self._staged = staged
        self.candidates = self._ranked(identity, None)
        self.choice = self._choose()

    @property
    def secret(self) -> bytes:
        """What passes are made of; for the publisher's ranks alone."""
        return self._secret

    @property
    def device(self) -> str:
        """The transport of the lane `device` to open; empty where there is none."""
        return self.choice.name if self.choice.lane == DEVICE else ""

    def names(self) -> list[str]:
        """The transports of the lane `host` to open, the one that makes the arena first.

        By `"auto"` also `tcp`, where the control channel can be reached from other hosts.
        """
        hosts = [c for c in self.candidates if c.lane == HOST]
        if self.choice.lane == HOST:
            names = [self.choice.name]
        elif self._wanted == "auto":
            names = [c.name for c in hosts[:1] if c.reach]
        else:
            names = []
        if self._wanted == "auto" and not self._host.startswith(("127.", "[::1]")):
            names += [c.name for c in hosts if c.name == "tcp" and c.reach]
        return list(dict.fromkeys(names))

    def way(self, peer: HostIdentity) -> Way:
        """How a peer gets its bytes: by one lane from all ranks that hand parts out.

        Raises:
            TransportError: it does not reach one of them.
        """
        instead = ""
        if self.device:
            try:
                return self._by(DEVICE, peer)
            except TransportError as error:
                instead = str(error)
                if not self.names():
                    raise
        if self.open_host is not None:
            self.open_host()
        try:
            return attrs.evolve(self._by(HOST, peer), instead=instead)
        except TransportError as error:
            text = f"{error}; by the device: {instead}" if instead else str(error)
            raise TransportError(text) from error

    def told(self, rank: int) -> bytes:
        """The offer by which a rank's weights are read where they lie."""
        return self.posts[rank].offers[self.device]

    def moved(
        self, rank: int, offers: Mapping[str, bytes], encrypted: Mapping[str, bool] | None = None
    ) -> None:
        """A rank hands its parts out by these too, or by these instead of what they were."""
        post = self.posts[rank]
        post = attrs.evolve(post, offers={**post.offers, **offers})
        if encrypted is not None:
            post = attrs.evolve(post, encrypted=encrypted)
        self.posts[rank] = post

    def _by(self, lane: str, peer: HostIdentity) -> Way:
        found, in_place = [], lane == DEVICE
        for post in self.posts.values():
            candidate = self._route(post, peer, lane)
            in_place = in_place and candidate.in_place
            found.append(
                m.Source(
                    rank=post.rank,
                    nbytes=post.nbytes,
                    transport=candidate.name,
                    offer=post.offers[candidate.name],
                    key=passes.issue(self._secret, post.rank),
                )
            )
        return Way(found, lane, in_place)

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

    def _route(self, post: Post, peer: HostIdentity, lane: str) -> TransportCandidate:
        reasons = [post.obstacle] if post.obstacle and lane == DEVICE else []
        for candidate in self._ranked(post.identity, peer):
            if candidate.name not in post.offers or candidate.lane != lane:
                continue
            if candidate.reach:
                return candidate
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
        found = hooks.transports(request)
        if self._staged:
            found = [
                attrs.evolve(c, reach=False, reason=self._staged) if c.lane == DEVICE else c
                for c in found
            ]
        return sorted(found, key=lambda c: (not c.reach, c.cost, c.name))

    def _choose(self) -> TransportCandidate:
        known = ", ".join(f"{c.name} ({c.reason})" for c in self.candidates) or "none"
        for candidate in self.candidates:
            if candidate.name == self._wanted and candidate.lane == DEVICE and not candidate.reach:
                raise TransportError(
                    f"transport {self._wanted!r} cannot be used here: {candidate.reason}"
                )
            if candidate.name == self._wanted or (self._wanted == "auto" and candidate.reach):
                return candidate
        raise TransportError(
            f"transport {self._wanted!r:.80} is not to be had here; there are: {known}"
        )


def describe(names: Iterable[str]) -> str:
    """`shm`, or `shm, tcp`, for reports."""
    return ", ".join(sorted({part for name in names for part in name.split("+") if part}))
