"""The character model in both frameworks, from the same weights and the same order of data.

Each framework trains once on one rank and once on two, all configurations in one start. Normally a
part of them runs that has each reduction, mode and number of ranks; all of them with `--full`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from parallelkit.spawn import spawn_ranks

HERE = Path(__file__).parent
FRAMEWORKS = ("torch", "mindspore")
STEPS = 100

#: Run always, by number of ranks: reduction, mode, dtype, steps. PyNative is slow: few steps.
PART = {
    1: ["mean-graph-float32-100", "mean-eager-float64-1"],
    2: ["sum-graph-float32-100", "mean-eager-float32-10"],
}
ALL = [
    f"{reduce}-{mode}-float32-{STEPS}" for reduce in ("mean", "sum") for mode in ("eager", "graph")
]

#: Over all steps, and between runs on other numbers of ranks.
LOSS_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = {"float32": 1e-6, "float64": 1e-8}

CASES = [(ranks, c) for ranks, part in PART.items() for c in part]
CASES += [
    pytest.param(ranks, c, marks=pytest.mark.slow)
    for ranks, part in PART.items()
    for c in ALL
    if c not in part
]

pytestmark = pytest.mark.ranks
Arrays = dict[str, np.ndarray]
Trained = Callable[[str, int], Arrays]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Trained:
    """Train all configurations of a framework on a number of ranks, once; what rank 0 wrote."""

    @functools.cache
    def train(framework: str, ranks: int) -> Arrays:
        folder = tmp_path_factory.mktemp(f"{framework}-{ranks}")
        full = [c for c in ALL if c not in PART[ranks]] if pytestconfig.getoption("--full") else []
        output = folder / "found.npz"
        argv = [sys.executable, str(HERE / "train.py"), framework, str(output), *PART[ranks], *full]
        env = {"OMP_NUM_THREADS": "1", "GLOG_v": "3"}
        for result in spawn_ranks(argv, ranks, timeout=1500 if full else 300, env=env, grace=20):
            assert result.returncode == 0, f"rank {result.rank}:\n{result.stderr[-4000:]}"
        with np.load(output) as found:
            return dict(found)

    return train


@pytest.mark.parametrize(("ranks", "configuration"), CASES)
def test_losses_agree(trained: Trained, ranks: int, configuration: str) -> None:
    torch, mindspore = (trained(f, ranks)[f"{configuration}/losses"] for f in FRAMEWORKS)
    steps = int(configuration.rpartition("-")[2])
    assert len(torch) == len(mindspore) == steps
    np.testing.assert_allclose(mindspore, torch, rtol=0, atol=LOSS_TOLERANCE)
    if steps == STEPS:
        assert torch[-1] < torch[0] - 1, "it learned nothing, so that nothing was compared"


@pytest.mark.parametrize(("ranks", "configuration"), CASES)
def test_first_gradients_agree(trained: Trained, ranks: int, configuration: str) -> None:
    prefix = f"{configuration}/gradient/"
    torch, mindspore = (
        {n: g for n, g in trained(f, ranks).items() if n.startswith(prefix)} for f in FRAMEWORKS
    )
    assert sorted(torch) == sorted(mindspore)
    assert len(torch) == 2 + 12 * 2  # embedding (the head is tied to it), norm, two layers
    for name, gradient in torch.items():
        tolerance = GRADIENT_TOLERANCE[configuration.split("-")[2]]
        np.testing.assert_allclose(mindspore[name], gradient, rtol=0, atol=tolerance, err_msg=name)
        assert np.abs(gradient).max() > 100 * tolerance, f"{name} is too small to compare"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_two_ranks_train_as_one(trained: Trained, framework: str) -> None:
    """Eagerly on two, as a graph on one: the mean over ranks is that of the whole batch."""
    two = trained(framework, 2)["mean-eager-float32-10/losses"]
    one = trained(framework, 1)["mean-graph-float32-100/losses"][: len(two)]
    np.testing.assert_allclose(two, one, rtol=0, atol=LOSS_TOLERANCE)


def test_the_comparison_would_see_a_sum_for_a_mean(trained: Trained) -> None:
    mean = trained("torch", 2)["mean-eager-float32-10/losses"]
    total = trained("mindspore", 2)["sum-graph-float32-100/losses"][: len(mean)]
    assert np.abs(mean - total)[0] < LOSS_TOLERANCE
    assert np.abs(mean - total)[1:].max() > 100 * LOSS_TOLERANCE
