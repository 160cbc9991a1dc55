"""A table put on a device, and the passes of an update over it: copy, digest, both, read-back."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Final

import attrs
import numpy as np
import torch

from parallelkit.errors import StateError
from parallelkit_torch.cuda import plain
from parallelkit_torch.cuda.digest import Words, finish, salts_of
from parallelkit_torch.cuda.errors import TableError
from parallelkit_torch.cuda.table import SOURCE, TARGET, Run, Table

#: Parts of a table that is copied over a link: while the link is busy, what came is read back at
#: the memory's speed, so that only the last part's reading adds to the copy.
PARTS: Final = 16

_COPIED, _AT_SOURCE, _AT_TARGET = range(3)


@attrs.frozen(eq=False)
class Digests:
    """Of each block, what passes since the last call of `Copier.digests` found.

    Attributes:
        copied: of the bytes as the copy read them; None if no copy took digests.
        source, target: of the bytes at the sources and targets; None if they were not read.
    """

    copied: Words | None
    source: Words | None
    target: Words | None


class Copier:
    """Does what a table says, on one device. Everything is asynchronous, on the current stream.

    Who calls keeps the memory behind the table's addresses until the device is done with it.
    """

    def __init__(self, table: Table, device: torch.device, *, fused: bool | None = None) -> None:
        """Put the table on the device.

        Args:
            table: what to do; its addresses are the device's to read and write.
            device: with index; the CPU works by torch's operations.
            fused: by the one kernel, which needs Triton, or pair by pair by torch's operations;
                None: the kernel where it can be used.

        Raises:
            TableError: the kernel was asked for and cannot be used.
        """
        usable = device.type == "cuda" and find_spec("triton") is not None
        if fused and not usable:
            raise TableError(f"the fused copy needs Triton and a CUDA device; this is {device}")
        self.table, self.device = table, device
        self.fused = usable if fused is None else fused
        self._blocks = len(table.block_nbytes)
        # each kind's sums begin at a multiple of 16 bytes, or the kernel is compiled once more
        room = max(self._blocks + self._blocks % 2, 2)
        self._sums = torch.zeros((3, room), dtype=torch.int64, device=device)
        self._salts = salts_of(table.block_nbytes)
        self._taken: set[int] = set()
        self._rows: Any = None
        self._side: Any = None
        if self.fused:
            from parallelkit_torch.cuda import kernel

            self._launch = kernel.launch
            self._rows = torch.from_numpy(table.rows).to(device)
            self._few = torch.cuda.get_device_properties(device).multi_processor_count

    def copy(self, *, digest: bool = False) -> None:
        """Copy every pair, with `digest` also digesting what is read, in the same pass."""
        if digest:
            self._begin(_COPIED)
        if self.fused:
            self._pass(self.table.runs, _COPIED, SOURCE, copy=True, digest=digest)
            return
        plain.copy_pairs(self.table, self.device)
        if digest:  # torch has no such pass: what was written stands for what was read
            plain.digest_pairs(self.table, self._sums[_COPIED], target=True)

    def digest_source(self) -> None:
        """Digest what is at the sources."""
        self._read(_AT_SOURCE)

    def digest_target(self) -> None:
        """Digest what is at the targets."""
        self._read(_AT_TARGET)

    def copy_and_read_back(self, parts: int = 1) -> None:
        """Copy with digests, and digest the targets.

        Args:
            parts: 1 to read back after the copy, which is faster on one device; `PARTS` where the
                sources are another's: part by part, reading back one while the next is copied.
        """
        if parts == 1 or not self.fused:
            self.copy(digest=True)
            self.digest_target()
            return
        self._begin(_COPIED)
        self._begin(_AT_TARGET)
        here = torch.cuda.current_stream(self.device)
        if self._side is None:
            cuda: Any = torch.cuda  # its streams have no types
            self._side = cuda.Stream(self.device, priority=-1)
        self._side.wait_stream(here)
        pieces = list(self.table.parts(parts))
        for runs in pieces:
            self._pass(runs, _COPIED, SOURCE, copy=True, digest=True)
            self._side.wait_stream(here)
            # all but the last leave the device to the copy that comes next, or the link would idle
            few = 0 if runs is pieces[-1] else self._few
            with torch.cuda.stream(self._side):
                self._pass(runs, _AT_TARGET, TARGET, copy=False, digest=True, programs=few)
        here.wait_stream(self._side)

    def digests(self) -> Digests:
        """Wait for the device and give the digests taken since the last call."""
        sums = self._sums.cpu().numpy().view(np.uint64)[:, : self._blocks]
        taken, self._taken = self._taken, set()
        of = [finish(sums[kind], self._salts) if kind in taken else None for kind in range(3)]
        return Digests(*of)

    def _read(self, kind: int) -> None:
        self._begin(kind)
        target = kind == _AT_TARGET
        if self.fused:
            column = TARGET if target else SOURCE
            self._pass(self.table.runs, kind, column, copy=False, digest=True)
        else:
            plain.digest_pairs(self.table, self._sums[kind], target=target)

    def _begin(self, kind: int) -> None:
        if self.table.block is None:
            raise StateError("digests were asked for, and the table was made without blocks")
        self._sums[kind].zero_()
        self._taken.add(kind)

    def _pass(
        self,
        runs: tuple[Run, ...],
        kind: int,
        column: int,
        *,
        copy: bool,
        digest: bool,
        programs: int = 0,
    ) -> None:
        self._launch(
            self._rows,
            self._sums[kind],
            runs,
            chunk=self.table.chunk,
            column=column,
            copy=copy,
            digest=digest,
            programs=programs,
        )
