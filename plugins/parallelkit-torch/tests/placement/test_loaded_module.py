"""Placement by a loader: what is recorded does the same, and what is not stays with the loader."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from parallelkit_torch.placement import LoadedModule
from parallelkit_torch.placement.record import memory_of
from parallelkit_torch.placement.twin import without_data
from torch import nn

from parallelkit.errors import (
    CorruptionError,
    LoaderError,
    ManifestError,
    ManifestMismatchError,
    StateError,
)
from parallelkit.protocols import LoaderSink

sys.path.insert(0, str(Path(__file__).parent))
import engines
from engines import Engine, Sizes, Target, Tree, Weights, checkpoint, manifest, state

sys.path.pop(0)

Tensors = dict[str, torch.Tensor]
Loads = Callable[[Target, Weights], Iterable[str] | None]


def learned(module: nn.Module, tensors: Tensors, loader: object = None) -> LoadedModule:
    sink = LoadedModule(module, loader or module.load_weights)  # type: ignore[arg-type]
    before = dict(state(module))
    sink.learn(manifest(tensors))
    assert dict(state(module)) == before, "learning touched live memory"
    return sink


def by_loader(sink: LoadedModule) -> dict[str, str]:
    """The loader's names and why, out of `explain`."""
    lines = [line.strip() for line in sink.explain().splitlines()]
    found = [line.removeprefix("by the loader: ") for line in lines if "by the loader: " in line]
    return {line.split("'")[1]: line.split("' ", 1)[1] for line in found}


def follow(module: Target | Engine, twin: Target | Engine, *versions: Tensors) -> LoadedModule:
    """Update `module` with each version, and load each into `twin`: equal bit by bit."""
    sink = learned(module, versions[0])
    for tensors in versions:
        engines.update(sink, tensors)
        with torch.no_grad():
            twin.load_weights([(n, t.detach().clone()) for n, t in tensors.items()])
        assert dict(state(module)) == dict(state(twin))
    return sink


def test_reading_back_notices_a_difference_in_any_place() -> None:
    def loads(target: Target, weights: Weights) -> None:
        for _, weight in weights:
            target.get_parameter("a").data.copy_(weight)
            target.get_parameter("b").data.copy_(weight)

    module = Target(loads, a=torch.zeros(3, 2), b=torch.zeros(3, 2))
    tensors = {"w": numbers(3, 2)}
    sink = learned(module, tensors)
    engines.update(sink, tensors)
    published = bytes(tensors["w"].view(-1).view(torch.uint8).tolist())
    assert bytes(sink.host_bytes(0)) == published
    for name in "ab":
        module.get_parameter(name).data[1, 1] = 9
        with pytest.raises(CorruptionError, match="'w' was placed into a, b, and these differ"):
            sink.host_bytes(0)
        engines.update(sink, tensors)
        assert bytes(sink.host_bytes(0)) == published


def numbers(*shape: int, start: float = 0.0) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(float(start), float(start) + count)[:count].reshape(shape)


# --- an engine's module ------------------------------------------------------------------------


def test_it_is_a_loader_sink() -> None:
    engine = Engine()
    sink = LoadedModule(engine, engine.load_weights)
    assert isinstance(sink, LoaderSink)
    assert sink.device == "cpu"
    assert sink.module is engine
    with pytest.raises(StateError, match="before learn"):
        sink.needs()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_replay_is_the_loader_bit_for_bit(seed: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(seed)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=random))

    groups, ranks = pick(1, 3), pick(1, 2)
    sizes = Sizes(
        groups=groups,
        heads=groups * pick(1, 3) * 2,
        width=pick(1, 3) * 2,
        hidden=pick(1, 9),
        inner=pick(1, 4) * 2,
        experts=pick(0, 3),
        ranks=ranks,
        rank=pick(0, ranks - 1),
        words=pick(1, 20),
    )
    make = functools.partial(checkpoint, sizes)
    versions = [make(dtype=torch.float32, seed=s) for s in range(3)]
    versions[1]["embed.weight"][0] = float("nan")
    engine = Engine(sizes, dtype)
    sink = follow(engine, Engine(sizes, dtype), *versions)
    assert by_loader(sink) == {}
    assert engine.head.weight is engine.embed.weight


def test_equal_dtypes_go_straight_into_live_memory() -> None:
    engine, tensors = Engine(), checkpoint()
    sink = learned(engine, tensors)
    addresses = [p.data_ptr() for p in engine.parameters()]
    unique = len(sink.needs().unique)
    assert engines.update(sink, tensors) == 0, "the first goes through the loader"
    assert engines.update(sink, tensors) == unique
    assert [p.data_ptr() for p in engine.parameters()] == addresses
    assert f"{unique} tensors: {unique} recorded on a copy without data ({unique} go" in (
        sink.explain()
    )


