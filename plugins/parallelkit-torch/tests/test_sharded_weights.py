"""Sources of models that are spread over ranks: with real ranks, and what needs none."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
import torch
from parallelkit_torch import pull
from parallelkit_torch.sharded_weights import ShardedModuleSource, weight_source
from parallelkit_torch.sharding import stages
from parallelkit_torch.weights import ModuleSource
from torch import nn

from parallelkit.errors import PeerLostError, StateError, UnsupportedFeatureError
from parallelkit.protocols import ShardedSource
from parallelkit.spawn import RankResult
from parallelkit.testing.fake import FakeGroup
from parallelkit.weights import publish_weights

Job = Callable[..., list[RankResult]]


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_follower_holds_the_whole_of_what_ranks_train_in_parts(job: Job, ranks: int) -> None:
    job("sharded.py", ranks=ranks)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_follower_of_two_gpus(job: Job) -> None:
    job("sharded.py", "cuda", ranks=2)


@pytest.mark.ranks
def test_what_ranks_divided_themselves_comes_together_exactly(job: Job) -> None:
    job("sharded_by_hand.py", ranks=4)


@pytest.mark.ranks
def test_what_contexts_made_is_published_whole_under_any_plan(job: Job) -> None:
    job("sharded_contexts.py", ranks=4)


@pytest.mark.ranks
def test_sends_of_another_group_and_updates_that_fail_do_not_end_the_next(job: Job) -> None:
    job("sharded_failures.py", "goes_on", ranks=3)


@pytest.mark.ranks
@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_is_killed_in_the_stream_is_named_on_all(job: Job, gone: int) -> None:
    job("sharded_failures.py", "killed", str(gone), ranks=3, ends={gone: -signal.SIGKILL})


@pytest.mark.ranks
@pytest.mark.parametrize("slow", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_that_stops_in_the_stream_is_named_within_the_deadline(job: Job, slow: int) -> None:
    job("sharded_failures.py", "stopped", str(slow), ranks=3)


# --- without ranks -----------------------------------------------------------------------------


class Staged(nn.Module):
    def __init__(self, **stages: nn.Module) -> None:
        super().__init__()
        self.indices = tuple(int(name[1:]) for name in stages)
        self.stage_modules = tuple(stages.values())


def test_a_whole_model_has_a_whole_source() -> None:
    assert isinstance(weight_source(nn.Linear(2, 2)), ModuleSource)
    assert not isinstance(weight_source(nn.Linear(2, 2)), ShardedSource)
    assert isinstance(weight_source(Staged(s0=nn.Linear(2, 2))), ShardedSource)


def test_stages_come_in_their_order() -> None:
    late, early = nn.Linear(2, 2), nn.Linear(2, 2)
    assert stages(Staged(s3=late, s1=early)) == [(1, early), (3, late)]
    assert stages(nn.Linear(2, 2)) is None


def test_one_process_can_hold_all_stages() -> None:
    first, second = nn.Module(), nn.Module()
    first.a, second.b = nn.Linear(2, 2), nn.Linear(2, 3)
    with publish_weights(Staged(s1=second, s0=first), timeout=5) as publisher:
        names = [t.name for t in publisher.plan.manifest.tensors]
        assert names == ["a.weight", "a.bias", "b.weight", "b.bias"]
        assert publisher.plan.manifest.mesh is None
        assert publisher.update().version == 1
        publisher._sharded.gather(  # type: ignore[union-attr]
            publisher._coordinator._spans(),  # type: ignore[union-attr]
            seconds=5,
            check=True,
        )
        arena = publisher._coordinator._arena  # type: ignore[union-attr]
        weight = torch.from_numpy(arena[:16].copy()).view(torch.float32).reshape(2, 2)
        assert torch.equal(weight, first.a.weight)


def test_before_join_there_is_no_manifest() -> None:
    with pytest.raises(StateError, match="before join"):
        ShardedModuleSource(nn.Linear(2, 2)).manifest()


def test_a_group_of_another_framework_is_refused(spec: Callable[..., object]) -> None:
    group = FakeGroup(spec(world_size=2, framework="fake"))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedFeatureError, match="this one is of fake"):
        ShardedModuleSource(nn.Linear(2, 2)).join(group)


@pytest.mark.parametrize(
    "word",
    [
        pull.Word(pull.END),
        pull.Word(pull.PULL, 7),
        pull.Word(pull.DONE, 2**64 - 1),
        pull.Word(pull.FAILED, 0, "ManifestError: was float32[2]"),
        pull.Word(pull.LOST, 1023, "ß" * 200),
    ],
)
def test_words_come_through(word: pull.Word) -> None:
    tensor = word.to_tensor(torch.device("cpu"))
    assert tensor.dtype == torch.uint8
    assert tensor.numel() == 512
    assert pull.Word.from_tensor(tensor) == word


def test_a_long_text_is_cut() -> None:
    tensor = pull.Word(pull.LATE, 1, "x" * 5000).to_tensor(torch.device("cpu"))
    heard = pull.Word.from_tensor(tensor)
    assert heard.text == "x" * len(heard.text)
    assert 400 < len(heard.text) < 512


def test_what_rank_0_left_behind_is_found() -> None:
    store = torch.distributed.HashStore()
    assert pull.look(store) is None
    pull.leave(store, pull.Word(pull.LOST, 3, "publisher rank 3 is gone"))
    assert pull.look(store) == pull.Word(pull.LOST, 3, "publisher rank 3 is gone")
    assert pull.look(None) is None


def test_on_a_broken_group_nothing_is_sent(spec: Callable[..., object]) -> None:
    from parallelkit_torch.group import init_process_group

    group = init_process_group(spec())  # type: ignore[arg-type]
    try:
        line = pull.Line(group.wire)
        group.wire.broken = "publisher rank 1 is gone"
        with pytest.raises(PeerLostError, match="earlier: publisher rank 1 is gone"):
            line.hear(0, 1.0)
    finally:
        group.close()
