"""Modules with loaders as inference engines have them, and what publishes for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import nn

from parallelkit.protocols import LoaderSink
from parallelkit.weights.manifest import Manifest, TensorSpec

Weights = Iterable[tuple[str, torch.Tensor]]
#: Names of a checkpoint, the parameter that takes them, and as which of its shards.
STACKED = (
    ("q_proj", "qkv_proj", "q"),
    ("k_proj", "qkv_proj", "k"),
    ("v_proj", "qkv_proj", "v"),
    ("gate_proj", "gate_up_proj", 0),
    ("up_proj", "gate_up_proj", 1),
)


class Qkv(nn.Module):
    """Query, key and value in one weight; each has its own rows. Grouped heads."""

    def __init__(self, hidden: int, heads: int, groups: int, width: int) -> None:
        super().__init__()
        self.rows = {"q": (0, heads * width)}
        self.rows["k"] = (heads * width, groups * width)
        self.rows["v"] = ((heads + groups) * width, groups * width)
        self.weight = nn.Parameter(torch.empty((heads + 2 * groups) * width, hidden))
        self.bias = nn.Parameter(torch.empty((heads + 2 * groups) * width))
        for parameter in (self.weight, self.bias):
            parameter.weight_loader = self.load  # type: ignore[attr-defined]

    def load(self, parameter: nn.Parameter, weight: torch.Tensor, shard: str) -> None:
        start, size = self.rows[shard]
        part = parameter.data.narrow(0, start, size)
        assert part.shape == weight.shape
        part.copy_(weight)


class GateUp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2 * inner, hidden))
        self.weight.weight_loader = self.load  # type: ignore[attr-defined]

    def load(self, parameter: nn.Parameter, weight: torch.Tensor, shard: int) -> None:
        parameter.data.chunk(2)[shard].copy_(weight)


class RowParallel(nn.Module):
    """Keeps its own columns of what is published."""

    def __init__(self, width: int, hidden: int, rank: int, ranks: int) -> None:
        super().__init__()
        self.rank, self.size = rank, width // ranks
        self.weight = nn.Parameter(torch.empty(hidden, self.size))
        self.weight.weight_loader = self.load  # type: ignore[attr-defined]

    def load(self, parameter: nn.Parameter, weight: torch.Tensor) -> None:
        parameter.data.copy_(weight.narrow(1, self.rank * self.size, self.size))


class Experts(nn.Module):
    """Two three-dimensional weights, from three names for each expert."""

    def __init__(self, experts: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.inner = inner
        self.w13 = nn.Parameter(torch.empty(experts, 2 * inner, hidden))
        self.w2 = nn.Parameter(torch.empty(experts, hidden, inner))

    def load(self, name: str, weight: torch.Tensor) -> str:
        expert, kind = name.split(".")[0], name.split(".")[1]
        if kind == "down_proj":
            self.w2.data[int(expert)].copy_(weight)
            return "w2"
        start = 0 if kind == "gate_proj" else self.inner
        self.w13.data[int(expert), start : start + self.inner] = weight
        return "w13"


class Embedding(nn.Module):
    """Pads the vocabulary with zeros."""

    def __init__(self, words: int, hidden: int, to: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(-(-words // to) * to, hidden))
        self.weight.weight_loader = self.load  # type: ignore[attr-defined]

    def load(self, parameter: nn.Parameter, weight: torch.Tensor) -> None:
        parameter[: len(weight)].data.copy_(weight)
        parameter[len(weight) :].data.fill_(0)


class Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        s = sizes
        self.qkv_proj = Qkv(s.hidden, s.heads, s.groups, s.width)
        self.o_proj = RowParallel(s.heads * s.width, s.hidden, s.rank, s.ranks)
        self.gate_up_proj = GateUp(s.hidden, s.inner)
        self.down_proj = RowParallel(s.inner, s.hidden, s.rank, s.ranks)
        self.norm = nn.LayerNorm(s.hidden)
        if s.experts:
            self.experts = Experts(s.experts, s.hidden, s.inner)


class Sizes:
    """Sizes of an engine's model; `words` is the vocabulary of the checkpoint."""

    def __init__(self, **given: int) -> None:
        self.words, self.hidden, self.inner, self.layers = 11, 8, 6, 2
        self.heads, self.groups, self.width = 4, 2, 4
        self.rank, self.ranks, self.experts, self.pad = 0, 1, 0, 8
        for name, value in given.items():
            assert hasattr(self, name)
            setattr(self, name, value)