def test_other_dtypes_and_columns_go_by_strided_copies() -> None:
    sizes = Sizes(ranks=2, rank=1)
    sink = learned(Engine(sizes), checkpoint(sizes))
    engines.update(sink, checkpoint(sizes))
    unique = len(sink.needs().unique)
    assert engines.update(sink, checkpoint(sizes, seed=3)) == unique - 2 * sizes.layers
    assert "verified: staged bytes, for 4 that cannot be read back" in sink.explain()


def test_reading_back_gives_the_published_bytes_or_says_that_it_cannot() -> None:
    tensors = checkpoint()
    sink = learned(Engine(), tensors)
    assert not sink.readable(0), "nothing was placed yet"
    with pytest.raises(StateError, match="cannot be read back"):
        sink.host_bytes(0)
    for seed in (1, 2):
        tensors = checkpoint(seed=seed)
        engines.update(sink, tensors)
        for index, spec in enumerate(sink.needs().unique):
            assert sink.readable(index)
            assert bytes(sink.host_bytes(index)) == bytes(
                tensors[spec.name].reshape(-1).view(torch.uint8).tolist()
            )
    cast = learned(Engine(dtype=torch.bfloat16), tensors)
    engines.update(cast, tensors)
    assert not any(cast.readable(i) for i in range(len(cast.needs().unique)))


def test_without_a_name_that_a_fused_parameter_needs() -> None:
    tensors = checkpoint()
    del tensors["layers.1.k_proj.weight"]
    with pytest.raises(ManifestMismatchError) as caught:
        learned(Engine(), tensors)
    assert caught.value.differences == (
        "missing: the loader gives 'layers.1.qkv_proj.weight' (float32[32, 8]) no value in rows "
        "16:24 of 32, although it says that it loaded it",
    )
    assert "Nothing was touched." in str(caught.value)


def test_without_a_whole_layer() -> None:
    tensors = {n: t for n, t in checkpoint().items() if not n.startswith("layers.1.")}
    with pytest.raises(ManifestMismatchError) as caught:
        learned(Engine(), tensors)
    assert len(caught.value.differences) == len(list(Engine().layers[1].parameters()))
    assert all("no value" in line for line in caught.value.differences)


def test_an_unknown_name_that_the_loader_refuses() -> None:
    tensors = checkpoint() | {"layers.0.qq_proj.weight": numbers(2, 2)}
    with pytest.raises(ManifestMismatchError, match=r"raised at 'layers.0.qq_proj.weight': KeyErr"):
        learned(Engine(), tensors)


def test_an_unknown_name_that_the_loader_ignores_and_the_nearest_that_it_knows() -> None:
    class Lenient(Engine):
        def load_one(self, parameters: object, name: str, weight: torch.Tensor) -> str:
            if name.endswith("q_prj.weight"):
                return name
            return super().load_one(parameters, name, weight)  # type: ignore[arg-type]

    tensors = checkpoint() | {"layers.0.q_prj.weight": numbers(2, 2)}
    with pytest.raises(ManifestMismatchError) as caught:
        learned(Lenient(), tensors)
    assert caught.value.differences == (
        "unknown: the publisher sends 'layers.0.q_prj.weight' (float32[2, 2]), the loader writes "
        "nothing of it, although it says that it loaded it; did you mean 'layers.0.q_proj.weight'?",
    )


def test_a_wrong_shape_is_refused_before_anything_is_written() -> None:
    tensors = checkpoint()
    tensors["layers.0.q_proj.weight"] = numbers(3, 8)
    with pytest.raises(ManifestMismatchError, match=r"raised at 'layers.0.q_proj.weight': Assert"):
        learned(Engine(), tensors)


def test_a_target_that_ties_what_is_published_apart() -> None:
    class Both(Engine):
        def load_weights(self, weights: Weights) -> set[str]:
            parameters = dict(self.named_parameters(remove_duplicate=False))
            return {self.load_one(parameters, name, weight) for name, weight in weights}

    tensors = checkpoint(Sizes(pad=1))
    learned(Both(Sizes(pad=1)), tensors)
    tensors["head.weight"] = tensors["head.weight"].clone()
    with pytest.raises(ManifestMismatchError, match=r"the target ties \['embed.weight', 'head"):
        learned(Both(Sizes(pad=1)), tensors)


