"""What rank 0 of a publisher asks of the other ranks, and how each of them does it.

Every rank that hands parts out opens an arena of its own when the publisher opens, and stages its
parts in each update. Rank 0 does the same by the same functions, so that all answer alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import attrs

from parallelkit import hooks
from parallelkit.errors import TransportError
from parallelkit.protocols import DeviceSink, DeviceSource, WeightSink, WeightSource
from parallelkit.specs import DeviceSpec, HostIdentity, TransportSpec
from parallelkit.weights.arena import LEAST_BYTES, Arena
from parallelkit.weights.collective import Crew, Message, failed_rank, pack_error, unpack_error
from parallelkit.weights.device_lane import DeviceLane
from parallelkit.weights.exporter import Exporter
from parallelkit.weights.exports import Export, export
from parallelkit.weights.identity import host_identity
from parallelkit.weights.lanes import DEVICE, HOST, Hashed, Lanes, Want
from parallelkit.weights.manifest import Manifest
from parallelkit.weights.needs import Needs
from parallelkit.weights.routes import Post
from parallelkit.weights.truth import hashed_to_plain

#: Of what an exchange may take, what finding out who is missing takes at most, in seconds.
_BLAME_SECONDS: Final = 2.0


@attrs.frozen(kw_only=True)
class Opening:
    """What every rank that hands parts out has to know to open its arena.

    Attributes:
        names: transports of the lane `host`, the one that makes the memory first.
        device: the transport of the lane `device`; empty: none.
        eager: open the lane `host` now, also where the lane `device` is open.
        run_id, secret: of the publisher; host: the interface of its control channel.
        slots: how often an arena holds the export.
        check_finite: whether staging refuses NaN and infinity.
        seconds: how long it may take.
    """

    names: Sequence[str]
    device: str
    eager: bool
    run_id: bytes
    secret: bytes = attrs.field(repr=False)
    host: str
    slots: int
    seconds: float
    check_finite: bool = False

    def to_plain(self) -> Message:
        """Plain form, for the other ranks."""
        return attrs.asdict(self) | {"names": list(self.names)}


@attrs.frozen(kw_only=True)
class Staging:
    """What every rank that hands parts out has to know to stage a version.

    Attributes:
        version, epoch, slot: of the update; verify: what is hashed.
        needs: a number for what members keep; lanes: by which lane they get it; each kind once.
        new: those of which the other ranks have not heard yet, as `Needs.to_wire` gives them.
        seconds: how long it may take.
    """

    version: int
    epoch: int
    slot: int
    verify: str
    needs: Sequence[int]
    lanes: Sequence[str]
    new: Sequence[Any]
    seconds: float

    def to_plain(self) -> Message:
        """Plain form, for the other ranks."""
        lists = {"needs": list(self.needs), "lanes": list(self.lanes), "new": list(self.new)}
        return attrs.asdict(self) | lists


class Kinds:
    """Numbers for what members keep, so that each kind is told to the other ranks once.

    Both ends know the kinds of the last order alone: those of members that left are forgotten.
    """

    def __init__(self) -> None:
        self._count = 0
        self._numbers: dict[Needs, int] = {}
        self._told: set[int] = set()
        self._known: dict[int, Needs] = {}

    def number(self, needs: Iterable[Needs]) -> tuple[list[int], list[Any]]:
        """Numbers of some kinds, and what the other ranks have to be told of them."""
        known, self._numbers = self._numbers, {}
        numbers, new = [], []
        for kind in needs:
            if kind in self._numbers:  # by another lane
                numbers.append(self._numbers[kind])
                continue
            number = known.get(kind)
            if number is None:
                number, self._count = self._count, self._count + 1
            self._numbers[kind] = number
            numbers.append(number)
            if number not in self._told:
                rows, which = kind.to_wire()
                new.append([number, [[low, size] for low, size in rows], which])
        return numbers, new

    def told(self, numbers: Iterable[int]) -> None:
        """The other ranks have heard of these, and forget all others."""
        self._told = set(numbers)

    def read(self, manifest: Manifest, staging: Staging) -> list[Want]:
        """What members of an update want, as rank 0 told it."""
        for number, rows, which in staging.new:
            boxes = [(list(low), list(size)) for low, size in rows]
            self._known[number] = Needs.from_wire(manifest, boxes, which)
        self._known = {number: self._known[number] for number in staging.needs}
        pairs = zip(staging.needs, staging.lanes, strict=True)
        return [Want(self._known[number], lane) for number, lane in pairs]


def open_lanes(
    source: WeightSource,
    manifest: Manifest,
    rank: int,
    opening: Opening,
    options: dict[str, object],
) -> tuple[Lanes, Post]:
    """Open the lanes of a rank.

    Where weights cannot be read on their device after all, and the lane `host` is allowed, that is
    opened instead.

    Raises:
        TransportError: memory or address are not to be had, or no lane is left.
    """
    mine, lanes, obstacle = export(manifest, rank), Lanes(), ""
    try:
        if opening.device:
            try:
                lanes.add(DEVICE, _device_lane(source, mine, opening))
            except TransportError as error:
                if not opening.names:
                    raise
                obstacle = str(error)
        if opening.names and (opening.eager or DEVICE not in lanes):
            open_host(lanes, source, mine, opening, options)
    except BaseException:
        lanes.close()
        raise
    nbytes = max(mine.nbytes, LEAST_BYTES)
    post = Post(rank, identity_of(source), nbytes, lanes.offers(), lanes.encrypted(), obstacle)
    return lanes, post


def open_host(
    lanes: Lanes,
    source: WeightSource,
    mine: Export,
    opening: Opening,
    options: dict[str, object],
) -> None:
    """Open the lane `host`, with an arena.

    Raises:
        TransportError: memory or address are not to be had.
    """
    spec = TransportSpec(
        name=opening.names[0],
        manifest=mine.manifest,
        nbytes=mine.nbytes,
        run_id=opening.run_id,
        rank=mine.rank,
        secret=opening.secret,
        host=opening.host,
        options=options,
    )
    arena = Arena(opening.names, spec, opening.slots)
    exporter = Exporter(source, mine, arena, opening.run_id, check_finite=opening.check_finite)
    lanes.add(HOST, exporter)


def _device_lane(source: WeightSource, mine: Export, opening: Opening) -> DeviceLane:
    if not isinstance(source, DeviceSource):
        raise TransportError(f"a {type(source).__qualname__} cannot be read on its device")
    spec = DeviceSpec(
        name=opening.device,
        source=source,
        parts=tuple(part.tensor for part in mine.parts()),
        rank=mine.rank,
        secret=opening.secret,
    )
    transport = hooks.open_device(spec)
    if transport is None:
        raise TransportError(f"transport {opening.device!r} is listed, but no plugin opens it")
    return DeviceLane(mine, transport, opening.run_id, check_finite=opening.check_finite)


def identity_of(holder: WeightSource | WeightSink) -> HostIdentity:
    """The identity of this process, with the device that weights are on."""
    if isinstance(holder, DeviceSource | DeviceSink):
        return attrs.evolve(host_identity(), accelerator=holder.accelerator())
    return host_identity()


def stage(lanes: Lanes, wants: Sequence[Want], staging: Staging) -> dict[int, Hashed]:
    """Write what is wanted by the lane `host`, and see where weights lie for the lane `device`.

    Returns:
        What this rank says, by position among `wants`; of the lane `device` nothing yet.
    """
    chosen = [i for i, want in enumerate(wants) if want.lane == HOST]
    said: list[Hashed] = []
    # without a member there may still be values to be refused
    if chosen or (not wants and HOST in lanes):
        needs = [wants[i].needs for i in chosen]
        said = lanes[HOST].stage(needs, staging.slot, staging.verify, staging.version)
    if len(chosen) < len(wants) or (not wants and HOST not in lanes):
        lanes[DEVICE].look()
    return dict(zip(chosen, said, strict=True))


def digest(lanes: Lanes, wants: Sequence[Want], staging: Staging) -> dict[int, Hashed]:
    """Digest what is wanted by the lane `device`; what this rank says, by position."""
    chosen = [i for i, want in enumerate(wants) if want.lane == DEVICE]
    if not chosen:
        return {}
    needs = [wants[i].needs for i in chosen]
    said = lanes[DEVICE].digest(needs, staging.verify, staging.version)
    return dict(zip(chosen, said, strict=True))


def do_together(
    crew: Crew, work: Callable[[], Message], seconds: float
) -> tuple[dict[int, Message], BaseException | None]:
    """Do this rank's share of something, and hear how the others did theirs. Collective.

    Args:
        work: this rank's share; only asked of ranks that hand parts out.
        seconds: for all of it, and for finding out who was too slow, so that members hear of it
            before they give up themselves.

    Returns:
        What each of them says, where one that failed says its error; and this rank's own error.

    Raises:
        PeerLostError, UpdateTimeoutError: a rank is gone or too slow; the group is broken.
    """
    deadline = time.monotonic() + seconds - min(_BLAME_SECONDS, seconds / 4)
    mine: Message = {}
    problem: BaseException | None = None
    if crew.rank in crew.exporters:
        try:
            mine = work()
        except BaseException as error:  # an interrupt too: the others wait to hear of it
            problem, mine = error, pack_error(error)
    return crew.exchange(mine, deadline), problem


def raise_failed(answers: dict[int, Message], problem: BaseException | None) -> None:
    """Raise this rank's own error, or that of the lowest rank which failed, by its number."""
    if problem is not None:
        raise problem
    rank = failed_rank(answers)
    if rank is not None:
        raise unpack_error(answers[rank], rank=rank)


def staged(hashed: Sequence[Hashed], offers: Mapping[str, bytes]) -> Message:
    """What a rank says once it has staged."""
    return {"hashed": hashed_to_plain(hashed), "offers": dict(offers)}
