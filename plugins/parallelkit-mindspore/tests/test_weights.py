"""Sources and sinks of Cells: every layout arrives right, ties stay ties, addresses stay."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import mint, nn
from parallelkit_mindspore import memory, runtime, tensors
from parallelkit_mindspore.weights import CellSink, CellSource

from parallelkit.errors import (
    ManifestError,
    StateError,
    UnsupportedFeatureError,
    WrongThreadError,
)
from parallelkit.protocols import LocatedSink, WeightSink, WeightSource
from parallelkit.weights.manifest import DTYPE_BYTES, differences
from parallelkit.weights.subscriber import SERVE_THREAD


def tensor(values: Any, dtype: Any = np.float32) -> ms.Tensor:
    return ms.Tensor(np.asarray(values, dtype))


def zeros_like(value: ms.Tensor) -> ms.Tensor:
    """Row-major zeros; `mint.zeros_like` has no kernel on CPU."""
    return ms.Tensor(np.zeros_like(value.asnumpy(), order="C"))


def parameter(value: ms.Tensor, *, frozen: bool = False) -> ms.Parameter:
    """A parameter that is the tensor, strides and all; MindSpore's constructor copies."""
    made = ms.Parameter(zeros_like(value), requires_grad=not frozen)
    made.set_data(value)
    assert tuple(made.stride()) == tuple(value.stride())
    return made


class Holder(nn.Cell):
    """Tensors by name, as buffers, or parameters where they are such."""

    def __init__(self, **held: ms.Tensor) -> None:
        super().__init__()
        for name, value in held.items():
            if isinstance(value, ms.Parameter):
                value.name = name
                self.insert_param_to_cell(name, value)
            else:
                self.register_buffer(name, value)


