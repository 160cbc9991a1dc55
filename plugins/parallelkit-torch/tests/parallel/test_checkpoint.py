"""Checkpoints in a world of one: what goes through unchanged, and what is refused."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from parallelkit_torch.group import TorchProcessGroup
from parallelkit_torch.parallel import checkpoint
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from parallelkit.errors import CheckpointError, NotPlainError, PlanError
from parallelkit.plan import plan
from parallelkit.spawn import RankResult


def net(seed: int = 0, hidden: int = 4) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, 2))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def equal(one: Any, other: Any) -> bool:
    """Whether two state dicts are the same, tensors by bits."""
    if isinstance(one, torch.Tensor):
        same = isinstance(other, torch.Tensor) and one.dtype == other.dtype
        return same and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


# --- optimizers

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": functools.partial(torch.optim.Adam, weight_decay=0.1),
    "AdamW": functools.partial(torch.optim.AdamW, amsgrad=True),
    "SGD": torch.optim.SGD,
    "SGD with momentum": functools.partial(torch.optim.SGD, momentum=0.9, weight_decay=0.1),
    "SGD with dampening": functools.partial(torch.optim.SGD, momentum=0.9, dampening=0.3),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": functools.partial(torch.optim.RMSprop, momentum=0.5, centered=True),
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
    "Adafactor": torch.optim.Adafactor,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_nothing_was(
    save: Any, load: Any, tmp_path: Path, name: str
) -> None:
    make = OPTIMIZERS[name]
    model, other = net(), net(1)
    optimizer, fresh = make(model.parameters(), lr=0.02), make(other.parameters(), lr=0.5)
    step(model, optimizer)
    step(model, optimizer, 1)
    before = copy.deepcopy(optimizer.state_dict())
    save(tmp_path / "c", model, optimizer)
    assert equal(optimizer.state_dict(), before)
    step(other, fresh, 7)
    load(tmp_path / "c", other, fresh)
    assert equal(fresh.state_dict(), before)
    for seed in (2, 3):
        step(model, optimizer, seed)
        step(other, fresh, seed)
    assert equal(other.state_dict(), model.state_dict())
    assert equal(fresh.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("name", ["Adam", "SGD with momentum"])
def test_an_optimizer_without_state_is_saved_as_that(
    save: Any, load: Any, tmp_path: Path, name: str
) -> None:
    model, other = net(), net(1)
    optimizer = OPTIMIZERS[name](model.parameters(), lr=0.02)
    values = copy.deepcopy(model.state_dict())
    save(tmp_path / "c", model, optimizer)
    assert not optimizer.state
    assert equal(model.state_dict(), values)
    used = OPTIMIZERS[name](other.parameters(), lr=0.5)
    step(other, used)
    load(tmp_path / "c", other, used)
    assert not used.state
    assert used.param_groups[0]["lr"] == 0.02


def test_frozen_unused_and_grouped_parameters(save: Any, load: Any, tmp_path: Path) -> None:
    def build(seed: int) -> tuple[nn.Sequential, torch.optim.Optimizer]:
        model = net(seed)
        model.unused = nn.Parameter(torch.randn(2))  # never gets a gradient, so has no state
        model[0].weight.requires_grad_(False)
        groups = [
            {"params": [model[2].weight, model.unused], "weight_decay": 0.5 / (seed + 1)},
            {"params": [model[2].bias], "lr": 0.3 + seed, "betas": (0.5, 0.9)},
        ]
        return model, torch.optim.AdamW(groups, lr=0.1)

    (model, optimizer), (other, fresh) = build(0), build(1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # gives the groups `initial_lr`
    step(model, optimizer)
    scheduler.step()
    save(
        tmp_path / "c", model, optimizer, extra={"scheduler": scheduler.state_dict()["last_epoch"]}
    )
    assert load(tmp_path / "c", other, fresh) == {"scheduler": 1}
    assert equal(fresh.state_dict(), optimizer.state_dict())
    assert fresh.param_groups[1]["initial_lr"] == 0.3
    assert other.unused not in fresh.state
    step(model, optimizer, 1)
    step(other, fresh, 1)
    assert equal(other.state_dict(), model.state_dict())


def test_how_an_optimizer_computes_stays_as_it_was_built(
    save: Any, load: Any, tmp_path: Path
) -> None:
    model, other = net(), net(1)
    rate = torch.tensor(0.02)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, foreach=False)
    step(model, optimizer)
    save(tmp_path / "c", model, optimizer)
    fresh = torch.optim.Adam(
        other.parameters(), lr=torch.tensor(1.0), foreach=False, capturable=False
    )
    load(tmp_path / "c", other, fresh)
    assert torch.equal(fresh.param_groups[0]["lr"], rate)
    plain = torch.optim.Adam(other.parameters(), lr=1.0, foreach=True)
    load(tmp_path / "c", other, plain)
    assert plain.param_groups[0]["lr"] == pytest.approx(0.02)
    assert plain.param_groups[0]["foreach"] is True


def test_states_finer_than_their_parameters_stay_exact(
    save: Any, load: Any, tmp_path: Path
) -> None:
    model, other = net().bfloat16(), net(1).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    exact = torch.full((4, 3), 1.0001)
    optimizer.state[model[0].weight]["momentum_buffer"] = exact  # fp32, as mixed precision keeps it
    save(tmp_path / "c", model, optimizer)
    fresh = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    load(tmp_path / "c", other, fresh)
    assert torch.equal(fresh.state[other[0].weight]["momentum_buffer"], exact)


# --- models


class Odd(nn.Module):
    """Tensors of every awkward kind."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.bf16 = nn.Parameter(torch.full((2, 3), fill, dtype=torch.bfloat16))
        self.scalar = nn.Parameter(torch.tensor(fill))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.turned = nn.Parameter(torch.arange(6.0).view(2, 3).t() * fill)
        self.register_buffer("count", torch.tensor(int(fill)))
        self.register_buffer("mask", torch.tensor([fill > 1, True]))
        self.register_buffer("spin", torch.full((2,), complex(fill, 1)))
        self.register_buffer("part", torch.full((100,), fill)[10:12])
        self.register_buffer("scratch", torch.tensor(fill), persistent=False)
        self.module = nn.Linear(2, 2)  # really called so


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: torch.compile(m, backend="eager")])
def test_tensors_of_every_kind_under_plain_names(
    save: Any, load: Any, tmp_path: Path, wrap: Callable[[nn.Module], Any]
) -> None:
    model, other = Odd(3.0), Odd(1.0)
    save(tmp_path / "c", wrap(model))
    load(tmp_path / "c", other)
    assert equal(other.state_dict(), model.state_dict())
    assert float(other.scratch) == 1.0
    index = json.loads((tmp_path / "c" / "tensors.json").read_text())
    assert list(index["model"]) == list(model.state_dict())


