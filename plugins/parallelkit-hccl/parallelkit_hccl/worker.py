"""One thread for one communicator: calls into C block, so somebody else has to keep the time.

The device's context belongs to a thread, too: a communicator that is opened in one and used in
another fails. So everything of one communicator happens in one thread of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from parallelkit_hccl.errors import HcclStateError, HcclTimeoutError

T = TypeVar("T")


class _Job(Generic[T]):
    def __init__(self, work: Callable[[], T]) -> None:
        self.work = work
        self.done = threading.Event()
        self.result: T | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self.work()
        except BaseException as error:  # it belongs to the thread that waits
            self.error = error
        self.done.set()


class Worker:
    """A daemon thread that does one job after the other.

    Attributes:
        stuck: what was being done when its deadline passed; None while all is well. A call in C
            cannot be ended from outside: the thread is lost, and with it what it owns.
    """

    def __init__(self, name: str) -> None:
        self.stuck: str | None = None
        self._turn = threading.Lock()
        self._jobs: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def run(self, what: str, work: Callable[[], T], deadline: float) -> T:
        """Do `work` in the thread, and wait for it until `deadline` (monotonic seconds).

        Callers in several threads wait for each other, within their deadlines.

        Raises:
            HcclTimeoutError: the deadline passed; the thread is lost.
            HcclStateError: the thread was lost or stopped before.
            BaseException: what `work` raised.
        """
        if not self._turn.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise HcclTimeoutError(f"{what} did not begin within its deadline, after {self.stuck}")
        try:
            return self._run_job(what, _Job(work), deadline)
        finally:
            self._turn.release()

    def _run_job(self, what: str, job: _Job[T], deadline: float) -> T:
        if self.stuck is not None:
            raise HcclStateError(f"{what} is impossible: the thread is still in {self.stuck}")
        if not self._thread.is_alive():
            raise HcclStateError(f"{what} is impossible: the thread was stopped")
        self.stuck = what  # it stays so where waiting is interrupted, by Ctrl-C
        self._jobs.put(job)
        if not job.done.wait(max(0.0, deadline - time.monotonic())):
            raise HcclTimeoutError(f"{what} did not end within its deadline")
        self.stuck = None
        if job.error is not None:
            raise job.error
        return job.result  # type: ignore[return-value]

    def stop(self, seconds: float = 5.0) -> None:
        """Let the thread end after its present job; a lost one is left to the process' end."""
        self._jobs.put(None)
        if self.stuck is None:
            self._thread.join(seconds)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
