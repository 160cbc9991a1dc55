"""Whole updates over `cuda_ipc`, between two ends in one process, on imagined GPUs."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from parallelkit_torch.cuda import plain
from torch import nn

from parallelkit.errors import (
    CorruptionError,
    NonFiniteError,
    PartialCommitError,
    PeerLostError,
    QuarantinedError,
    TransportError,
    UpdateAbortedError,
    WeightTransferError,
)

sys.path.insert(0, str(Path(__file__).parent))
from imagined import Scene, imagined

VERIFY = ["off", "digest", "readback", "sample"]
COMMIT = ["in_place", "staged"]


class Net(nn.Module):
    """Tensors of many kinds: odd sizes, small dtypes, a tie, a buffer, an empty one, a scalar."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(1000, 300)
        self.head = nn.Linear(300, 1000, bias=False)
        self.head.weight = self.embed.weight
        self.odd = nn.Parameter(torch.randn(7, 3))
        self.halves = nn.Parameter(torch.randn(33).to(torch.bfloat16))
        self.small = nn.Parameter(torch.randn(5).to(torch.float8_e4m3fn), requires_grad=False)
        self.turned = nn.Parameter(torch.randn(30, 20).t())
        self.none = nn.Parameter(torch.zeros(0, 4))
        self.register_buffer("flags", torch.rand(11) > 0.5)
        self.register_buffer("count", torch.tensor(seed))


