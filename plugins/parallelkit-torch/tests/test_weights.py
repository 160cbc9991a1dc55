"""Sources and sinks of modules: every layout arrives right, ties stay ties, identity is kept."""

from __future__ import annotations

import importlib
import mmap
import threading

import pytest
import torch
from parallelkit_torch.weights import ModuleSink, ModuleSource
from torch import nn
from torch.nn.utils import parametrize

from parallelkit.errors import ManifestError, StateError, UnsupportedFeatureError
from parallelkit.protocols import WeightSink, WeightSource
from parallelkit.weights.manifest import DTYPE_BYTES, differences
from parallelkit.weights.subscriber import SERVE_THREAD


class Holder(nn.Module):
    """Tensors by name, as buffers, or parameters where they are floating."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(self.embed(x))))  # type: ignore[no-any-return]


def values(tensor: torch.Tensor) -> bytes:
    """Row-major bytes, by the slow and obvious way."""
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return bytes(flat.view(torch.uint8).tolist())


def transfer(source: WeightSource, sink: WeightSink) -> None:
    assert not differences(source.manifest(), sink.needs())
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


def awkward() -> dict[str, torch.Tensor]:
    base = torch.arange(24.0).reshape(4, 6)
    return {
        "transposed": base.t(),
        "sliced": base[1:3, ::2],
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "channels_last": torch.arange(48.0)
        .reshape(2, 2, 3, 4)
        .contiguous(memory_format=torch.channels_last),
        "offset": torch.arange(9.0)[3:6],
        "ones_in_shape": torch.arange(4.0).reshape(1, 4, 1),
        "bool": torch.tensor([True, False, True]),
    }


def test_protocols() -> None:
    assert isinstance(ModuleSource(nn.Linear(1, 1)), WeightSource)
    assert isinstance(ModuleSink(nn.Linear(1, 1)), WeightSink)


def test_manifest_of_a_tied_model() -> None:
    model = Tied()
    manifest = ModuleSource(model).manifest()
    assert [t.name for t in manifest.tensors] == list(model.state_dict())
    aliases = {t.name: t.alias_of for t in manifest.tensors if t.alias_of}
    assert aliases == {"head.weight": "embed.weight"}
    assert ModuleSource(model).device == "cpu"
    assert manifest.digest() == ModuleSource(model).manifest().digest()


@pytest.mark.parametrize("name", sorted(DTYPE_BYTES))
def test_every_allowed_dtype(name: str) -> None:
    dtype = getattr(torch, name)
    given = torch.tensor([0, 1, 1, 0]).to(torch.float32).to(dtype)
    source, target = Holder(x=given), Holder(x=torch.empty(4, dtype=dtype))
    transfer(ModuleSource(source), ModuleSink(target))
    assert values(target.x) == values(given)  # type: ignore[arg-type]
    assert ModuleSource(source).manifest().tensors[0].dtype == name


@pytest.mark.parametrize("name", awkward())
@pytest.mark.parametrize("contiguous", [True, False])
def test_layouts_arrive_right(name: str, contiguous: bool) -> None:
    given = awkward()[name]
    into = torch.zeros_like(given) if contiguous else torch.zeros_like(awkward()[name])
    if contiguous:
        into = into.contiguous()
    source, target = Holder(x=given), Holder(x=into)
    assert bytes(ModuleSource(source).host_bytes(0)) == values(given)
    transfer(ModuleSource(source), ModuleSink(target))
    assert torch.equal(target.x, given)  # type: ignore[arg-type]
    assert target.x is into


def test_expanded_can_be_read_and_not_written() -> None:
    model = Holder(x=torch.tensor([[1.0], [2.0]]).expand(2, 3))
    assert bytes(ModuleSource(model).host_bytes(0)) == values(torch.tensor([[1.0] * 3, [2.0] * 3]))
    with pytest.raises(ManifestError, match=r"'x'.*share memory"):
        ModuleSink(model).needs()
    overlapping = torch.arange(10.0).as_strided((3, 4), (2, 1))
    with pytest.raises(ManifestError, match="share memory"):
        ModuleSink(Holder(x=overlapping)).needs()


def test_contiguous_tensors_are_not_copied() -> None:
    model = nn.Linear(3, 2)
    source, sink = ModuleSource(model), ModuleSink(model)
    model.weight.data.fill_(1)
    view = source.host_bytes(0)
    model.weight.data.fill_(2)
    assert bytes(view) == values(model.weight)
    sink.begin()
    where = sink.destination(0)
    assert where is not None
    where[:] = bytes(where.nbytes)
    sink.finish()
    assert not model.weight.any()


def test_conjugate_and_negative_views() -> None:
    z = torch.tensor([1 + 2j, 3 - 1j])
    assert bytes(ModuleSource(Holder(z=z.conj())).host_bytes(0)) == values(z.conj().resolve_conj())
    negative = z.conj().imag
    assert bytes(ModuleSource(Holder(n=negative)).host_bytes(0)) == values(negative.resolve_neg())


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (nn.Linear(2, 2, device="meta"), "'weight'.*meta device"),
        (Holder(weight=nn.UninitializedParameter()), "'weight'.*uninitialised"),
        (Holder(x=torch.eye(2).to_sparse()), "'x'.*layout"),
        (Holder(x=torch.zeros(2).to(torch.float8_e8m0fnu)), "'x'.*float8_e8m0fnu"),
    ],
)
def test_what_has_no_bytes_is_refused_by_name(module: nn.Module, said: str) -> None:
    for kind in (ModuleSource, ModuleSink):
        with pytest.raises(ManifestError, match=said):
            kind(module)


def test_replaced_buffers_are_followed_and_changed_shapes_are_errors() -> None:
    model = Holder(x=torch.zeros(3))
    source = ModuleSource(model)
    model.x = torch.ones(3)
    assert bytes(source.host_bytes(0)) == values(torch.ones(3))
    model.x = torch.ones(4)
    with pytest.raises(ManifestError, match=r"'x' was float32\[3\] and is now float32\[4\]"):
        source.host_bytes(0)


# --- adopt -------------------------------------------------------------------------------------


def arena(source: ModuleSource) -> tuple[mmap.mmap, list[memoryview]]:
    """Buffers at addresses that are multiples of 64, as the plan lays them out."""
    spans, at = [], 0
    for spec in source.manifest().unique:
        spans.append((at, at + spec.nbytes))
        at += -(-spec.nbytes // 64) * 64
    memory = mmap.mmap(-1, max(at, 1))
    return memory, [memoryview(memory)[a:b] for a, b in spans]


def test_adopt_keeps_training_going() -> None:
    torch.manual_seed(0)
    model, twin = Tied(), Tied()
    twin.load_state_dict(model.state_dict())
    optimisers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, twin)]
    parameters = dict(model.named_parameters())
    source = ModuleSource(model)

    def step() -> None:
        for m, optimiser in zip((model, twin), optimisers, strict=True):
            optimiser.zero_grad()
            m(torch.tensor([1, 2, 3])).square().sum().backward()
            optimiser.step()

    step()
    _, buffers = arena(source)
    source.adopt(buffers)
    step()
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(a is parameters[n] for n, a in model.named_parameters())
    assert model.head.weight is model.embed.weight
    for (name, a), b in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    for index, buffer in enumerate(buffers):
        assert bytes(source.host_bytes(index)) == bytes(buffer)
    source.release()
    buffers[0][:] = bytes(buffers[0].nbytes)
    assert torch.equal(model.embed.weight, twin.embed.weight)
    step()
    assert torch.equal(model.embed.weight, twin.embed.weight)


def test_two_parameters_over_one_storage_stay_tied() -> None:
    shared = torch.arange(6.0)
    model = Holder(a=nn.Parameter(shared), b=nn.Parameter(shared), c=torch.ones(()))
    source = ModuleSource(model)
    assert source.manifest().tensors[1].alias_of == "a"
    source.adopt(arena(source)[1])
    with torch.no_grad():
        model.a.add_(1)  # type: ignore[operator, union-attr]
    assert torch.equal(model.b, torch.arange(6.0) + 1)  # type: ignore[arg-type]


def test_adopt_makes_tensors_contiguous_with_the_same_values() -> None:
    model, before = Holder(**awkward()), awkward()
    source = ModuleSource(model)
    del model.sliced  # shares memory with another in `awkward`
    source = ModuleSource(model)
    source.adopt(arena(source)[1])
    for name, tensor in model.named_buffers():
        assert torch.equal(tensor, before[name]), name
        assert tensor.is_contiguous()


def test_adopt_refuses_and_moves_nothing() -> None:
    model = nn.Linear(4, 4)
    source = ModuleSource(model)
    address = model.weight.data_ptr()
    _, (weight, bias) = arena(source)
    shifted = memoryview(bytearray(80))
    for buffers, said in [
        ([weight], "1 buffers for 2 tensors"),
        ([weight, bias[:8]], "'bias' needs .* 16 bytes"),
        ([weight.toreadonly(), bias], "read-only: True"),
        ([next(shifted[i : i + 64] for i in (1, 2) if i % 4), bias], "multiple of its element"),
    ]:
        with pytest.raises(UnsupportedFeatureError, match=said):
            source.adopt(buffers)
    assert model.weight.data_ptr() == address
    fused = torch.arange(8.0)
    overlapping = ModuleSource(Holder(whole=fused, part=fused[2:4]))
    with pytest.raises(UnsupportedFeatureError, match="'whole' and 'part' share memory"):
        overlapping.adopt(arena(overlapping)[1])


def test_partly_overlapping_tensors_are_separate() -> None:
    fused = torch.arange(8.0)
    manifest = ModuleSource(Holder(whole=fused, part=fused[2:4])).manifest()
    assert [t.alias_of for t in manifest.tensors] == [None, None]


# --- sink --------------------------------------------------------------------------------------


def test_writes_between_begin_and_finish_only() -> None:
    sink = ModuleSink(nn.Linear(2, 2))
    for call in (lambda: sink.destination(0), lambda: sink.write(0, memoryview(b"")), sink.finish):
        with pytest.raises(StateError):
            call()


def test_finish_voids_graphs_recorded_before() -> None:
    model = nn.Linear(2, 2)
    sink = ModuleSink(model)
    loss = model(torch.ones(1, 2, requires_grad=True)).square().sum()
    sink.begin()
    sink.finish()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("grad", [True, False])
def test_a_surrounding_autocast_computes_with_what_was_placed(grad: bool) -> None:
    """It keeps casts of parameters until it is left, and does not look whether they changed."""
    model, trained = nn.Linear(4, 4), nn.Linear(4, 4)
    sink, x = ModuleSink(model), torch.ones(2, 4)
    with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16):
        before = model(x)
        transfer(ModuleSource(trained), sink)
        after = model(x)
        assert torch.equal(after, trained(x))
        assert not torch.equal(after, before)


def test_a_default_device_does_not_move_what_is_on_the_way() -> None:
    """As `torch.set_default_device("cuda")` in a script: what is made here is the host's."""
    a, b = Holder(t=torch.randn(3, 4).t()), Holder(t=torch.zeros(3, 4).t())
    with torch.device("meta"):
        transfer(ModuleSource(a), ModuleSink(b))
    assert torch.equal(a.t, b.t)


