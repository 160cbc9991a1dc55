"""A worker extension whose worker fails when it is told to, to see what becomes of its engine."""

from __future__ import annotations

import os
import signal
import time
from typing import Any


class Upset:
    """For `worker_extension_cls="upset.Upset"`."""

    weight_transfer_engine: Any
    rank: int

    def which_rank(self) -> int:
        return self.rank

    def upset_next_load(self, how: str, seconds: float = 0.0, rank: int | None = None) -> None:
        """The next update of this worker's weights breaks off half way: `raise`, `die` or `hang`.

        `hang` takes so many seconds and then goes on. With a rank, that worker's alone.
        """
        if rank not in (None, self.rank):
            return
        model = self.weight_transfer_engine.model
        whole = model.load_weights

        def broken(pairs: Any) -> Any:
            model.load_weights = whole
            pairs = list(pairs)
            if how == "hang":
                time.sleep(seconds)
                return whole(pairs)
            whole(pairs[: len(pairs) // 2])
            if how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("made to fail half way")

        model.load_weights = broken
