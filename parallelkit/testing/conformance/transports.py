"""The contract of a transport: subclass `TransportSuite`, name the transport, run pytest.

    class TestTcp(TransportSuite):
        name = "tcp"

Both ends are opened by the hooks, in this process and, where one is to die, in another. Whether a
member can read on after the publisher went away is a transport's own matter (shared memory stays);
what it gets is right, or an error, and in time.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final

import numpy as np
import pytest

from parallelkit.errors import (
    EpochError,
    PeerLostError,
    ProtocolError,
    TransportError,
    UpdateTimeoutError,
    WeightTransferError,
)
from parallelkit.protocols import PublisherTransport, SubscriberTransport
from parallelkit.testing.conformance.serving import Served, connect, open_end, pattern
from parallelkit.weights.passes import PASS_BYTES, SECRET_BYTES, issue
from parallelkit.weights.regions import Bytes, Span, view

RANK: Final = 3
SIZE: Final = 300_000
#: For whatever has to end well on a busy machine.
PATIENCE_SECONDS: Final = 60.0


class Ends:
    """A publisher rank's end, and as many members' ends as a test asks for."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self.name = name
        self.options = options
        self.secret = os.urandom(SECRET_BYTES)
        self.stack = contextlib.ExitStack()
        self.publisher: PublisherTransport

    def open(self, nbytes: int = SIZE) -> Bytes:
        """Open the publisher's end; returns its arena, filled with `pattern`."""
        self.publisher = self.stack.enter_context(
            contextlib.closing(
                open_end(self.name, nbytes, secret=self.secret, rank=RANK, options=self.options)
            )
        )
        arena = np.frombuffer(self.publisher.buffer, np.uint8)
        arena[:] = pattern(nbytes)
        return arena

    def join(self, key: bytes | None = None) -> SubscriberTransport:
        """Connect a member, with a fresh pass unless one is given."""
        key = issue(self.secret, RANK) if key is None else key
        end = connect(self.name, self.publisher.offer(), key)
        return self.stack.enter_context(contextlib.closing(end))


def soon(seconds: float = PATIENCE_SECONDS) -> float:
    """A deadline."""
    return time.monotonic() + seconds


def pulled(end: SubscriberTransport, *spans: Span, epoch: int = 0) -> list[bytes]:
    """The bytes of spans, each pulled into an array that held something else."""
    into = [np.full(span.nbytes, 0xEE, np.uint8) for span in spans]
    end.pull(spans, into, epoch=epoch, deadline=soon())
    return [array.tobytes() for array in into]


def some_spans(nbytes: int, seed: int, count: int = 60) -> list[Span]:
    """Spans inside of an arena: runs, boxes of up to three steps, empty ones, many overlapping."""
    random = np.random.default_rng(seed)
    spans: list[Span] = []
    while len(spans) < count:
        steps: list[tuple[int, int]] = []
        run = extent = int(random.integers(0, 400))
        for _ in range(random.integers(0, 4)):
            far = extent + int(random.integers(0, 50))
            steps.insert(0, (int(random.integers(1, 9)), far))
            extent = (steps[0][0] - 1) * far + extent
        if extent <= nbytes:
            offset = int(random.integers(0, nbytes - extent + 1))
            spans.append(Span(offset, run, tuple(steps)))
    return spans


