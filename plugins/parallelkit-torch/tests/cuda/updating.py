"""A process with a module on a GPU that publishes it, or lets it follow. A script, no test.

It is told what to do by lines of JSON, and answers each with a line:

{"do": "publish", "options": {...}}    a ticket, and what `explain` says
{"do": "subscribe", "ticket": "..."}   over which transport, and whether in place
{"do": "update"}, {"do": "step"}       the report; the version
{"do": "change"}                       change all weights
{"do": "nan"}, {"do": "finite"}        make one NaN; and not
{"do": "close"}                        close what was published or subscribed
{"do": "move"}                         give all weights new memory
{"do": "corrupt", "times": n}          flip a bit of what the next n copies write
{"do": "hang"}                         the next copy is told, and then waits until this is killed
{"do": "slow"}                         the next copy is told, and then begins a second later
{"do": "state"}                        a hash of the weights, the state, the memory in use

Errors are answered by {"error": ..., "says": ...}.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from typing import Any

import torch
from torch import nn

import parallelkit as pk
from parallelkit.errors import ParallelKitError

DEVICE = os.environ.get("PARALLELKIT_TEST_DEVICE", "cuda:0")


class Net(nn.Module):
    """Tensors of many kinds, of about 200 MB."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(20_000, 1024)
        self.head = nn.Linear(1024, 20_000, bias=False)
        self.head.weight = self.embed.weight
        self.layers = nn.ModuleList([nn.Linear(1024, 1024).to(torch.bfloat16) for _ in range(40)])
        self.odd = nn.Parameter(torch.randn(7, 3))
        self.small = nn.Parameter(torch.randn(5).to(torch.float8_e4m3fn), requires_grad=False)
        self.turned = nn.Parameter(torch.randn(300, 200).t())
        self.none = nn.Parameter(torch.zeros(0, 4))
        self.register_buffer("flags", torch.rand(11) > 0.5)
        self.register_buffer("count", torch.tensor(seed))
        self.to(DEVICE)
        self.turned.data = torch.randn(300, 200, device=DEVICE).t()


class Actor:
    """Does what it is told."""

    def __init__(self, seed: int) -> None:
        self.net = Net(seed)
        self.publisher: Any = None
        self.subscriber: Any = None

    def publish(self, options: dict[str, Any]) -> Any:
        self.publisher = pk.publish_weights(self.net, **{"timeout": 20.0} | options)
        return {"ticket": self.publisher.ticket, "explain": self.publisher.explain()}

    def ticket(self) -> Any:
        return {"ticket": self.publisher.new_ticket(), "explain": self.publisher.explain()}

    def subscribe(self, ticket: str) -> Any:
        self.subscriber = pk.subscribe_weights(self.net, ticket, timeout=20.0)
        return {
            "transport": self.subscriber._placement.readers.name,
            "in_place": self.subscriber._in_place,
        }

    def update(self) -> Any:
        report = self.publisher.update()
        return {
            "version": report.version,
            "phases": report.phases,
            "members": [
                {
                    "state": m.state,
                    "transport": m.transport,
                    "repeated": m.repeated,
                    "pause": m.pause_seconds,
                    "verified": m.verified,
                }
                for m in report.members
            ],
        }

    def step(self, timeout: float = 20.0) -> Any:
        return {"version": self.subscriber.step(timeout)}

    def change(self) -> Any:
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.copy_(parameter.float().mul(-1.5).clamp(-100, 100).to(parameter.dtype))
        return {}

    def nan(self) -> Any:
        with torch.no_grad():
            self.net.odd[2, 1] = float("nan")
        return {}

    def finite(self) -> Any:
        with torch.no_grad():
            self.net.odd[2, 1] = 1.0
        return {}

    def move(self) -> Any:
        for tensor in (*self.net.parameters(), *self.net.buffers()):
            tensor.data = tensor.data.clone()
        torch.cuda.empty_cache()
        return {}

    def corrupt(self, times: int) -> Any:
        from parallelkit_torch.cuda import target
        from parallelkit_torch.cuda.memory import bytes_at

        real = target.Copier.copy

        def copy(self: Any, *, digest: bool = False) -> None:
            nonlocal times
            real(self, digest=digest)
            if times and self.table.block is not None:
                times -= 1
                bytes_at(int(self.table.target[0]), 1, self.device)[0] ^= 1
                if digest:
                    self._sums[0, 0] += 1

        target.Copier.copy = copy  # type: ignore[method-assign]
        return {}

    def hang(self) -> Any:
        from parallelkit_torch.cuda import target

        def copy(self: Any, **options: Any) -> None:
            print(json.dumps({"hangs": True}), flush=True)
            time.sleep(600)

        target.StreamCopier.copy = copy  # type: ignore[method-assign]
        return {}

    def slow(self) -> Any:
        from parallelkit_torch.cuda import target

        real = target.StreamCopier.copy

        def copy(self: Any, *, digest: bool) -> None:
            target.StreamCopier.copy = real  # type: ignore[method-assign]
            print(json.dumps({"slow": True}), flush=True)
            time.sleep(1.0)
            real(self, digest=digest)

        target.StreamCopier.copy = copy  # type: ignore[method-assign]
        return {}

    def state(self) -> Any:
        h = hashlib.blake2b(digest_size=16)
        for name, tensor in self.net.state_dict().items():
            octets = tensor.detach().reshape(-1).contiguous().view(torch.uint8).cpu()
            h.update(name.encode())
            h.update(octets.numpy().tobytes())
        found: dict[str, Any] = {"hash": h.hexdigest()}
        if self.subscriber is not None:
            found |= {"state": self.subscriber.state, "version": self.subscriber.version}
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
            found |= {"used": total - free, "allocated": torch.cuda.memory_allocated()}
        found["files"] = len(os.listdir("/proc/self/fd"))
        return found

    def close(self) -> Any:
        for end in (self.publisher, self.subscriber):
            if end is not None:
                end.close()
        self.publisher = self.subscriber = None
        return {}


def main() -> None:
    actor = Actor(int(sys.argv[1]))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = getattr(actor, order.pop("do"))(**order)
        except ParallelKitError as error:
            answer = {"error": type(error).__name__, "says": str(error)}
            cause = error.__cause__
            if cause is not None:
                answer["cause"] = f"{type(cause).__name__}: {cause}"
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
