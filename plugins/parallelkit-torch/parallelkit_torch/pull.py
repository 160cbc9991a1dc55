"""Rank 0 pulls parcels of bytes from the other ranks of a group, one by one, with deadlines.

For each parcel rank 0 sends a word and gets the bytes and a closing word with their hash. So
either side can stop between parcels, what one side cannot do is told to the other, and a rank
from which nothing is asked is not disturbed. Messages have tags of their own: they cannot be
taken for anything that the user sends over the same group.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
import xxhash

from parallelkit.errors import PeerLostError, UpdateTimeoutError
from parallelkit_torch.faults import brief
from parallelkit_torch.wire import Wire

_WORD_BYTES: Final = 512
_HEAD_BYTES: Final = 11
_WORD_TAG, _DATA_TAG, _CLOSING_TAG = 0x706B01, 0x706B02, 0x706B03
#: How long to look for what rank 0 left behind when it gave up, in seconds.
_LOOK_SECONDS: Final = 1.0
_LAST_WORDS: Final = "pull/last words"

PULL: Final = "p"  # rank 0: send me your parcel with this number
CHECK: Final = "c"  # the same, with the hash of its bytes
END: Final = "e"  # rank 0: that was all
LOST: Final = "l"  # rank 0: the rank with this number is gone
LATE: Final = "t"  # rank 0: the rank with this number did not answer in time
DONE: Final = "d"  # that was the parcel; the number is its hash
FAILED: Final = "f"  # those were bytes without meaning, since I could not read mine


class Word(NamedTuple):
    """A short message.

    Attributes:
        kind: what it says, one of the letters above.
        number: of the parcel, of a rank, or a hash.
        text: for people.
    """

    kind: str
    number: int = 0
    text: str = ""

    def to_tensor(self, device: torch.device) -> torch.Tensor:
        """The word in its fixed size; a long text is cut."""
        text = self.text.encode(errors="replace")[: _WORD_BYTES - _HEAD_BYTES]
        head = self.kind.encode() + self.number.to_bytes(8, "little") + len(text).to_bytes(2)
        data = bytearray((head + text).ljust(_WORD_BYTES, b"\0"))
        return torch.frombuffer(data, dtype=torch.uint8).to(device)

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> Word:
        """Read what `to_tensor` made."""
        data = bytes(tensor.cpu().numpy())
        text = data[_HEAD_BYTES:][: int.from_bytes(data[9:_HEAD_BYTES])]
        number = int.from_bytes(data[1:9], "little")
        return cls(data[:1].decode(errors="replace"), number, text.decode(errors="replace"))


def scratch(nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory for bytes on their way."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def digest(data: torch.Tensor) -> int:
    """The hash of bytes in host memory; 0 elsewhere, where looking would cost a copy."""
    return xxhash.xxh3_64_intdigest(data.numpy().data) if data.device.type == "cpu" else 0


class Line:
    """Words and bytes between two ranks of a group.

    A failure breaks the group for good, as that of a collective does.

    Attributes:
        fault: at rank 0, what it has to tell the others of a failure.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.device = wire.device
        self.rank = wire.rank
        self.world_size = wire.world_size
        self.fault: Word | None = None

    def send(self, data: torch.Tensor, peer: int, tag: int, seconds: float) -> None:
        """Send bytes; returns once they have left `data`."""
        work = self._start(lambda: self._begin(dist.isend, data, peer, tag), peer)
        self.finish(work, peer, seconds)

    def expect(self, into: torch.Tensor, peer: int, tag: int) -> Any:
        """Start to receive bytes of exactly the size of `into`; `finish` ends it."""
        return self._start(lambda: self._begin(dist.irecv, into, peer, tag), peer)

    def finish(self, work: Any, peer: int, seconds: float) -> None:
        """Wait for what `expect` started.

        Raises:
            PeerLostError, UpdateTimeoutError: naming the peer, or whom rank 0 says to be missing.
        """
        seconds = max(seconds, 0.001)
        try:
            if self.device.type != "cpu":  # there wait() is for the stream, and returns at once
                _poll(work, seconds)
            work.wait(timedelta(seconds=seconds))
        except (RuntimeError, ValueError) as error:
            raise self._failure(error, peer, seconds) from error

    def hear(self, peer: int, seconds: float) -> Word:
        """Wait for a word."""
        into = scratch(_WORD_BYTES, self.device)
        self.finish(self.expect(into, peer, _WORD_TAG), peer, seconds)
        return Word.from_tensor(into)

    def say_all(self, word: Word, seconds: float) -> None:
        """Send a word to every other rank; one that is gone does not keep it from the rest."""
        data = word.to_tensor(self.device)
        works = []
        for peer in set(range(self.world_size)) - {self.rank}:
            with contextlib.suppress(RuntimeError, ValueError):
                works.append(self._begin(dist.isend, data, peer, _WORD_TAG))
        deadline = time.monotonic() + seconds
        for work in works:
            with contextlib.suppress(RuntimeError, ValueError):
                left = max(deadline - time.monotonic(), 0.1)
                if self.device.type != "cpu":
                    _poll(work, left)
                work.wait(timedelta(seconds=left))

    def answer(self, data: torch.Tensor, closing: Word, seconds: float) -> None:
        """Send rank 0 the parcel that it asked for."""
        self.send(data, 0, _DATA_TAG, seconds)
        self.send(closing.to_tensor(self.device), 0, _CLOSING_TAG, seconds)

    def give_up(self, word: Word) -> PeerLostError | UpdateTimeoutError:
        """Take rank 0's word that a rank is missing; returns the error to raise."""
        text, peer = f"{word.text} (as rank 0 reports)", rank_name(word.number)
        self._wire.broken = text
        if word.kind == LATE:
            return UpdateTimeoutError(text, missing=[peer])
        return PeerLostError(text, peers=[peer])

    def _begin(self, call: Any, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        """Start a send or a receive."""
        native = self._wire.native
        if self.device.type == "cpu":
            start = native.send if call is dist.isend else native.recv
            return start([tensor], peer, tag)
        # In a batch of one: NCCL makes a communicator for each pair, and warns, otherwise.
        (work,) = dist.batch_isend_irecv([dist.P2POp(call, tensor, group=native, group_peer=peer)])
        return work

    def _start(self, call: Callable[[], Any], peer: int) -> Any:
        if self._wire.broken:
            raise PeerLostError(
                f"the publisher's group is broken; earlier: {self._wire.broken}",
                peers=[rank_name(peer)],
            )
        try:
            return call()
        except (RuntimeError, ValueError) as error:
            raise self._failure(error, peer, 0.0) from error

    def _failure(
        self, error: Exception, peer: int, seconds: float
    ) -> PeerLostError | UpdateTimeoutError:
        """Our error for the backend's.

        With a timeout the backend closes all connections of this rank: the others see rank 0 go,
        and find its reason in the store.
        """
        name, late = rank_name(peer), "timed out" in str(error).lower()
        if late:
            text = f"{name} did not answer within {seconds:.3g} s"
        else:
            text = f"{name} is gone ({brief(error)})"
        if self.rank == 0:
            self.fault = Word(LATE if late else LOST, peer, text)
            leave(self._wire.store, self.fault)
        elif peer == 0 and not late:
            word = look(self._wire.store)
            if word is not None:
                return self.give_up(word)
        self._wire.broken = text
        if late:
            return UpdateTimeoutError(text, missing=[name])
        return PeerLostError(text, peers=[name])


class Pull:
    """One parcel that rank 0 asks for."""

    def __init__(self, line: Line, peer: int, number: int, into: torch.Tensor, check: bool) -> None:
        """Prepare to receive the parcel `number` of `peer`; `check`: with the hash of its bytes."""
        self._line, self._peer, self._number = line, peer, number
        self.into = into
        self.check = check and into.device.type == "cpu"
        self._closing = scratch(_WORD_BYTES, line.device)
        self._works: list[Any] = []

    def start(self, seconds: float) -> None:
        """Ask; what comes is received from now on.

        On a CPU the receiving starts first, so that an interrupt finds it to be ended. On a GPU
        messages of two ranks keep their order, and the word has to go first.
        """
        word = Word(CHECK if self.check else PULL, self._number).to_tensor(self._line.device)
        on_cpu = self._line.device.type == "cpu"
        if not on_cpu:
            self._line.send(word, self._peer, _WORD_TAG, seconds)
        self._works += [
            self._line.expect(self.into, self._peer, _DATA_TAG),
            self._line.expect(self._closing, self._peer, _CLOSING_TAG),
        ]
        if on_cpu:
            self._line.send(word, self._peer, _WORD_TAG, seconds)

    def finish(self, seconds: float) -> Word:
        """Wait for the bytes and the closing word; harmless when repeated."""
        deadline = time.monotonic() + seconds
        while self._works:
            self._line.finish(self._works[0], self._peer, deadline - time.monotonic())
            self._works.pop(0)
        return Word.from_tensor(self._closing)


def _poll(work: Any, seconds: float) -> None:
    """Wait until a GPU's message is done."""
    deadline = time.monotonic() + seconds
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise RuntimeError(f"timed out after {seconds:.3g} s")
        time.sleep(0.0005)


def leave(store: Any, word: Word) -> None:
    """Put down why this rank gives up, for those who will only see that it is gone."""
    _in_time(lambda: store.set(_LAST_WORDS, bytes(word.to_tensor(torch.device("cpu")).numpy())))


def look(store: Any) -> Word | None:
    """What rank 0 put down; None if it had no time to, or the store went with it."""
    found: list[Word] = []

    def wait() -> None:
        end = time.monotonic() + _LOOK_SECONDS
        while time.monotonic() < end:
            if store.check([_LAST_WORDS]):
                data = bytearray(store.get(_LAST_WORDS))
                found.append(Word.from_tensor(torch.frombuffer(data, dtype=torch.uint8)))
                return
            time.sleep(0.02)

    _in_time(wait)
    return found[0] if found else None


def _in_time(call: Callable[[], None]) -> None:
    """Do it in a thread: a store whose host is stopped would block without a deadline."""

    def quietly() -> None:
        try:
            call()
        except (RuntimeError, AttributeError):  # the store is gone, or there is none
            return

    thread = threading.Thread(target=quietly, name="parallelkit-pull", daemon=True)
    thread.start()
    thread.join(2 * _LOOK_SECONDS)


def rank_name(rank: int) -> str:
    """What a rank of the publisher is called in errors."""
    return f"publisher rank {rank}"
