"""From the publisher's device memory into a target's, by the target's device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from parallelkit.errors import CorruptionError, ProtocolError
from parallelkit.protocols import DeviceCopier, DeviceMemory, DeviceSink, DeviceSubscriber
from parallelkit.weights.buckets import Workers, to_wire
from parallelkit.weights.manifest import Manifest
from parallelkit.weights.moves import laid_out
from parallelkit.weights.placing import Fetch, Placing
from parallelkit.weights.plan import TransferPlan
from parallelkit.weights.readers import check_epochs, grouped
from parallelkit.weights.runs import Digests, Numbers, Runs, runs_of

Flags = np.ndarray[Any, np.dtype[np.bool_]]


class DeviceReaders:
    """Where each publisher rank's parts lie, for one device to read.

    Attributes:
        plan: of this member.
        by_rank: the plan's buckets, by rank ascending.
    """

    def __init__(self, plan: TransferPlan, transports: Mapping[int, DeviceSubscriber]) -> None:
        """
        Args:
            plan: what this member gets.
            transports: one for each of the plan's ranks.

        Raises:
            ProtocolError: a rank's part of a tensor is smaller than the plan says.
        """
        self.plan = plan
        self.by_rank = grouped(plan.buckets)
        self.runs = runs_of(plan.buckets)
        self._transports = dict(transports)
        self._sources: Numbers | None = None
        self.sources()

    @property
    def name(self) -> str:
        """`cuda_ipc`."""
        return "+".join(sorted({t.name for t in self._transports.values()})) or "none"

    @property
    def linked(self) -> bool:
        """Whether some rank's memory is another device's than the target's."""
        return any(t.linked for t in self._transports.values())

    def check_epoch(self, epoch: int, version: int, deadline: float) -> None:
        """Raise `EpochError` unless every rank is at this epoch still."""
        check_epochs(self._transports, epoch, version, deadline)

    def follow(self, offers: Sequence[tuple[int, bytes]]) -> None:
        """Some ranks' weights lie elsewhere now."""
        for rank, offer in offers:
            if rank in self._transports:  # else nothing is kept of what it has
                self._sources = None
                self._transports[rank].follow(offer)

    def sources(self) -> Numbers:
        """The address of each run of the plan; the same object while nothing moved."""
        if self._sources is None:
            runs = self.runs
            found = np.zeros(len(runs.rank), np.int64)
            for rank, transport in self._transports.items():
                mine = runs.rank == rank
                addresses, sizes = transport.parts()
                tensors = runs.tensor[mine]
                if len(tensors) and int(tensors.max()) >= len(addresses):
                    raise ProtocolError(
                        f"rank {rank} of the publisher offers {len(addresses)} tensors, the plan "
                        f"needs number {int(tensors.max())}"
                    )
                bad = runs.source[mine] + runs.nbytes[mine] > sizes[tensors]
                if bad.any():
                    tensor = int(tensors[np.argmax(bad)])
                    raise ProtocolError(
                        f"rank {rank} of the publisher offers {int(sizes[tensor])} bytes of "
                        f"{self.plan.manifest.unique[tensor].name!r}, fewer than the plan needs"
                    )
                found[mine] = addresses[tensors] + runs.source[mine]
            self._sources = found
        return self._sources

    def close(self) -> None:
        """Close every transport; harmless when repeated."""
        transports, self._transports = self._transports, {}
        for transport in transports.values():
            transport.close()


class _Made(NamedTuple):
    """A copier, and the addresses that it was made for."""

    addresses: tuple[Numbers | None, ...]
    copier: DeviceCopier