class Engine(nn.Module):
    """A decoder whose head is its embedding."""

    def __init__(self, sizes: Sizes | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.sizes = sizes or Sizes()
        self.embed = Embedding(self.sizes.words, self.sizes.hidden, self.sizes.pad)
        self.layers = nn.ModuleList(Layer(self.sizes) for _ in range(self.sizes.layers))
        self.head = nn.Linear(1, 1, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("cosine", torch.full((4,), 0.5), persistent=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.data = parameter.data.to(dtype).fill_(77)

    def load_weights(self, weights: Weights) -> set[str]:
        parameters = dict(self.named_parameters())
        done = set()
        for name, weight in weights:
            if name.startswith("head.") or name.endswith("inv_freq"):
                continue
            done.add(self.load_one(parameters, name, weight))
        return done

    def load_one(
        self, parameters: Mapping[str, nn.Parameter], name: str, weight: torch.Tensor
    ) -> str:
        if ".experts." in name:
            prefix, rest = name.split(".experts.")
            experts = self.get_submodule(prefix + ".experts")
            assert isinstance(experts, Experts)
            return f"{prefix}.experts.{experts.load(rest, weight)}"
        for part, fused, shard in STACKED:
            if f".{part}." in name:
                target = name.replace(part, fused)
                parameters[target].weight_loader(parameters[target], weight, shard)  # type: ignore[attr-defined]
                return target
        parameter = parameters[name]
        load = getattr(parameter, "weight_loader", lambda p, w: p.data.copy_(w))
        load(parameter, weight)
        return name


def checkpoint(
    sizes: Sizes | None = None, dtype: torch.dtype = torch.float32, seed: int = 0
) -> dict[str, torch.Tensor]:
    """What a trainer publishes for an `Engine`; head and embedding are one tensor."""
    s = sizes or Sizes()
    random = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    found = {"embed.weight": make(s.words, s.hidden)}
    for i in range(s.layers):
        where = f"layers.{i}."
        for name, heads in (("q_proj", s.heads), ("k_proj", s.groups), ("v_proj", s.groups)):
            found[f"{where}{name}.weight"] = make(heads * s.width, s.hidden)
            found[f"{where}{name}.bias"] = make(heads * s.width)
        found[f"{where}o_proj.weight"] = make(s.hidden, s.heads * s.width)
        for name in ("gate_proj", "up_proj"):
            found[f"{where}{name}.weight"] = make(s.inner, s.hidden)
        found[f"{where}down_proj.weight"] = make(s.hidden, s.inner)
        found[f"{where}norm.weight"], found[f"{where}norm.bias"] = make(s.hidden), make(s.hidden)
        for e in range(s.experts):
            for name in ("gate_proj", "up_proj"):
                found[f"{where}experts.{e}.{name}.weight"] = make(s.inner, s.hidden)
            found[f"{where}experts.{e}.down_proj.weight"] = make(s.hidden, s.inner)
    found["head.weight"] = found["embed.weight"]
    return found


class Tree(nn.Module):
    """A module that holds tensors under dotted names, such as a checkpoint's."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        made: dict[int, nn.Parameter] = {}
        for name, tensor in tensors.items():
            at: nn.Module = self
            *path, last = name.split(".")
            for key in path:
                if key not in at._modules:
                    at.add_module(key, nn.Module())
                at = at.get_submodule(key)
            if id(tensor) not in made:
                made[id(tensor)] = nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
            at.register_parameter(last, made[id(tensor)])


def manifest(tensors: Mapping[str, torch.Tensor]) -> Manifest:
    """As a source of these tensors has it."""
    owners: dict[int, str] = {}
    specs = []
    for name, tensor in tensors.items():
        owner = owners.setdefault(id(tensor), name)
        dtype = str(tensor.dtype).removeprefix("torch.")
        alias_of = None if owner == name else owner
        specs.append(
            TensorSpec(name=name, dtype=dtype, shape=tuple(tensor.shape), alias_of=alias_of)
        )
    return Manifest(specs)


def state(module: nn.Module) -> Iterator[tuple[str, bytes]]:
    """Every parameter and buffer, bit by bit."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
    for name, tensor in named:
        yield name, bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


class Target(nn.Module):
    """A module with given parameters and a loader given as a function."""

    def __init__(
        self,
        loads: Callable[[Target, Weights], Iterable[str] | None],
        buffers: Mapping[str, torch.Tensor] | None = None,
        **parameters: torch.Tensor,
    ) -> None:
        super().__init__()
        for name, tensor in parameters.items():
            self.register_parameter(name, nn.Parameter(tensor, tensor.is_floating_point()))
        for name, tensor in (buffers or {}).items():
            self.register_buffer(name, tensor)
        self.loads = loads
        self.calls: list[list[str]] = []

    def load_weights(self, weights: Weights) -> Iterable[str] | None:
        names: list[str] = []

        def noted() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                names.append(name)
                yield name, tensor

        self.calls.append(names)
        return self.loads(self, noted())


def update(sink: LoaderSink, tensors: Mapping[str, torch.Tensor]) -> int:
    """One update as a subscriber makes it; returns how many tensors needed no `write`.

    The bytes are wiped afterwards: whoever kept a view of them is found out.
    """
    direct = 0
    sink.check()
    sink.begin()
    for index, spec in enumerate(sink.needs().unique):
        data = bytearray(tensors[spec.name].detach().contiguous().view(-1).view(torch.uint8))
        target = sink.destination(index)
        if target is None:
            sink.write(index, memoryview(data).toreadonly())
        else:
            target[:] = data
            direct += 1
        data[:] = bytes(len(data))
    sink.finish()
    return direct
