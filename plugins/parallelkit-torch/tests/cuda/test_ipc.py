"""Exports and imports on a driver of the imagination: once each, counted, nothing left mapped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from parallelkit_torch.cuda import ipc
from parallelkit_torch.cuda.errors import IpcError
from parallelkit_torch.cuda.ipc import Exports, Imports, extent
from parallelkit_torch.cuda.sheet import Sheet

from parallelkit.errors import StateError

FIRST, SECOND, PEER = 1 << 30, (1 << 30) + (1 << 20), 1 << 40


@pytest.fixture
def sent(driver: Any) -> Iterator[Sheet]:
    """A sheet as another process would get it: three spans in two allocations."""
    with Exports(driver) as exports:
        data = exports.memory([(FIRST + 256, 100), (SECOND, 512), (FIRST + 4096, 8)]).encode()
    yield Sheet.decode(data)
    assert not ipc._own


def test_an_allocation_is_exported_once(driver: Any) -> None:
    with Exports(driver) as exports:
        one = exports.memory([(FIRST + i * 64, 64) for i in range(1000)] + [(PEER, 8), (7, 0)])
        assert driver.calls["export"] == 2
        assert driver.calls["allocation"] <= 4
        assert [h.nbytes for h in one.handles] == [1 << 20] * 2
        assert one.handles[1].gpu == driver.uuid(1)
        assert one.allocation.tolist() == [0] * 1000 + [1, 0]
        again = exports.memory([(FIRST, 1 << 20), (SECOND, 1)])
        assert again.handles[0] == one.handles[0]
        assert driver.calls["export"] == 3


def test_another_export_of_the_same_memory_is_another(driver: Any) -> None:
    with Exports(driver) as one, Exports(driver) as other:
        assert one.memory([(FIRST, 8)]).handles != other.memory([(FIRST, 8)]).handles


def test_memory_that_no_handle_can_be_made_of_names_the_setting(driver: Any) -> None:
    driver.virtual.add(SECOND)
    with Exports(driver) as exports:
        with pytest.raises(IpcError, match="expandable_segments"):
            exports.memory([(FIRST, 8), (SECOND, 8)])
        assert not ipc._own, "what a failed call exported may be freed by its owner"
        assert not exports._handles


def test_a_range_over_two_allocations_is_refused(driver: Any) -> None:
    with Exports(driver) as exports, pytest.raises(IpcError, match="reach beyond the allocation"):
        exports.memory([(SECOND - 4, 8)])


def test_tensors_of_the_cpu_are_refused(driver: Any) -> None:
    with Exports(driver) as exports, pytest.raises(IpcError, match="tensor 0 is on cpu"):
        exports.tensors([torch.zeros(3)])
    assert not driver.calls


def test_closed_exports_export_nothing(driver: Any) -> None:
    exports = Exports(driver)
    exports.close()
    exports.close()
    with pytest.raises(StateError, match="closed"):
        exports.memory([(FIRST, 8)])


def test_the_extent_of_a_tensor_reaches_to_its_last_element() -> None:
    whole = torch.zeros(6, 10, dtype=torch.bfloat16)
    assert extent(whole) == (whole.data_ptr(), 120)
    assert extent(whole[1:3, 2:4]) == (whole.data_ptr() + 24, (10 + 2) * 2)
    assert extent(whole.T) == extent(whole)
    assert extent(whole[:0])[1] == 0


def test_a_sheet_is_opened_once_however_often(driver: Any, sent: Sheet) -> None:
    with Imports(driver, 0) as imports:
        first = imports.open(sent)
        assert first.tolist() == [a + (1 << 50) for a in (FIRST + 256, SECOND, FIRST + 4096)]
        assert imports.open(Sheet.decode(sent.encode())).tolist() == first.tolist()
        assert driver.calls["open"] == 2
        imports.release(sent)
        assert not driver.calls["close"]
        imports.release(sent)
        assert driver.calls["close"] == 2
        assert len(imports) == 0
        with pytest.raises(StateError, match="once too often"):
            imports.release(sent)
        assert imports.open(sent).tolist() == first.tolist()
    assert not any(driver.mapped.values())
    imports.close()
    assert driver.calls["close"] == 4


def test_a_sheet_that_opens_in_part_leaves_nothing_open(driver: Any, sent: Sheet) -> None:
    driver.broken.add(sent.handles[1].handle)
    with Imports(driver, 0) as imports:
        with pytest.raises(IpcError, match="has its owner ended") as caught:
            imports.open(sent)
        assert caught.value.code == 1
        assert not any(driver.mapped.values())
        assert len(imports) == 0


def test_what_this_process_exported_is_not_opened_here(driver: Any) -> None:
    with Exports(driver) as exports, Imports(driver, 0) as imports:
        with pytest.raises(IpcError, match="two processes"):
            imports.open(exports.memory([(FIRST, 8)]))
    assert not driver.calls["open"]


def test_what_cannot_be_mapped_is_named(driver: Any, sent: Sheet) -> None:
    driver.broken.add(sent.handles[0].handle)
    with Imports(driver, 0) as imports, pytest.raises(IpcError) as caught:
        imports.open(sent)
    assert "1048576 bytes on GPU-30303030-3030-3030-3030-303030303030" in str(caught.value)
    assert "for cuda:0" in str(caught.value)