def test_published_once_and_needed_twice() -> None:
    def loads(target: Target, weights: Weights) -> None:
        for name, weight in weights:
            target.get_parameter({"head": "a", "embed": "b"}[name]).data.copy_(weight)

    shared = numbers(3, 2)
    versions = [{"embed": t, "head": t} for t in (shared, shared + 1, shared + 2)]
    make = functools.partial(Target, loads, a=torch.zeros(3, 2), b=torch.zeros(3, 2))

    def alone(target: Target, weights: Weights) -> None:
        for _, weight in weights:
            target.get_parameter("a").data.copy_(weight)
            target.get_parameter("b").data.copy_(weight)

    sink = follow(make(), make(), *versions)
    assert by_loader(sink) == {}
    twice = functools.partial(Target, alone, a=torch.zeros(3, 2), b=torch.zeros(3, 2))
    sink = follow(twice(), twice(), *({"embed": v["embed"]} for v in versions))
    assert by_loader(sink) == {}


# --- loaders that do other things --------------------------------------------------------------


def one(body: Callable[[torch.Tensor, torch.Tensor], None]) -> Loads:
    """A loader that gives each tensor to the parameter of its name."""

    def loads(target: Target, weights: Weights) -> set[str]:
        done = set()
        for name, weight in weights:
            body(target.get_parameter(name).data, weight)
            done.add(name)
        return done

    return loads


def rows_by_number(parameter: torch.Tensor, weight: torch.Tensor) -> None:
    index = torch.tensor([2, 0, 1])
    parameter.index_copy_(0, index, weight)


def rows_by_list(parameter: torch.Tensor, weight: torch.Tensor) -> None:
    parameter[torch.tensor([2, 0, 1])] = weight


def by_blocks(parameter: torch.Tensor, weight: torch.Tensor) -> None:
    for part, given in zip(parameter.split(1, dim=1), weight.unbind(1), strict=True):
        part.squeeze(1).copy_(given)


RECORDED: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    "copy": lambda p, w: p.copy_(w),
    "foreach": lambda p, w: torch._foreach_copy_([p[:1], p[1:]], [w[:1], w[1:]]),
    "assignment": lambda p, w: p.__setitem__(slice(None), w),
    "permuted rows": rows_by_number,
    "permuted rows by a list": rows_by_list,
    "blocks": by_blocks,
    "two transposes": lambda p, w: p.t().copy_(w.t()),
    "reshaped": lambda p, w: p.view(-1).copy_(w.reshape(-1)),
    "cast before": lambda p, w: p.copy_(w.to(p.dtype)),
    "cast before, in part": lambda p, w: [
        a.copy_(b) for a, b in zip(p, w.to(p.dtype), strict=True)
    ],
    "cloned": lambda p, w: [p[1:].copy_(w.clone()[1:]), p[:1].copy_(w[:1].clone())],
    "moved": lambda p, w: p.copy_(w.to("cpu", copy=True)),
    "bits": lambda p, w: (
        p.copy_(w) if p.dtype != w.dtype else p.view(torch.uint8).copy_(w.view(torch.uint8))
    ),
    "read in shape only": lambda p, w: p.copy_(w) if torch.empty_like(w).shape == p.shape else None,
    "into a temporary parameter": lambda p, w: nn.Parameter(p).data.copy_(w),
}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("how", "dtype"),
    [(how, torch.float32) for how in RECORDED]
    # what torch itself casts
    + [(how, torch.bfloat16) for how in RECORDED if not how.startswith("permuted")],
)
def test_plain_copies_of_any_form_are_recorded(how: str, dtype: torch.dtype) -> None:
    make = functools.partial(
        Target, one(RECORDED[how]), a=torch.zeros(3, 4, dtype=dtype), b=torch.zeros(3, 4).t()
    )
    if how in ("permuted rows", "permuted rows by a list", "reshaped", "bits"):
        make = functools.partial(Target, one(RECORDED[how]), a=torch.zeros(3, 4, dtype=dtype))
    names = list(dict(make().named_parameters()))
    shapes = {n: tuple(p.shape) for n, p in make().named_parameters()}
    versions = [{n: numbers(*shapes[n], start=100 * v + 0.1) for n in names} for v in range(3)]
    module = make()
    sink = follow(module, make(), *versions)
    assert by_loader(sink) == {}
    assert len(module.calls) == 1, "the loader was not needed any more"


def test_transposed_into_a_contiguous_parameter() -> None:
    make = functools.partial(Target, one(lambda p, w: p.copy_(w.t())), a=torch.zeros(3, 4))
    versions = [{"a": numbers(4, 3, start=v)} for v in range(3)]
    sink = follow(make(), make(), *versions)
    assert by_loader(sink) == {}
    assert sink.readable(0)
    assert bytes(sink.host_bytes(0)) == bytes(versions[2]["a"].view(-1).view(torch.uint8).tolist())


