"""Manifests: every rule by its message, and how a difference between two is told."""

from __future__ import annotations

import attrs
import pytest

from parallelkit.errors import ManifestError, ManifestMismatchError
from parallelkit.weights.layout import Mesh, ShardLayout
from parallelkit.weights.manifest import (
    DTYPE_BYTES,
    MAX_DIMS,
    MAX_NAME_BYTES,
    MAX_TENSOR_BYTES,
    Manifest,
    TensorSpec,
    check_exact,
    differences,
)


def spec(name="w", dtype="float32", shape=(2, 3), alias_of=None):
    return TensorSpec(name=name, dtype=dtype, shape=shape, alias_of=alias_of)


@pytest.mark.parametrize(
    "name",
    ["", None, 7, b"w", "n" * (MAX_NAME_BYTES + 1), "é" * (MAX_NAME_BYTES // 2 + 1), "\ud800"],
    ids=["empty", "none", "int", "bytes", "long", "long-in-bytes", "surrogate"],
)
def test_bad_names_are_refused(name):
    with pytest.raises(ManifestError, match="is not a non-empty string of at most 512 bytes"):
        spec(name=name)


@pytest.mark.parametrize("name", ["w", "n" * MAX_NAME_BYTES, "é" * (MAX_NAME_BYTES // 2), "a\nb"])
def test_good_names_are_kept_as_they_are(name):
    assert spec(name=name).name == name


@pytest.mark.parametrize("dtype", ["", "float", "Float32", "torch.float32", "object", None, 4, []])
def test_unknown_dtypes_are_refused_with_the_allowed_ones(dtype):
    with pytest.raises(ManifestError, match="tensor 'w' has dtype") as caught:
        spec(dtype=dtype)
    assert all(known in str(caught.value) for known in DTYPE_BYTES)


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_every_dtype_counts_its_bytes(dtype):
    assert spec(dtype=dtype, shape=(3, 5)).nbytes == 15 * DTYPE_BYTES[dtype]
    assert spec(dtype=dtype, shape=()).nbytes == DTYPE_BYTES[dtype]
    assert spec(dtype=dtype, shape=(3, 0)).nbytes == 0


@pytest.mark.parametrize(
    "shape",
    [(-1,), (2, -3), (True,), (1.0,), ("2",), (None,), (1,) * (MAX_DIMS + 1)],
    ids=["negative", "second-negative", "bool", "float", "text", "none", "dims"],
)
def test_bad_shapes_are_refused(shape):
    with pytest.raises(ManifestError, match="a shape is at most 16 non-negative integers"):
        spec(shape=shape)


def test_shapes_become_tuples_and_may_have_sixteen_dims():
    assert spec(shape=[2, 3]).shape == (2, 3)
    assert spec(shape=(1,) * MAX_DIMS).nbytes == 4


def test_a_tensor_has_a_largest_size():
    assert spec(dtype="uint8", shape=(MAX_TENSOR_BYTES,)).nbytes == MAX_TENSOR_BYTES
    with pytest.raises(ManifestError, match=f"the limit is {MAX_TENSOR_BYTES}"):
        spec(dtype="uint8", shape=(MAX_TENSOR_BYTES + 1,))
    with pytest.raises(ManifestError, match="the limit is"):
        spec(shape=(1 << 60, 1 << 60))


@pytest.mark.parametrize(
    "fields", [{"dtype": "x" * 10**6}, {"shape": [3] * 10**6}, {"shape": [2**63] * MAX_DIMS}]
)
def test_a_message_about_something_huge_is_short(fields):
    with pytest.raises(ManifestError) as caught:
        spec(**fields)
    assert len(str(caught.value)) < 1500


def test_a_spec_describes_itself_and_cannot_change():
    assert spec(dtype="bfloat16", shape=(1024, 896)).describe() == "bfloat16[1024, 896]"
    assert spec(shape=()).describe() == "float32[]"
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        spec().name = "v"


@pytest.mark.parametrize("fusion", ["", 7, b"qkv", "n" * (MAX_NAME_BYTES + 1), "\ud800"])
def test_bad_fusion_groups_are_refused(fusion):
    with pytest.raises(ManifestError, match="tensor 'w' has fusion group"):
        TensorSpec(name="w", dtype="int8", shape=(), fusion=fusion)


def test_an_alias_has_the_fusion_group_of_its_tensor():
    w = attrs.evolve(spec("w"), fusion="qkv")
    assert Manifest([w, attrs.evolve(w, name="tied", alias_of="w")]).unique == (w,)
    with pytest.raises(ManifestError, match=r"their fusion groups differ \(None; 'qkv'\)"):
        Manifest([w, spec("tied", alias_of="w")])


def test_kinds_are_by_value_and_in_order_of_use():
    mesh, layout = Mesh(("tensor",), (2,)), ShardLayout([("tensor", 0)])
    rows = [
        attrs.evolve(spec("a"), layout=layout),
        spec("b"),
        attrs.evolve(spec("c"), layout=ShardLayout([("tensor", 0)])),
        attrs.evolve(spec("d"), layout=layout, fusion="x"),
        attrs.evolve(spec("e"), layout=layout, fusion="y"),
        spec("f", dtype="int8"),
        spec("g", shape=(3, 2)),
        spec("tied", alias_of="b"),
        spec("h"),
    ]
    kinds, which = Manifest(rows, mesh).kinds
    assert kinds == (
        (layout, (2, 3), "float32", False),
        (None, (2, 3), "float32", False),
        (layout, (2, 3), "float32", True),
        (None, (2, 3), "int8", False),
        (None, (3, 2), "float32", False),
    )
    assert which.tolist() == [0, 1, 0, 2, 2, 3, 4, 1]
    assert kinds[3].itemsize == 1


def test_names_are_unique():
    with pytest.raises(ManifestError, match="tensor name 'w' occurs twice"):
        Manifest([spec(), spec("v"), spec()])


@pytest.mark.parametrize(
    "rows",
    [
        [spec("tied", alias_of="w")],
        [spec("tied", alias_of="w"), spec("w")],
        [spec("tied", alias_of="tied")],
        [spec("w"), spec("a", alias_of="w"), spec("b", alias_of="a")],
    ],
    ids=["absent", "later", "itself", "chain"],
)
def test_an_alias_is_of_an_earlier_tensor_of_its_own(rows):
    with pytest.raises(ManifestError, match="which is not an earlier tensor of its own"):
        Manifest(rows)


@pytest.mark.parametrize("other", [{"dtype": "float16"}, {"shape": (3, 2)}])
def test_an_alias_has_the_dtype_and_shape_of_its_tensor(other):
    with pytest.raises(ManifestError, match="dtype and shape must be equal"):
        Manifest([spec("w"), spec("tied", alias_of="w", **other)])


def test_aliases_own_no_bytes():
    manifest = Manifest([spec("w"), spec("tied", alias_of="w"), spec("b", "uint8", (5,))])
    assert [t.name for t in manifest.unique] == ["w", "b"]
    assert manifest.nbytes == 24 + 5
    assert len(manifest.tensors) == 3


def test_an_empty_manifest_is_a_manifest():
    assert Manifest([]).unique == ()
    assert Manifest(()).nbytes == 0


def test_the_digest_is_of_every_field_and_of_the_order():
    rows = [spec("a"), spec("b"), spec("c", alias_of="a")]
    different = [
        rows,
        [rows[1], rows[0], rows[2]],
        rows[:2],
        [spec("A"), spec("b"), spec("c", alias_of="A")],
        [spec("a"), spec("b", dtype="int32"), rows[2]],
        [spec("a"), spec("b", shape=(3, 2)), rows[2]],
        [spec("a"), spec("b", shape=(6,)), rows[2]],
        [spec("a"), spec("b"), spec("c", alias_of="b")],
        [spec("a"), spec("b"), spec("c")],
        [],
    ]
    digests = [Manifest(r).digest() for r in different]
    assert len(set(digests)) == len(different)
    assert {len(d) for d in digests} == {16}
    assert Manifest(list(rows)).digest() == digests[0]


def test_a_name_cannot_imitate_the_text_of_another_entry():
    two = Manifest([spec("a"), spec("b")])
    one = Manifest([spec(f"a', 'float32', (2, 3), None){(spec('b').name,)!r}")])
    assert one.digest() != two.digest()


# --- differences -------------------------------------------------------------------------------

BASE = [spec("embed.weight"), spec("layer.weight", shape=(4,)), spec("scale", shape=())]


def test_equal_manifests_have_no_differences_in_any_order():
    assert differences(Manifest(BASE), Manifest(BASE)) == []
    assert differences(Manifest(BASE), Manifest(BASE[::-1])) == []
    check_exact(Manifest(BASE), Manifest(BASE[::-1]))


def test_a_missing_tensor_is_named_with_the_nearest_that_is_there():
    (line,) = differences(Manifest(BASE), Manifest([*BASE, spec("layer.weights", shape=(4,))]))
    assert line.startswith("missing: the target needs 'layer.weights' (float32[4])")
    assert line.endswith("did you mean 'layer.weight'?")


def test_an_unknown_tensor_is_named_with_the_nearest_that_is_needed():
    (line,) = differences(Manifest([*BASE, spec("layer.weights")]), Manifest(BASE))
    assert line.startswith("unknown: the publisher sends 'layer.weights' (float32[2, 3])")
    assert line.endswith("did you mean 'layer.weight'?")


def test_a_part_of_a_model_may_lack_what_is_published_and_nothing_else():
    part = Manifest(BASE[1:])
    assert [line[:7] for line in differences(Manifest(BASE), part)] == ["unknown"]
    assert differences(Manifest(BASE), part, partial=True) == []
    check_exact(Manifest(BASE), part, partial=True)
    (line,) = differences(part, Manifest(BASE), partial=True)
    assert line.startswith("missing: the target needs")
    other = [attrs.evolve(BASE[1], dtype="int8"), *BASE[2:]]
    (line,) = differences(Manifest(BASE), Manifest(other), partial=True)
    assert line.startswith("dtype of")


def test_nothing_near_is_no_hint():
    (line,) = differences(Manifest([*BASE, spec("zzzzqqqq")]), Manifest(BASE))
    assert "did you mean" not in line


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module."])
def test_a_wrapped_model_is_told_the_plain_names(prefix):
    wrapped = Manifest([attrs.evolve(t, name=prefix + t.name) for t in BASE])
    lines = differences(wrapped, Manifest(BASE))
    assert len(lines) == 6
    assert any(f"did you mean '{prefix}embed.weight'" in line for line in lines)
    assert any("did you mean 'embed.weight'" in line for line in lines)


def test_two_large_models_that_share_no_name_are_compared_at_once(monkeypatch):
    import difflib

    calls = []
    monkeypatch.setattr(difflib, "get_close_matches", lambda *a, **k: calls.append(len(a[1])) or [])
    ours = Manifest([spec(f"model.layers.{i}.weight") for i in range(4000)])
    theirs = Manifest([spec(f"_orig_mod.model.layers.{i}.weight") for i in range(4000)])
    assert len(differences(ours, theirs)) == 8000
    assert sum(calls) < 100_000, "each comparison of two names takes about a tenth of a ms"


def test_dtype_and_shape_are_compared_apart():
    other = [BASE[0], spec("layer.weight", "float16", (5,)), BASE[2]]
    assert differences(Manifest(other), Manifest(BASE)) == [
        "dtype of 'layer.weight': the publisher has float16, the target float32",
        "shape of 'layer.weight': the publisher has [5], the target [4]",
    ]


def test_ties_must_be_the_same_on_both_sides():
    tied = Manifest([spec("embed"), spec("head", alias_of="embed")])
    apart = Manifest([spec("embed"), spec("head")])
    assert differences(tied, apart) == [
        "aliases: the publisher ties ['embed', 'head'], the target does not"
    ]
    assert differences(apart, tied) == [
        "aliases: the target ties ['embed', 'head'], the publisher does not"
    ]


def test_which_name_owns_a_tie_does_not_matter():
    one = Manifest([spec("embed"), spec("head", alias_of="embed")])
    other = Manifest([spec("head"), spec("embed", alias_of="head")])
    assert differences(one, other) == []


def test_other_ties_are_listed_both_ways_and_always_in_the_same_order():
    names = [f"t{i}" for i in range(6)]

    def tie(pairs):
        owner = {b: a for a, b in pairs}
        return Manifest([spec(n, alias_of=owner.get(n)) for n in names])

    ours = tie([("t0", "t1"), ("t2", "t3"), ("t4", "t5")])
    theirs = tie([("t0", "t3"), ("t1", "t4"), ("t2", "t5")])
    assert differences(ours, theirs) == [
        "aliases: the publisher ties ['t0', 't1'], the target does not",
        "aliases: the publisher ties ['t2', 't3'], the target does not",
        "aliases: the publisher ties ['t4', 't5'], the target does not",
        "aliases: the target ties ['t0', 't3'], the publisher does not",
        "aliases: the target ties ['t1', 't4'], the publisher does not",
        "aliases: the target ties ['t2', 't5'], the publisher does not",
    ]


def test_a_tie_with_a_name_that_is_absent_is_told_once():
    ours = Manifest([spec("embed"), spec("head", alias_of="embed")])
    (line,) = differences(ours, Manifest([spec("embed")]))
    assert line.startswith("unknown: the publisher sends 'head'")


def test_check_exact_lists_all_and_caps_the_message():
    ours = Manifest([spec(f"ours.{i}") for i in range(30)])
    theirs = Manifest([spec(f"theirs.{i}") for i in range(15)])
    with pytest.raises(ManifestMismatchError) as caught:
        check_exact(ours, theirs, limit=10)
    text = str(caught.value)
    assert caught.value.differences == tuple(differences(ours, theirs))
    assert len(caught.value.differences) == 45
    assert "45 difference(s)" in text
    assert "... and 35 more" in text
    assert text.count("missing:") == 10
    assert "unknown:" not in text
    assert text.endswith("Nothing was touched. Publish and subscribe the same model.")


def test_a_short_list_is_shown_whole():
    with pytest.raises(ManifestMismatchError) as caught:
        check_exact(Manifest(BASE), Manifest(BASE[:2]))
    assert "1 difference(s)" in str(caught.value)
    assert "more" not in str(caught.value)


# --- layouts -----------------------------------------------------------------------------------


def test_layouts_are_part_of_the_fingerprint_and_of_no_difference():
    mesh = Mesh(("data", "tensor"), (2, 2))

    def made(layout, mesh=mesh):
        return Manifest([TensorSpec(name="w", dtype="int8", shape=(4, 4), layout=layout)], mesh)

    variants = [
        made(None, None),
        made(ShardLayout([("tensor", 0)])),
        made(ShardLayout([("tensor", 1)])),
        made(ShardLayout([("data", 0)])),
        made(ShardLayout(at=[("data", 1)])),
        made(ShardLayout([("tensor", 0)]), Mesh(("data", "tensor"), (1, 4))),
        made(ShardLayout([("tensor", 0)]), Mesh(("dp", "tensor"), (2, 2))),
    ]
    assert len({manifest.digest() for manifest in variants}) == len(variants)
    for manifest in variants:
        check_exact(manifest, variants[0])


def test_a_layout_needs_a_mesh_that_has_its_axes():
    spec = TensorSpec(name="w", dtype="int8", shape=(4,), layout=ShardLayout([("tensor", 0)]))
    with pytest.raises(ManifestError, match="'w' has a layout .* and the manifest no mesh"):
        Manifest([spec])
    with pytest.raises(ManifestError, match="'w': the mesh has no axis 'tensor'"):
        Manifest([spec], Mesh(("data",), (2,)))
    scalar = attrs.evolve(spec, name="v", shape=())
    with pytest.raises(ManifestError, match="'v': the layout .* divides dim 0"):
        Manifest([spec, scalar], Mesh(("tensor",), (2,)))


def test_an_alias_has_the_layout_of_its_tensor():
    spec = TensorSpec(name="w", dtype="int8", shape=(4,), layout=ShardLayout([("tensor", 0)]))
    head = TensorSpec(name="head", dtype="int8", shape=(4,), alias_of="w")
    with pytest.raises(ManifestError, match="'head' is an alias of 'w', and their layouts differ"):
        Manifest([spec, head], Mesh(("tensor",), (2,)))
