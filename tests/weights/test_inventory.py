"""What a model holds, by facts alone: the manifest, what changed since, what overlaps."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from parallelkit.errors import ManifestError
from parallelkit.weights.inventory import Found, changed, describe, match
from parallelkit.weights.overlap import Span, overlap, self_overlapping, shared


def model(**changes: Found | None) -> list[Found]:
    found = {
        "embed": Found("embed", "float32", (4, 2), 1),
        "body": Found("body", "float16", (3,), 2),
        "head": Found("head", "float32", (4, 2), 1),
    }
    return [item for item in (found | changes).values() if item is not None]


def test_names_of_one_tensor_are_one_group() -> None:
    manifest, groups = describe(model())
    assert [(t.name, t.alias_of) for t in manifest.tensors] == [
        ("embed", None),
        ("body", None),
        ("head", "embed"),
    ]
    assert groups == [[0, 2], [1]]


def test_a_tensor_without_bytes_is_refused_by_name() -> None:
    with pytest.raises(ManifestError, match="'body' is on no device"):
        describe(model(body=Found("body", problem="is on no device")))


def test_what_was_replaced_by_the_like_is_found_again() -> None:
    manifest, _ = describe(model())
    moved = [Found(f.name, f.dtype, f.shape, (f.identity, "moved")) for f in reversed(model())]
    assert match(manifest, moved) == [[2, 0], [1]]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"body": None}, "'body' is no longer there"),
        ({"more": Found("more", "bool", (), 9)}, "'more' is new"),
        ({"body": Found("body", "float16", (4,), 2)}, r"was float16\[3\] and is now float16\[4\]"),
        ({"body": Found("body", "float32", (3,), 2)}, r"was float16\[3\] and is now float32\[3\]"),
        ({"body": Found("body", "float16", (3,), 1)}, "'body' is now tied to 'embed'"),
        ({"head": Found("head", "float32", (4, 2), 5)}, "'head' is no longer tied to 'embed'"),
        ({"body": Found("body", problem="is on no device")}, "'body' is on no device"),
    ],
)
def test_what_changed_is_said(changes: dict[str, Found | None], said: str) -> None:
    manifest, _ = describe(model())
    with pytest.raises(ManifestError, match=said):
        match(manifest, model(**changes))


def test_a_long_list_of_changes_is_cut() -> None:
    manifest, _ = describe([Found(f"t{i}", "int8", (i,), i) for i in range(9)])
    with pytest.raises(ManifestError, match=r"'t4' is no longer there \(and 4 more\)"):
        match(manifest, [])


def test_changed() -> None:
    spec = describe(model())[0].tensors[1]
    assert changed(spec, "float16", [3]) is None
    assert changed(spec, "float16", [3, 1]) == "was float16[3] and is now float16[3, 1]"


def span(name: str, start: int, shape: tuple[int, ...], steps: tuple[int, ...], on="cpu") -> Span:
    return Span(name, start, 4, shape, steps, on)


@pytest.mark.parametrize(
    ("spans", "pair"),
    [
        ([span("a", 0, (4,), (4,)), span("b", 16, (4,), (4,))], None),
        ([span("a", 0, (4,), (4,)), span("b", 12, (4,), (4,))], ("a", "b")),
        ([span("a", 0, (4,), (4,)), span("b", 12, (4,), (4,), "npu:0")], None),
        # two columns of one matrix interleave and share nothing
        ([span("left", 0, (3,), (8,)), span("right", 4, (3,), (8,))], None),
        ([span("whole", 0, (3, 2), (8, 4)), span("right", 4, (3,), (8,))], ("whole", "right")),
        ([span("half", 2, (2,), (4,)), span("a", 0, (2,), (4,))], ("a", "half")),
        ([], None),
    ],
)
def test_overlap(spans: list[Span], pair: tuple[str, str] | None) -> None:
    assert overlap(spans) == pair


@pytest.mark.parametrize(
    ("ours", "theirs", "answer"),
    [
        ([span("", 0, (4,), (4,))], [span("", 16, (4,), (4,))], False),
        ([span("", 0, (4,), (4,))], [span("", 12, (4,), (4,))], True),
        ([span("", 0, (4,), (4,))], [span("", 0, (4,), (4,), "npu:0")], False),
        # a transposed matrix has no gaps: rows of it are in it
        ([span("", 0, (4, 8), (4, 16))], [span("", 32, (4,), (4,))], True),
        # two columns of one matrix interleave and share nothing; a third lies over both
        ([span("", 0, (3,), (8,))], [span("", 4, (3,), (8,))], False),
        ([span("", 0, (3,), (8,))], [span("", 2, (3,), (8,))], True),
        # a run that begins between the elements of the other
        ([span("", 0, (3,), (8,))], [span("", 4, (2,), (4,))], True),
        ([span("", 0, (3,), (8,))], [span("", 4, (1,), (4,))], False),
        # those of one group may overlap one another
        ([span("", 0, (4,), (4,)), span("", 8, (4,), (4,))], [span("", 24, (1,), (4,))], False),
        ([], [], False),
    ],
)
def test_shared(ours: list[Span], theirs: list[Span], answer: bool) -> None:
    assert shared(ours, theirs) is answer
    assert shared(theirs, ours) is answer


def test_shared_is_exact() -> None:
    random = np.random.default_rng(7)

    def some() -> list[Span]:
        spans = []
        for _ in range(random.integers(1, 4)):
            shape = tuple(int(n) for n in random.integers(1, 4, random.integers(0, 3)))
            steps = tuple(int(n) for n in random.integers(0, 9, len(shape)))
            spans.append(Span("", int(random.integers(0, 60)), 2, shape, steps))
        return spans

    def places(spans: list[Span]) -> set[int]:
        found = set()
        for x in spans:
            for at in itertools.product(*map(range, x.shape)):
                first = x.start + sum(i * step for i, step in zip(at, x.steps, strict=True))
                found |= set(range(first, first + x.item))
        return found

    answers = []
    for _ in range(2000):
        ours, theirs = some(), some()
        answers.append(shared(ours, theirs))
        assert answers[-1] is bool(places(ours) & places(theirs)), (ours, theirs)
    assert 200 < sum(answers) < 1800


@pytest.mark.parametrize(
    ("shape", "strides", "answer"),
    [
        ((2, 3), (3, 1), False),
        ((2, 3), (1, 2), False),
        ((2, 3), (0, 1), True),
        ((3, 4), (2, 1), True),
        ((1, 4), (0, 1), False),
        ((0, 3), (0, 0), False),
        ((), (), False),
    ],
)
def test_self_overlapping(shape: tuple[int, ...], strides: tuple[int, ...], answer: bool) -> None:
    assert self_overlapping(shape, strides) is answer
