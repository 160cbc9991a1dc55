"""Where tensors lie and how they go on the wire; transfers themselves are in `test_moves.py`."""

from __future__ import annotations

import gc
import weakref

import pytest
from parallelkit_hccl.errors import HcclArgumentError
from parallelkit_hccl.transfer import DeviceTensor, located, on_the_wire

from parallelkit.errors import ManifestError
from parallelkit.weights.manifest import TensorSpec


class Lying:
    """A tensor as far as `located` looks."""

    def __init__(self, dtype: str, *shape: int, contiguous: bool = True, at: int = 64) -> None:
        self.dtype, self.shape, self._contiguous, self._at = dtype, shape, contiguous, at

    def is_contiguous(self) -> bool:
        return self._contiguous

    def data_ptr(self) -> int:
        return self._at


@pytest.mark.parametrize(
    ("said", "ours"),
    [
        ("torch.bfloat16", "bfloat16"),
        ("BFloat16", "bfloat16"),
        ("Float32", "float32"),
        ("torch.bool", "bool"),
        ("Bool", "bool"),
        ("torch.float8_e4m3fn", "float8_e4m3fn"),
        ("Float8E4M3FN", "float8_e4m3fn"),
        ("Float8E5M2", "float8_e5m2"),
    ],
)
def test_dtypes_of_both_frameworks(said, ours):
    (found,) = located([("w", Lying(said, 2, 3))])
    assert found == DeviceTensor(TensorSpec(name="w", dtype=ours, shape=(2, 3)), 64)


def test_real_tensors_of_torch():
    torch = pytest.importorskip("torch")
    x = torch.zeros(4, 6, dtype=torch.bfloat16)
    (found,) = located([("x", x)])
    assert found.pointer == x.data_ptr()
    assert found.spec.describe() == "bfloat16[4, 6]"
    with pytest.raises(HcclArgumentError, match=r"'x' \(bfloat16\[6, 4\]\) is not contiguous"):
        located([("x", x.t())])
    (empty,) = located([("e", torch.zeros(0, 3))])
    assert empty.spec.nbytes == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (5, "located got 5; it takes pairs"),
        (None, "located got None"),
        ([5], "5 is no pair"),
        ([("a",)], "is no pair"),
        (["ab"], "'ab' is no pair"),
        ([("a", 5)], "'a' is a int without dtype, shape, data_ptr, is_contiguous"),
        ([("a", bytearray(3))], "'a' is a bytearray without"),
    ],
)
def test_what_is_no_tensor(given, said):
    with pytest.raises(HcclArgumentError, match=said):
        located(given)


def test_arrays_and_tensors_without_memory():
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    with pytest.raises(HcclArgumentError, match="'a' is a ndarray without data_ptr"):
        located([("a", numpy.zeros(3))])
    with pytest.raises(HcclArgumentError, match="'a'.* lies at 0|'a'.*no memory"):
        located([("a", torch.zeros(3, device="meta"))])
    with pytest.raises(HcclArgumentError, match="'a'.*no memory"):
        located([("a", torch.eye(3).to_sparse())])


def test_a_dtype_that_nobody_knows():
    with pytest.raises(ManifestError, match="int4"):
        located([("w", Lying("torch.int4", 2))])


def test_what_was_located_stays_alive():
    def temporary() -> Lying:
        made = Lying("float32", 2)
        seen.append(weakref.ref(made))
        return made

    seen: list[weakref.ref[Lying]] = []
    found = located(("w", temporary()) for _ in range(1))
    gc.collect()
    assert seen[0]() is not None
    del found
    gc.collect()
    assert seen[0]() is None


def test_a_tensor_that_was_given_other_memory_is_refused():
    tensor = Lying("float32", 2)
    (found,) = located([("w", tensor)])
    found.check_place()
    tensor._at = 128
    with pytest.raises(HcclArgumentError, match=r"'w' \(float32\[2\]\) was given other memory"):
        found.check_place()


def test_an_address_by_hand_has_no_owner():
    found = DeviceTensor(TensorSpec(name="w", dtype="float32", shape=(2,)), 64)
    found.check_place()
    assert found.owner is None


@pytest.mark.parametrize("pointer", [0, -1, 1 << 64, None, "64", True])
def test_no_address(pointer):
    spec = TensorSpec(name="w", dtype="float32", shape=(2,))
    with pytest.raises(HcclArgumentError, match="'w'.*which is no address"):
        DeviceTensor(spec, pointer)


def test_an_empty_tensor_needs_none():
    assert DeviceTensor(TensorSpec(name="w", dtype="float32", shape=(0,)), 0).pointer == 0


@pytest.mark.parametrize(
    ("dtype", "shape", "wire"),
    [
        ("bfloat16", (3, 5), ("bfloat16", 15)),
        ("float64", (), ("float64", 1)),
        ("int8", (0, 4), ("int8", 0)),
        ("bool", (3,), ("uint8", 3)),
        ("complex64", (3,), ("uint8", 24)),
        ("float8_e5m2", (2, 2), ("uint8", 4)),
    ],
)
def test_what_hccl_has_no_dtype_for_goes_as_bytes(dtype, shape, wire):
    assert on_the_wire(TensorSpec(name="w", dtype=dtype, shape=shape)) == wire
