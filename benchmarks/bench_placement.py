"""Placing received bytes by recorded copies, against the module's own loader and one memcpy.

One process: the bytes of an update lie in an arena, as a subscriber has them before it places them;
nothing is hashed. The loader is called with views of the arena, which is the least it can cost, and
with copies that it may keep, which is what a subscriber must give it; "times loader" is against
that. Loader and recorded copies write modules that are alike, and what each left there is compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import numpy as np
import torch
from common import (
    Goal,
    Row,
    Run,
    Timing,
    finish,
    interleaved,
    parser,
    ratios,
    time_calls,
    wait_idle,
)
from parallelkit_torch.placement import LoadedModule
from torch import nn

from parallelkit.testing.scripted import Memory
from parallelkit.weights.buckets import Workers
from parallelkit.weights.exports import export
from parallelkit.weights.manifest import Manifest, TensorSpec
from parallelkit.weights.placement import Fetch, Placement

#: layers, hidden size, inner size, experts.
KINDS: Final = {"dense": (24, 512, 1536, 0), "experts": (24, 128, 32, 128)}
QUICK: Final = {"dense": (2, 32, 64, 0), "experts": (2, 16, 8, 4)}
COLUMNS: Final = ("kind", "tensors", "MB", "arm", "ms", "low ms", "high ms", "GB/s", "times loader")


class Engine(nn.Module):
    """Layers as an engine has them: query, key and value fused, gate and up fused, experts too."""

    def __init__(self, layers: int, hidden: int, inner: int, experts: int) -> None:
        super().__init__()
        self.inner = inner
        self.layers = nn.ModuleList(nn.Module() for _ in range(layers))
        for layer in self.layers:
            lead = (experts,) if experts else ()
            shapes = {"qkv": (3 * hidden, hidden), "o": (hidden, hidden), "norm": (hidden,)}
            shapes |= {"gate_up": (*lead, 2 * inner, hidden), "down": (*lead, hidden, inner)}
            for name, shape in shapes.items():
                layer.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=DTYPE)))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        parameters = {name: p.data for name, p in self.named_parameters()}
        done = set()
        for name, weight in weights:
            target, part = self.part(parameters, name, len(weight))
            part.copy_(weight)
            done.add(target)
        return done

    def part(
        self, parameters: dict[str, torch.Tensor], name: str, rows: int
    ) -> tuple[str, torch.Tensor]:
        """The parameter that takes a published tensor, and where in it."""
        layer, _, rest = name.rpartition(".")
        expert = None
        if ".experts." in layer:
            layer, _, expert = layer.partition(".experts.")
        for fused, shards in FUSED.items():
            if rest in shards:
                target, start = f"{layer}.{fused}", shards.index(rest) * rows
                whole = parameters[target] if expert is None else parameters[target][int(expert)]
                return target, whole.narrow(0, start, rows)
        target = f"{layer}.{rest}"
        return target, parameters[target] if expert is None else parameters[target][int(expert)]


DTYPE: Final = torch.bfloat16
FUSED: Final = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--repeats", type=int, default=15)
    args = made.parse_args()
    wait_idle(args.wait_idle)
    run = Run("placement", args)
    repeats = 2 if args.quick else args.repeats
    rows: list[Row] = []
    for kind, sizes in (QUICK if args.quick else KINDS).items():
        rows += measure(kind, sizes, repeats)
    goals = [
        Goal(f"{row['kind']}: times the loader with copies", 1.0, row["times loader"])
        for row in rows
        if row["arm"] == "recorded"
    ]
    finish(run.result(rows, goals, kinds=KINDS, dtype=str(DTYPE)), COLUMNS, args.output)


def measure(kind: str, sizes: tuple[int, int, int, int], repeats: int) -> list[Row]:
    """All arms for one kind of model, in turns."""
    published = Manifest(list(names(*sizes)))
    arena = Memory(published)
    bytes_ = np.frombuffer(arena.memory, np.uint8)
    bytes_[:] = np.random.default_rng(0).integers(0, 255, len(bytes_), np.uint8)
    flat = torch.from_numpy(bytes_)
    tensors = {}
    for part in export(published, 0).parts():
        spec = published.unique[part.tensor]
        data = flat[part.offset : part.offset + part.nbytes]
        tensors[spec.name] = data.view(DTYPE).reshape(spec.shape)
    engine, twin, copy = Engine(*sizes), Engine(*sizes), np.zeros_like(bytes_)
    sink = LoadedModule(engine, engine.load_weights)
    learning = Timing.of(time_calls(lambda: sink.learn(published), warmups=0, repeats=3))
    placement = Placement(sink, sink.needs(), arena.readers(), "off", bytes(16))
    workers = Workers()
    placement.fetch(Fetch(1, 0, 0, math.inf), workers, staged=False)

    def clones() -> None:
        twin.load_weights({name: tensor.clone() for name, tensor in tensors.items()}.items())

    arms: dict[str, Callable[[], object]] = {
        "recorded": lambda: placement.place(workers),
        "loader": lambda: twin.load_weights(tensors.items()),
        "loader, its own copies": clones,
        "memcpy": lambda: np.copyto(copy, bytes_),
    }
    first = time_calls(arms["recorded"], warmups=0, repeats=1)
    with torch.no_grad():
        took = interleaved(
            {arm: timed(call) for arm, call in arms.items()}, warmups=2, repeats=repeats
        )
    for (name, ours), theirs in zip(engine.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16)), name
    placement.release()
    workers.close()
    label = {"kind": kind, "tensors": len(published.tensors), "MB": published.nbytes / 1e6}
    rows = [
        label
        | columns(arm, Timing.of(seconds), published.nbytes)
        | {"times loader": ratios(took["loader, its own copies"], seconds).median}
        for arm, seconds in took.items()
    ]
    rows += [
        label | columns(arm, timing, published.nbytes) | {"times loader": None}
        for arm, timing in (("recording, once", learning), ("first update", Timing.of(first)))
    ]
    return rows


def timed(call: Callable[[], object]) -> Callable[[], float]:
    return lambda: time_calls(call, warmups=0, repeats=1)[0]


def columns(arm: str, took: Timing, nbytes: int) -> Row:
    milliseconds = {"ms": took.median, "low ms": took.low, "high ms": took.high}
    row: Row = {"arm": arm, "GB/s": nbytes / took.median / 1e9}
    return row | {name: value * 1e3 for name, value in milliseconds.items()}


def names(layers: int, hidden: int, inner: int, experts: int) -> Iterator[TensorSpec]:
    """What a trainer publishes: one tensor for each projection, of each expert."""

    def spec(name: str, *shape: int) -> TensorSpec:
        return TensorSpec(name=name, dtype="bfloat16", shape=shape)

    for layer in range(layers):
        for name in ("q", "k", "v", "o"):
            yield spec(f"layers.{layer}.{name}", hidden, hidden)
        yield spec(f"layers.{layer}.norm", hidden)
        for where in [f".experts.{e}" for e in range(experts)] or [""]:
            yield spec(f"layers.{layer}{where}.gate", inner, hidden)
            yield spec(f"layers.{layer}{where}.up", inner, hidden)
            yield spec(f"layers.{layer}{where}.down", hidden, inner)


if __name__ == "__main__":
    main()
