"""Three ranks of a sharded publisher, of which one fails in the stream. `argv[1]` is the case."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from parallelkit_torch import pull
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import parallelkit as pk
from parallelkit.errors import (
    CorruptionError,
    ParallelKitError,
    PeerLostError,
    UpdateAbortedError,
    UpdateTimeoutError,
    WeightTransferError,
)

case = sys.argv[1]
me = os.getpid()
group = pk.init_process_group(device="cpu", timeout=20)
rank, world = group.rank, group.world_size
mesh = DeviceMesh("cpu", torch.arange(world), mesh_dim_names=("shard",))


class Model(nn.Module):
    """Parts larger than a parcel, so that the stream has steps; a whole one for the follower."""

    def __init__(self, divided: bool) -> None:
        super().__init__()
        for number in range(3):
            whole = torch.full((3 << 20, 2), float(number + 1))
            if divided:
                whole = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
            self.register_parameter(f"w{number}", nn.Parameter(whole))

    def fill(self, value: float) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                local = getattr(parameter, "to_local", lambda p=parameter: p)()
                local.fill_(value)

    def values(self) -> set[float]:
        return {float(v) for p in self.parameters() for v in p.detach().aminmax()}


class Follower:
    """On rank 0, a whole model that steps in a thread."""

    def __init__(self, publisher: pk.WeightPublisher) -> None:
        if rank == 0:
            self.model = Model(divided=False)
            self.model.fill(0.0)
            self.subscriber = pk.subscribe_weights(self.model, publisher.ticket, timeout=20)

    def update(self, publisher: pk.WeightPublisher) -> tuple[Exception | None, Exception | None]:
        """One update: the publisher's error and the follower's."""
        errors: list[Exception | None] = [None, None]

        def step() -> None:
            try:
                self.subscriber.step(20)
            except ParallelKitError as error:
                errors[1] = error

        thread = threading.Thread(target=step)
        if rank == 0:
            thread.start()
        try:
            publisher.update()
        except ParallelKitError as error:
            errors[0] = error
        finally:
            if rank == 0:
                thread.join(30)
                assert not thread.is_alive()
        return errors[0], errors[1]

    def close(self) -> None:
        if rank == 0:
            self.subscriber.close()


def in_the_stream(at: int, call: Callable[[], None]) -> None:
    """Call something on this rank once its `at`-th parcel is on its way."""
    count = 0
    plain_digest = pull.digest

    def digest(data: torch.Tensor) -> int:
        nonlocal count
        count += 1
        if count == at:
            call()
        return plain_digest(data)

    pull.digest = digest  # both ends hash every parcel


def stop_for(seconds: float) -> None:
    helper = os.fork()
    if helper == 0:
        time.sleep(seconds)
        os.kill(me, signal.SIGCONT)
        os._exit(0)
    os.kill(me, signal.SIGSTOP)


model = Model(divided=True)
timeout = {"stopped": 4.0, "killed": 6.0}.get(case, 20.0)
publisher = pk.publish_weights(model, timeout=timeout)
follower = Follower(publisher)
publisher.wait(1, timeout=20)
model.fill(1.5)
assert follower.update(publisher) == (None, None)
assert rank or follower.model.values() == {1.5}
model.fill(2.5)

if case == "goes_on":
    # rank 1 sends to rank 2 in a group of the two, which takes it only after the update
    pair = group.subgroup([1, 2])
    everyone = dist.group.WORLD
    big, small = torch.full((1 << 20,), 7.0), torch.full((3,), 9.0)
    if rank == 1:
        works = [dist.isend(big, 2, group=pair.native), dist.isend(small, 2, group=everyone)]
    assert follower.update(publisher) == (None, None)
    if rank == 2:
        got, more = torch.zeros_like(big), torch.zeros_like(small)
        dist.recv(got, 1, group=pair.native)
        dist.recv(more, 1, group=everyone)
        assert bool((got == 7).all() and (more == 9).all())
    elif rank == 1:
        for work in works:
            work.wait()
    if pair is not None:
        assert float(pair.all_reduce(torch.ones(1))) == 2
    assert rank or follower.model.values() == {2.5}
    model.fill(3.5)

    def fail() -> None:
        raise MemoryError("no room to read")

    # a rank that cannot read, bytes that change on their way, a rank 0 that cannot place
    if rank == 1:
        in_the_stream(2, fail)
    error, theirs = follower.update(publisher)
    assert type(error) is WeightTransferError, error
    assert "publisher rank 1 could not read: MemoryError: no room" in str(error)
    assert rank or isinstance(theirs, UpdateAbortedError), theirs
    if rank == 2:
        plain_digest = pull.digest
        pull.digest = lambda data: plain_digest(data) ^ 1
    error, theirs = follower.update(publisher)
    assert isinstance(error, CorruptionError), error
    assert "bytes from publisher rank 2 arrived changed" in str(error), error
    assert rank or isinstance(theirs, UpdateAbortedError), theirs
    if rank == 2:
        pull.digest = plain_digest
    if rank == 0:
        in_the_stream(2, fail)
    try:
        error, theirs = follower.update(publisher)
    except MemoryError:
        assert rank == 0
    else:
        assert rank
        assert "no room to read (as rank 0 reports)" in str(error), error
    # nothing of it was applied, and the next one goes through
    assert rank or follower.model.values() == {2.5}
    assert publisher.version == 2
    assert follower.update(publisher) == (None, None)
    assert rank or follower.model.values() == {3.5}
    follower.close()

elif case in ("killed", "stopped"):
    culprit = int(sys.argv[2])
    pause = 8.0 if culprit else 25.0
    if rank == culprit:
        in_the_stream(
            2, lambda: os.kill(me, signal.SIGKILL) if case == "killed" else stop_for(pause)
        )
    group.barrier()  # with more time than the publisher has
    began = time.monotonic()
    error, theirs = follower.update(publisher)
    seconds = time.monotonic() - began
    name = f"publisher rank {culprit}"
    print(f"{type(error).__name__} after {seconds:.1f} s: {error}")
    if rank == culprit:  # it was stopped, and the others have given up
        assert error is not None
    else:
        late = case == "stopped" or culprit == 0  # gloo tells a sender of a dead peer when it likes
        allowed = (UpdateTimeoutError,) if case == "stopped" else (PeerLostError,)
        assert isinstance(error, (*allowed, UpdateTimeoutError) if late else allowed), error
        assert name in str(error), error
        # rank 0 waits until the update's deadline, the others for all that rank 0 may need
        assert seconds < (2 * timeout + 10 if culprit == 0 else timeout) + 10
    if rank == 0 and culprit:
        assert isinstance(theirs, UpdateAbortedError), theirs
        assert name in str(theirs), theirs
        assert follower.model.values() == {1.5}
        assert follower.subscriber.version == 1
    try:
        publisher.update()
    except ParallelKitError as later:
        assert "broken group" in str(later) or "gone" in str(later), later
    else:
        raise AssertionError("a broken group goes on")
    follower.close()

publisher.close()
group.close()
