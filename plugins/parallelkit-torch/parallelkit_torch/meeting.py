"""What ranks settle among each other: one rank's error is everyone's, and who holds what."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from parallelkit.protocols import ProcessGroup
from parallelkit.weights.assembly import Roster
from parallelkit.weights.collective import pack_error, unpack_error


@contextmanager
def together(group: ProcessGroup | None) -> Iterator[None]:
    """Do something on every rank; if it fails on one, raise on all. Collective at its end.

    A rank on which it failed raises its own error, the others that of the lowest such rank.
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    if group is not None:
        flag = torch.tensor([problem is not None], dtype=torch.uint8, device=group.device)
        failed = [rank for rank, flags in enumerate(group.all_gather(flag)) if int(flags)]
        if failed:
            mine: Any = None if problem is None else pack_error(problem)
            said: Any = group.broadcast_object(mine, src=failed[0])
            if problem is None:
                raise unpack_error(said, rank=failed[0])
    if problem is not None:
        raise problem


def exchange(group: ProcessGroup | None, mine: Roster) -> tuple[list[Roster], list[int]]:
    """Give every rank every different roster, and which rank has which. Collective.

    Hashes are compared first, so that what many ranks have alike is sent once.
    """
    if group is None:
        return [mine], [0]
    plain = mine.to_plain()
    data = hashlib.blake2b(msgspec.msgpack.encode(plain), digest_size=16).digest()
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(group.device)
    hashes = [bytes(t.cpu().numpy()) for t in group.all_gather(tensor)]
    different = list(dict.fromkeys(hashes))
    sources = [hashes.index(digest) for digest in different]
    rosters = [Roster.from_plain(group.broadcast_object(plain, src)) for src in sources]
    return rosters, [different.index(digest) for digest in hashes]
