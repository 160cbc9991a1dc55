"""The ranks of a checkpoint keep in step: what one of them cannot do, none of them does."""

from __future__ import annotations

from typing import Final, TypeVar, final

import msgspec
import torch

from parallelkit.errors import CheckpointError
from parallelkit.protocols import ProcessGroup

T = TypeVar("T")
#: How many times the group's timeout a rank waits for others to write or read their part.
PATIENCE: Final = 10
_SHORT: Final = 500


@final
class Peers:
    """All ranks of a group, which meet at the same points until one of them has a problem.

    At the first meeting to which a rank brings a problem every rank raises, and there are no
    more meetings: `meet` raises again at once, without communication. So a rank that fails goes
    straight to its next meeting, and no other rank waits for it longer than for its work.

    Attributes:
        rank: of this process in the group.
        size: number of ranks.
    """

    def __init__(self, group: ProcessGroup, timeout: float | None = None) -> None:
        """
        Args:
            group: whose ranks meet.
            timeout: seconds to wait for others that write or read; None: ten times the group's.
        """
        self._group = group
        self._timeout = group.timeout * PATIENCE if timeout is None else timeout
        self._ended: Exception | None = None
        self._met = False
        self.rank = group.rank
        self.size = group.world_size

    def meet(
        self,
        step: str,
        mine: T,
        kind: type[T],
        *,
        problem: Exception | None = None,
    ) -> list[T]:
        """Give every rank every rank's object, by rank. Collective.

        Args:
            step: what is being done, for messages.
            mine: of `kind`, which msgpack can carry.
            kind: what the others' objects must be.
            problem: why this rank cannot go on; then `mine` does not matter.

        Raises:
            Exception: `problem`, or that of an earlier meeting.
            CheckpointError: another rank has a problem; the message names each and says what.
            CollectiveTimeoutError, CollectiveError: a rank did not come, or is gone.
        """
        if self._ended is not None:
            raise self._ended
        if problem is not None and self.size == 1:
            raise problem
        if self.size == 1:
            return [mine]
        try:
            # The first meeting is at the start of a call. Before later ones others may write.
            self._group.barrier(timeout=self._timeout if self._met else None)
            self._met = True
            head = [step, "" if problem is None else _short(problem)]
            body = b"" if problem is not None else msgspec.msgpack.encode(mine)
            rows = self._exchange(msgspec.msgpack.encode(head), body)
            self._refuse(step, [msgspec.msgpack.decode(head, type=list[str]) for head, _ in rows])
            return [msgspec.msgpack.decode(body, type=kind) for _, body in rows]
        except Exception as error:
            self._ended = problem or error
        raise self._ended

    def _refuse(self, step: str, heads: list[list[str]]) -> None:
        """Raise if a rank brought a problem."""
        failed = [(rank, text) for rank, (_, text) in enumerate(heads) if text]
        if failed:
            raise CheckpointError(
                f"{step} failed; " + "; ".join(f"rank {rank}: {text}" for rank, text in failed)
            )
        if any(other != step for other, _ in heads):
            raise CheckpointError(
                "ranks are at different steps of a checkpoint: "
                + ", ".join(f"rank {rank} at {other!r}" for rank, (other, _) in enumerate(heads))
                + ". Every rank must make the same calls in the same order"
            )

    def _exchange(self, head: bytes, body: bytes) -> list[tuple[bytes, bytes]]:
        sizes = self._gather(torch.tensor([len(head), len(body)], dtype=torch.int64))
        longest = max(int(size.sum()) for size in sizes)
        row = torch.zeros(longest, dtype=torch.uint8)
        data = bytearray(head + body)
        row[: len(data)] = torch.frombuffer(data, dtype=torch.uint8)
        found = []
        for size, text in zip(sizes, self._gather(row), strict=True):
            first, second = (int(n) for n in size)
            everything = text.numpy().tobytes()
            found.append((everything[:first], everything[first : first + second]))
        return found

    def _gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [part.cpu() for part in self._group.all_gather(x.to(self._group.device))]


def _short(problem: Exception) -> str:
    text = str(problem) or type(problem).__name__
    return text if len(text) <= _SHORT else text[: _SHORT - 3] + "..."