def test_a_broadcast_is_recorded() -> None:
    make = functools.partial(Target, one(lambda p, w: p.copy_(w)), a=torch.zeros(3, 4))
    sink = follow(make(), make(), *({"a": numbers(4, start=v)} for v in range(3)))
    assert by_loader(sink) == {}
    assert not sink.readable(0)
    assert "1 that cannot be read back: 'a'" in sink.explain()


def test_a_buffer_that_is_loaded_is_checked_like_a_parameter() -> None:
    def loads(target: Target, weights: Weights, rows: int = 3) -> None:
        for _, weight in weights:
            target.table[:rows].copy_(weight[:rows])  # type: ignore[index, operator]

    def make(rows: int) -> Target:
        return Target(functools.partial(loads, rows=rows), buffers={"table": torch.zeros(3, 2)})

    follow(make(3), make(3), *({"t": numbers(3, 2, start=v)} for v in range(2)))
    with pytest.raises(
        ManifestMismatchError, match=r"'table' \(float32\[3, 2\]\) no value in rows 2"
    ):
        learned(make(2), {"t": numbers(3, 2)})


def quantise(target: Target, weights: Weights) -> None:
    """Two names: one is quantised with a scale of its own, one is copied."""
    for name, weight in weights:
        if name == "w":
            scale = weight.abs().amax(1) / 127
            target.get_parameter("q").data.copy_((weight / scale[:, None]).round().to(torch.int8))
            target.get_parameter("scale").data.copy_(scale)
        else:
            target.get_parameter(name).data.copy_(weight)


def quantised() -> Target:
    return Target(
        quantise, q=torch.zeros(3, 4, dtype=torch.int8), scale=torch.zeros(3), plain=torch.zeros(2)
    )


def test_a_quantising_layer_stays_with_the_loader_and_the_rest_does_not() -> None:
    versions = [{"w": numbers(3, 4, start=v + 1), "plain": numbers(2, start=v)} for v in range(3)]
    module = quantised()
    sink = follow(module, quantised(), *versions)
    assert by_loader(sink) == {"w": "goes through aten.abs.default"}
    assert module.calls == [["w", "plain"], ["w"], ["w"]]
    assert "2 tensors: 1 recorded" in sink.explain()
    assert [sink.readable(i) for i in range(2)] == [False, True]


def test_a_loader_that_wants_all_names_at_once_gets_them() -> None:
    def loads(target: Target, weights: Weights) -> None:
        given = dict(weights)
        target.get_parameter("ab").data.copy_(torch.cat([given["a"], given["b"]]))
        target.get_parameter("c").data.copy_(given["c"])

    make = functools.partial(Target, loads, ab=torch.zeros(4), c=torch.zeros(2))
    versions = [{n: numbers(2, start=v + i) for i, n in enumerate("abc")} for v in range(3)]
    module = make()
    sink = follow(module, make(), *versions)
    assert (
        by_loader(sink)["c"] == "the loader does otherwise when it is not given all names at once"
    )
    assert module.calls == [["a", "b", "c"]] * 3


def test_two_names_fused_only_when_they_come_together() -> None:
    def loads(target: Target, weights: Weights) -> None:
        waiting = {}
        for name, weight in weights:
            if name in ("a", "b"):
                waiting[name] = weight
                if len(waiting) == 2:
                    target.get_parameter("ab").data.copy_(torch.cat([waiting["a"], waiting["b"]]))
            else:
                target.get_parameter(name).data.copy_(weight)

    make = functools.partial(Target, loads, ab=torch.zeros(4), c=torch.zeros(2))
    versions = [{n: numbers(2, start=v + i) for i, n in enumerate("acb")} for v in range(3)]
    module = make()
    follow(module, make(), *versions)
    assert module.calls == [["a", "c", "b"], ["a", "b"], ["a", "b"]]
    with pytest.raises(ManifestMismatchError, match="missing: the loader gives 'ab'"):
        learned(make(), {n: t for n, t in versions[0].items() if n != "b"})


def test_a_loader_that_claims_without_copying() -> None:
    def loads(target: Target, weights: Weights) -> list[str]:
        return [name for name, weight in weights if weight.numel()]

    with pytest.raises(ManifestMismatchError) as caught:
        learned(Target(loads, a=torch.zeros(2, 2)), {"a": numbers(2, 2)})
    assert caught.value.differences == (
        "missing: the loader gives 'a' (float32[2, 2]) no value, although it says that it "
        "loaded it",
        "unknown: the publisher sends 'a' (float32[2, 2]), the loader writes nothing of it, "
        "although it says that it loaded it",
    )


def test_a_loader_that_only_fills_gives_no_value() -> None:
    loads = one(lambda p, w: p.fill_(3))
    with pytest.raises(ManifestMismatchError, match="missing: the loader gives 'a'"):
        learned(Target(loads, a=torch.zeros(2, 2)), {"a": numbers(2, 2)})


