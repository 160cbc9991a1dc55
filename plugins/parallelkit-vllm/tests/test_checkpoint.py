"""What an engine needs, from checkpoints and configurations, and comparing it with a manifest."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import tiny_qwen as tiny
from parallelkit_vllm import checkpoint
from parallelkit_vllm.checkpoint import INDEX, needed, read_header, shards
from parallelkit_vllm.compare import Given, Needed, compare
from parallelkit_vllm.errors import EngineCheckpointError

from parallelkit.errors import ManifestMismatchError
from parallelkit.weights.manifest import Manifest, TensorSpec

# torch writes TORCHINDUCTOR_CACHE_DIR at the first compilation, and transformers comes by it
torch.compile(lambda: None, backend="eager")

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
LOAD = SimpleNamespace(load_format="auto", download_dir=None)


def model_config(folder, *, tied=False, dtype="torch.bfloat16"):
    text = SimpleNamespace(tie_word_embeddings=tied)
    config = SimpleNamespace(get_text_config=lambda: text)
    return SimpleNamespace(model=str(folder), dtype=dtype, hf_config=config, revision=None)


def test_a_single_file(tmp_path):
    found = needed(model_config(tiny.save(tmp_path)), LOAD)
    assert found.tensors == {n: (t.dtype, t.shape) for n, t in tiny.tensors().items()}
    assert found.dtype == "bfloat16"
    assert not found.tied
    assert str(tmp_path) in found.source
    assert needed(model_config(tmp_path, tied=True), LOAD).tied


def test_it_is_read_once_until_the_files_change(tmp_path, monkeypatch):
    tiny.save(tmp_path)
    first = needed(model_config(tmp_path), LOAD).tensors
    assert needed(model_config(tmp_path), LOAD).tensors is first
    path = tmp_path / "model.safetensors"
    tiny.write_file(path, {"w": tiny.raw(np.zeros(3, np.float32))})
    os.utime(path, ns=(1, 1))
    assert needed(model_config(tmp_path), LOAD).tensors == {"w": ("bfloat16", (3,))}
    monkeypatch.setattr(checkpoint, "_KEPT", 1)
    tiny.save(tmp_path / "other")
    needed(model_config(tmp_path / "other"), LOAD)
    assert len(checkpoint._read) == 1


def write_index(folder, names):
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))


def split(folder):
    """A checkpoint in two files with an index, and a file beside that is not of it."""
    given = list(tiny.tensors().items())
    names = {}
    for number, part in enumerate((given[:9], given[9:])):
        file = f"model-{number}.safetensors"
        tiny.write_file(folder / file, dict(part))
        names |= dict.fromkeys((name for name, _ in part), file)
    tiny.write_file(folder / "extra.safetensors", {"extra": tiny.raw(np.zeros(1, np.float32))})
    write_index(folder, names)
    return names


def test_files_of_an_index(tmp_path):
    names = split(tmp_path)
    found = needed(model_config(tmp_path), LOAD).tensors
    assert found.keys() == names.keys() == tiny.tensors().keys()


def test_consolidated_files_are_the_same_again(tmp_path):
    tiny.save(tmp_path)
    tiny.write_file(tmp_path / "consolidated.safetensors", tiny.tensors())
    assert [p.name for p in shards(tmp_path)] == ["model.safetensors"]
    (tmp_path / "model.safetensors").unlink()
    assert [p.name for p in shards(tmp_path)] == ["consolidated.safetensors"]


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda f, n: (f / "model-1.safetensors").unlink(), "is no file beside it"),
        (lambda f, n: write_index(f, n | {"x": "../model-0.safetensors"}), "no file beside it"),
        (lambda f, n: write_index(f, n | {"x": "model-0.safetensors"}), "no file has, such as 'x'"),
        (lambda f, n: (f / INDEX).write_text("{"), "cannot be read"),
        (lambda f, n: (f / INDEX).write_text("{}"), "cannot be read: KeyError"),
        (lambda f, n: write_index(f, ["a"]), "no table of file names"),
        (
            lambda f, n: tiny.write_file(f / "model-1.safetensors", tiny.tensors()),
            "as another file has, too",
        ),
    ],
)
def test_an_index_that_lies(tmp_path, spoil, text):
    spoil(tmp_path, split(tmp_path))
    with pytest.raises(EngineCheckpointError, match=text):
        needed(model_config(tmp_path), LOAD)


def header(path, table, data=b"\0" * 64):
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(**changes):
    return {"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | changes}


@pytest.mark.parametrize(
    ("table", "text"),
    [
        (b"{", "cannot be read as safetensors"),
        (b"\xff\xff", "cannot be read as safetensors"),
        ([], "its header is no table"),
        (entry(dtype="F4"), "unknown 'F4'"),
        (entry(dtype=["F32"]), "malformed"),
        (entry(shape=[2, 3]), "do not agree"),
        (entry(shape=[-2, -2]), "do not agree"),
        (entry(shape=4), "malformed"),
        (entry(shape=["2", 2]), "do not agree|malformed"),
        (entry(data_offsets=[64, 80]), "damaged or cut short"),
        (entry(data_offsets=[0]), "malformed"),
        ({"w": {"dtype": "F32"}}, "has no or an unknown 'shape'"),
        ({"w": 3}, "malformed"),
    ],
)
def test_headers_that_are_damaged(tmp_path, table, text):
    with pytest.raises(EngineCheckpointError, match=text):
        list(read_header(header(tmp_path / "x.safetensors", table)))


def test_a_file_that_is_none(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"not at all a safetensors file")
    with pytest.raises(EngineCheckpointError, match="its header would have"):
        needed(model_config(tmp_path), LOAD)
    header(path, {"__metadata__": {"format": "pt"}})
    with pytest.raises(EngineCheckpointError, match="no tensor in"):
        needed(model_config(tmp_path), LOAD)


def test_scalars_and_empty_tensors(tmp_path):
    table = {
        "s": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
        "e": {"dtype": "I64", "shape": [0, 3], "data_offsets": [4, 4]},
    }
    found = dict(read_header(header(tmp_path / "x.safetensors", table)))
    assert found == {"s": ("float32", ()), "e": ("int64", (0, 3))}


def test_a_name_that_is_no_folder_and_not_in_the_cache():
    assert checkpoint.find_folder(model_config("nobody/nothing-at-all"), LOAD) is None


@pytest.mark.parametrize("tied", [False, True])
def test_without_a_checkpoint_the_configuration_says_it(tmp_path, tied):
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2Config(**tiny.config(tied=tied))
    told = SimpleNamespace(
        model=str(tmp_path), dtype="torch.bfloat16", hf_config=config, revision=None
    )
    found = needed(told, LOAD)
    expected = {n: (t.dtype, t.shape) for n, t in tiny.tensors(tied=tied).items()}
    assert found.tensors == expected
    assert found.tied == tied
    assert needed(told, LOAD).tensors is found.tensors


def test_a_configuration_that_makes_no_model(tmp_path):
    pytest.importorskip("transformers")
    config = SimpleNamespace(architectures=["Nothing"], to_json_string=lambda use_diff: "x")
    told = SimpleNamespace(model=str(tmp_path), dtype="torch.float16", hf_config=config)
    with pytest.raises(EngineCheckpointError, match="no model can be made of its configuration"):
        needed(told, LOAD)


# --- comparing


def tensors(**shapes):
    return {name.replace("__", "."): ("bfloat16", shape) for name, shape in shapes.items()}


def published(given, aliases=(), dtype="bfloat16"):
    specs = [
        TensorSpec(name=name, dtype=kind or dtype, shape=shape)
        for name, (kind, shape) in given.items()
    ]
    by = {spec.name: spec for spec in specs}
    specs += [
        TensorSpec(name=name, dtype=by[owner].dtype, shape=by[owner].shape, alias_of=owner)
        for name, owner in aliases
    ]
    return Manifest(specs)


NEED = tensors(
    embed__weight=(8, 4),
    l__q_proj__weight=(4, 4),
    l__k_proj__weight=(2, 4),
    l__v_proj__weight=(2, 4),
    l__q_proj__bias=(4,),
    l__k_proj__bias=(2,),
    l__v_proj__bias=(2,),
    norm__weight=(4,),
)
HEADED = NEED | tensors(lm_head__weight=(8, 4))


def wanted(tensors=NEED, *, tied=False, dtype="bfloat16"):
    return Needed(tensors, "a test", dtype, tied)


def lines(manifest, need):
    with pytest.raises(ManifestMismatchError) as caught:
        compare(manifest, need, PACKED)
    assert "Nothing was touched" in str(caught.value)
    return list(caught.value.differences)


def without(name, given=NEED):
    return {n: t for n, t in given.items() if n != name}


def test_the_same():
    given = compare(published(NEED), wanted(), PACKED)
    assert given == [Given(name, i) for i, name in enumerate(NEED)]
    assert compare(published(HEADED), wanted(HEADED), PACKED)[-1] == Given("lm_head.weight", 8)


def test_every_difference_is_listed():
    given = without("norm.weight") | {"norm.weights": ("bfloat16", (4,))}
    given |= {"embed.weight": ("float32", (9, 4)), "l.q_proj.weight": ("bfloat16", (4, 3))}
    assert lines(published(given), wanted()) == [
        "missing: the engine needs 'norm.weight' (bfloat16[4]), the publisher does not have it; "
        "did you mean 'norm.weights'?",
        "unknown: the publisher sends 'norm.weights' (bfloat16[4]), the engine's checkpoint has "
        "no such tensor; did you mean 'norm.weight'?",
        "dtype of 'embed.weight': the publisher has float32, the engine needs bfloat16",
        "shape of 'embed.weight': the publisher has [9, 4], the engine needs [8, 4] (1 rows too "
        "many)",
        "shape of 'l.q_proj.weight': the publisher has [4, 3], the engine needs [4, 4]",
    ]


def test_many_differences_are_cut_in_the_message_alone():
    given = {f"x{i}.weight": ("bfloat16", (2,)) for i in range(30)}
    with pytest.raises(ManifestMismatchError, match=r"(?s)38 diff.*\.\.\. and 18 more") as caught:
        compare(published(given), wanted(), PACKED)
    assert len(caught.value.differences) == 38


@pytest.mark.parametrize("head_in_checkpoint", [False, True])
def test_a_tied_head_may_be_absent_or_an_alias(head_in_checkpoint):
    need = wanted(HEADED if head_in_checkpoint else NEED, tied=True)
    expected = [Given(name, i) for i, name in enumerate(NEED)]
    assert compare(published(NEED), need, PACKED) == expected
    alias = [("lm_head.weight", "embed.weight")]
    assert compare(published(NEED, alias), need, PACKED) == expected
    (line,) = lines(published(HEADED), need)
    assert "the engine ties 'lm_head.weight' to its embedding" in line


def test_the_head_may_own_what_it_shares():
    given = {"lm_head.weight": NEED["embed.weight"]} | without("embed.weight")
    manifest = published(given, [("embed.weight", "lm_head.weight")])
    found = compare(manifest, wanted(tied=True), PACKED)
    assert Given("embed.weight", 0) in found
    assert "lm_head.weight" not in [g.name for g in found]


def test_a_head_of_its_own_is_needed_where_it_is_not_tied():
    (line,) = lines(published(NEED), wanted(HEADED))
    assert line.startswith("missing: the engine needs 'lm_head.weight'")
    tied_there = published(NEED, [("lm_head.weight", "embed.weight")])
    assert compare(tied_there, wanted(HEADED), PACKED)[-1] == Given("lm_head.weight", 0)


def test_a_head_that_is_tied_to_something_else():
    (line,) = lines(published(NEED | {"else.lm_head.weight": NEED["embed.weight"]}), wanted(tied=1))
    assert "sends it apart" in line


FUSED = {n: t for n, t in NEED.items() if not n.startswith("l.")} | tensors(
    l__qkv_proj__weight=(8, 4), l__qkv_proj__bias=(8,)
)


def test_fused_names_are_cut():
    found = compare(published(FUSED), wanted(), PACKED)
    assert [g for g in found if g.index == 2] == [
        Given("l.q_proj.weight", 2, 0, 4),
        Given("l.k_proj.weight", 2, 4, 2),
        Given("l.v_proj.weight", 2, 6, 2),
    ]
    assert {g.name for g in found} == NEED.keys()


def test_fused_names_must_be_complete():
    short = FUSED | {"l.qkv_proj.weight": ("bfloat16", (6, 4))}
    (line,) = lines(published(short), wanted())
    assert "shape of 'l.qkv_proj.weight': the publisher has [6, 4]" in line
    assert "make [8, 4]" in line
    found = lines(published(without("l.qkv_proj.bias", FUSED)), wanted())
    assert [line.split("(")[0] for line in found] == [
        f"missing: the engine needs 'l.{n}_proj.bias' " for n in "qkv"
    ]
    (line,) = lines(published(FUSED | {"l.qkv_proj.bias": ("int8", (8,))}), wanted())
    assert "dtype of 'l.qkv_proj.bias': the publisher has int8" in line
    found = lines(published(FUSED), wanted(without("l.k_proj.weight")))
    assert [line.split(" (")[0] for line in found] == [
        "missing: the engine needs 'l.q_proj.weight'",
        "missing: the engine needs 'l.v_proj.weight'",
        "unknown: the publisher sends 'l.qkv_proj.weight'",
    ]


def test_fused_and_apart_is_twice():
    both = FUSED | {"l.k_proj.weight": NEED["l.k_proj.weight"]}
    (line,) = lines(published(both), wanted())
    assert "twice: 'l.k_proj.weight' is published as" in line


def test_a_fused_name_without_a_module():
    need = wanted(tensors(q_proj__w=(1,), k_proj__w=(1,), v_proj__w=(1,)))
    found = compare(published(tensors(qkv_proj__w=(3,))), need, PACKED)
    assert [g.name for g in found] == ["q_proj.w", "k_proj.w", "v_proj.w"]
    (line, *_) = lines(published(tensors(qkv_proj=(3,))), need)
    assert line.startswith("missing")


@pytest.mark.parametrize(
    ("checkpoint_dtype", "engine", "given", "good"),
    [
        ("float32", "bfloat16", "float32", True),
        ("float32", "bfloat16", "bfloat16", True),
        ("float32", "bfloat16", "float16", False),
        ("bfloat16", "float16", "float16", True),
        ("bfloat16", "bfloat16", "float32", False),
        ("int8", "bfloat16", "bfloat16", False),
        ("float8_e4m3fn", "bfloat16", "bfloat16", False),
        ("float8_e4m3fn", "bfloat16", "float8_e4m3fn", True),
    ],
)
def test_dtypes(checkpoint_dtype, engine, given, good):
    need = wanted({"w": (checkpoint_dtype, (2,))}, dtype=engine)
    manifest = published({"w": (given, (2,))})
    if good:
        assert compare(manifest, need, PACKED) == [Given("w", 0)]
        return
    (line,) = lines(manifest, need)
    assert line.startswith(f"dtype of 'w': the publisher has {given}, the engine needs ")
    if checkpoint_dtype == "float32":
        assert line.endswith("float32 or bfloat16")


def test_what_the_loader_drops_may_be_there_or_not():
    name = "l.self_attn.rotary_emb.inv_freq"
    extra = NEED | {name: ("float32", (2,))}
    assert name not in [g.name for g in compare(published(extra), wanted(), PACKED)]
    assert compare(published(NEED), wanted(extra), PACKED) == [
        Given(n, i) for i, n in enumerate(NEED)
    ]
