"""Three ranks of a sharded publisher, of which one fails in an update. `argv[1]` is the case."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from parallelkit_torch.sharded_weights import ShardedModuleSource
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import parallelkit as pk
from parallelkit.errors import (
    ParallelKitError,
    PeerLostError,
    UpdateAbortedError,
    UpdateTimeoutError,
)

case = sys.argv[1]
me = os.getpid()
group = pk.init_process_group(device="cpu", timeout=20)
rank, world = group.rank, group.world_size
mesh = DeviceMesh("cpu", torch.arange(world), mesh_dim_names=("shard",))


class Model(nn.Module):
    """Three tensors in parts, which are read one after the other; whole ones at the follower."""

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
        except (ParallelKitError, MemoryError) as error:
            errors[0] = error
        finally:
            if rank == 0:
                thread.join(30)
                assert not thread.is_alive()
        return errors[0], errors[1]

    def close(self) -> None:
        if rank == 0:
            self.subscriber.close()


def while_reading(at: int, call: Callable[[], None]) -> None:
    """Call something on this rank once, as its `at`-th part from now on is read."""
    count = 0
    plain = ShardedModuleSource.host_bytes

    def host_bytes(source: ShardedModuleSource, index: int) -> memoryview:
        nonlocal count
        count += 1
        if count == at:
            ShardedModuleSource.host_bytes = plain
            call()
        return plain(source, index)

    ShardedModuleSource.host_bytes = host_bytes


def stop_for(seconds: float) -> None:
    helper = os.fork()
    if helper == 0:
        time.sleep(seconds)
        os.kill(me, signal.SIGCONT)
        os._exit(0)
    os.kill(me, signal.SIGSTOP)


model = Model(divided=True)
timeout = {"stopped": 8.0, "killed": 6.0}.get(case, 20.0)
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

    # a rank that cannot read its part, rank 0 among them: nothing of it is applied anywhere
    for culprit in (1, 0):
        if rank == culprit:
            while_reading(2, fail)
        error, theirs = follower.update(publisher)
        assert error is not None
        assert "no room to read" in str(error), error
        assert rank == culprit or f"rank {culprit}" in str(error), error
        assert rank or isinstance(theirs, UpdateAbortedError), theirs
        assert rank or follower.model.values() == {2.5}
        assert publisher.version == 2
    assert follower.update(publisher) == (None, None)
    assert rank or follower.model.values() == {3.5}
    follower.close()

elif case in ("killed", "stopped"):
    culprit = int(sys.argv[2])
    pause = 14.0 if culprit else 35.0
    if rank == culprit:
        while_reading(
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
