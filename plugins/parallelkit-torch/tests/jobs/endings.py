"""Ranks whose groups end right after a collective, while something still holds the group.

`argv[1]` says how many times, `argv[2]` whether ranks close the group ("close"), leave it to the
end of the process ("exit") or have opened it with torch alone and go on with that ("adopted"),
`argv[3]` is an empty folder. Each time two children of this
process, which has imported everything, are the ranks.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import parallelkit_torch.plugin  # noqa: F401 - before the children are made
import torch
import torch.distributed as dist

import parallelkit as pk

held = []  # as a wrapped model does


def rank(number: int, meeting: Path, ending: str) -> None:
    sys.setswitchinterval(1000)  # so a thread that wants Python's lock waits for long
    os.environ |= {"RANK": str(number), "WORLD_SIZE": "2", "LOCAL_RANK": str(number)}
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    os.environ |= {"PARALLELKIT_RENDEZVOUS_FILE": str(meeting)}
    if ending == "adopted":
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=number, world_size=2)
    group = pk.init_process_group(framework="torch", device="cpu", timeout=60)
    held.append(group.native)
    if ending == "adopted":
        group.close()
    for _ in range(3):
        dist.all_reduce(torch.ones(1000), async_op=True).wait()
    if ending == "close":
        group.close()
    if ending == "adopted":
        dist.destroy_process_group()


for turn in range(int(sys.argv[1])):
    children = []
    for number in range(2):
        children.append(os.fork())
        if children[-1] == 0:
            rank(number, Path(sys.argv[3]) / str(turn), sys.argv[2])
            sys.exit(0)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0, 0], f"turn {turn}: {codes}"
