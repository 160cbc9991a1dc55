"""What a rank makes of a failed collective by what the others said, without any process."""

from __future__ import annotations

import threading
import time

import pytest
from parallelkit_torch import faults
from parallelkit_torch.wire import HashStore

from parallelkit.errors import CollectiveError, CollectiveTimeoutError

TIMED_OUT = RuntimeError("Timed out waiting 1500ms for send operation to complete")


def explain(store: object, rank: int, error: Exception = TIMED_OUT) -> CollectiveError:
    return faults.explain(
        error,
        what="barrier()",
        timeout=1.5,
        elapsed=1.5,
        store=store,  # type: ignore[arg-type]
        rank=rank,
        world_size=3,
    )


class Dying:
    """A store that goes away once it answered so many questions."""

    def __init__(self, inner: object, answers: int) -> None:
        self.inner, self.answers = inner, answers

    def __getattr__(self, name: str) -> object:
        self.answers -= 1
        if self.answers < 0:
            raise RuntimeError("Failed to recv, got 0 bytes")
        return getattr(self.inner, name)


def test_rank_zero_stays_until_later_ranks_have_looked() -> None:
    store, ended = HashStore(), {}

    def fail(rank: int, delay: float) -> None:
        time.sleep(delay)
        error = explain(store, rank)
        ended[rank] = (time.monotonic(), error)

    threads = [threading.Thread(target=fail, args=at) for at in ((0, 0.0), (1, 0.6))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _, error in ended.values():
        assert isinstance(error, CollectiveTimeoutError)
        assert error.missing == (2,)
    assert ended[0][0] > ended[1][0] - 0.2


def test_a_rank_zero_that_had_given_up_takes_nothing_with_it() -> None:
    inner = HashStore()
    inner.set("fault/0", "timeout 1.5")
    error = explain(Dying(inner, 9), 1)
    assert isinstance(error, CollectiveTimeoutError)
    assert error.missing == (2,)


def test_a_store_that_dies_before_rank_zero_spoke_says_nothing_of_others() -> None:
    error = explain(Dying(HashStore(), 9), 1, RuntimeError("Connection reset by peer"))
    assert not isinstance(error, CollectiveTimeoutError)
    assert "look at the log of rank 0" in str(error)


@pytest.mark.parametrize("answers", range(4))
def test_a_dead_store_is_no_error_of_its_own(answers: int) -> None:
    error = explain(Dying(HashStore(), answers), 1)
    assert isinstance(error, CollectiveTimeoutError)
    assert error.missing == ()