class Tied(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.body = nn.Dense(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = mint.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.embedding_table
        self.head._params["weight"] = self.embed.embedding_table
        self.norm.beta.requires_grad = False

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return self.head(self.norm(self.body(self.embed(x))))


def values(given: ms.Tensor) -> bytes:
    """Row-major bytes, by way of MindSpore's own copy."""
    return np.ascontiguousarray(given.asnumpy()).tobytes()


def transfer(source: WeightSource, sink: WeightSink) -> None:
    assert not differences(source.manifest(), sink.needs())
    source.begin()
    sink.begin()
    for index in range(len(source.manifest().unique)):
        data = source.host_bytes(index)
        where = sink.destination(index)
        if where is None:
            sink.write(index, data.toreadonly())
        else:
            where[:] = data
        assert bytes(sink.host_bytes(index)) == bytes(data)
    sink.finish()


def awkward() -> dict[str, ms.Tensor]:
    base = tensor(np.arange(24)).reshape(4, 6)
    return {
        "transposed": base.t(),
        "sliced": base[1:3, ::2],
        "scalar": tensor(3.5),
        "empty": tensor(np.zeros((0, 4))),
        "permuted": mint.permute(tensor(np.arange(24)).reshape(2, 3, 4), (2, 0, 1)),
        "offset": tensor(np.arange(9))[3:6],
        "ones_in_shape": tensor(np.arange(4)).reshape(1, 4, 1),
        "bool": tensor([True, False, True], np.bool_),
    }


def test_protocols() -> None:
    assert isinstance(CellSource(nn.Dense(1, 1)), WeightSource)
    assert isinstance(CellSink(nn.Dense(1, 1)), WeightSink)


def test_manifest_of_a_tied_model() -> None:
    model = Tied()
    manifest = CellSource(model).manifest()
    aliases = {t.name: t.alias_of for t in manifest.tensors if t.alias_of}
    assert aliases == {"head.weight": "embed.weight"}
    assert "norm.bias" in {t.name for t in manifest.tensors}, "frozen ones are included"
    assert CellSource(model).device == "cpu"
    assert manifest.digest() == CellSource(model).manifest().digest()


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("name", sorted(DTYPE_BYTES))
def test_every_allowed_dtype(name: str, strided: bool) -> None:
    size = 6 * DTYPE_BYTES[name]
    data = bytes([0, 1] * (size // 2)) if name == "bool" else bytes(range(1, size + 1))
    given, into = (tensors.from_bytes(d, name, (2, 3)) for d in (data, bytes(size)))
    target = Holder(x=into.t() if strided else into)
    source = Holder(x=given.t() if strided else given)
    transfer(CellSource(source), CellSink(target))
    assert bytes(memory.copy_out(into)) == data
    assert CellSource(source).manifest().tensors[0].dtype == name


@pytest.mark.parametrize("kind", ["buffer", "parameter", "frozen"])
@pytest.mark.parametrize("name", awkward())
def test_layouts_arrive_right(name: str, kind: str) -> None:
    given, into = awkward()[name], zeros_like(awkward()[name])
    before = into.data_ptr()
    if kind != "buffer":
        into = parameter(into, frozen=kind == "frozen")
    transfer(CellSource(Holder(x=given)), CellSink(Holder(x=into)))
    assert values(into) == values(given)
    assert into.data_ptr() == before
    # and into memory that is laid out as the source's
    other = awkward()[name]
    transfer(CellSource(Holder(x=zeros_like(given))), CellSink(Holder(x=other)))
    assert values(other) == values(zeros_like(given))


def test_expanded_can_be_read_and_not_written() -> None:
    model = Holder(x=mint.broadcast_to(tensor([[1.0], [2.0]]), (2, 3)))
    source = CellSource(model)
    assert bytes(source.host_bytes(0)) == np.array([[1] * 3, [2] * 3], np.float32).tobytes()
    with pytest.raises(ManifestError, match=r"'x'.*share memory"):
        CellSink(model).needs()


def test_overlapping_tensors_are_separate_and_not_written() -> None:
    whole = tensor(np.arange(8))
    model = Holder(whole=whole, part=whole[2:4])
    assert [t.alias_of for t in CellSource(model).manifest().tensors] == [None, None]
    with pytest.raises(ManifestError, match="'whole' and 'part' of the target share memory"):
        CellSink(model).needs()


def test_two_parameters_over_one_memory_are_tied() -> None:
    shared = tensor(np.arange(6))
    a, b = parameter(shared), parameter(shared)
    manifest = CellSource(Holder(a=a, b=b, c=tensor(1.0))).manifest()
    assert [t.alias_of for t in manifest.tensors] == [None, "a", None]


def test_contiguous_tensors_are_not_copied() -> None:
    model = nn.Dense(3, 2)
    source, sink = CellSource(model), CellSink(model)
    source.begin()
    view = source.host_bytes(0)
    assert source.host_bytes(0) is view
    sink.begin()
    where = sink.destination(0)
    assert where is not None
    where[:] = bytes(range(where.nbytes))
    sink.finish()
    assert bytes(view) == bytes(range(view.nbytes))
    assert values(model.weight) == bytes(range(view.nbytes))


def test_memory_in_a_file_that_is_mapped_for_reading_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(np.arange(4, dtype=np.float32).tobytes())
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    model = Holder(x=ms.Tensor.from_numpy(np.frombuffer(mapped, np.float32)), y=tensor([1.0]))
    assert bytes(CellSource(model).host_bytes(0)) == path.read_bytes()
    with pytest.raises(ManifestError, match="'x' of the target .* mapped for reading only"):
        CellSink(model).needs()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda p: setattr(p, "sliced", True), "'x' is one rank's part"),
        (lambda p: setattr(p, "init_mode", "late"), "'x' is uninitialised"),
    ],
)
def test_what_has_no_bytes_is_refused_by_name(
    spoil: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = ms.Parameter(tensor([1.0, 2.0]))
    model = Holder(x=held)
    source = CellSource(model)
    if "uninitialised" in said:
        monkeypatch.setattr(type(held), "has_init", property(lambda self: True))
    else:
        spoil(held)
    for kind in (CellSource, CellSink):
        with pytest.raises(ManifestError, match=said):
            kind(model)
    with pytest.raises(ManifestError, match=f"{said}.*publish or subscribe it again"):
        source.begin()


# --- the model changes -------------------------------------------------------------------------


def test_a_part_of_a_divided_layer_is_none_for_whole_cells() -> None:
    from parallelkit_mindspore.parallel.divided import part_of

    whole = ms.Parameter(tensor(np.arange(8).reshape(4, 2)), name="weight")
    model = Holder(whole=whole, weight=part_of(whole, 0, 1, 2))
    for kind in (CellSource, CellSink):
        with pytest.raises(ManifestError, match="'weight' is one rank's part of a parameter"):
            kind(model)


def test_moved_memory_is_followed() -> None:
    model = Holder(x=ms.Parameter(tensor([0.0, 0.0])), y=tensor([0.0]))
    source, sink = CellSource(model), CellSink(model)
    assert bytes(source.host_bytes(0)) == values(tensor([0.0, 0.0]))
    model.x.set_data(tensor([1.0, 2.0]))  # moves the parameter
    model._buffers["y"] = tensor([3.0])
    source.begin()
    assert bytes(source.host_bytes(0)) == values(tensor([1.0, 2.0]))
    assert bytes(source.host_bytes(1)) == values(tensor([3.0]))
    sink.begin()
    for index in (0, 1):
        where = sink.destination(index)
        assert where is not None
        where[:] = bytes(where.nbytes)
    sink.finish()
    assert model.x.asnumpy().tolist() == [0, 0]
    assert model._buffers["y"].asnumpy().tolist() == [0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.x.set_data(tensor([1.0] * 3)), r"was float32\[2\] and is now float32\[3\]"),
        (
            lambda m: m._buffers.update(y=tensor([1], np.int32)),
            r"'y' was float32\[1\] and is now int32\[1\]",
        ),
        (lambda m: m._buffers.pop("y"), "'y' is no longer there"),
        (lambda m: m.register_buffer("z", tensor([1.0])), "'z' is new"),
        (lambda m: m._params.update(w=m.x), "'w' is now tied to 'x'"),
    ],
)
def test_other_changes_are_errors(change: Any, said: str) -> None:
    model = Holder(
        x=ms.Parameter(tensor([0.0, 0.0])), w=ms.Parameter(tensor([0.0, 0.0])), y=tensor([0.0])
    )
    source, sink = CellSource(model), CellSink(model)
    change(model)
    for call in (source.begin, sink.check, sink.begin, sink.needs):
        with pytest.raises(ManifestError, match=said):
            call()