@pytest.mark.parametrize("kept", ["tensor", "view", "cast", "list"])
def test_a_loader_that_keeps_what_it_is_given(kept: str) -> None:
    def loads(target: Target, weights: Weights) -> None:
        for name, weight in weights:
            parameter = target.get_parameter(name)
            parameter.data.copy_(weight)
            if name == "a":
                target.kept = {  # type: ignore[assignment]
                    "tensor": weight,
                    "view": weight[1:],
                    "cast": weight.to(torch.float64),
                    "list": [weight],
                }[kept]

    module = Target(loads, a=torch.zeros(3), b=torch.zeros(3))
    versions = [{n: numbers(3, start=v + 1) for n in "ab"} for v in range(3)]
    sink = learned(module, versions[0])
    assert by_loader(sink) == {"a": "is kept by the loader or the module after loading"}
    for tensors in versions:
        engines.update(sink, tensors)
        held = module.kept[0] if kept == "list" else module.kept  # type: ignore[index, union-attr]
        expected = tensors["a"][1:] if kept == "view" else tensors["a"]
        assert torch.equal(held.float(), expected), "it sees the publisher's memory"  # type: ignore[operator, union-attr]


def test_a_loader_that_gives_a_parameter_other_memory() -> None:
    def loads(target: Target, weights: Weights) -> None:
        for name, weight in weights:
            target.get_parameter(name).data = weight

    make = functools.partial(Target, loads, a=torch.zeros(3), b=torch.zeros(3))
    versions = [{n: numbers(3, start=v + 1) for n in "ab"} for v in range(3)]
    module = make()
    follow(module, make(), *versions)
    assert len(module.calls) == 3

    def empty(target: Target, weights: Weights) -> None:
        for name, weight in weights:
            target.get_parameter(name).data = torch.empty_like(weight)

    with pytest.raises(ManifestMismatchError, match="gives 'a' .* memory without a value"):
        learned(Target(empty, a=torch.zeros(3), b=torch.zeros(3)), versions[0])


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (lambda p, w: [p.copy_(w), p.copy_(w * 2)], "goes through aten.mul.Tensor"),
        (lambda p, w: [p.copy_(w), p.mul_(2)], "goes through aten.mul_.Tensor"),
        (lambda p, w: p.copy_(w.mul_(2)), "goes through aten.mul_.Tensor"),
        (lambda p, w: torch.mul(w, 2, out=p), "goes through aten.mul.out"),
        (lambda p, w: [p.zero_(), p.copy_(w)], "elements of 'a' are written more than once, by"),
        (lambda p, w: [p.copy_(w), p[:1].copy_(w[1:2])], "elements of 'a' are written more"),
        (
            lambda p, w: p.copy_(w.half().to(p.dtype)),
            "is cast twice, torch.float32 to torch.float1",
        ),
        (lambda p, w: p.copy_(torch.zeros_like(w).copy_(w)), "is copied into memory that is no pa"),
        (
            lambda p, w: p.view(9).copy_(w.t().contiguous().view(9)),
            "is written in part from a copy",
        ),
        (lambda p, w: p.copy_(w.conj().imag if w.is_complex() else -w), "goes through aten.neg"),
    ],
)
def test_whatever_is_no_plain_copy_is_the_loaders(
    body: Callable[[torch.Tensor, torch.Tensor], None], why: str
) -> None:
    make = functools.partial(Target, one(body), a=torch.zeros(3, 3))
    versions = [{"a": numbers(3, 3, start=v + 0.1)} for v in range(3)]
    module = make()
    sink = learned(module, versions[0])
    assert by_loader(sink)["a"].startswith(why)
    follow(make(), make(), *versions)


def test_a_value_derived_from_a_parameter_after_loading() -> None:
    def loads(target: Target, weights: Weights) -> None:
        for name, weight in weights:
            target.get_parameter(name).data.copy_(weight)
        target.largest.copy_(target.get_parameter("a").max())  # type: ignore[operator]

    def make() -> Target:
        return Target(
            loads, buffers={"largest": torch.zeros(())}, a=torch.zeros(3), b=torch.ones(2)
        )

    versions = [{"a": numbers(3, start=v), "b": numbers(2, start=v)} for v in range(3)]
    sink = follow(make(), make(), *versions)
    assert by_loader(sink) == {"a": "goes through aten.max.default"}


