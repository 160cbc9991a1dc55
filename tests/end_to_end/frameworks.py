"""One model in Torch and in MindSpore, as a trainer or follower in a process of its own.

    python frameworks.py publish|follow|serve torch|mindspore [followers]

The publisher prints a ticket for each follower and takes commands from standard input, such as
`eager 3`; a follower takes its ticket from there. Both print a JSON line for each version, with a
hash of every tensor's bytes, taken without parallelkit.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import parallelkit as pk

WIDTH, WORDS = 8, 11
IDS = np.arange(WORDS, dtype=np.int32)
#: What MindSpore's layers call these tensors; written out here, not asked of the plugin.
THEIRS = {
    "embed.weight": "embed.embedding_table",
    "norm.weight": "norm.gamma",
    "norm.bias": "norm.beta",
    "batch.weight": "batch.gamma",
    "batch.bias": "batch.beta",
    "batch.running_mean": "batch.moving_mean",
    "batch.running_var": "batch.moving_variance",
}
NAMES = [*THEIRS, "body.weight", "body.bias", "head.weight", "frozen", "low", "scalar", "empty"]


def emit(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


class Torch:
    def __init__(self, seed: int) -> None:
        import torch
        from torch import nn

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed = nn.Embedding(WORDS, WIDTH)
                self.norm = nn.LayerNorm(WIDTH)
                self.body = nn.Linear(WIDTH, WIDTH)
                self.batch = nn.BatchNorm1d(WIDTH)
                self.head = nn.Linear(WIDTH, WORDS, bias=False)
                self.head.weight = self.embed.weight
                self.frozen = nn.Parameter(torch.full((WIDTH,), float(seed)), requires_grad=False)
                self.register_buffer("low", torch.full((3, 5), seed, dtype=torch.bfloat16))
                self.register_buffer("scalar", torch.tensor(float(seed), dtype=torch.float64))
                self.register_buffer("empty", torch.zeros((0, 4), dtype=torch.int8))

            def forward(self, ids: torch.Tensor) -> torch.Tensor:
                x = self.body(self.norm(self.embed(ids)) + self.frozen)
                return self.head(self.batch(x))

        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.torch = torch
        self.net = self.published = Net()
        self.compiled = torch.compile(self.net, backend="eager")
        self.ids = torch.from_numpy(IDS)
        self.optimizer = torch.optim.Adam(
            [p for p in self.net.parameters() if p.requires_grad], lr=0.01
        )

    def train(self, mode: str, steps: int) -> None:
        call = self.net if mode == "eager" else self.compiled
        self.net.train()
        for _ in range(steps):
            self.optimizer.zero_grad()
            call(self.ids).square().mean().backward()
            self.optimizer.step()
        self.net.low += 1

    def outputs(self) -> list[list[float]]:
        self.net.eval()
        with self.torch.no_grad():
            return [f(self.ids).flatten().tolist() for f in (self.net, self.compiled)]

    def digests(self) -> dict[str, str]:
        state = self.net.state_dict()
        return {
            name: digest(bytes(state[name].detach().reshape(-1).view(self.torch.uint8).tolist()))
            for name in NAMES
        }

    def addresses(self) -> list[int]:
        return [t.data_ptr() for t in self.net.state_dict().values()]


class MindSpore:
    def __init__(self, seed: int) -> None:
        import mindspore as ms
        from mindspore import nn

        class Net(nn.Cell):
            def __init__(self) -> None:
                super().__init__()
                self.embed = nn.Embedding(WORDS, WIDTH)
                self.norm = nn.LayerNorm((WIDTH,), epsilon=1e-5)  # as Torch has it
                self.body = nn.Dense(WIDTH, WIDTH)
                self.batch = nn.BatchNorm1d(WIDTH)
                self.head = nn.Dense(WIDTH, WORDS, has_bias=False)
                self.head.weight = self.embed.embedding_table
                self.frozen = ms.Parameter(
                    ms.Tensor(np.full(WIDTH, seed, np.float32)), name="frozen", requires_grad=False
                )
                self.register_buffer("low", ms.Tensor(np.full((3, 5), seed), ms.bfloat16))
                self.register_buffer("scalar", ms.Tensor(seed, ms.float64))
                self.register_buffer("empty", ms.Tensor(np.zeros((0, 4), np.int8)))

            def construct(self, ids):  # type: ignore[no-untyped-def]
                x = self.body(self.norm(self.embed(ids)) + self.frozen)
                return self.head(self.batch(x))

        class Loss(nn.Cell):
            def construct(self, out, label):  # type: ignore[no-untyped-def]
                return (out * out).mean()

        ms.set_seed(seed)
        self.ms = ms
        self.net = Net()
        optimizer = nn.Adam(self.net.trainable_params(), learning_rate=0.01)
        self.published = nn.TrainOneStepCell(nn.WithLossCell(self.net, Loss()), optimizer)
        self.compiled = ms.jit(self.net)
        self.ids = ms.Tensor(IDS)

    def train(self, mode: str, steps: int) -> None:
        ms = self.ms
        ms.set_context(mode=ms.PYNATIVE_MODE if mode == "eager" else ms.GRAPH_MODE)
        self.published.set_train(True)
        for _ in range(steps):
            self.published(self.ids, self.ids)
        self.net.low.copy_(self.net.low + 1)

    def outputs(self) -> list[list[float]]:
        ms = self.ms
        self.net.set_train(False)
        found = []
        for mode, call in (
            (ms.PYNATIVE_MODE, self.net),
            (ms.PYNATIVE_MODE, self.compiled),
            (ms.GRAPH_MODE, self.net),
        ):
            ms.set_context(mode=mode)
            found.append(call(self.ids).asnumpy().ravel().tolist())
        return found

    def tensors(self) -> dict[str, Any]:
        tied = {"head.weight": self.net.head.weight}
        buffers = dict(self.net.named_buffers())
        return {**dict(self.net.parameters_and_names()), **buffers, **tied}

    def digests(self) -> dict[str, str]:
        tensors = self.tensors()
        return {n: digest(tensors[THEIRS.get(n, n)].asnumpy().tobytes()) for n in NAMES}

    def addresses(self) -> list[int]:
        return [t.data_ptr() for t in self.tensors().values()]


MODELS: dict[str, Callable[[int], Any]] = {"torch": Torch, "mindspore": MindSpore}


def publish(model: Any, followers: int) -> None:
    with pk.publish_weights(model.published, timeout=100.0) as publisher:
        for _ in range(followers):
            emit(ticket=publisher.new_ticket())
        publisher.wait(followers, timeout=100.0)
        for line in sys.stdin:
            mode, steps = line.split()
            model.train(mode, int(steps))
            try:
                report = publisher.update()
            except pk.ParallelKitError as error:
                emit(error=type(error).__name__, message=str(error))
                continue
            digests = model.digests()
            emit(version=report.version, digests=digests, outputs=model.outputs())


def follow(model: Any, serving: bool) -> None:
    model.outputs()  # compiles, so that later ones are by what was compiled already
    before = model.addresses()
    with pk.subscribe_weights(model.net, sys.stdin.readline(), timeout=100.0) as follower:
        if serving:
            follower.serve()
        while True:
            try:
                version = follower.step(100.0)
            except pk.ParallelKitError as error:
                emit(error=type(error).__name__, message=str(error))
                return
            with follower.use() as current:
                assert current is model.net
                digests, outputs = model.digests(), model.outputs()
            emit(version=version, digests=digests, outputs=outputs)
            assert model.addresses() == before


if __name__ == "__main__":
    role, framework = sys.argv[1:3]
    made = MODELS[framework](1 if role == "publish" else 2)
    if role == "publish":
        publish(made, int(sys.argv[3]))
    else:
        follow(made, role == "serve")
