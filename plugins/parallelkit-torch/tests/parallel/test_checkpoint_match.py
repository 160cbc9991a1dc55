"""Checkpoints and models or optimizers that they do not fit: all is said, nothing is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parallelkit.errors import CheckpointError


def net(fill: float = 0.0, hidden: int = 4) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, hidden), nn.Linear(hidden, 2))
    for parameter in model.parameters():
        nn.init.constant_(parameter, fill)
    return model


def filled(model: nn.Module) -> float:
    """The one value that all parameters have."""
    found = torch.cat([p.detach().flatten() for p in model.parameters()]).unique()
    assert found.numel() == 1
    return float(found)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.5)


def test_all_differences_of_a_model_are_listed(save: Any, load: Any, tmp_path: Path) -> None:
    save(tmp_path / "c", net(1.0))
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2, bias=False).double())
    model.add_module("00", nn.Linear(1, 1, bias=False))
    model.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "c", model)
    lines = str(caught.value).splitlines()
    assert "nothing was loaded" in lines[0]
    assert [line.strip() for line in lines[1:]] == [
        "model: 'scale' is not in the checkpoint",
        "model: '0.weight' is float32 [5, 3] here and float32 [4, 3] in the checkpoint",
        "model: '0.bias' is float32 [5] here and float32 [4] in the checkpoint",
        "model: '1.weight' is float64 [2, 5] here and float32 [2, 4] in the checkpoint",
        "model: '00.weight' is not in the checkpoint; the nearest there is '0.weight'",
        "model: the checkpoint has '1.bias', the model here has not",
    ]


def test_many_differences_are_counted(save: Any, load: Any, tmp_path: Path) -> None:
    save(tmp_path / "c", net())
    with pytest.raises(CheckpointError, match=r"and 192 more") as caught:
        load(tmp_path / "c", nn.Sequential(*[nn.Linear(1, 1) for _ in range(102)]))
    assert len(str(caught.value).splitlines()) == 14


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda m: torch.optim.AdamW(m.parameters(), lr=0.5), "is a AdamW here and was a Adam"),
        (lambda m: adam(m[0]), r"the checkpoint has '1\.weight', the optimizer here has not"),
    ],
)
def test_optimizers_that_do_not_fit(
    save: Any, load: Any, tmp_path: Path, make: Any, said: str
) -> None:
    model, other = net(1.0), net(7.0)
    save(tmp_path / "c", model, torch.optim.Adam(model.parameters(), lr=0.25))
    optimizer = make(other)
    with pytest.raises(CheckpointError, match=said):
        load(tmp_path / "c", other, optimizer)
    assert filled(other) == 7.0
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_an_optimizer_may_be_grouped_in_another_way(save: Any, load: Any, tmp_path: Path) -> None:
    model, other = net(1.0), net(7.0)
    save(tmp_path / "c", model, torch.optim.Adam(model.parameters(), lr=0.25))
    parts = [{"params": m.parameters(), "lr": 3.0} for m in (other[1], other[0])]
    optimizer = torch.optim.Adam(parts, lr=0.5)
    load(tmp_path / "c", other, optimizer)
    assert [g["lr"] for g in optimizer.param_groups] == [0.25, 0.25]


def test_no_optimizer_was_saved(save: Any, load: Any, tmp_path: Path) -> None:
    save(tmp_path / "c", net(1.0))
    model = net(7.0)
    with pytest.raises(CheckpointError, match="saved without one"):
        load(tmp_path / "c", model, adam(model))
    assert filled(model) == 7.0


def test_an_optimizer_that_was_saved_may_be_left(save: Any, load: Any, tmp_path: Path) -> None:
    model = net(1.0)
    save(tmp_path / "c", model, adam(model))
    load(tmp_path / "c", other := net(7.0))
    assert filled(other) == 1.0


def test_parameters_of_two_groups_in_one_need_the_same_options(
    save: Any, load: Any, tmp_path: Path
) -> None:
    model = net(1.0)
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.25}]
    save(tmp_path / "c", model, torch.optim.Adam(groups, lr=0.5))
    other = net(7.0)
    with pytest.raises(CheckpointError, match=r"'1\.weight', which was in a group of other"):
        load(tmp_path / "c", other, adam(other))
    assert filled(other) == 7.0


def test_a_frozen_parameter_that_is_trained_now(save: Any, load: Any, tmp_path: Path) -> None:
    model = net(1.0)
    save(tmp_path / "c", model, adam(model[0]))
    other = net(7.0)
    with pytest.raises(CheckpointError, match=r"no state of '1\.bias' is in the checkpoint"):
        load(tmp_path / "c", other, adam(other))