def test_an_expanded_parameter() -> None:
    def make(body: Callable[[torch.Tensor, torch.Tensor], None]) -> Target:
        return Target(one(body), a=torch.zeros(1, 3).expand(4, 3), b=torch.zeros(2))

    versions = [{"a": numbers(1, 3, start=v), "b": numbers(2, start=v)} for v in range(3)]

    def row(parameter: torch.Tensor, weight: torch.Tensor) -> None:
        parameter[: len(weight)].copy_(weight)

    module = make(row)
    sink = follow(module, make(row), *versions)
    assert by_loader(sink) == {}
    assert torch.equal(module.a, versions[2]["a"].expand(4, 3))  # type: ignore[arg-type]

    wide = [{"a": t["a"].expand(4, 3).clone(), "b": t["b"]} for t in versions]
    sink = learned(make(lambda p, w: p.copy_(w)), wide[0])
    assert by_loader(sink) == {"a": "is written into an expanded view of 'a'"}


# --- loaders that cannot be tried on a copy ----------------------------------------------------


def test_a_function_is_recorded_in_the_first_update() -> None:
    module, tensors = Engine(), checkpoint()
    sink = learned(module, tensors, lambda weights: module.load_weights(weights))
    assert "will be recorded in the first update, since it is not a method" in sink.explain()
    reference = Engine()
    for seed in range(3):
        tensors = checkpoint(seed=seed)
        direct = engines.update(sink, tensors)
        reference.load_weights(tensors.items())
        assert dict(state(module)) == dict(state(reference))
    assert direct == len(sink.needs().unique)
    assert "recorded in the first update (" in sink.explain()


def test_a_state_dict_is_a_loader() -> None:
    tensors = {"0.weight": numbers(2, 3), "0.bias": numbers(2)}
    module = nn.Sequential(nn.Linear(3, 2))
    sink = learned(module, tensors, lambda weights: module.load_state_dict(dict(weights)) and None)
    for _ in range(2):
        direct = engines.update(sink, tensors)
    assert direct == 2
    assert torch.equal(module[0].weight, tensors["0.weight"])


def test_a_partial_of_the_modules_own_method_is_tried_on_a_copy() -> None:
    module = Engine()

    def load(prefix: str, engine: Engine, weights: Weights) -> set[str]:
        return engine.load_weights((n.removeprefix(prefix), w) for n, w in weights)

    tensors = {f"model.{n}": t for n, t in checkpoint().items()}
    sink = learned(module, tensors, functools.partial(load, "model.", module))
    assert "recorded on a copy without data" in sink.explain()


@pytest.mark.parametrize(
    ("look", "said"),
    [
        (lambda w: w.isnan().any().item(), "it looks at values of 'a'"),
        (lambda w: bool((w > 0).all()), "it looks at values of 'a'"),
        (lambda w: w.numpy(), "it takes values of 'a' out of torch (numpy)"),
        (lambda w: np.asarray(w), "it takes values of 'a' out of torch (__array__)"),
        (lambda w: w[1:].tolist(), "it takes values of 'a' out of torch (tolist)"),
    ],
)
def test_a_loader_that_looks_at_values(look: Callable[[torch.Tensor], object], said: str) -> None:
    def loads(target: Target, weights: Weights) -> None:
        for name, weight in weights:
            if name == "a":
                look(weight)
            target.get_parameter(name).data.copy_(weight)

    make = functools.partial(Target, loads, a=torch.zeros(3), b=torch.zeros(3))
    module = make()
    versions = [{n: numbers(3, start=v + 1) for n in "ab"} for v in range(3)]
    assert said in learned(make(), versions[0]).explain()
    sink = follow(module, make(), *versions)
    assert by_loader(sink)["a"].startswith(("goes through", "leaves torch"))
    assert module.calls == [["a", "b"], ["a"], ["a"]]


def test_a_loader_that_packs_with_numpy() -> None:
    def loads(target: Target, weights: Weights) -> None:
        for name, weight in weights:
            parameter = target.get_parameter(name)
            if name == "packed":
                bits = np.packbits(weight.numpy() > 0, axis=-1)
                parameter.data.copy_(torch.from_numpy(bits))
            else:
                parameter.data.copy_(weight)

    make = functools.partial(
        Target, loads, packed=torch.zeros(3, 1, dtype=torch.uint8), b=torch.zeros(3)
    )
    versions = [{"b": numbers(3, start=v), "packed": numbers(3, 8) % (v + 2)} for v in range(3)]
    module = make()
    sink = follow(module, make(), *versions)
    assert by_loader(sink) == {"packed": "leaves torch (numpy)"}
    assert module.calls == [["b", "packed"], ["packed"], ["packed"]]


def test_a_method_that_works_on_the_live_module_all_the_same() -> None:
    other: list[Target] = []

    def loads(target: Target, weights: Weights) -> None:
        for name, weight in weights:
            other[0].get_parameter(name).data.zero_()
            other[0].get_parameter(name).data.copy_(weight)

    module = Target(loads, a=torch.ones(3))
    other.append(module)
    sink = learned(module, {"a": numbers(3)})
    assert "since it uses tensors of the live module" in sink.explain()