class DevicePlacement(Placing):
    """The device pulls by itself; a copier is made once for each pair of ends, and kept."""

    readers: DeviceReaders
    _sink: DeviceSink

    def __init__(
        self,
        sink: DeviceSink,
        needs: Manifest,
        readers: DeviceReaders,
        verify: str,
        run_id: bytes,
    ) -> None:
        super().__init__(sink, needs, readers, verify, run_id)
        self._tensors = np.array([t for t, *_ in self._kept()], np.int64)
        self._index = np.array([self._order[t] for t in self._tensors.tolist()], np.int64)
        self._start = np.array(self._starts, np.int64)
        self._size = np.array(self._sizes, np.int64)
        self._spare: DeviceMemory | None = None
        self._staging: DeviceMemory | None = None
        self._scratch: tuple[bytes, DeviceMemory] | None = None  # and for which tensors
        self._copiers: dict[str, _Made] = {}
        self._live_digests: Digests | None = None  # read back while they were pulled

    def explain(self) -> str:
        return (
            f"{len(self._tensors)} tensors, each under its own name; the target's device reads the "
            "publisher's memory"
        )

    def allocate_staging(self, versions: int = 2) -> None:
        if self._spare is None:
            self._spare = self._sink.allocate(self._room)
        if self._staging is None and versions == 2:
            self._staging = self._sink.allocate(self._room)

    def prepare(self, *, staged: bool) -> None:
        if staged:
            self.allocate_staging()
        else:
            self._into_live(self._live_addresses())

    def fetch(self, fetch: Fetch, workers: Workers, *, staged: bool) -> bytes:
        self.allocate_staging(1)
        assert self._spare is not None
        wanted = np.array(self._wanted(fetch.version), bool)
        found = self._pull(self._into(self._spare), digest=bool(wanted.any()))
        self._fetched = b"" if found is None else _wire(found, wanted)
        return self._fetched

    def keep_staged(self, version: int) -> None:
        self._spare, self._staging = self._staging, self._spare
        self._placed, self._hashed_live = self._fetched, 0
        self.staged_version = version

    def place(self, workers: Workers) -> None:
        assert self._spare is not None
        self._placed = self._fetched
        self._copy(self._spare)

    def place_staged(self, workers: Workers) -> None:
        assert self._staging is not None
        self._copy(self._staging)

    def fetch_verified(self, fetch: Fetch, expected: bytes, workers: Workers) -> None:
        self.allocate_staging(1)
        assert self._spare is not None
        memory = self._spare
        told, wanted = self._told(fetch.version, expected)
        found = self._pull(self._into(memory), digest=bool(wanted.any()))
        self._repeat(told, wanted, found, memory.address + self._start)
        self._fetched = expected

    def place_fetched(self, fetch: Fetch, expected: bytes, workers: Workers) -> None:
        told, wanted = self._told(fetch.version, expected)
        self._begin()
        addresses = self._live_addresses()
        copier = self._into_live(addresses)
        targets = self._targets(addresses)
        back = self._verify == "readback" and not (addresses == 0).any()
        if back:
            copier.copy_and_read_back(linked=self.readers.linked)
            pulled = copier.wait()
            found, self._live_digests = pulled.copied, pulled.target
        else:
            found, self._live_digests = self._pull(copier, digest=bool(wanted.any())), None
        if self._repeat(told, wanted, found, targets):
            self._live_digests = None
        self._place_indirect(addresses, targets)
        self._sink.finish()
        self._placed, self._hashed_live = expected, 0

    def readback(self, version: int, workers: Workers) -> bytes:
        told, wanted = self._told(version, self._placed)
        found, self._live_digests = self._live_digests, None
        if found is None:
            found = self._read_live()
        bad = _differing(told, wanted, found)
        if bad:
            names, text = self._names(bad)
            raise CorruptionError(f"live memory differs after placement, in {text}", tensors=names)
        self._hashed_live = len(self._tensors)
        return _wire(found, wanted)

    def release(self) -> None:
        self._copiers.clear()
        self._spare = self._staging = self._scratch = None

    # --- addresses

    def _live_addresses(self) -> Numbers:
        """Of each kept tensor's live memory, in the order of the plan; 0: not in one run."""
        return np.array(self._sink.addresses(), np.int64)[self._index]

    def _targets(self, addresses: Numbers) -> Numbers:
        """For every unique tensor where it is pulled to: live memory, else scratch."""
        targets = np.zeros(len(self._start), np.int64)
        targets[self._tensors] = addresses
        indirect = self._tensors[addresses == 0]
        if len(indirect):
            starts, room = laid_out(self._size[indirect].tolist())
            if self._scratch is None or self._scratch[0] != indirect.tobytes():
                self._scratch = (indirect.tobytes(), self._sink.allocate(room))
            targets[indirect] = self._scratch[1].address + np.array(starts, np.int64)
        return targets

    # --- copiers

    def _into(self, memory: DeviceMemory) -> DeviceCopier:
        """From the publisher into memory of our own."""
        targets = memory.address + self._start
        return self._kept_copier(f"pull {memory.address}", targets, self._pulling)

    def _into_live(self, addresses: Numbers) -> DeviceCopier:
        """From the publisher into live memory."""
        return self._kept_copier("pull live", self._targets(addresses), self._pulling)

    def _pulling(self, sources: Numbers | None, targets: Numbers) -> DeviceCopier:
        assert sources is not None
        return self._copier_of(self.readers.runs, sources, targets)

    def _copier_of(self, runs: Runs, sources: Numbers, targets: Numbers) -> DeviceCopier:
        into = targets[runs.tensor] + runs.target
        return self._sink.copier(sources, into, runs.nbytes, runs.bucket)

    def _kept_copier(
        self,
        name: str,
        targets: Numbers,
        make: Callable[[Numbers | None, Numbers], DeviceCopier],
        *,
        local: bool = False,
    ) -> DeviceCopier:
        """A copier that is made anew where one of its ends has moved only."""
        sources = None if local else self.readers.sources()
        made = self._copiers.get(name)
        if made is None or not _same(made.addresses, (sources, targets)):
            self._copiers.pop(name, None)  # before the next one takes as much memory
            made = self._copiers[name] = _Made((sources, targets), make(sources, targets))
        return made.copier

    def _pull(self, copier: DeviceCopier, *, digest: bool) -> Digests | None:
        copier.copy(digest=digest)
        return copier.wait().copied

    def _told(self, version: int, wire: bytes) -> tuple[Digests, Flags]:
        """The source's digests, and which of them are to be compared."""
        wanted = np.array(self._wanted(version), bool)
        return self._digests(wire, len(wanted) if wanted.any() else 0), wanted

    def _repeat(
        self, told: Digests, wanted: Flags, found: Digests | None, targets: Numbers
    ) -> bool:
        """Pull buckets that came changed once more; whether there were any."""
        bad = [] if found is None else _differing(told, wanted, found)
        if not bad:
            return False
        self.repeated += len(bad)
        mine = np.isin(self.readers.runs.bucket, np.array(bad, np.int64))
        copier = self._copier_of(self.readers.runs.of(bad), self.readers.sources()[mine], targets)
        again = self._pull(copier, digest=True)
        assert again is not None
        left = _differing(told[bad], wanted[bad], again)
        if left:
            names, text = self._names([bad[i] for i in left])
            raise CorruptionError(
                f"{len(left)} of {len(self.plan.buckets)} buckets came changed twice, in {text}",
                tensors=names,
            )
        return True

    # --- placing

    def _copy(self, memory: DeviceMemory) -> None:
        """Copy from memory of our own into live memory."""
        self._hashed_live, self._live_digests = 0, None
        self._begin()
        addresses = self._live_addresses()
        copier = self._kept_copier(
            f"place {memory.address}",
            addresses,
            lambda _, live: self._placing(memory, live),
            local=True,
        )
        copier.copy(digest=False)
        copier.wait()
        self._place_indirect(addresses, memory.address + self._start)
        self._sink.finish()

    def _placing(self, memory: DeviceMemory, addresses: Numbers) -> DeviceCopier:
        direct = addresses != 0
        tensors = self._tensors[direct]
        sources = memory.address + self._start[tensors]
        return self._sink.copier(sources, addresses[direct], self._size[tensors], None)

    def _place_indirect(self, addresses: Numbers, packed: Numbers) -> None:
        for tensor in self._tensors[addresses == 0].tolist():
            self._sink.place(self._order[tensor], int(packed[tensor]))

    def _read_live(self) -> Digests:
        """Digests of live memory, by bucket."""
        addresses = self._live_addresses()
        targets = self._targets(addresses)
        for tensor in self._tensors[addresses == 0].tolist():
            self._sink.gather(self._order[tensor], int(targets[tensor]))
        copier = self._kept_copier("read", targets, lambda _, live: self._reading(live), local=True)
        copier.digest_source()
        found = copier.wait().source
        assert found is not None
        return found

    def _reading(self, targets: Numbers) -> DeviceCopier:
        runs = self.readers.runs
        at = targets[runs.tensor] + runs.target
        return self._sink.copier(at, None, runs.nbytes, runs.bucket)


def _same(one: Sequence[Numbers | None], other: Sequence[Numbers | None]) -> bool:
    return all(
        a is b or (a is not None and b is not None and np.array_equal(a, b))
        for a, b in zip(one, other, strict=True)
    )


def _differing(told: Digests, wanted: Flags, found: Digests) -> list[int]:
    bad: list[int] = np.flatnonzero(wanted & (told != found)).tolist()
    return bad


def _wire(digests: Digests, wanted: Flags) -> bytes:
    return to_wire(np.where(wanted, digests, np.uint64(0)), wanted.tolist())
