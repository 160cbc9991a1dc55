"""Mode auto on torch: options, pins, what is assumed of devices, and the memory of real steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from parallelkit_torch.parallel.auto import LINKS, Request, choose, device_memory
from torch import nn

import parallelkit as pk
from parallelkit.errors import ExampleError, NoPlanError, PlanError
from parallelkit.search import Search
from parallelkit.spawn import RankResult
from parallelkit.specs import ContextSpec

WIDTH, DEPTH = 64, 8


class Block(nn.Module):
    """Layers with the names that the built-in layouts know."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(WIDTH, 4 * WIDTH)
        self.down_proj = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down_proj(torch.relu(self.up_proj(x)))  # type: ignore[no-any-return]


def build() -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(*(Block() for _ in range(DEPTH)))


#: Bytes of parameters, of which Adam needs four times.
BYTES = DEPTH * (2 * 4 * WIDTH * WIDTH + 5 * WIDTH) * 4


class Group:
    """As much of a process group as the search asks of one."""

    def __init__(self, world: int, facts: list[list[float]] | None = None) -> None:
        self.world_size, self.local_rank, self.device = world, 0, "cpu"
        self.facts = facts

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        others = self.facts or [[x[0].item(), float(rank)] for rank in range(self.world_size)]
        return [torch.tensor(other, dtype=x.dtype) for other in others]


def auto(
    world: int = 4, pinned: dict[str, int] | None = None, group: Any = None, **options: Any
) -> tuple[Search, dict[str, Any]]:
    options = {"model": build(), "example": torch.zeros(2, WIDTH), "reserve": 0.0} | options
    plan = pk.plan(world, "auto", **(pinned or {}))  # type: ignore[arg-type]
    spec = ContextSpec(plan=plan, mode="auto", options=options, pinned=pinned or {})
    return choose(spec, group or Group(world))


def test_room_for_everything_means_replicas() -> None:
    found, rest = auto(memory=1000 * BYTES, global_batch=4096)
    assert found.best.plan.degrees == pk.plan(4, "auto").degrees
    assert found.best.plan.mode == "auto"
    assert rest == {}
    assert found.training.state == 2.0
    assert found.hardware.devices_per_host == 4
    assert "auto: 4 ranks = data 4" in found.explain()


