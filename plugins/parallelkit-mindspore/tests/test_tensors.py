"""Tensors as bytes and back, for every dtype that MindSpore has."""

from __future__ import annotations

import threading

import mindspore as ms
import numpy as np
import pytest
from parallelkit_mindspore import runtime, tensors

from parallelkit.errors import ManifestError, WrongThreadError
from parallelkit.weights.manifest import DTYPE_BYTES


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_bytes_come_back(dtype: str) -> None:
    size = 6 * DTYPE_BYTES[dtype]
    data = bytes([0, 1] * (size // 2)) if dtype == "bool" else bytes(range(size))
    tensor = tensors.from_bytes(data, dtype, (2, 3))
    assert tensor.shape == (2, 3)
    assert tensors.dtype_name(tensor) == dtype
    assert bytes(tensors.as_bytes(tensor)) == data


def test_live_bytes_are_the_tensor_s_own() -> None:
    tensor = ms.Tensor(np.zeros((2, 2), np.float32)) + 1
    runtime.synchronize()
    live = tensors.live_bytes(tensor)
    assert live is not None
    live[:4] = np.float32(7).tobytes()
    assert tensor.asnumpy().tolist() == [[7, 1], [1, 1]]


def test_a_view_out_of_order_is_copied() -> None:
    tensor = ms.Tensor(np.arange(6, dtype=np.float32).reshape(2, 3)).t()
    assert tensors.live_bytes(tensor) is None
    found = np.frombuffer(tensors.as_bytes(tensor), np.float32)
    assert found.tolist() == [0, 3, 1, 4, 2, 5]


def test_nothing_and_one() -> None:
    assert tensors.from_bytes(b"", "float32", (0, 3)).shape == (0, 3)
    assert tensors.from_bytes(np.float32(2).tobytes(), "float32", ()).asnumpy() == 2
    assert len(tensors.as_bytes(tensors.from_bytes(b"", "bfloat16", (2, 0)))) == 0


def test_wrong_size_is_refused() -> None:
    with pytest.raises(ManifestError, match=r"float32\[2\] has 8 bytes, 4 were given"):
        tensors.from_bytes(b"1234", "float32", (2,))


def test_another_thread_is_refused() -> None:
    runtime.own("this test")
    found: list[BaseException] = []

    def use() -> None:
        try:
            runtime.mindspore("collective")
        except WrongThreadError as error:
            found.append(error)

    thread = threading.Thread(target=use, name="other")
    thread.start()
    thread.join()
    assert "collective was called in thread 'other'" in str(found[0])