def test_adopt_is_refused_with_the_reason_and_moves_nothing() -> None:
    model = nn.Dense(2, 2)
    before = model.weight.data_ptr()
    source = CellSource(model)
    with pytest.raises(UnsupportedFeatureError, match="set_data .* Publish without aliased"):
        source.adopt([memoryview(bytearray(16)), memoryview(bytearray(8))])
    assert model.weight.data_ptr() == before


def test_why_adopt_is_refused() -> None:
    """MindSpore 2.10: after `set_data`, an optimiser that ran before trains the old memory.

    When this fails, MindSpore has changed, and `adopt` can be written.
    """
    model = nn.Dense(2, 2)
    optimizer = nn.SGD(model.trainable_params(), learning_rate=0.1)
    gradients = tuple(tensor(np.ones(p.shape)) for p in model.trainable_params())
    optimizer(gradients)
    before = model.weight.asnumpy().copy()
    model.weight.set_data(tensor(before))
    optimizer(gradients)
    runtime.synchronize()
    assert (model.weight.asnumpy() == before).all()


# --- sink --------------------------------------------------------------------------------------


def test_writes_between_begin_and_finish_only() -> None:
    sink = CellSink(nn.Dense(2, 2))
    for call in (lambda: sink.destination(0), lambda: sink.write(0, memoryview(b"")), sink.finish):
        with pytest.raises(StateError):
            call()


def test_a_wrong_length_is_refused() -> None:
    sink = CellSink(Holder(x=mint.zeros((4, 4)).t()))
    sink.begin()
    assert sink.destination(0) is None
    with pytest.raises(ManifestError, match="'x' has 64 bytes, 4 were given"):
        sink.write(0, memoryview(b"1234"))


def test_sink_tells_where_it_writes() -> None:
    model = Holder(x=parameter(mint.zeros((4, 2)).t()), none=mint.zeros((0, 3)))
    sink = CellSink(model)
    assert isinstance(sink, LocatedSink)
    sink.begin()
    seen = sink.live_memory()
    assert [(s.start, s.shape, s.space) for s in seen] == [(model.x.data_ptr(), (2, 4), "cpu")]
    sink.finish()
    sink.begin()
    assert sink.live_memory() is seen, "nothing moved"
    sink.finish()
    model.x.set_data(mint.ones((2, 4)))
    sink.begin()
    assert [s.start for s in sink.live_memory()] == [model.x.data_ptr()]


def test_sink_gives_back_the_wrapper_and_needs_plain_names() -> None:
    model = Tied()
    step = nn.WithLossCell(model, nn.MSELoss())
    sink = CellSink(step)
    assert sink.module is step
    assert sink.needs() == CellSource(model).manifest()
    assert CellSource(ms.Model(model)).manifest() == sink.needs()