def test_little_room_means_parts() -> None:
    found, _ = auto(memory=2 * BYTES)
    best = found.best
    assert best.memory.total <= 2 * BYTES
    assert best.plan.data == 1 or best.plan.data_shard * best.plan.tensor * best.plan.pipeline > 1
    with pytest.raises(NoPlanError) as caught:
        auto(memory=BYTES // 10)
    assert caught.value.needed_bytes is not None
    assert auto(memory=caught.value.needed_bytes + 1)[0].best.fits


def test_degrees_that_were_given_are_kept() -> None:
    found, _ = auto(memory=100 * BYTES, pinned={"tensor": 2})
    assert {one.plan.tensor for one in found.estimates} == {2}
    assert len(found.estimates) > 1


def test_a_pipeline_gets_the_stages_that_were_reckoned_with() -> None:
    found, rest = auto(memory=100 * BYTES, pinned={"pipeline": 4}, global_batch=32)
    assert found.best.plan.pipeline == 4
    assert rest["stages"] == [[str(n), str(n + 1)] for n in range(0, DEPTH, 2)]
    assert found.best.microbatches >= 4
    mine = [["0"], ["1"], ["2"], ["3", "4", "5", "6", "7"]]
    _, rest = auto(memory=100 * BYTES, pinned={"pipeline": 4}, global_batch=32, stages=mine)
    assert rest["stages"] == mine


def test_other_options_are_left_to_the_context() -> None:
    layouts = {"*.up_proj": "colwise", "*.down_proj": "rowwise"}
    _, rest = auto(memory=100 * BYTES, layouts=layouts, reshard_after_forward=False)
    assert rest == {"layouts": layouts, "reshard_after_forward": False}


@pytest.mark.parametrize(
    ("optimizer", "state"), [("sgd", 0.0), ("momentum", 1.0), ("adam", 2.0), (3, 3.0), (0.5, 0.5)]
)
def test_optimizers(optimizer: Any, state: float) -> None:
    found, _ = auto(memory=100 * BYTES, optimizer=optimizer, pinned={"data": 4})
    assert found.training.state == state
    assert found.best.memory.optimizer == pytest.approx(state * BYTES)
    assert found.training.batch == 8  # an example for each rank


def test_the_weakest_device_and_the_fullest_host_decide() -> None:
    facts = [[100.0 * BYTES, 0.0], [90.0 * BYTES, 1.0], [50.0 * BYTES, 0.0], [60.0 * BYTES, 0.0]]
    found, _ = auto(group=Group(4, facts))
    assert found.hardware.devices_per_host == 2
    assert found.hardware.memory == 50 * BYTES // 2  # ranks of a host share its memory
    given, _ = auto(group=Group(4, facts), memory=70 * BYTES, devices_per_host=4)
    assert given.hardware.devices_per_host == 4
    assert given.hardware.memory == 50 * BYTES  # what another rank gave
    links, _ = auto(memory=100 * BYTES, links={"inside": 7.0})
    assert links.hardware.inside == 7.0
    assert links.hardware.between == LINKS["cpu"]["between"]


def test_memory_of_this_machine() -> None:
    found = device_memory(torch.device("cpu"))
    assert 2**26 < found < 2**50
    assert auto(world=1)[0].hardware.memory <= found


@pytest.mark.parametrize(
    ("options", "error", "mention"),
    [
        ({"model": None}, PlanError, "mode 'auto' looks at the model"),
        ({"model": 3}, PlanError, "model is 3"),
        ({"optimizer": "lion"}, PlanError, "optimizer is 'lion'"),
        ({"optimizer": -1}, PlanError, "optimizer is -1"),
        ({"optimizer": True}, PlanError, "optimizer is True"),
        ({"links": {"speed": 1}}, PlanError, "links has ['speed']"),
        ({"links": {"inside": -1.0}}, PlanError, "inside is -1.0"),
        ({"memory": 0.5}, PlanError, "memory is 0.5"),
        ({"devices_per_host": 0}, PlanError, "devices_per_host is 0"),
        ({"global_batch": 0}, PlanError, "batch is 0"),
        ({"microbatches": -1}, PlanError, "microbatches is -1"),
        ({"reserve": 2}, PlanError, "reserve is 2"),
        ({"example": torch.zeros(2, 3)}, ExampleError, "does not run"),
    ],
)
def test_options_that_are_not_allowed(
    options: dict[str, Any], error: type[Exception], mention: str
) -> None:
    with pytest.raises(error) as caught:
        auto(**({"memory": 100 * BYTES} | options))
    assert mention in str(caught.value)


def test_without_an_example_it_says_so() -> None:
    found, _ = auto(memory=100 * BYTES, example=None)
    assert "activations count as nothing" in found.explain()
    assert found.training.batch == 4


def test_nothing_is_sent_before_the_options_are_checked() -> None:
    silent = SimpleNamespace(world_size=4, local_rank=0, device="cpu")  # has no all_gather
    for options in ({"reserve": 2}, {"global_batch": 0}, {"memory": 0}, {"links": {"flops": 0}}):
        with pytest.raises(PlanError):
            auto(group=silent, **options)


def test_split_keeps_the_options_apart() -> None:
    model = SimpleNamespace()
    with pytest.raises(PlanError):
        Request.split({"model": model})
    request, rest = Request.split({"model": build(), "memory": 5, "schedule": "gpipe"})
    assert request.memory == 5
    assert rest == {"schedule": "gpipe"}


EVERY = ("standalone", "replicas", "shards", "parts", "stages")


@pytest.mark.ranks
@pytest.mark.parametrize("asked", [("shards",), pytest.param(EVERY, marks=pytest.mark.slow)])
def test_memory_of_real_steps(job: Callable[..., list[RankResult]], asked: tuple[str, ...]) -> None:
    results = job("peaks.py", *asked, ranks=2, timeout=300.0)
    for result in results:
        found = json.loads(result.stdout.splitlines()[-1])
        assert {name for name, *_ in found} == set(asked)
        for name, *case, reckoned, peak in found:
            assert abs(reckoned / peak - 1) < 0.15, (name, case)