def test_finish_with_inference_tensors() -> None:
    with torch.inference_mode():
        model = nn.Linear(2, 2)
    transfer(ModuleSource(nn.Linear(2, 2)), ModuleSink(model))


def test_a_wrong_length_is_refused() -> None:
    sink = ModuleSink(Holder(x=torch.zeros(4, 4).t()))
    sink.begin()
    with pytest.raises(ManifestError, match="'x' has 64 bytes, 4 were given"):
        sink.write(0, memoryview(b"1234"))


def test_sink_gives_back_the_wrapper_and_needs_plain_names() -> None:
    model = Tied()
    compiled = torch.compile(model, backend="eager")
    sink = ModuleSink(compiled)
    assert sink.module is compiled
    assert sink.needs() == ModuleSource(model).manifest()
    assert not differences(ModuleSource(compiled).manifest(), sink.needs())


@pytest.mark.parametrize("nbytes", [0, 8])
def test_memory_that_was_freed_is_noticed_on_both_sides(nbytes: int) -> None:
    source, sink = ModuleSource(source_module := Tied()), ModuleSink(target := Tied())
    for module in (source_module, target):
        module.body.weight.untyped_storage().resize_(nbytes)
    with pytest.raises(ManifestError, match=r"'body\.weight' has no memory behind it"):
        source.begin()
    with pytest.raises(ManifestError, match=r"'body\.weight' has no memory behind it"):
        sink.check()
    with pytest.raises(ManifestError, match=r"'body\.weight' has no memory behind it"):
        ModuleSource(target)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_element_with_any_stride(shape: tuple[int, ...]) -> None:
    def strided(value: float) -> torch.Tensor:
        return torch.full((9,), value).as_strided(shape, (4,) * len(shape), 3)

    a, b = Holder(t=strided(1.0)), Holder(t=strided(2.0))
    transfer(ModuleSource(a), ModuleSink(b))
    assert b.t.flatten().tolist() == [1.0]


