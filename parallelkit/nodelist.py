"""SLURM's short forms: host lists such as `node[003-005,7]`, task counts such as `2(x3),1`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from parallelkit.errors import LaunchError

_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)
_COUNT = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?", re.ASCII)
_HOST = re.compile(r"[A-Za-z0-9_.:%-]*", re.ASCII)


def expand_nodelist(text: str) -> Iterator[str]:
    """Yield the hosts of a SLURM host list, in its order, one at a time.

    Args:
        text: names separated by commas, each with any number of bracketed lists of numbers and
            ranges; leading zeros give the width.

    Raises:
        LaunchError: the text is not a host list. Raised when the faulty part is reached.

    Example:
        >>> list(expand_nodelist("node[003-005,7],gpu1"))
        ['node003', 'node004', 'node005', 'node7', 'gpu1']
    """
    for item in _split(text):
        pieces = re.split(r"\[([^\[\]]*)\]", item)  # plain, inside brackets, plain, ...
        if not item or not all(_HOST.fullmatch(plain) for plain in pieces[::2]):
            raise _malformed(text)
        choices = [
            list(_numbers(piece, text)) if odd else [piece]
            for odd, piece in zip(itertools.cycle((False, True)), pieces, strict=False)
        ]
        yield from map("".join, itertools.product(*choices))


def first_host(text: str) -> str:
    """Return the first host of a SLURM host list: where rank 0 runs.

    Example:
        >>> first_host("r[1-2]n[08-11]")
        'r1n08'
    """
    return next(expand_nodelist(text))


def tasks_on_node(text: str, node: int) -> int | None:
    """Return the number of tasks on node number `node` from a list such as `2(x3),1`.

    Returns:
        The count, or None where the list is shorter than that.

    Raises:
        LaunchError: the text is not a list of counts.

    Example:
        >>> tasks_on_node("2(x3),1", 3)
        1
    """
    for item in text.split(","):
        match = _COUNT.fullmatch(item.strip())
        if match is None:
            raise LaunchError(
                f"SLURM_TASKS_PER_NODE is {text!r}, which is not a list of counts such as "
                f"'2(x3),1'; start the script with srun, or pass rank and world size explicitly"
            )
        node -= int(match[2] or 1)
        if node < 0:
            return int(match[1])
    return None


def _split(text: str) -> Iterator[str]:
    depth = start = 0
    for position, character in enumerate(text):
        if character == "," and depth == 0:
            yield text[start:position].strip()
            start = position + 1
        depth += (character == "[") - (character == "]")
    yield text[start:].strip()


def _numbers(inside: str, text: str) -> Iterator[str]:
    for part in inside.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise _malformed(text)
        low, high = match[1], match[2] or match[1]
        if int(high) < int(low) or int(high) - int(low) > 1_000_000:
            raise _malformed(text)
        yield from (f"{number:0{len(low)}d}" for number in range(int(low), int(high) + 1))


def _malformed(text: str) -> LaunchError:
    return LaunchError(
        f"the SLURM node list {text!r} is not a host list such as 'node[003-005,7],gpu1'; "
        f"set MASTER_ADDR to the host of rank 0 instead"
    )
