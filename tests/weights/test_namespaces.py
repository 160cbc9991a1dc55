"""A member in a PID namespace of its own: nothing that is sent needs a process's number."""

import subprocess
import sys
import threading

import pytest

from parallelkit.testing.peer import sample_model
from parallelkit.weights import publish_weights

APART = ("unshare", "--pid", "--fork", "--kill-child")

MEMBER = """
import os, sys
import parallelkit as pk
from parallelkit.testing.peer import sample_model
model = sample_model()
with pk.subscribe_weights(model, sys.stdin.readline(), timeout=30) as follower:
    version = follower.step(30)
    print(os.getpid(), version, {float(a.flat[0]) for a in model.arrays.values() if a.size})
"""


def _can_be_apart():
    try:
        done = subprocess.run([*APART, "true"], capture_output=True, timeout=30)
    except OSError:
        return False
    return done.returncode == 0


@pytest.mark.ranks
@pytest.mark.skipif(not _can_be_apart(), reason="this user may not make PID namespaces")
@pytest.mark.parametrize("named", [False, True])
def test_shared_memory_reaches_another_pid_namespace(named):
    with publish_weights(sample_model(3.0), timeout=30, named=named) as publisher:
        ticket, ended = publisher.new_ticket(), []
        with subprocess.Popen(
            [*APART, sys.executable, "-c", MEMBER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as member:
            tell = threading.Thread(
                target=lambda: ended.append(member.communicate(ticket + "\n", timeout=60)[0])
            )
            tell.start()
            try:
                publisher.wait(timeout=30)
                (report,) = publisher.update().members
            finally:
                tell.join(60)
                member.kill()
    assert (report.state, report.transport) == ("committed", "shm")
    pid, version, values = ended[0].split(maxsplit=2)
    assert pid == "1", "it is the first of its namespace"
    assert (version, values.strip()) == ("1", "{3.0}")