def test_addresses_and_gradients_stay(save: Any, load: Any, tmp_path: Path) -> None:
    model = net()
    save(tmp_path / "c", model)
    model(torch.ones(1, 3)).sum().backward()
    places = [p.data_ptr() for p in model.parameters()]
    gradients = [p.grad for p in model.parameters()]
    load(tmp_path / "c", model)
    assert [p.data_ptr() for p in model.parameters()] == places
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(p.requires_grad for p in model.parameters())


class Tied(nn.Module):
    def __init__(self, fill: float, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        nn.init.constant_(self.embed.weight, fill)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))  # type: ignore[no-any-return]


def test_tied_tensors_are_stored_once_and_go_into_untied_ones(
    save: Any, load: Any, tmp_path: Path
) -> None:
    model = Tied(3.0)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    save(tmp_path / "c", model, optimizer)
    assert list(json.loads((tmp_path / "c" / "tensors.json").read_text())["model"]) == [
        "embed.weight"
    ]
    again, untied = Tied(1.0), Tied(1.0, tied=False)
    load(tmp_path / "c", again, torch.optim.Adam(again.parameters()))
    assert torch.equal(again.head.weight, model.head.weight)
    assert again.head.weight is again.embed.weight
    both = torch.optim.Adam(untied.parameters())
    load(tmp_path / "c", untied, both)
    assert torch.equal(untied.head.weight, model.head.weight)
    assert untied.head.weight is not untied.embed.weight
    assert torch.equal(
        both.state[untied.head.weight]["exp_avg"], optimizer.state[model.embed.weight]["exp_avg"]
    )
    save(tmp_path / "untied", untied)
    with pytest.raises(CheckpointError, match=r"has 'head\.weight', the model here has not"):
        load(tmp_path / "untied", again)


def test_torchs_own_tools_read_it(save: Any, tmp_path: Path) -> None:
    model, other = net(), net(1)
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    save(tmp_path / "c", model, optimizer)
    dcp_to_torch_save(tmp_path / "c", tmp_path / "file")
    found = torch.load(tmp_path / "file", weights_only=True)
    other.load_state_dict(found["model"])
    assert equal(other.state_dict(), model.state_dict())
    state = optimizer.state[model[0].weight]
    assert torch.equal(found["optim"]["state.0.weight.exp_avg"], state["exp_avg"])
    assert torch.equal(found["optim"]["state.0.weight.step"], state["step"])
    again = {"model": net(1).state_dict()}
    dcp.load(again, checkpoint_id=tmp_path / "c")
    assert equal(again["model"], dict(model.state_dict()))


# --- extra


