"""What may come of a model, what is missing, and when it is whole."""

from __future__ import annotations

import pytest
import tiny_qwen as tiny
from parallelkit_vllm.collecting import Collection, dtype_name
from parallelkit_vllm.compare import Needed

from parallelkit.errors import ManifestError, ManifestMismatchError

PACKED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}
LAYER = "model.layers.0."


def collection(*, tied=False, dtype="bfloat16", more=()):
    given = tiny.tensors(tied=tied, dtype=dtype)
    needed = {name: (t.dtype, t.shape) for name, t in given.items()} | dict(more)
    return Collection(
        Needed(needed, "the checkpoint", "bfloat16", tied), PACKED, lambda a, b: a == b
    )


def send(to, given, *names):
    for name in names or given:
        tensor = given[name]
        to.take(to.admit(name, tensor.dtype, list(tensor.shape)), tensor)


def test_it_is_whole_with_the_last_name_and_not_before():
    given = tiny.tensors()
    to = collection()
    assert to.missing == list(given)
    assert not to.whole
    *most, last = reversed(given)
    send(to, given, *most)
    assert to.missing == [last]
    assert not to.whole
    send(to, given, last)
    assert to.whole
    assert to.missing == []
    assert {n: t for n, (_, t) in to.drain().items()} == given
    assert (len(to), to.missing) == (0, list(given))


def test_the_same_name_again_replaces():
    to = collection()
    old, new = tiny.tensors(0), tiny.tensors(1)
    send(to, old, "model.norm.weight", "lm_head.weight")
    send(to, new, "model.norm.weight")
    held = to.drain()
    assert held["model.norm.weight"][1] == new["model.norm.weight"]
    assert held["lm_head.weight"][1] == old["lm_head.weight"]


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.bfloat16"])
def test_a_dtype_by_name(dtype):
    assert dtype_name(dtype) == "bfloat16"


def test_a_dtype_of_torch():
    torch = pytest.importorskip("torch")
    assert dtype_name(torch.float8_e4m3fn) == "float8_e4m3fn"


@pytest.mark.parametrize("dtype", ["bf16", "torch.torch.bfloat16", "qint8", None, "os.system", 7])
def test_a_dtype_that_there_is_not(dtype):
    with pytest.raises(ManifestError, match=r"dtype is .*; it is torch's, or its name: bool, "):
        collection().admit("model.norm.weight", dtype, [tiny.HIDDEN])


@pytest.mark.parametrize("shape", [128, "128", [-128], [128.0], None, {128: 1}, [True]])
def test_a_shape_that_there_is_not(shape):
    with pytest.raises(ManifestError, match="shape"):
        collection().admit("model.norm.weight", "bfloat16", shape)


@pytest.mark.parametrize("name", ["", None, 7, "\ud800"])
def test_a_name_that_there_is_not(name):
    with pytest.raises(ManifestError, match="name"):
        collection().admit(name, "bfloat16", [128])


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "said"),
    [
        ("model.norm.wieght", "bfloat16", [128], "did you mean 'model.norm.weight'"),
        ("module.model.norm.weight", "bfloat16", [128], "has no such tensor"),
        ("model.norm.weight", "bfloat16", [127], r"the engine needs \[128\]"),
        ("model.norm.weight", "bfloat16", [1, 128], r"the engine needs \[128\]"),
        (LAYER + "self_attn.q_proj.weight", "bfloat16", [129, 128], "1 rows too many"),
        (LAYER + "self_attn.qkv_proj.weight", "bfloat16", [255, 128], r"make \[256, 128\]"),
        ("model.norm.weight", "int8", [128], "has int8, the engine needs bfloat16"),
        ("model.norm.weight", "uint16", [128], "has uint16, the engine needs bfloat16"),
    ],
)
def test_what_the_engine_does_not_have_is_refused_and_nothing_is_kept(name, dtype, shape, said):
    to = collection()
    with pytest.raises(ManifestMismatchError, match=said) as caught:
        to.admit(name, dtype, shape)
    assert len(caught.value.differences) == 1
    assert len(to) == 0


def test_fused_names_bring_their_parts():
    given = tiny.tensors()
    to = collection()
    admitted = to.admit(LAYER + "self_attn.qkv_proj.weight", "bfloat16", [256, 128])
    assert admitted.brings == tuple(f"{LAYER}self_attn.{x}_proj.weight" for x in "qkv")
    to.take(admitted, "q, k and v")
    assert len(to.missing) == len(given) - 3
    to.take(to.admit(LAYER + "self_attn.qkv_proj.weight", "bfloat16", [256, 128]), "again")
    with pytest.raises(ManifestMismatchError, match=r"twice: .*k_proj.*leave one out"):
        to.admit(LAYER + "self_attn.k_proj.weight", "bfloat16", [64, 128])


@pytest.mark.parametrize(
    ("checkpoint", "sent", "kept"),
    [
        ("bfloat16", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "bfloat16"),
        ("bfloat16", "float16", "bfloat16"),
        ("float32", "bfloat16", "bfloat16"),  # the engine's own, which the loader would make of it
        ("float32", "float16", "float32"),
        ("float32", "float32", "float32"),
    ],
)
def test_floats_are_cast_as_a_loader_would(checkpoint, sent, kept):
    to = collection(dtype=checkpoint)
    for name, shape in (
        ("model.norm.weight", [128]),
        (LAYER + "mlp.gate_up_proj.weight", [512, 128]),
    ):
        admitted = to.admit(name, sent, shape)
        assert (admitted.spec.dtype, admitted.dtype, admitted.kept.dtype) == (sent, kept, kept)


def test_a_tied_head_is_never_missing_and_must_equal_its_embedding():
    given = tiny.tensors(tied=True)
    to = collection(tied=True)
    assert to.missing == list(given)
    head = to.admit("lm_head.weight", "bfloat16", [256, 128])
    assert head.use == "head"
    to.take(head, given["model.embed_tokens.weight"])
    assert (len(to), to.heads) == (0, ["lm_head.weight"])
    send(to, given)
    assert to.whole
    assert list(to.drain()) == list(given)
    send(to, given)
    to.take(head, tiny.tensors(1, tied=True)["model.embed_tokens.weight"])
    with pytest.raises(ManifestMismatchError, match="ties 'lm_head.weight' to its embedding"):
        to.drain()
    assert (len(to), to.heads) == (0, []), "what came is given up"


def test_what_the_engine_computes_itself_is_dropped():
    name = LAYER + "self_attn.rotary_emb.inv_freq"
    to = collection(more={name: ("float32", (16,))})
    assert name not in to.missing
    admitted = to.admit(name, "float32", [16])
    to.take(admitted, "tables")
    assert (admitted.use, len(to)) == ("drop", 0)


def test_clearing_forgets_everything():
    to = collection(tied=True)
    send(to, tiny.tensors(tied=True), "model.norm.weight")
    to.take(to.admit("lm_head.weight", "bfloat16", [256, 128]), "a head")
    to.clear()
    assert (len(to), to.heads) == (0, [])