def test_no_tensors_at_all() -> None:
    source = CellSource(nn.ReLU())
    assert source.manifest().tensors == ()
    assert source.device == "cpu"


@pytest.mark.parametrize("mode", [ms.PYNATIVE_MODE, ms.GRAPH_MODE])
def test_what_was_compiled_computes_with_the_new_values(mode: int) -> None:
    class Scaled(nn.Cell):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.weight = ms.Parameter(tensor([value] * 3))
            self.frozen = ms.Parameter(tensor([value] * 3), requires_grad=False)

        def construct(self, x: ms.Tensor) -> ms.Tensor:
            return x * self.weight + self.frozen

    ms.set_context(mode=mode)
    try:
        target = Scaled(1.0)
        calls = [target, ms.jit(target)]
        x = mint.ones(3)
        for call in calls:
            assert call(x).asnumpy().tolist() == [2, 2, 2]
        addresses = [p.data_ptr() for p in target.get_parameters()]
        for value in (3.0, 4.0):
            transfer(CellSource(Scaled(value)), CellSink(target))
            for call in calls:
                assert call(x).asnumpy().tolist() == [2 * value] * 3
        assert [p.data_ptr() for p in target.get_parameters()] == addresses
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)


# --- threads -----------------------------------------------------------------------------------


def in_thread(call: Any, name: str) -> BaseException | None:
    found: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join()
    return found[0] if found else None


def test_other_threads_are_refused() -> None:
    model = nn.Dense(2, 2)
    source, sink = CellSource(model), CellSink(model)
    calls = (source.begin, sink.begin, sink.check, lambda: CellSource(model))
    for call in calls:
        error = in_thread(call, "other")
        assert isinstance(error, WrongThreadError)
        assert "in thread 'other'" in str(error)


def test_the_serving_thread_sees_what_is_gone_and_asks_mindspore_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Holder(x=tensor([1.0]))
    sink = CellSink(model)
    with monkeypatch.context() as patch:
        for name in ("unreadable", "identity", "span", "elements"):
            patch.delattr(memory, name)
        patch.delattr(runtime, "synchronize")
        assert in_thread(sink.check, SERVE_THREAD) is None
    model._buffers["x"] = tensor([1.0, 2.0])
    assert in_thread(sink.check, SERVE_THREAD) is None
    with pytest.raises(ManifestError, match="is now"):
        sink.begin()
    del model._buffers["x"]
    assert isinstance(in_thread(sink.check, SERVE_THREAD), ManifestError)


# --- devices, as far as this machine can tell --------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(DTYPE_BYTES) - {"float8_e4m3fn", "float8_e5m2"}))
def test_on_a_device_no_pointer_is_followed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU tensor that says it is elsewhere: MindSpore's copies are used, and give the bytes."""
    size = 6 * DTYPE_BYTES[name]
    data = bytes([0, 1] * (size // 2)) if name == "bool" else bytes(range(1, size + 1))
    given, into = (tensors.from_bytes(d, name, (2, 3)) for d in (data, bytes(size)))
    source, sink = CellSource(Holder(x=given)), CellSink(Holder(x=into))
    monkeypatch.setattr(memory, "device", lambda tensor: "ascend:0")
    with monkeypatch.context() as patch:
        patch.delattr(memory, "elements")
        assert source.device == "ascend:0"
        transfer(source, sink)
    runtime.synchronize()
    assert bytes(tensors.as_bytes(into)) == data


def test_a_graph_that_holds_a_replaced_parameter_is_compiled_anew() -> None:
    class Layers(ms.nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = ms.nn.Dense(3, 3), ms.nn.Dense(3, 3, has_bias=False)

        def construct(self, x: ms.Tensor) -> ms.Tensor:
            return self.last(self.first(x))

    model, x = Layers(), ms.Tensor(np.ones((1, 3), np.float32))
    sink = CellSink(model)
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        before = model(x).asnumpy()
        model.last.weight = ms.Parameter(
            ms.Tensor(np.zeros((3, 3), np.float32)), name="last.weight"
        )
        assert np.array_equal(model(x).asnumpy(), before), "the test needs a stale graph"
        sink.begin()
        for index, spec in enumerate(sink.needs().unique):
            view = sink.destination(index)
            assert view is not None
            values = np.full(spec.shape, 2.0, np.float32)
            view[:] = values.tobytes()
        sink.finish()
        assert np.array_equal(model(x).asnumpy(), np.full((1, 3), 2.0 * 3 * (2.0 * 3 + 2.0)))
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)