@pytest.mark.parametrize(
    "extra",
    [
        None,
        {},
        {"a": None, "b": True, "c": 1, "d": 2.5, "e": "é", "f": [1, [2]], "g": {"h": {}}},
        {"best": float("inf"), "worst": float("-inf"), "big": 2**80},
    ],
)
def test_extra_comes_back(save: Any, load: Any, tmp_path: Path, extra: Any) -> None:
    save(tmp_path / "c", net(), extra=extra)
    assert load(tmp_path / "c", net()) == (extra or {})


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"a": {"b": (1, 2)}}, r"extra\['a'\]\['b'\] is of type tuple"),
        ({"a": [0, b"x"]}, r"extra\['a'\]\[1\] is of type bytes"),
        ({"loss": torch.tensor(1.0)}, r"extra\['loss'\] is of type Tensor"),
        ({1: 2}, "key 1"),
        ([1], "extra is a list"),
        ({"a": type("Deep", (dict,), {})()}, "Deep"),
    ],
)
def test_extra_that_is_not_plain_is_refused_by_name(
    save: Any, tmp_path: Path, extra: Any, said: str
) -> None:
    with pytest.raises(NotPlainError, match=said):
        save(tmp_path / "c", net(), extra=extra)
    assert not list(tmp_path.iterdir())


# --- what cannot be stored


class Extra(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"a": 1}

    def set_extra_state(self, state: object) -> None:
        pass


def _sparse() -> nn.Module:
    model = net()
    model.register_buffer("s", torch.eye(2).to_sparse())
    return model


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Extra(1, 1), "Extra in the model keeps extra state"),
        (lambda: nn.LazyLinear(2), "'weight' is uninitialised"),
        (lambda: net().to("meta"), r"'0\.weight' is on the meta device"),
        (_sparse, "'s' has layout torch.sparse_coo"),
    ],
)
def test_models_that_cannot_be_stored(save: Any, tmp_path: Path, make: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        save(tmp_path / "c", make())
    assert not list(tmp_path.iterdir())


def _spoilt(**state: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.state[next(model.parameters())].update(state)
        return optimizer

    return make


def _option(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": model.parameters(), "hook": print}], lr=0.1)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda _: torch.optim.SGD(net().parameters()), "the model does not have"),
        (lambda _: "adam", "optimizer is a str"),
        (_spoilt(history=[torch.ones(2)]), "state 'history' of '0.weight' .* is a Tensor"),
        (_spoilt(**{"a.b": 1}), "without dots"),
        (_spoilt(s=torch.eye(2).to_sparse()), "state 's' .* has layout"),
        (_option, "option 'hook' of group 0 of the optimizer is a builtin_function"),
    ],
)
def test_optimizers_that_cannot_be_stored(save: Any, tmp_path: Path, make: Any, said: str) -> None:
    model = net()
    with pytest.raises(CheckpointError, match=said):
        save(tmp_path / "c", model, make(model))
    assert not list(tmp_path.iterdir())


def test_a_plan_for_other_ranks_is_refused(group: TorchProcessGroup, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="2 ranks"):
        checkpoint.save(tmp_path / "c", net(), group=group, plan=plan(2))


# --- ranks


@pytest.mark.ranks
def test_training_goes_on_from_plan_to_plan(
    job: Callable[..., list[RankResult]], tmp_path: Path
) -> None:
    first, *_ = job("checkpoint.py", str(tmp_path), "chain", ranks=4, timeout=300.0)
    assert "done" in first.stdout


@pytest.mark.ranks
@pytest.mark.slow
def test_every_plan_into_every_other(job: Callable[..., list[RankResult]], tmp_path: Path) -> None:
    first, *_ = job("checkpoint.py", str(tmp_path), "all", ranks=4, timeout=600.0)
    assert "done" in first.stdout


@pytest.mark.ranks
def test_what_one_rank_cannot_do_none_does(
    job: Callable[..., list[RankResult]], tmp_path: Path
) -> None:
    assert all("done" in result.stdout for result in job("checkpoint_faults.py", str(tmp_path)))


@pytest.mark.ranks
@pytest.mark.parametrize(("victim", "how"), [(0, "ends"), (1, "hangs")])
def test_a_rank_that_stops_in_mid_save(
    job: Callable[..., list[RankResult]],
    save: Any,
    load: Any,
    tmp_path: Path,
    victim: int,
    how: str,
) -> None:
    results = job("checkpoint_crash.py", str(tmp_path), str(victim), how, ends={victim: 7})
    assert "told" in results[1 - victim].stdout
    path, model = tmp_path / "crash", net()
    assert load(path, model) == {"step": 1}, "the old one is whole"
    assert equal(model.state_dict(), net().state_dict())
    left = [p.name for p in tmp_path.iterdir() if p != path]
    assert len(left) == (1 if victim == 0 else 0), left
    save(path, model, extra={"step": 3}, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["crash"], "the next save tidies up"
    assert load(path, model) == {"step": 3}