def test_no_tensors_at_all() -> None:
    source = ModuleSource(nn.ReLU())
    assert source.manifest().tensors == ()
    assert source.device == "cpu"
    source.adopt([])


def test_what_the_serving_thread_sees_is_not_what_is_written_by() -> None:
    module = nn.Sequential(nn.Linear(2, 2, bias=False))
    sink = ModuleSink(module)
    sink.check()
    groups = sink._groups
    thread = threading.Thread(target=sink.check, name=SERVE_THREAD)
    thread.start()
    thread.join()
    assert sink._groups is groups
    # A look that began before this, and ends after the version is begun to be placed.
    late = sink._walked()
    module[0] = nn.Linear(2, 2, bias=False)
    sink.begin()
    assert sink._groups[0][0].holder is not late[0][0].holder


def test_weights_kept_of_parametrizations_are_made_anew() -> None:
    class Double(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

    module = nn.Linear(2, 2, bias=False)
    parametrize.register_parametrization(module, "weight", Double())
    sink = ModuleSink(module)
    with torch.no_grad(), parametrize.cached():
        before = module.weight
        assert module.weight is before, "the test needs a kept weight"
        sink.begin()
        sink.destination(0)[:] = bytes(16)
        sink.finish()
        assert torch.equal(module.weight, torch.zeros(2, 2))


def test_state_that_turns_up_later_in_no_tensor_stops_the_next_update() -> None:
    class Scaled(nn.Linear):
        scale: object = None

        def get_extra_state(self) -> object:
            return self.scale

    module = Scaled(2, 2)
    source = ModuleSource(module)
    source.begin()
    module.scale = {"scale": 3.0}
    with pytest.raises(ManifestError, match="keeps extra state"):
        source.begin()


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_a_script_module_is_refused_by_name() -> None:
    module = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(ManifestError, match="'1' is a RecursiveScriptModule"):
        ModuleSource(module)


def test_a_compiled_target_is_refused_while_its_weights_would_be_constants() -> None:
    config = importlib.import_module("torch._inductor.config")
    sink = ModuleSink(torch.compile(nn.Linear(2, 2), backend="eager"))
    plain = ModuleSink(nn.Linear(2, 2))
    sink.check()
    with config.patch(freezing=True):  # monkeypatch would delete it at the end
        plain.check()
        with pytest.raises(ManifestError, match=r"torch\._inductor\.config\.freezing is set"):
            sink.check()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_forward_in_a_stream_of_its_own_keeps_the_values_that_it_began_with() -> None:
    model = nn.Linear(4096, 4096, bias=False, device="cuda")
    with torch.no_grad():
        model.weight.fill_(1.0)
    sink, x = ModuleSink(model), torch.ones(8, 4096, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.no_grad(), torch.cuda.stream(stream):
        torch.cuda._sleep(2_000_000_000)  # about a second
        y = model(x)
    sink.begin()
    sink.write(0, memoryview(torch.full((4096 * 4096,), 2.0).view(torch.uint8).numpy()))
    sink.finish()
    with torch.no_grad(), torch.cuda.stream(stream):
        z = model(x)
    torch.cuda.synchronize()
    assert set(y.flatten().tolist()) == {4096.0}
    assert set(z.flatten().tolist()) == {8192.0}