def test_what_is_missing_is_found_in_the_first_update_at_the_latest() -> None:
    module = Engine()
    tensors = checkpoint()
    del tensors["layers.1.k_proj.weight"]
    sink = learned(module, tensors, lambda weights: module.load_weights(weights))
    for _ in range(2):
        with pytest.raises(ManifestMismatchError, match=r"rows 16:24 of 32.*\n.*of no version now"):
            engines.update(sink, tensors)


def test_a_module_that_cannot_be_copied() -> None:
    module = Engine()
    module.lock = iter([]).__iter__  # type: ignore[assignment]
    module.files = (i for i in ())  # type: ignore[assignment]
    sink = learned(module, checkpoint())
    assert "since the module cannot be copied (TypeError" in sink.explain()


def test_tensors_that_a_module_holds_elsewhere_are_copied_without_data() -> None:
    class Held:
        def __init__(self) -> None:
            self.tensors = {"cache": [torch.zeros(1 << 20)], "own": nn.Parameter(torch.zeros(9))}

    module = Engine()
    module.caches = Held()  # type: ignore[assignment]
    module.layers[0].alias = [module.layers[0].norm.weight.data[:4]]
    twin, loader = without_data(module, module.load_weights)
    held = twin.caches.tensors  # type: ignore[union-attr]
    assert all(t.is_meta for t in [*held["cache"], held["own"], *twin.parameters()])  # type: ignore[index, misc, operator]
    assert isinstance(held["own"], nn.Parameter)  # type: ignore[index, operator]
    assert loader.__self__ is twin  # type: ignore[attr-defined]
    alias, norm = twin.layers[0].alias[0], twin.layers[0].norm.weight  # type: ignore[union-attr, index]
    assert memory_of(alias) == memory_of(norm)
    assert twin.embed.weight.weight_loader.__self__ is twin.embed  # type: ignore[union-attr]


def test_empty_tensors_are_names_too() -> None:
    def loads(target: Target, weights: Weights) -> None:
        given = dict(weights)
        target.get_parameter("a").data.copy_(given["a"])
        target.get_parameter("none").data.copy_(given["none"])

    make = functools.partial(Target, loads, a=torch.zeros(3), none=torch.zeros(0, 3))
    versions = [{"a": numbers(3, start=v), "none": torch.zeros(0, 3)} for v in range(3)]
    sink = follow(make(), make(), *versions)
    assert by_loader(sink) == {}
    sink = learned(make(), versions[0])
    sink.begin()
    sink.write(0, memoryview(bytes(12)))  # of what has no bytes, none may come
    sink.finish()


# --- what goes wrong later ---------------------------------------------------------------------


def test_other_bytes_than_the_loaders_keep_a_name_with_the_loader() -> None:
    """A loader that behaves otherwise on data than it did without any."""

    def loads(target: Target, weights: Weights) -> None:
        for name, weight in weights:
            source = weight.flip(0) if name == "a" and not weight.is_meta else weight
            target.get_parameter(name).data.copy_(source)

    module = Target(loads, a=torch.zeros(3), b=torch.zeros(3))
    versions = [{n: numbers(3, start=v) for n in "ab"} for v in range(3)]
    sink = learned(module, versions[0])
    assert by_loader(sink) == {}
    for tensors in versions:
        engines.update(sink, tensors)
        assert torch.equal(module.a, tensors["a"].flip(0))  # type: ignore[arg-type]
        assert torch.equal(module.b, tensors["b"])  # type: ignore[arg-type]
    assert by_loader(sink) == {"a": "the recorded copies give 'a' other bytes than the loader"}
    assert module.calls == [["a", "b"], ["a"], ["a"]]


def test_what_a_loader_does_with_data_only_keeps_a_name_with_it() -> None:
    def loads(target: Target, weights: Weights) -> None:
        for name, weight in weights:
            if name == "a" and not weight.is_meta:
                target.largest = weight.max()  # type: ignore[assignment]
            if name == "b" and not weight.is_meta:
                target.kept = weight  # type: ignore[assignment]
            target.get_parameter(name).data.copy_(weight)

    module = Target(loads, a=torch.zeros(3), b=torch.zeros(3), c=torch.zeros(3))
    versions = [{n: numbers(3, start=v) for n in "abc"} for v in range(3)]
    sink = learned(module, versions[0])
    assert by_loader(sink) == {}
    for tensors in versions:
        engines.update(sink, tensors)
        assert module.largest == tensors["a"].max()
        assert torch.equal(module.kept, tensors["b"])  # type: ignore[arg-type]
    assert by_loader(sink) == {
        "a": "goes through aten.max.default",
        "b": "is kept by the loader or the module after loading",
    }
    assert module.calls == [["a", "b", "c"], ["a", "b"], ["a", "b"]]