class TransportSuite:
    """What holds for both ends of every transport.

    Attributes:
        name: the transport; options: of `publish_weights`, for it.
        needs_pass: whether who has an offer also needs a pass.
    """

    name: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    needs_pass: ClassVar[bool] = True

    @pytest.fixture
    def ends(self) -> Iterator[Ends]:
        ends = Ends(self.name, self.options)
        with ends.stack:
            yield ends

    def _needs_pass(self) -> None:
        if not self.needs_pass:
            pytest.skip(f"transport {self.name!r} with {self.options} has other means than passes")

    # --- bytes -----------------------------------------------------------------------------------

    def test_both_ends_are_what_the_protocols_say(self, ends: Ends) -> None:
        arena = ends.open()
        end = ends.join()
        assert isinstance(ends.publisher, PublisherTransport)
        assert isinstance(end, SubscriberTransport)
        assert ends.publisher.name == end.name == self.name
        assert ends.publisher.buffer.nbytes == SIZE
        assert not ends.publisher.buffer.readonly
        if end.memory is not None:
            assert end.memory.readonly
            assert bytes(end.memory) == arena.tobytes()

    @pytest.mark.parametrize("seed", range(4))
    def test_spans_arrive_exactly(self, ends: Ends, seed: int) -> None:
        arena = ends.open()
        spans = some_spans(SIZE, seed)
        found = pulled(ends.join(), *spans)
        assert found == [view(arena, span).tobytes() for span in spans]

    def test_the_ends_of_the_arena_the_whole_and_nothing(self, ends: Ends) -> None:
        arena = ends.open()
        end = ends.join()
        everything, last = Span(0, SIZE), Span(SIZE - 1, 1)
        assert pulled(end, everything, last, everything, Span(SIZE, 0), Span(0, 1)) == [
            *(arena.tobytes(), arena[-1:].tobytes(), arena.tobytes(), b"", arena[:1].tobytes())
        ]
        assert pulled(end) == []
        assert pulled(end, Span(5, 0), Span(7, 3, ((0, 4),))) == [b"", b""]

    def test_arrays_of_any_shape_are_filled_in_order(self, ends: Ends) -> None:
        arena = ends.open()
        box = np.zeros((4, 5, 6), np.uint8)
        ends.join().pull([Span(9, 6, ((20, 100),))], [box], epoch=0, deadline=soon())
        assert box.tobytes() == view(arena, Span(9, 6, ((20, 100),))).tobytes()

    def test_many_small_spans(self, ends: Ends) -> None:
        arena = ends.open()
        spans = [Span(50 * i, 1 + i % 97) for i in range(5000)]
        found = pulled(ends.join(), *spans)
        assert b"".join(found) == b"".join(arena[s.offset : s.end].tobytes() for s in spans)

    def test_a_large_pull_in_runs_and_in_columns(self, ends: Ends) -> None:
        nbytes = 64 << 20
        arena = ends.open(nbytes)
        end = ends.join()
        target = np.zeros(nbytes, np.uint8)
        end.pull([Span(0, nbytes)], [target], epoch=0, deadline=soon())
        assert np.array_equal(target, arena)
        columns = Span(1000, 3000, ((1 << 14, 1 << 12),))
        packed = np.zeros(columns.nbytes, np.uint8)
        end.pull([columns], [packed], epoch=0, deadline=soon())
        assert np.array_equal(packed, view(arena, columns).reshape(-1))

    def test_the_arena_is_read_at_the_time_of_the_pull(self, ends: Ends) -> None:
        arena = ends.open()
        end = ends.join()
        for value in range(5):
            arena[:] = value
            assert pulled(end, Span(0, SIZE), epoch=value) == [bytes([value]) * SIZE]
            ends.publisher.bump()

    def test_several_members_at_once(self, ends: Ends) -> None:
        arena = ends.open()
        members = [ends.join() for _ in range(3)]
        found: list[list[bytes]] = [[] for _ in members]

        def read(number: int) -> None:
            for seed in range(5):
                found[number] += pulled(members[number], *some_spans(SIZE, seed))

        threads = [threading.Thread(target=read, args=(n,)) for n in range(len(members))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_SECONDS)
        expected = [
            view(arena, span).tobytes() for seed in range(5) for span in some_spans(SIZE, seed)
        ]
        assert found == [expected] * len(members)

    # --- epochs ----------------------------------------------------------------------------------

    def test_members_see_the_epoch_move(self, ends: Ends) -> None:
        ends.open()
        end = ends.join()
        assert ends.publisher.epoch == end.epoch(deadline=soon()) == 0
        assert ends.publisher.bump() == ends.publisher.epoch == 1
        assert end.epoch(deadline=soon()) == ends.join().epoch(deadline=soon()) == 1

    @pytest.mark.parametrize("epoch", [0, 2, 2**40])
    def test_a_pull_of_another_epoch_is_refused(self, ends: Ends, epoch: int) -> None:
        arena = ends.open()
        end = ends.join()
        ends.publisher.bump()
        with pytest.raises(EpochError, match="epoch"):
            pulled(end, Span(0, 10), epoch=epoch)
        assert pulled(end, Span(0, 10), epoch=1) == [arena[:10].tobytes()]

    def test_what_is_read_while_the_epoch_moves_is_void_or_whole(self, ends: Ends) -> None:
        """The arena is written after each bump; no pull that ends well mixes two contents."""
        nbytes, rounds = 4 << 20, 20
        arena = ends.open(nbytes)
        end = ends.join()
        arena[:] = 0
        complete, stop = [0], threading.Event()

        def write() -> None:
            while not stop.wait(0.01):
                epoch = ends.publisher.bump()
                arena[:] = epoch % 251
                complete[0] = epoch

        writer = threading.Thread(target=write)
        writer.start()
        target = np.zeros(nbytes, np.uint8)
        try:
            for _ in range(rounds):
                epoch = complete[0]
                with contextlib.suppress(EpochError):
                    end.pull([Span(0, nbytes)], [target], epoch=epoch, deadline=soon())
                    assert (target == epoch % 251).all()
        finally:
            stop.set()
            writer.join(PATIENCE_SECONDS)
        epoch = complete[0]
        assert pulled(end, Span(0, nbytes), epoch=epoch) == [bytes([epoch % 251]) * nbytes]

    # --- who may ---------------------------------------------------------------------------------

    def test_no_secret_is_in_the_offer(self, ends: Ends) -> None:
        ends.open()
        offer = ends.publisher.offer()
        assert ends.secret not in offer
        assert issue(ends.secret, RANK)[-32:] not in offer

    def test_a_pass_works_once(self, ends: Ends) -> None:
        self._needs_pass()
        arena = ends.open()
        key = issue(ends.secret, RANK)
        first = ends.join(key)
        with pytest.raises(TransportError):
            ends.join(key)
        assert pulled(first, Span(0, 10)) == [arena[:10].tobytes()]
        first.close()
        with pytest.raises(TransportError):
            ends.join(key)

    @pytest.mark.parametrize(
        "kind", ["another rank", "another publisher", "altered", "random", "short", "long", "none"]
    )
    def test_another_pass_is_refused_and_a_right_one_works_after_it(
        self, ends: Ends, kind: str
    ) -> None:
        self._needs_pass()
        arena = ends.open()
        good = issue(ends.secret, RANK)
        key = {
            "another rank": issue(ends.secret, RANK + 1),
            "another publisher": issue(os.urandom(SECRET_BYTES), RANK),
            "altered": good[:-1] + bytes([good[-1] ^ 1]),
            "random": os.urandom(PASS_BYTES),
            "short": good[:-1],
            "long": good + b"\0",
            "none": b"",
        }[kind]
        with pytest.raises((TransportError, ProtocolError)):
            ends.join(key)
        assert pulled(ends.join(good), Span(0, 10)) == [arena[:10].tobytes()]

    @pytest.mark.parametrize("cut", [0, 1, 0.5, -1])
    def test_a_damaged_offer_is_refused(self, ends: Ends, cut: float) -> None:
        ends.open()
        offer = ends.publisher.offer()
        length = int(cut * len(offer)) if isinstance(cut, float) else cut
        with pytest.raises(ProtocolError):
            connect(self.name, offer[:length], issue(ends.secret, RANK))

    def test_an_offer_of_another_kind_is_refused(self, ends: Ends) -> None:
        for offer in (b"\xc1", b"\x80", b"\x93\x01\x02\x03", b"\x81\xa1x\x01", os.urandom(64)):
            with pytest.raises(ProtocolError):
                connect(self.name, offer, issue(ends.secret, RANK))

    # --- pulls that cannot be --------------------------------------------------------------------

    @pytest.mark.parametrize(
        "span",
        [
            Span(SIZE, 1),
            Span(SIZE - 9, 10),
            Span(-1, 10),
            Span(0, -1),
            Span(0, 10, ((2, SIZE),)),
            Span(0, 10, ((-1, 10),)),
            Span(100, 10, ((2, -10),)),
            Span(0, 1, ((1, 1),) * 99),
            Span(1 << 63, 10),
            Span(0, 1, ((1 << 62, 1),)),
        ],
    )
    def test_a_span_outside_of_the_arena_is_refused(self, ends: Ends, span: Span) -> None:
        arena = ends.open()
        end = ends.join()
        target = np.full(10, 0xEE, np.uint8)
        with pytest.raises(ProtocolError):
            end.pull([Span(0, 10), span], [target, target], epoch=0, deadline=soon())
        assert set(target) == {0xEE}, "nothing was written"
        assert pulled(end, Span(0, 10)) == [arena[:10].tobytes()]

    @pytest.mark.parametrize("kind", ["small", "large", "type", "read-only", "strided", "missing"])
    def test_an_array_that_does_not_fit_is_refused(self, ends: Ends, kind: str) -> None:
        ends.open()
        arrays: dict[str, list[Any]] = {
            "small": [np.zeros(9, np.uint8)],
            "large": [np.zeros(11, np.uint8)],
            "type": [np.zeros(10, np.int8)],
            "read-only": [np.frombuffer(bytes(10), np.uint8)],
            "strided": [np.zeros(20, np.uint8)[::2]],
            "missing": [],
        }
        with pytest.raises(ProtocolError):
            ends.join().pull([Span(0, 10)], arrays[kind], epoch=0, deadline=soon())

    # --- ends that go away -----------------------------------------------------------------------

    def test_after_the_publisher_closed_a_pull_is_right_or_an_error(self, ends: Ends) -> None:
        ends.open()
        expected = pattern(SIZE).tobytes()
        end = ends.join()
        ends.publisher.close()
        ends.publisher.close()
        for _ in range(2):
            with contextlib.suppress(PeerLostError, TransportError):
                assert pulled(end, Span(0, SIZE)) == [expected]
            with contextlib.suppress(PeerLostError, TransportError):
                assert end.epoch(deadline=soon()) == 0

    def test_a_member_that_leaves_does_not_disturb_the_others(self, ends: Ends) -> None:
        arena = ends.open()
        one, other = ends.join(), ends.join()
        one.close()
        one.close()
        assert pulled(other, Span(0, SIZE)) == [arena.tobytes()]
        with pytest.raises((WeightTransferError, ValueError)):
            pulled(one, Span(0, SIZE))

    def test_a_deadline_that_has_passed(self, ends: Ends) -> None:
        arena = ends.open()
        end = ends.join()
        target = np.zeros(SIZE, np.uint8)
        with contextlib.suppress(UpdateTimeoutError):
            end.pull([Span(0, SIZE)], [target], epoch=0, deadline=time.monotonic() - 1)
            assert target.tobytes() == arena.tobytes()
        assert pulled(end, Span(0, SIZE)) == [arena.tobytes()]

    @pytest.mark.ranks
    @pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
    def test_a_publisher_that_dies_or_stands_in_the_middle_of_pulls(
        self, how: signal.Signals
    ) -> None:
        nbytes = 16 << 20
        expected, target = pattern(nbytes), np.zeros(nbytes, np.uint8)
        with Served(self.name, self.options, nbytes) as served:
            end = connect(self.name, served.offer, served.passes[0])
            with contextlib.closing(end):
                end.pull([Span(0, nbytes)], [target], epoch=0, deadline=soon())
                assert np.array_equal(target, expected)
                timer = threading.Timer(0.05, served.process.send_signal, [how])
                timer.start()
                start = time.monotonic()
                expected_error = PeerLostError if how == signal.SIGKILL else UpdateTimeoutError
                with contextlib.suppress(expected_error):
                    while time.monotonic() - start < 1:
                        target[:] = 0
                        end.pull([Span(0, nbytes)], [target], epoch=0, deadline=start + 2)
                        assert np.array_equal(target, expected)
                timer.join()
                assert time.monotonic() - start < 2 + PATIENCE_SECONDS / 2

    # --- what is left ----------------------------------------------------------------------------

    def test_connections_leave_nothing_behind(self, ends: Ends) -> None:
        nbytes = 1 << 20
        ends.open(nbytes)
        for _ in range(3):
            pulled(ends.join(), Span(0, nbytes))
        kept = ends.join()  # what the first one makes and the last one ends is there
        before = settled()
        for _ in range(50):
            with contextlib.closing(ends.join()) as end:
                pulled(end, Span(0, nbytes))
        deadline = soon()
        while settled()[0] > before[0] and time.monotonic() < deadline:
            time.sleep(0.05)
        descriptors, threads, resident = settled()
        assert (descriptors, threads) == before[:2]
        assert resident - before[2] < 25 * nbytes, "less than half of what was pulled"
        kept.close()


def settled() -> tuple[int, int, int]:
    """Open descriptors, threads of any kind, and resident bytes of this process."""
    gc.collect()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), resident
