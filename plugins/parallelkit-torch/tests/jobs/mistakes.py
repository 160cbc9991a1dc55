"""What two ranks get wrong: named on both, before anything is trained wrongly."""

from __future__ import annotations

from typing import Any

import models
import torch
from parallelkit_torch.kinds import is_unit
from torch import nn

import parallelkit as pk
from parallelkit.errors import LayoutError, RankMismatchError, StageError

group = pk.init_process_group(device="cpu", timeout=30)
rank = group.rank


def expect(error: type[Exception], text: str, call: Any) -> None:
    try:
        call()
    except error as caught:
        assert text in str(caught), caught
    else:
        raise AssertionError(f"no {error.__name__}")


def spread(model: nn.Module, **options: Any) -> nn.Module:
    return pk.parallel_context(**options).parallelize(model)


# ranks that ask for different things
blocks = [["model.layers.*"], ["model.layers.0"]][rank]
expect(RankMismatchError, "options", lambda: spread(models.decoder(), data_shard=2, blocks=blocks))
cut = [["0", "1", "2"], ["3", "4", "5", "6"]], [["0"], ["1", "2", "3", "4", "5", "6"]]
expect(RankMismatchError, "options", lambda: spread(models.mlp(), pipeline=2, stages=cut[rank]))
expect(RankMismatchError, "options", lambda: spread(models.mlp(), reduce=["sum", "mean"][rank]))
half = models.mlp()
half[0].requires_grad_(rank == 0)
expect(RankMismatchError, ["models", "frozen"][rank], lambda: spread(half, data=2))


class Between(nn.Module):
    """A parameter that is used on a divided activation."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.inner = nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner["down"](self.inner["up"](x).tanh() * self.scale)  # type: ignore[no-any-return]


torch.manual_seed(0)
context = pk.parallel_context(
    "semi_auto", tensor=2, layouts={"inner.up": "colwise", "inner.down": "rowwise"}
)
model = context.parallelize(Between())
x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
expect(
    LayoutError,
    "scale differ between",
    lambda: context.train_step(model, x, x, loss=nn.functional.mse_loss),
)


class Odd(nn.Module):
    """Of no known form, and with a sum that each stage would make."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(8, 4), nn.Embedding(4, 4)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tok(x) + self.pos(torch.arange(4))
        return self.two(self.one(x))  # type: ignore[no-any-return]


stages = [["tok", "pos", "one"], ["two"]]
ids = torch.arange(4)[None]
expect(StageError, "Give example=", lambda: spread(Odd(), pipeline=2, stages=stages))
expect(
    StageError,
    "another result",
    lambda: spread(Odd(), pipeline=2, stages=stages, example=ids),
)
hooked = models.mlp()
hooked.register_forward_hook(lambda module, inputs, output: output * 2)
expect(StageError, "hooks", lambda: spread(hooked, pipeline=2))

# a frozen model is sharded all the same: a reference model should not be whole on every rank
frozen = spread(models.decoder().requires_grad_(False), data_shard=2)
assert is_unit(frozen)
with torch.no_grad():
    expected = models.decoder()(ids)
    torch.testing.assert_close(frozen(ids), expected)
group.close()