def test_a_function_that_wants_all_names_at_once_gets_them_after_it_failed_once() -> None:
    module = Target(lambda target, weights: None, ab=torch.zeros(4), c=torch.zeros(2))

    def loader(weights: Weights) -> None:
        given = dict(weights)
        module.get_parameter("ab").data.copy_(torch.cat([given["a"], given["b"]]))
        module.get_parameter("c").data.copy_(given["c"])

    versions = [{n: numbers(2, start=v + i) for i, n in enumerate("abc")} for v in range(4)]
    sink = learned(module, versions[0], loader)
    engines.update(sink, versions[0])
    assert set(by_loader(sink)) == {"a", "b"}
    with pytest.raises(LoaderError, match="KeyError: 'c'"):
        engines.update(sink, versions[1])
    for tensors in versions[2:]:
        engines.update(sink, tensors)
        assert torch.equal(module.ab, torch.cat([tensors["a"], tensors["b"]]))  # type: ignore[arg-type]
        assert torch.equal(module.c, tensors["c"])  # type: ignore[arg-type]
    assert by_loader(sink)["c"] == "the loader failed when it was given some names only"


def test_a_loader_that_raises_or_does_nothing_later() -> None:
    module = quantised()
    tensors = {"w": numbers(3, 4, start=1), "plain": numbers(2)}
    sink = learned(module, tensors)
    engines.update(sink, tensors)
    module.loads = lambda target, weights: [None for _ in weights] and None  # type: ignore[assignment, return-value]
    with pytest.raises(LoaderError, match="wrote nothing of 'w' to 'q', 'scale'"):
        engines.update(sink, tensors)
    module.loads = lambda target, weights: 1 / 0  # type: ignore[assignment, return-value]
    with pytest.raises(LoaderError, match="raised before it took a tensor: ZeroDivisionError"):
        engines.update(sink, tensors)
    module.loads = quantise
    engines.update(sink, tensors)
    assert torch.equal(module.plain, tensors["plain"])  # type: ignore[arg-type]


def test_a_module_that_changed() -> None:
    engine, tensors = Engine(), checkpoint()
    sink = learned(engine, tensors)
    engines.update(sink, tensors)
    was = engine.layers[0].norm.weight
    engine.layers[0].norm.weight = nn.Parameter(torch.zeros_like(was))
    sink.check()  # the like: followed
    engines.update(sink, tensors)
    assert torch.equal(engine.layers[0].norm.weight, tensors["layers.0.norm.weight"])
    engine.layers[0].norm.weight = nn.Parameter(torch.zeros(9))
    with pytest.raises(ManifestError, match=r"'layers.0.norm.weight' was float32\[8\].* is now fl"):
        sink.check()
    engine.layers[0].norm.weight = was
    engine.layers[0].gate_up_proj.weight = nn.Parameter(torch.zeros(8, 12).t())
    with pytest.raises(ManifestError, match=r"of strides \[8, 1\] and is now .* \[1, 12\]"):
        sink.begin()
    engine.layers[0].gate_up_proj.weight = None
    with pytest.raises(ManifestError, match="'layers.0.gate_up_proj.weight' is no longer there"):
        sink.begin()


def test_calls_out_of_order_and_wrong_lengths() -> None:
    sink = learned(Engine(), checkpoint())
    for call in (lambda: sink.destination(0), lambda: sink.write(0, memoryview(b"")), sink.finish):
        with pytest.raises(StateError, match="outside begin and finish"):
            call()
    sink.begin()
    with pytest.raises(ManifestError, match=r"'embed.weight' has 352 bytes, 3 were given"):
        sink.write(0, memoryview(b"123"))


def test_a_graph_recorded_before_an_update_is_void() -> None:
    engine, tensors = Engine(), checkpoint()
    sink = learned(engine, tensors)
    for _ in range(2):
        loss = (engine.layers[0].norm.weight * engine.layers[0].norm.weight).sum()
        engines.update(sink, tensors)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_what_cannot_be_watched_is_refused_by_name() -> None:
    module = Tree({"a": torch.zeros(2)})
    for bad, said in (
        (nn.Parameter(torch.zeros(2, device="meta")), "'a' has no data"),
        (nn.Parameter(torch.eye(2).to_sparse()), "'a' has layout torch.sparse_coo"),
        (nn.UninitializedParameter(), "'a' has no data"),
    ):
        module.a = bad
        with pytest.raises(ManifestError, match=said):
            LoadedModule(module, print)  # type: ignore[arg-type]