def same(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return all(
        torch.equal(
            a[k].contiguous().view(-1).view(torch.uint8), b[k].reshape(-1).view(torch.uint8)
        )
        if a[k].dim()
        else bool(a[k] == b[k])
        for k in a
    )


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    with imagined(monkeypatch) as made:
        yield made


def change(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.float().neg().to(parameter.dtype))


@pytest.mark.parametrize("commit", COMMIT)
@pytest.mark.parametrize("verify", VERIFY)
def test_every_byte_arrives(scene: Scene, commit: str, verify: str) -> None:
    source, target = Net(1), Net(2)
    scene.machine.home(target)
    before = {name: p.data_ptr() for name, p in target.named_parameters()}
    publisher = scene.publish(source, commit=commit, verify=verify)
    source.turned.data = torch.randn(30, 20).t()
    follower = scene.follow(target)
    for _ in range(3):
        report = scene.update()
        assert follower.error is None
        assert same(source, target)
        change(source)
    assert report.transport == "cuda_ipc"
    assert report.members[0].state == "committed"
    assert {name: p.data_ptr() for name, p in target.named_parameters()} == before
    assert "transport cuda_ipc" in publisher.explain()
    assert scene.machine.calls["open"] == scene.machine.calls["export"], "opened once"
    if verify in ("digest", "readback"):
        assert report.changed_ratio is not None
        assert 0.9 < report.changed_ratio <= 1
    if verify == "readback":
        assert "live memory" in report.members[0].verified


def test_auto_is_in_place_on_one_gpu_and_staged_on_another(scene: Scene) -> None:
    source = Net(1)
    scene.publish(source, transport="auto")
    near = scene.follow(Net(2))
    scene.machine.gpu = 1
    far = scene.follow(Net(3))
    assert near.subscriber._in_place
    assert not far.subscriber._in_place
    report = scene.update()
    assert {m.transport for m in report.members} == {"cuda_ipc"}
    assert same(source, near.module)
    assert same(source, far.module)
    assert near.subscriber._placement._spare is None
    assert far.subscriber._placement._spare is not None


def test_a_copier_is_made_once(scene: Scene) -> None:
    source = Net(1)
    scene.publish(source)
    follower = scene.follow(Net(2))
    scene.update()
    made = dict(follower.subscriber._placement._copiers)
    scene.update()
    assert follower.subscriber._placement._copiers == made


@pytest.mark.parametrize("commit", COMMIT)
def test_weights_that_moved_are_exported_anew(scene: Scene, commit: str) -> None:
    source, target = Net(1), Net(2)
    scene.publish(source, commit=commit)
    follower = scene.follow(target)
    scene.update()
    opened = scene.machine.calls["open"]
    for _ in range(4):
        scene.machine.home(source)
        change(source)
        scene.update()
        assert follower.error is None
        assert same(source, target)
    assert scene.machine.calls["open"] > opened
    assert sum(scene.machine.mapped.values()) <= opened
    assert len(scene.publisher._coordinator.lanes["device"]._transport._exports._kept) == 1


def test_a_target_that_moved_is_written_where_it_is(scene: Scene) -> None:
    source, target = Net(1), Net(2)
    scene.publish(source)
    scene.follow(target)
    scene.update()
    change(source)
    scene.machine.home(target)
    scene.update()
    assert same(source, target)


@pytest.mark.parametrize("commit", COMMIT)
def test_a_thread_that_serves_stages(scene: Scene, commit: str) -> None:
    source, target = Net(1), Net(2)
    scene.publish(source, commit=commit)
    follower = scene.follow(target)
    scene.followers.clear()
    follower.subscriber.serve()
    for version in (1, 2, 3):
        report = scene.publisher.update()
        assert report.members[0].state == "staged"
        assert not same(source, target)
        assert follower.subscriber.step(5.0) == version
        assert same(source, target)
        change(source)


def test_a_staged_version_that_arrives_changed_is_no_version(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = Net(1), Net(2)
    scene.publish(source, commit="staged")
    follower = scene.follow(target)
    scene.update()
    before = {k: v.clone() for k, v in target.state_dict().items()}
    change(source)
    damage(monkeypatch, 1)
    with pytest.raises(UpdateAbortedError, match="arrived changed") as caught:
        scene.update()
    assert isinstance(caught.value.__cause__, CorruptionError)
    assert all(torch.equal(v.float(), before[k].float()) for k, v in target.state_dict().items())
    assert follower.subscriber.version == 1
    assert scene.update().version == 2
    assert same(source, target)


@pytest.mark.parametrize("verify", ["digest", "readback"])
def test_what_comes_changed_in_place_is_pulled_once_more(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, verify: str
) -> None:
    source, target = Net(1), Net(2)
    scene.publish(source, commit="in_place", verify=verify)
    scene.follow(target)
    damage(monkeypatch, 1)
    report = scene.update()
    assert report.members[0].repeated == 1
    assert same(source, target)


def test_what_comes_changed_twice_is_quarantine_and_the_next_version_is_whole(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = Net(1), Net(2)
    scene.publish(source, commit="in_place")
    follower = scene.follow(target)
    damage(monkeypatch, 2)
    with pytest.raises(PartialCommitError, match="came changed twice, in"):
        scene.update()
    assert isinstance(follower.error, QuarantinedError)
    assert follower.subscriber.state == "quarantined"
    assert scene.update().version == 2
    assert follower.subscriber.state == "current"
    assert same(source, target)


def damage(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Flip a bit of the first target, so many times."""
    real, left = plain.copy_pairs, [times]

    def copy(pairs: Any, device: torch.device) -> None:
        real(pairs, device)
        if left[0]:
            left[0] -= 1
            where = next(int(a) for a, n in zip(pairs.target, pairs.nbytes, strict=True) if n)
            plain.bytes_at(where, 1, device)[0] ^= 1

    monkeypatch.setattr(plain, "copy_pairs", copy)


def test_weights_that_change_while_they_are_read_are_found(scene: Scene) -> None:
    source, target = Net(1), Net(2)
    publisher = scene.publish(source, commit="in_place")
    follower = scene.follow(target)
    publisher._coordinator._phase_hook = lambda phase: change(source) if phase == "verify" else None
    with pytest.raises(PartialCommitError, match="came changed twice"):
        scene.update()
    assert follower.subscriber.state == "quarantined"


def test_a_member_that_comes_too_late_uses_nothing(scene: Scene) -> None:
    """It was stopped after it got ready; meanwhile the publisher went on."""
    source, target = Net(1), Net(2)
    publisher = scene.publish(source, commit="staged", timeout=1.0)
    follower = scene.follow(target)
    late = threading.Event()
    real = follower.subscriber._placement.fetch

    def fetch(*args: Any, **options: Any) -> bytes:
        late.wait(10)
        found: bytes = real(*args, **options)
        return found

    follower.subscriber._placement.fetch = fetch
    follower.begin()
    with pytest.raises(UpdateAbortedError):
        publisher.update()
    late.set()
    follower.end()
    assert isinstance(follower.error, UpdateAbortedError)
    assert not same(source, target)
    follower.subscriber._placement.fetch = real
    assert scene.update().version == 1
    assert same(source, target)


def test_a_publisher_that_goes_while_it_is_read_is_told_of_in_time(scene: Scene) -> None:
    source, target = Net(1), Net(2)
    publisher = scene.publish(source, commit="staged")
    follower = scene.follow(target)
    publisher._coordinator._phase_hook = lambda phase: 1 / 0 if phase == "transfer" else None
    follower.begin()
    with pytest.raises(ZeroDivisionError):
        publisher.update()
    publisher.close()
    started = time.monotonic()
    follower.end()
    assert isinstance(follower.error, UpdateAbortedError | PeerLostError)
    assert time.monotonic() - started < 5
    assert not same(source, target)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_on_the_device(scene: Scene, value: float) -> None:
    source = Net(1)
    scene.publish(source, check_finite=True)
    scene.follow(Net(2))
    scene.update()
    with torch.no_grad():
        source.odd[2, 1] = value
    with pytest.raises(NonFiniteError, match="odd"):
        scene.publisher.update()


def test_nan_travels_where_it_is_not_refused(scene: Scene) -> None:
    source, target = Net(1), Net(2)
    with torch.no_grad():
        source.odd[2, 1] = float("nan")
    scene.publish(source)
    scene.follow(target)
    scene.update()
    assert target.odd[2, 1].isnan()
    assert same(source, target)


# --- what cannot be ------------------------------------------------------------------------------


def test_memory_that_no_handle_can_be_made_of_goes_through_the_host(scene: Scene) -> None:
    source, target = Net(1), Net(2)
    scene.machine.virtual = True
    publisher = scene.publish(source, transport="auto")
    scene.follow(target)
    report = scene.update()
    assert report.transport == "shm"
    assert same(source, target)
    assert "not cuda_ipc: " in publisher.explain()
    assert "expandable_segments" in publisher.explain()
    with pytest.raises(TransportError, match="cannot be used here: .*expandable_segments"):
        scene.publish(source, transport="cuda_ipc")


def test_a_member_that_cannot_read_it_gets_it_through_the_host_and_the_other_does_not(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Net(1)
    publisher = scene.publish(source, transport="auto")
    assert "host" not in publisher._coordinator.lanes, "no arena while nobody needs it"
    near = scene.follow(Net(2))
    monkeypatch.setattr(type(near.subscriber._placement._sink), "accelerator", lambda self: None)
    far = scene.follow(Net(3))
    for _ in range(2):
        report = scene.update()
        assert [m.transport for m in report.members] == ["cuda_ipc", "shm"]
        assert same(source, near.module)
        assert same(source, far.module)
        change(source)
    assert "no GPU" in publisher.explain()


@pytest.mark.parametrize("option", ["keep_last", "aliased"])
def test_options_that_need_host_memory_choose_it(scene: Scene, option: str) -> None:
    source = Net(1)
    del source.turned
    publisher = scene.publish(source, transport="auto", **{option: True})
    assert f"{option}=True" in publisher.explain()
    target = Net(2)
    del target.turned
    scene.follow(target)
    assert scene.update().transport == "shm"
    with pytest.raises(WeightTransferError, match=f"{option}=True"):
        scene.publish(source, transport="cuda_ipc", **{option: True})
