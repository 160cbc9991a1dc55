"""The other process of `bench_shm.py`: follows by parallelkit, or reads pickles from a pipe.

Commands are lines of JSON on standard input, answers on standard output.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import Any

from model_layouts import MODELS, make_layout


class Follower:
    """A running follower, as the trainer sees it. A context manager that ends it."""

    def __init__(self, target: str, kind: str, nbytes: int, pipe: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, target, kind, str(nbytes), str(pipe)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=(pipe,),
        )
        self.answer()

    def ask(self, do: str, **fields: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the follower ended; its error is above")
        return json.loads(line)

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def main(target: str, kind: str, nbytes: str, pipe: str) -> None:
    model = MODELS[target](make_layout(kind, int(nbytes)))
    connection = Connection(int(pipe), writable=False)
    say("ready")
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "follow":
            follow(model, command["ticket"], command["updates"], command["timeout"])
        elif command["do"] == "unpickle":
            model.load(pickle.loads(connection.recv_bytes()))
            say("loaded")
        elif command["do"] == "digest":
            say(model.digest())


def follow(model: Any, ticket: str, updates: int, timeout: float) -> None:
    """Take part in `updates` updates, saying when ready for each."""
    from parallelkit import subscribe_weights

    with subscribe_weights(model.target, ticket, timeout=timeout) as subscriber:
        for _ in range(updates):
            say("waiting")
            subscriber.step(timeout)
        say("followed")
        sys.stdin.readline()  # stay until the publisher has heard the last acknowledgement


def say(value: Any) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
