"""Jobs whose ranks are forked from a process that has imported their framework.

Importing a framework takes seconds of each rank, most of the time of a short job. `ForkServer`
starts one process that imports it once; of each job it forks a leader, which forks the ranks and
waits for them. From there on a rank is like one of `spawn_ranks`: a process group, an environment
and output files of its own, its script as `__main__`, and an end as Python has it. Not for what
is to be seen in a fresh interpreter: imports, variables that a framework reads while it is
imported, memory of the whole process, source of every caller (the outermost are runpy's).
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, Final

import attrs

from parallelkit.spawn import Child, RankResult, output_path, rank_environ, watch_ranks

#: Bytes of a request, above all the environment.
_ROOM: Final = 1 << 20


@attrs.frozen(kw_only=True)
class JobRequest:
    """What a leader is to run; see `parallelkit.testing.jobs.run_job`.

    Attributes:
        environ: variables of the process that asks; env: what is set on top, in all ranks.
        folder: where the ranks start.
    """

    script: str
    args: list[str]
    ranks: int
    timeout: float
    grace: float
    environ: dict[str, str]
    env: dict[str, str]
    folder: str


class ForkServer:
    """The side of the tests. Jobs may run at the same time, from several threads.

    Args:
        modules: what is imported before any rank is forked.
        filters: warnings, as Python's `-W` takes them, of the imports and of all ranks.
        env: variables that the modules read while they are imported.
    """

    def __init__(
        self,
        modules: Sequence[str],
        *,
        filters: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._socket, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)
        options = [part for text in filters for part in ("-W", text)]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *options, "-m", __name__, str(theirs.fileno()), *modules],
                env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def run(
        self,
        script: Path | str,
        args: Sequence[str] = (),
        *,
        ranks: int,
        timeout: float,
        env: Mapping[str, str],
        grace: float,
    ) -> list[RankResult]:
        """Run a script on forked ranks, in this process's folder and environment, plus `env`.

        Raises:
            RuntimeError: the server or the job's leader ended; with what the server said.
        """
        request = JobRequest(
            script=str(script),
            args=list(args),
            ranks=ranks,
            timeout=timeout,
            grace=grace,
            environ=dict(os.environ),
            env=dict(env),
            folder=os.getcwd(),
        )
        reading, writing = os.pipe()
        with open(reading, "rb") as answers:
            try:
                socket.send_fds(
                    self._socket, [json.dumps(attrs.asdict(request)).encode()], [writing]
                )
            except OSError as error:
                raise RuntimeError(f"no fork server: {error}\n{self._said()}") from error
            finally:
                os.close(writing)
            answer = answers.read()
        if not answer:
            raise RuntimeError(f"the leader of a job ended without an answer:\n{self._said()}")
        return [RankResult(**result) for result in json.loads(answer)]

    def close(self) -> None:
        """End the server."""
        self._socket.close()
        self._process.wait(30)
        self._errors.close()

    def _said(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-6000:]


@attrs.define
class _Forked:
    """A child by its id, as `parallelkit.spawn` watches it."""

    pid: int
    returncode: int | None = None

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def main(argv: Sequence[str]) -> None:
    """Serve until the other side closes. In a rank it returns when the rank's script is over.

    Nothing stands between the script and the interpreter's own end, `finally` least of all.
    """
    for module in argv[2:]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # else every rank's end looks through all that was imported, several times
    rank = _serve(socket.socket(fileno=int(argv[1])))
    if rank is not None:
        _run_script(*rank)


def _serve(requests: socket.socket) -> tuple[JobRequest, int] | None:
    """Fork a leader for each request; returns in ranks with what they run, and at the end."""
    leaders: list[int] = []
    while True:
        message, fds, *_ = socket.recv_fds(requests, _ROOM, 1)
        leaders = [leader for leader in leaders if os.waitpid(leader, os.WNOHANG)[0] == 0]
        if not message:
            requests.close()
            return None
        leaders.append(os.fork())
        if leaders[-1] == 0:
            requests.close()
            return _lead(JobRequest(**json.loads(message)), fds[0])
        os.close(fds[0])


def _lead(request: JobRequest, answers: int) -> tuple[JobRequest, int]:
    """Fork the ranks, in which it returns; wait for them, answer and end."""
    os.chdir(request.folder)
    _set_environ(request.environ)
    folder = Path(tempfile.mkdtemp(prefix="parallelkit-"))
    children = []
    for rank in range(request.ranks):
        pid = os.fork()
        if pid == 0:
            os.close(answers)
            _become(rank, request, folder)
            return request, rank
        children.append(Child(rank, _Forked(pid)))
    results = watch_ranks(children, folder, timeout=request.timeout, grace=request.grace)
    shutil.rmtree(folder, ignore_errors=True)
    with open(answers, "w") as file:
        json.dump([attrs.asdict(result) for result in results], file)
    os._exit(0)


def _become(rank: int, request: JobRequest, folder: Path) -> None:
    """Take a rank's process group, environment and output."""
    os.setsid()
    _set_environ(rank_environ(rank, request.ranks, folder) | request.env)
    for descriptor, stream in ((1, "out"), (2, "err")):
        with output_path(folder, rank, stream).open("wb") as file:
            os.dup2(file.fileno(), descriptor)


def _set_environ(environ: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)


def _run_script(request: JobRequest, rank: int) -> None:
    """Run the script as `__main__`, which lives on until the interpreter ends."""
    sys.argv = [request.script, *request.args]
    sys.path[0] = str(Path(request.script).parent)
    loader = SourceFileLoader("__main__", request.script)
    module: Any = types.ModuleType("__main__")
    module.__file__ = request.script
    sys.modules["__main__"] = module
    loader.exec_module(module)


if __name__ == "__main__":
    main(sys.argv)
