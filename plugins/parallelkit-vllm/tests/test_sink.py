"""`EngineSink` by itself: what it takes, and what it gives the loader; nothing is reloaded here."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import tiny_qwen as tiny
from parallelkit_vllm import reload, sink
from parallelkit_vllm.errors import ReloadError
from parallelkit_vllm.sink import EngineSink

from parallelkit.errors import ManifestError, ManifestMismatchError, StateError
from parallelkit.protocols import FiniteSink, LoaderSink, LocatedSink
from parallelkit.weights.manifest import Manifest, TensorSpec


@pytest.fixture
def config(tmp_path):
    tiny.save(tmp_path)
    text = SimpleNamespace(tie_word_embeddings=False)
    model = SimpleNamespace(
        model=str(tmp_path),
        dtype=torch.bfloat16,
        revision=None,
        hf_config=SimpleNamespace(get_text_config=lambda: text),
    )
    return SimpleNamespace(
        model_config=model,
        load_config=SimpleNamespace(download_dir=None),
        device_config=SimpleNamespace(device="cpu"),
    )


@pytest.fixture
def loaded(monkeypatch):
    """What the reload was given, by name; as values, since views end with the update."""
    seen = []

    def load(model, model_config, vllm_config, pairs, *, whole):
        seen.append({name: tensor.clone() for name, tensor in pairs})

    monkeypatch.setattr(reload, "load", load)
    monkeypatch.setattr(reload, "opened", lambda model: False)
    monkeypatch.setattr(reload, "clear_kv", lambda config: seen.append("cleared"))
    return seen


class Model(torch.nn.Module):
    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}  # noqa: RUF012


def update(target, given, *, readonly=False, finite=None):
    target.check()
    target.begin()
    if finite is not None:
        target.note_finite(finite)
    for index, spec in enumerate(target.needs().unique):
        assert target.destination(index) is None
        data = bytes(given[spec.name].data) if readonly else bytearray(given[spec.name].data)
        target.write(index, memoryview(data))
    target.finish()


@pytest.mark.parametrize("readonly", [False, True])
def test_every_tensor_reaches_the_loader(config, loaded, readonly):
    calls = []
    target = EngineSink(Model(), config, placed=lambda: calls.append("placed"))
    assert isinstance(target, LoaderSink)
    given = tiny.tensors(1)
    target.learn(tiny.manifest(given))
    update(target, given, readonly=readonly)
    (seen,) = loaded
    assert seen.keys() == given.keys()
    for name, tensor in seen.items():
        assert tensor.dtype is torch.bfloat16
        assert np.array_equal(tensor.float().numpy(), given[name].values)
    assert calls == ["placed"]
    assert target.device == "cpu"
    assert isinstance(target.module, Model)
    assert "27 tensors by the engine's loader, layer by layer;" in target.explain()


def test_where_it_writes(config, loaded, monkeypatch):
    model = Model()
    model.weight = torch.nn.Parameter(torch.zeros(2, 3).t())
    model.packed = torch.nn.Parameter(torch.zeros(0))
    target = EngineSink(model, config)
    assert isinstance(target, LocatedSink)
    given = tiny.tensors(1)
    target.learn(tiny.manifest(given))

    def places():
        return [(span.start, span.shape, span.space) for span in target.live_memory()]

    before = model.weight.data_ptr()
    update(target, given)
    seen = target.live_memory()
    assert places() == [(before, (3, 2), "cpu")]
    update(target, given)
    assert target.live_memory() is seen

    other = torch.ones(3, 2)
    monkeypatch.setattr(reload, "load", lambda *a, **kw: setattr(model.weight, "data", other))
    update(target, given)
    assert [start for start, *_ in places()] == [before, other.data_ptr()]
    update(target, given)
    assert [start for start, *_ in places()] == [other.data_ptr()]


def test_bytes_that_may_be_written_are_not_copied(config, loaded, monkeypatch):
    target = EngineSink(Model(), config)
    given = tiny.tensors(1)
    target.learn(tiny.manifest(given))
    target.begin()
    kept = [bytearray(given[spec.name].data) for spec in target.needs().unique]
    for index, data in enumerate(kept):
        target.write(index, memoryview(data))
    for data in kept:
        data[:] = bytes(len(data))
    target.finish()
    assert not any(tensor.any() for tensor in loaded[0].values())


def test_fused_tensors_are_cut_for_the_loader(config, loaded):
    given = tiny.tensors(1)
    fused = dict(given)
    names = [f"model.layers.0.self_attn.{n}_proj.weight" for n in "qkv"]
    rows = np.concatenate([fused.pop(name).values for name in names])
    fused["model.layers.0.self_attn.qkv_proj.weight"] = tiny.raw(rows)
    target = EngineSink(Model(), config)
    target.learn(tiny.manifest(fused))
    update(target, fused)
    for name in names:
        assert np.array_equal(loaded[0][name].float().numpy(), given[name].values)
    assert "3 of them cut from fused ones" in target.explain()


def test_caches_are_cleared_after_values_that_were_not_finite(config, loaded):
    target = EngineSink(Model(), config)
    given = tiny.tensors(1)
    target.learn(tiny.manifest(given))
    norm = given["model.norm.weight"].values.copy()
    for odd in (np.nan, np.inf, -np.inf):
        norm[5] = odd
        update(target, given | {"model.norm.weight": tiny.raw(norm)})
        update(target, given)
        assert loaded[-1] == "cleared"
        loaded.clear()
    update(target, given)
    assert len(loaded) == 1
    assert target.cleared == 3


def test_what_was_found_out_before_is_not_looked_at_again(config, loaded, monkeypatch):
    target = EngineSink(Model(), config)
    assert isinstance(target, FiniteSink)
    given = tiny.tensors(1)
    target.learn(tiny.manifest(given))
    with monkeypatch.context() as patched:
        patched.setattr(sink, "non_finite", None)
        for finite in (False, True, True):
            update(target, given, finite=finite)
    assert [seen for seen in loaded if seen == "cleared"] == ["cleared"]
    with pytest.raises(StateError, match="outside begin and finish"):
        target.note_finite(True)
    norm = np.full_like(given["model.norm.weight"].values, np.nan)
    update(target, given, finite=True)
    update(target, given | {"model.norm.weight": tiny.raw(norm)})  # what was said is of before
    update(target, given)
    assert target.cleared == 2


DTYPES = ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_seen_in_every_dtype(config, dtype):
    target = EngineSink(Model(), config)
    kind = getattr(torch, dtype)
    specs = [TensorSpec(name=n, dtype=dtype, shape=(k,)) for n, k in (("a", 9), ("b", 0), ("c", 2))]
    target._published = Manifest(specs)
    target._pending = {0: torch.ones(9).to(kind), 1: torch.empty(0, dtype=kind)}
    assert target._look()
    target._pending[2] = torch.tensor([1.0, float("nan")]).to(kind)
    assert not target._look()


def test_a_reload_that_fails_lets_go_of_everything(config, loaded, monkeypatch):
    def fails(*given, **told):
        raise ReloadError("no")

    monkeypatch.setattr(reload, "load", fails)
    target = EngineSink(Model(), config)
    given = tiny.tensors(1)
    target.learn(tiny.manifest(given))
    with pytest.raises(ReloadError):
        update(target, given)
    assert not target._pending
    with pytest.raises(StateError, match="outside begin and finish"):
        target.finish()


def test_nothing_is_reloaded_of_a_part(config, loaded):
    target = EngineSink(Model(), config)
    given = tiny.tensors(1)
    target.learn(tiny.manifest(given))
    target.begin()
    target.write(0, memoryview(given["model.embed_tokens.weight"].data))
    with pytest.raises(ReloadError, match=r"26 tensors were not written.*nothing was touched"):
        target.finish()
    assert not loaded


def test_calls_out_of_order(config, loaded):
    target = EngineSink(Model(), config)
    with pytest.raises(StateError, match="before learn"):
        target.needs()
    target.learn(tiny.manifest(tiny.tensors()))
    for call in (
        lambda: target.destination(0),
        lambda: target.write(0, memoryview(b"")),
        target.finish,
    ):
        with pytest.raises(StateError, match="outside begin and finish"):
            call()
    target.begin()
    with pytest.raises(ManifestError, match="has 65536 bytes, 2 were given"):
        target.write(0, memoryview(b"ab"))
    assert not target.readable(0)
    with pytest.raises(StateError, match="cannot be read back from an engine"):
        target.host_bytes(0)


def test_an_engine_that_is_not_ready(config, loaded, monkeypatch):
    def not_now():
        raise RuntimeError("not now")

    target = EngineSink(Model(), config, ready=not_now)
    for call in (target.check, target.begin):
        with pytest.raises(RuntimeError, match="not now"):
            call()
    monkeypatch.setattr(reload, "opened", lambda model: True)
    with pytest.raises(ReloadError, match="another update of this engine is open"):
        EngineSink(Model(), config).begin()


def test_other_tensors_than_the_checkpoint_has(config):
    target = EngineSink(Model(), config)
    given = tiny.tensors()
    del given["model.norm.weight"]
    with pytest.raises(
        ManifestMismatchError, match="missing: the engine needs 'model.norm.weight'"
    ):
        target.learn(tiny.manifest(given))
    with pytest.raises(StateError, match="before learn"):
        target.needs()


def lacking(layer, *given):
    """What `reload` finds missing of a layer's parameter, given the arguments of each loading."""
    state = SimpleNamespace(loaded_weights=[("w", SimpleNamespace(arguments=a)) for a in given])
    return reload._lacking(layer, state, {"w": None})


