"""Sources of models that are spread over ranks: with real ranks, and what needs none."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parallelkit_torch import names
from parallelkit_torch.sharded_weights import ShardedModuleSource, weight_source
from parallelkit_torch.sharding import stages
from parallelkit_torch.weights import ModuleSource
from torch import nn

from parallelkit.errors import StateError, UnsupportedFeatureError
from parallelkit.protocols import ShardedSource
from parallelkit.spawn import RankResult
from parallelkit.testing.fake import FakeGroup
from parallelkit.weights import publish_weights

Job = Callable[..., list[RankResult]]


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


class Named(nn.Module):
    """Has what stages are known by, in a model that is whole."""

    def __init__(self, kind: Callable[[list[nn.Module]], Any]) -> None:
        super().__init__()
        self.stem = nn.Linear(2, 2)
        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.stage_modules, self.indices = kind(list(self.blocks)), (0, 1)


@pytest.mark.parametrize("kind", [tuple, list, nn.ModuleList])
def test_attributes_of_these_names_do_not_cut_a_whole_model(
    kind: Callable[[list[nn.Module]], Any],
) -> None:
    model = Named(kind)
    assert stages(model) is None
    source = weight_source(model)
    assert [tensor.name for tensor in source.manifest().tensors] == names.plain_names(model)


def test_one_process_can_hold_all_stages() -> None:
    first, second = nn.Module(), nn.Module()
    first.a, second.b = nn.Linear(2, 2), nn.Linear(2, 3)
    with publish_weights(Staged(s1=second, s0=first), timeout=5) as publisher:
        names = [t.name for t in publisher.plan.manifest.tensors]
        assert names == ["a.weight", "a.bias", "b.weight", "b.bias"]
        assert publisher.plan.manifest.mesh is None
        assert publisher.update().version == 1


def test_a_rank_gives_the_live_bytes_of_what_it_holds_and_nothing_else() -> None:
    first, second = nn.Module(), nn.Module()
    first.a, second.b = nn.Linear(2, 2), nn.Linear(2, 3)
    source = ShardedModuleSource(Staged(s1=second, s0=first))
    source.join(None)
    assert source.device == "cpu"
    data = source.host_bytes(0)
    weight = torch.frombuffer(data, dtype=torch.float32).reshape(2, 2)
    assert weight.data_ptr() == first.a.weight.data_ptr()
    assert torch.equal(weight, first.a.weight)
    source._parts.pop(2)  # as on a rank of another stage
    with pytest.raises(StateError, match="'b.weight' is not on rank 0; this rank has 3 of 4"):
        source.host_bytes(2)


def test_before_join_there_is_no_manifest() -> None:
    with pytest.raises(StateError, match="before join"):
        ShardedModuleSource(nn.Linear(2, 2)).manifest()


def test_a_group_of_another_framework_is_refused(spec: Callable[..., object]) -> None:
    group = FakeGroup(spec(world_size=2, framework="fake"))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedFeatureError, match="this one is of fake"):
        ShardedModuleSource(nn.Linear(2, 2)).join(group)
