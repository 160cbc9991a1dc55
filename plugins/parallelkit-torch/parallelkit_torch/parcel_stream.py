"""The stream of parts that makes whole tensors on rank 0, as rank 0 and as the others see it.

Every rank computes the same parcels from the manifest (`parallelkit.weights.parcels`), so nothing
but bytes and short words is sent.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, final

import numpy as np
import torch

from parallelkit.errors import CorruptionError, ProtocolError, WeightTransferError
from parallelkit.weights.manifest import Manifest
from parallelkit.weights.parcels import Bytes, Parcel, Part, inbound, parcels, place, window
from parallelkit_torch import pull, tensors

#: Parcels that rank 0 has asked for at once: one arrives while another is put in place.
_AHEAD: Final = 2
#: For what is left to say or hear once an update failed or ended, in seconds.
_LAST_SECONDS: Final = 5.0
_NOTHING: Final = np.empty(0, np.uint8)


@final
class ParcelStream:
    """One rank's end. In an update rank 0 calls `gather` and `dismiss`, the others `serve`."""

    def __init__(
        self,
        manifest: Manifest,
        rank: int,
        line: pull.Line | None,
        live: Callable[[Part], torch.Tensor],
    ) -> None:
        """Make an end.

        Args:
            line: to the other ranks; None where there are none.
            live: gives this rank's part of a tensor, or raises `ManifestError`.
        """
        self._manifest = manifest
        self._rank = rank
        self._line = line
        self._live = live

    def gather(self, buffers: Sequence[memoryview], *, seconds: float, check: bool) -> None:
        """Fill each buffer with the whole unique tensor of its index. Rank 0; others `serve`.

        Memory beyond the buffers: two parcels of 16 MiB, or two parts where they are larger.

        Args:
            buffers: writable, contiguous, of the tensors' bytes.
            seconds: for all of it.
            check: compare a hash of every parcel taken where it comes from with one taken here
                (bytes in host memory only).

        Raises:
            PeerLostError, UpdateTimeoutError: a rank is gone, or did not answer in time; the
                group is broken.
            CorruptionError: bytes arrived changed.
            WeightTransferError: a rank could not read its part.
        """
        deadline = time.monotonic() + seconds
        wholes = [np.frombuffer(b, np.uint8) if b.nbytes else _NOTHING for b in buffers]
        for parcel in parcels(self._manifest, self._rank):
            for part in parcel.parts:
                data = np.frombuffer(tensors.as_bytes(self._live(part)), np.uint8)
                self._place(wholes, part, data)
        if self._line is None:
            return
        waiting: deque[tuple[Parcel, pull.Pull]] = deque()
        numbers = [0] * self._line.world_size
        try:
            for parcel in inbound(self._manifest):
                if len(waiting) == _AHEAD:
                    self._receive(*waiting[0], wholes, deadline)
                    waiting.popleft()
                number, into = numbers[parcel.rank], self._into(wholes, parcel)
                asked = pull.Pull(self._line, parcel.rank, number, into, check)
                waiting.append((parcel, asked))
                asked.start(deadline - time.monotonic())
                numbers[parcel.rank] += 1
            while waiting:
                self._receive(*waiting[0], wholes, deadline)
                waiting.popleft()
        except BaseException:
            self._drain([asked for _, asked in waiting])
            raise

    def serve(self, seconds: float) -> None:
        """Hand out what rank 0 asks for, until it says that it has ended. Ranks other than 0.

        Args:
            seconds: how long to wait for each word of rank 0.

        Raises:
            PeerLostError: rank 0 is gone, or says that another rank is.
            UpdateTimeoutError: rank 0 was silent, or says that another rank was too slow.
        """
        if self._line is None:
            return
        mine = enumerate(parcels(self._manifest, self._rank))
        while True:
            word = self._line.hear(0, seconds)
            if word.kind == pull.END:
                return
            if word.kind in (pull.LOST, pull.LATE):
                raise self._line.give_up(word)
            number, parcel = next(mine, (-1, None))
            if word.kind not in (pull.PULL, pull.CHECK) or parcel is None or word.number != number:
                raise ProtocolError(
                    f"rank 0 asks rank {self._rank} for parcel {word.number} ({word.kind!r}) where "
                    f"parcel {number} is next: the ranks do not publish the same manifest"
                )
            self._answer(parcel, word.kind == pull.CHECK, seconds)

    def dismiss(self) -> bool:
        """Let the others leave `serve`. Rank 0, at the end of an update, however it went.

        Returns:
            Whether the group still works; if not, the others are told why.
        """
        if self._line is None:
            return True
        fault = self._line.fault
        self._line.say_all(pull.Word(pull.END) if fault is None else fault, _LAST_SECONDS)
        return fault is None

    def _place(self, wholes: Sequence[Bytes], part: Part, data: Bytes) -> None:
        place(wholes[part.tensor], self._manifest.unique[part.tensor], part.region, data)

    def _into(self, wholes: Sequence[Bytes], parcel: Parcel) -> torch.Tensor:
        """Where a parcel is received: in place where it is one run of a tensor in host memory."""
        assert self._line is not None
        if len(parcel.parts) == 1 and self._line.device.type == "cpu":
            part = parcel.parts[0]
            spec = self._manifest.unique[part.tensor]
            run = window(wholes[part.tensor], spec, part.region)
            if run is not None:
                return torch.from_numpy(run)
        return pull.scratch(parcel.nbytes, self._line.device)

    def _receive(
        self, parcel: Parcel, asked: pull.Pull, wholes: Sequence[Bytes], deadline: float
    ) -> None:
        """Take a parcel to its place."""
        word = asked.finish(deadline - time.monotonic())
        if word.kind != pull.DONE:
            raise WeightTransferError(f"publisher rank {parcel.rank} could not read: {word.text}")
        if asked.check and word.number != pull.digest(asked.into):
            names = sorted({self._manifest.unique[p.tensor].name for p in parcel.parts})
            raise CorruptionError(
                f"bytes from publisher rank {parcel.rank} arrived changed, in "
                f"{', '.join(names[:6])}{' ...' if len(names) > 6 else ''}",
                tensors=names,
            )
        data, start = asked.into.cpu().numpy(), 0
        for part in parcel.parts:
            piece = data[start : start + part.nbytes]
            if not np.may_share_memory(piece, wholes[part.tensor]):
                self._place(wholes, part, piece)
            start += part.nbytes

    def _drain(self, waiting: Sequence[pull.Pull]) -> None:
        """Take what is on its way to nowhere, so that the others are free to hear of the end."""
        assert self._line is not None
        if self._line.fault is None:
            with contextlib.suppress(WeightTransferError):
                for asked in waiting:
                    asked.finish(_LAST_SECONDS)

    def _answer(self, parcel: Parcel, check: bool, seconds: float) -> None:
        """Send a parcel: as many bytes as rank 0 waits for, even where they cannot be read."""
        assert self._line is not None
        try:
            data = self._pack(parcel)
            closing = pull.Word(pull.DONE, pull.digest(data) if check else 0)
        except Exception as error:
            data = pull.scratch(parcel.nbytes, self._line.device)
            closing = pull.Word(pull.FAILED, 0, f"{type(error).__name__}: {error}")
        self._line.answer(data, closing, seconds)

    def _pack(self, parcel: Parcel) -> torch.Tensor:
        """A parcel's bytes on the group's device: the live memory where it is one whole part."""
        assert self._line is not None
        flats = (tensors.flat_bytes(self._live(part)) for part in parcel.parts)
        if len(parcel.parts) == 1:
            return next(flats).to(self._line.device)
        data, start = pull.scratch(parcel.nbytes, self._line.device), 0
        for flat in flats:
            data[start : start + flat.numel()].copy_(flat)
            start += flat.numel()
        return data
