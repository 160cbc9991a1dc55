"""Models that change after they were published or subscribed: followed, or an error by name.

Nothing is skipped in silence: what cannot be sent or written as it was described is refused before
a byte moves.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parallelkit_torch.weights import ModuleSink, ModuleSource
from torch import nn

from parallelkit.errors import ManifestError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.fc = nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("count", torch.zeros(2))


def looks(model: nn.Module) -> list[Callable[[], None]]:
    """Everything that looks at a model again."""
    sink = ModuleSink(model)
    return [ModuleSource(model).begin, sink.begin, sink.check, ModuleSink(model).needs]  # type: ignore[list-item]


def read(source: ModuleSource) -> dict[str, bytes]:
    unique = source.manifest().unique
    return {spec.name: bytes(source.host_bytes(i)) for i, spec in enumerate(unique)}


def fill(sink: ModuleSink, byte: int) -> None:
    sink.begin()
    for index, spec in enumerate(sink.needs().unique):
        data = bytes([byte]) * spec.nbytes
        where = sink.destination(index)
        if where is None:
            sink.write(index, memoryview(data))
        else:
            where[:] = data
    sink.finish()


# --- what is refused ---------------------------------------------------------------------------


def assign_untied(m: Any) -> None:
    m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}, assign=True)


def set_head(m: Any) -> None:
    m.head.weight = nn.Parameter(m.head.weight.detach().clone())


def remove(m: Any) -> None:
    del m.fc.weight


def set_none(m: Any) -> None:
    m.fc.weight = None


def remove_module(m: Any) -> None:
    del m.fc


def add_parameter(m: Any) -> None:
    m.fc.register_parameter("scale", nn.Parameter(torch.ones(1)))


def add_buffer(m: Any) -> None:
    m.register_buffer("late", torch.ones(1))


def add_module(m: Any) -> None:
    m.extra = nn.Linear(1, 1)


def other_shape(m: Any) -> None:
    m.fc = nn.Linear(3, 4)


def other_dtype(m: Any) -> None:
    m.fc.half()


def to_meta(m: Any) -> None:
    m.to("meta")


def parametrize(m: Any) -> None:
    nn.utils.parametrizations.weight_norm(m.fc)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (assign_untied, r"'head.weight' is no longer tied to 'emb.weight'"),
        (set_head, r"'head.weight' is no longer tied to 'emb.weight'"),
        (remove, r"'fc.weight' is no longer there"),
        (set_none, r"'fc.weight' is no longer there"),
        (remove_module, r"'fc.weight' is no longer there; tensor 'fc.bias' is no longer there"),
        (add_parameter, r"'fc.scale' is new"),
        (add_buffer, r"'late' is new"),
        (add_module, r"'extra.weight' is new; tensor 'extra.bias' is new"),
        (other_shape, r"'fc.weight' was float32\[3, 3\] and is now float32\[4, 3\]"),
        (other_dtype, r"'fc.weight' was float32\[3, 3\] and is now float16\[3, 3\]"),
        (to_meta, r"'emb.weight' is on the meta device"),
        (parametrize, r"'fc.weight' is no longer there.*'fc.parametrizations.weight.*is new"),
    ],
)
def test_a_changed_model_is_refused_by_name(change: Callable[[Any], None], said: str) -> None:
    model = Model()
    calls = looks(model)
    change(model)
    for call in calls:
        with pytest.raises(ManifestError, match=said):
            call()


def test_tensors_that_become_tied_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    calls = looks(model)
    model[1].weight = model[0].weight
    for call in calls:
        with pytest.raises(ManifestError, match=r"'1.weight' is now tied to '0.weight'"):
            call()


def test_many_differences_are_counted() -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(5)))
    source = ModuleSource(model)
    del model[1:]
    with pytest.raises(ManifestError, match=r"\(and 3 more\)"):
        source.begin()


def test_a_tensor_that_goes_while_it_is_read_is_an_error_by_name() -> None:
    model = nn.Linear(2, 2)
    source = ModuleSource(model)
    source.begin()
    model.weight = None  # type: ignore[assignment]
    with pytest.raises(ManifestError, match="'weight' is no longer there"):
        source.host_bytes(0)
    model.weight = nn.Parameter(torch.zeros(2, 2, device="meta"))
    with pytest.raises(ManifestError, match="'weight' is on the meta device"):
        source.host_bytes(0)


def test_a_refused_sink_stays_shut_and_opens_when_put_right() -> None:
    model = Model()
    sink = ModuleSink(model)
    model.head.weight = nn.Parameter(torch.zeros(5, 3))
    with pytest.raises(ManifestError):
        sink.begin()
    model.head.weight = model.emb.weight
    fill(sink, 0)
    assert not model.emb.weight.any()


# --- what is followed --------------------------------------------------------------------------


def replace_module(m: Any) -> None:
    m.fc = nn.Linear(3, 3)


def replace_parameter(m: Any) -> None:
    m.fc.weight = nn.Parameter(torch.ones(3, 3))


def replace_buffer(m: Any) -> None:
    m.count = torch.ones(2)


def reorder(m: Any) -> None:
    weight = m.fc.weight
    del m.fc.weight
    m.fc.weight = weight


def retie(m: Any) -> None:
    m.emb.weight = m.head.weight = nn.Parameter(torch.ones(5, 3))


def assign_tied(m: Any) -> None:
    state = {k: v.clone() for k, v in m.state_dict().items()}
    state["head.weight"] = state["emb.weight"]
    m.load_state_dict(state, assign=True)


@pytest.mark.parametrize(
    "change", [replace_module, replace_parameter, replace_buffer, reorder, retie, assign_tied]
)
def test_the_like_is_followed(change: Callable[[Any], None]) -> None:
    model = Model()
    source, sink = ModuleSource(model), ModuleSink(model)
    change(model)
    source.begin()
    assert read(source) == read(ModuleSource(model)) or change is reorder
    fill(sink, 0)
    assert not any(t.any() for t in model.state_dict().values())
    assert not any(any(data) for data in read(source).values())


def test_a_replaced_module_is_written_through_wrappers() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    sink = ModuleSink(torch.compile(model, backend="eager"))
    model[0] = nn.DataParallel(nn.Linear(2, 2))
    fill(sink, 0)
    assert not any(t.any() for t in model.state_dict().values())


def test_finish_voids_graphs_of_every_tied_object() -> None:
    shared = torch.ones(2, 2)
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[0].weight, model[1].weight = nn.Parameter(shared), nn.Parameter(shared)
    sink = ModuleSink(model)
    loss = model[1](torch.ones(1, 2, requires_grad=True)).sum()
    sink.begin()
    sink.finish()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_looking_again_is_cheap() -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(500)))
    for look in (ModuleSource(model).begin, ModuleSink(model).check):
        took = []
        for _ in range(5):
            started = time.process_time()
            look()
            took.append(time.process_time() - started)
        assert min(took) / 1000 < 100e-6  # about 10 µs; room for a busy machine


# --- adopted -----------------------------------------------------------------------------------


def adopted(model: nn.Module) -> tuple[ModuleSource, list[memoryview]]:
    source = ModuleSource(model)
    unique = source.manifest().unique
    memory = memoryview(mmap.mmap(-1, 4096 * len(unique)))
    buffers = [memory[4096 * i : 4096 * i + t.nbytes] for i, t in enumerate(unique)]
    source.adopt(buffers)
    return source, buffers


def test_adopted_parameters_that_were_replaced_are_seen_elsewhere() -> None:
    model = Model()
    source, buffers = adopted(model)
    source.begin()
    model.fc.weight = nn.Parameter(model.fc.weight.detach().clone())
    source.begin()
    index = [t.name for t in source.manifest().unique].index("fc.weight")
    buffers[index][:] = b"\1" * buffers[index].nbytes
    assert bytes(source.host_bytes(index)) != bytes(buffers[index])
    set_head(model)
    with pytest.raises(ManifestError, match="no longer tied"):
        source.begin()


def test_release_frees_a_model_that_changed() -> None:
    model = Model()
    source, buffers = adopted(model)
    lost, before = model.fc.weight, model.fc.weight.detach().clone()
    kept = model.emb.weight.detach().clone()
    del model.fc
    model.head.weight = nn.Parameter(model.emb.weight.detach())  # another object, same memory
    add_buffer(model)
    source.release()
    for buffer in buffers:
        buffer[:] = b"\1" * buffer.nbytes
    assert torch.equal(lost, before)
    assert torch.equal(model.emb.weight, kept)
    assert model.emb.weight.data_ptr() == model.head.weight.data_ptr()


def test_adopt_looks_again() -> None:
    model = Model()
    source = ModuleSource(model)
    add_buffer(model)
    with pytest.raises(ManifestError, match="'late' is new"):
        source.adopt([])


# --- views that have no bytes of their own -----------------------------------------------------


def lazy_views() -> dict[str, torch.Tensor]:
    z = torch.tensor([1 + 2j, 3 - 1j])
    return {"conj": z.clone().conj(), "neg": torch._neg_view(torch.tensor([1.0, -2.0]))}


@pytest.mark.parametrize("name", ["conj", "neg"])
def test_conjugate_and_negative_targets_are_written(name: str) -> None:
    model = nn.Module()
    model.register_buffer("x", lazy_views()[name])
    given = torch.tensor([5 - 1j, 2 + 7j]) if name == "conj" else torch.tensor([4.0, -9.0])
    source = nn.Module()
    source.register_buffer("x", given)
    sink = ModuleSink(model)
    sink.begin()
    assert sink.destination(0) is None
    sink.write(0, ModuleSource(source).host_bytes(0))
    assert bytes(sink.host_bytes(0)) == bytes(ModuleSource(source).host_bytes(0))
    sink.finish()
    assert torch.equal(model.x, given)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
def test_nested_tensors_are_refused_by_name(layout: torch.layout) -> None:
    model = nn.Module()
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    model.register_buffer("ragged", nested)
    for kind in (ModuleSource, ModuleSink):
        with pytest.raises(ManifestError, match="'ragged' is a nested tensor"):
            kind(model)


# --- targets that overlap ----------------------------------------------------------------------


def holder(*tensors: torch.Tensor) -> nn.Module:
    model = nn.Module()
    for name, tensor in zip("abcdefgh", tensors, strict=False):
        model.register_buffer(name, tensor)
    return model


def overlapping() -> dict[str, tuple[torch.Tensor, ...]]:
    flat, square = torch.zeros(8), torch.arange(9.0).reshape(3, 3)
    memory = torch.zeros(8).numpy()
    z = torch.tensor([1 + 2j])
    return {
        "parts": (flat[0:4], flat[2:6]),
        "contained": (flat, flat[6:]),
        "transposed": (square, square.t()),
        "reinterpreted": (flat, flat.view(torch.int32)),
        "bytes": (flat, flat.view(torch.uint8)[5:6]),
        "two storages": (torch.from_numpy(memory), torch.from_numpy(memory[2:4])),
        "conjugate": (z, z.conj()),
        "crossing": (square[:, 1], square[1]),
    }


def apart() -> dict[str, tuple[torch.Tensor, ...]]:
    flat, matrix = torch.zeros(8), torch.zeros(4, 6)
    column = torch.zeros(4, 1)
    return {
        "neighbours": (flat[:3], flat[3:4], flat[4:]),
        "columns": (matrix[:, :2], matrix[:, 2:5], matrix[:, 5]),
        "interleaved": (flat[::2], flat[1::2]),
        "real and imaginary": tuple(
            torch.view_as_real(torch.zeros(3, dtype=torch.cfloat)).unbind(1)
        ),
        "types": (flat[:4].view(torch.int32), flat[4:]),
        "empty": (flat, flat[3:3]),
        "tied": (flat, flat[:], flat.view(8)),
        "tied, other strides of one": (
            column.t(),
            column.t().contiguous().as_strided((1, 4), (9, 1)),
        ),
    }


@pytest.mark.parametrize("name", overlapping())
def test_targets_that_overlap_are_refused(name: str) -> None:
    for order in (overlapping()[name], overlapping()[name][::-1]):
        sink = ModuleSink(holder(*order))
        for call in (sink.needs, sink.check, sink.begin):
            with pytest.raises(ManifestError, match=r"'(a' and 'b|b' and 'a)' of the target share"):
                call()


@pytest.mark.parametrize("name", apart())
def test_targets_apart_in_one_storage_are_fine(name: str) -> None:
    model = holder(*apart()[name])
    fill(ModuleSink(model), 1)
    assert all(set(data) <= {1} for data in read(ModuleSource(model)).values())


def test_the_two_that_overlap_are_named() -> None:
    matrix = torch.zeros(4, 6)
    sink = ModuleSink(holder(matrix[:, 0], matrix[:, 1:3], matrix[:, 4], matrix[:, 2:4]))
    with pytest.raises(ManifestError, match="'b' and 'd' of the target"):
        sink.needs()


def test_a_target_that_comes_to_overlap_is_refused() -> None:
    model = nn.Linear(4, 4)
    sink = ModuleSink(model)
    sink.needs()
    model.bias = nn.Parameter(model.weight.detach()[1])
    with pytest.raises(ManifestError, match="'weight' and 'bias' of the target share memory"):
        sink.check()
