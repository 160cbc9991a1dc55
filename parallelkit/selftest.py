"""What each rank of `parallelkit doctor` runs: `python -m parallelkit.selftest [framework]`.

It opens a group of that framework, or by the default choice, sends objects round, waits for
everybody, and closes. The last line of its output is `ok` and the facts.
"""

from __future__ import annotations

import sys

import parallelkit as pk
from parallelkit.protocols import Plain


def main(framework: str = "auto", timeout: float = 30.0) -> int:
    """Take part in the self-test as one rank. Collective; blocks up to `timeout` seconds."""
    with pk.init_process_group(framework, timeout=timeout) as group:
        for src in range(group.world_size):
            sent: Plain = {"from": src, "bytes": bytes(range(256)), "list": [src, None, 0.5, "é"]}
            got = group.broadcast_object(sent if group.rank == src else None, src)
            if got != sent:
                print(f"rank {group.rank}: rank {src} sent {sent!r}, {got!r} arrived")
                return 1
        group.barrier()
        facts = f"{group.framework}/{group.backend} on {group.device}, {group.world_size} ranks"
    print(f"ok {facts}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "auto"))
