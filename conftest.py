"""Rules for every test of the repository: what it opens it closes, what it starts it ends."""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

#: Long-lived helpers that the standard library starts once for a process.
HELPERS = ("resource_tracker", "forkserver", "semaphore_tracker")
#: Daemon threads that may outlive a test, by the start of their name.
DAEMONS = ("QueueFeederThread", "tqdm_monitor")
#: The same by their class: pyzmq's, which waits for messages sent without a copy to be gone.
DAEMON_TYPES = ("GarbageCollectorThread",)
#: Variables that pytest itself moves.
MOVING = ("PYTEST_CURRENT_TEST", "COLUMNS", "LINES")
PATIENCE_SECONDS = 3.0

_SEGMENT = re.compile(r"parallelkit-\d+-(\d+)-")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the tests marked slow, too")
    parser.addoption(
        "--write-tables", action="store_true", help="write tables of the docs that tests declare"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    skip = pytest.mark.skip(reason="slow; run with --full")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves environment, threads, processes, memory, sockets or groups behind."""
    environ = _environ()
    threads, children = set(threading.enumerate()), _children()
    segments, sockets = _segments(), _sockets()
    yield
    problems = _open_things()
    changed = {
        name: (environ.get(name), _environ().get(name))
        for name in environ.keys() | _environ().keys()
        if environ.get(name) != _environ().get(name)
    }
    if changed:
        os.environ.update(environ)
        for name in _environ().keys() - environ.keys():
            del os.environ[name]
        problems.append(f"environment (before, after): {changed}")
    problems += _patiently(
        {
            "threads": lambda: [t.name for t in _threads() - threads],
            "child processes": lambda: [v for k, v in _children().items() if k not in children],
            "shared memory": lambda: sorted(_segments() - segments),
            "sockets": lambda: sorted(_sockets() - sockets),
        }
    )
    if problems:
        pytest.fail("the test leaks " + "; ".join(problems), pytrace=False)


def _patiently(checks: dict[str, Callable[[], list[str]]]) -> list[str]:
    """Give things that are on their way out a moment; look again only at what is left."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    problems = []
    for what, look in checks.items():
        while (left := look()) and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.02)
        if left:
            problems.append(f"{what}: {', '.join(left)}")
    return problems


def _environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in MOVING}


def _threads() -> set[threading.Thread]:
    """List living threads of Python; of native ones that ran some, it never learns the end."""
    return {
        thread
        for thread in threading.enumerate()
        if not (thread.daemon and thread.name.startswith(DAEMONS))
        and type(thread).__name__ not in DAEMON_TYPES
        and not isinstance(thread, threading._DummyThread)
    }


def _children() -> dict[int, str]:
    """Map the living children of this process to their command lines."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            pids = (task / "children").read_text().split()
        except OSError:
            continue
        for pid in map(int, pids):
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if not any(helper in line for helper in HELPERS):
                found[pid] = line.strip() or f"(zombie {pid})"
    return found


def _segments() -> set[str]:
    """List our shared-memory files of this process, and of processes that are gone."""
    found = set()
    for path in Path("/dev/shm").glob("parallelkit-*"):
        match = _SEGMENT.match(path.name)
        pid = int(match.group(1)) if match else 0
        if pid == os.getpid() or not Path(f"/proc/{pid}").exists():
            found.add(path.name)
    return found


def _sockets() -> set[str]:
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(fd)
        except OSError:
            continue
        if target.startswith("socket:"):
            found.add(target)
    return found


def _open_things() -> list[str]:
    """Close groups and forget plugins that a test left, and name them."""
    problems = []
    groups, loader = (sys.modules.get(f"parallelkit.{name}") for name in ("groups", "loader"))
    if groups is not None and (held := groups.open_group()) is not None:
        problems.append(f"a process group: {held!r}")
        groups.reset()
    if loader is not None and loader._default is not None:
        left = [p.name for p in loader._default.plugins.plugins if not p.dist]
        if left:
            problems.append(f"registered plugins: {', '.join(left)}")
        loader.reset()
    return problems