def shards(*names):
    return [{"loaded_shard_id": name} for name in names]


def experts(*pairs):
    return [{"shard_id": kind, "expert_id": number} for kind, number in pairs]


QKV = SimpleNamespace(total_num_kv_heads=2, output_sizes=[4, 2, 2])
MERGED = SimpleNamespace(output_sizes=[4, 4])
MOE = SimpleNamespace()


@pytest.mark.parametrize(
    ("layer", "given", "lack"),
    [
        (MERGED, [], ["w"]),
        (MERGED, [{"param": 1}], []),  # in one piece, and padded
        (QKV, shards("q", "k", "v"), []),
        (QKV, shards("q"), ["w (without k, v)"]),
        (MERGED, shards(1, 0), []),
        (MERGED, shards(1), ["w (without 0)"]),
        (MOE, experts(("w1", 0), ("w3", 0), ("w3", 1), ("w1", 1)), []),
        (MOE, experts(("w1", 0), ("w3", 0), ("w3", 1)), ["w (without w1 of expert 1)"]),
        (MOE, experts(("w2", 2), ("w2", 0)), ["w (without w2 of expert 1)"]),
        (MOE, shards("a", "b"), ["w (of parts that are not known, 2 came)"]),
    ],
)
def test_what_an_incomplete_layer_lacks(layer, given, lack):
    assert lacking(layer, *given) == lack


@pytest.mark.parametrize(
    ("dtype", "shape"), [("float32", (3,)), ("int8", (2, 2)), ("bool", ()), ("float64", (0, 4))]
)
def test_bytes_as_tensors(dtype, shape):
    values = np.arange(12.0)[: int(np.prod(shape))].reshape(shape).astype(dtype)
    found = sink._tensor(memoryview(bytearray(values.tobytes())), getattr(torch, dtype), shape)
    assert found.shape == shape
    assert np.array_equal(found.numpy(), values)


def test_bytes_that_are_not_aligned_are_copied():
    data = memoryview(bytearray(1) + bytearray(np.arange(4, dtype=np.float32).tobytes()))[1:]
    found = sink._tensor(data, torch.float32, (4,))
    assert found.data_ptr() % 4 == 0
    assert found.tolist() == [0, 1, 2, 3]
