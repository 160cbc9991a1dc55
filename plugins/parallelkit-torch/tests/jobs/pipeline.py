"""Two ranks of a pipeline: every schedule equals the whole model in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from models import TinyDecoder, decoder, mlp
from parallelkit_torch.parallel import pipeline
from torch import nn
from torch.distributed import distributed_c10d

import parallelkit as pk
from parallelkit.errors import DataShardError, PlanError, RankMismatchError, StageError

group: Any = pk.init_process_group(device="cpu", timeout=30)
rank, world = group.rank, group.world_size
mean = nn.functional.cross_entropy


def refuse(*args: object, **kwargs: object) -> None:
    raise AssertionError("torch was about to send a pickled object")


for name in ("_object_to_tensor", "_tensor_to_object"):
    assert hasattr(distributed_c10d, name)
    setattr(distributed_c10d, name, refuse)


def tokens_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Sum over tokens; those of -100 have no weight."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def mean_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return mean(output.flatten(0, 1), target.flatten())


def raises(kind: type[Exception], call: Callable[[], object], *said: str) -> None:
    try:
        call()
    except kind as error:
        text = str(error) + "".join(getattr(error, "__notes__", []))
        assert all(part in text for part in said), text
    else:
        raise AssertionError(f"no {kind.__name__}")


def same(model: nn.Module, reference: nn.Module) -> None:
    """Gradients of this rank's stages are those of the whole model, under the same names."""
    whole = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        expected = whole[name].grad
        assert (parameter.grad is None) == (expected is None), name
        if expected is not None:
            torch.testing.assert_close(parameter.grad, expected, rtol=2e-5, atol=1e-6, msg=name)


def cut(model: nn.Module, schedule: str, virtual: int = 1) -> pipeline.PipelineModule:
    stages = pipeline.assign(model, world * virtual)
    return pipeline.cut_for(model, stages, group=group, schedule=schedule, virtual_stages=virtual)


class Placed(TinyDecoder):
    """Takes positions by name, in every stage."""

    def forward(self, tokens: torch.Tensor, *, positions: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = self.model.embed_tokens(tokens)
        cos, sin = self.model.rotary_emb(positions[0])
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.model.norm(x))  # type: ignore[no-any-return]


generator = torch.Generator().manual_seed(1)
tokens = torch.randint(0, 32, (9, 7), generator=generator)
labels = torch.randint(0, 32, (9, 7), generator=generator)
labels[3, 2:] = -100  # other numbers of tokens by item

for schedule, virtual in (("1f1b", 1), ("gpipe", 1), ("interleaved", 2)):
    staged = cut(decoder(layers=3), schedule, virtual)
    whole = decoder(layers=3)
    assert staged.indices == tuple(range(rank, world * virtual, world))
    assert {n for n, _ in staged.named_parameters()} < {n for n, _ in whole.named_parameters()}
    # 8 items in 4, an uneven last batch of 3 in 3, one of 1, and 8 in a number that does not fit
    for start, stop, asked, cuts in ((0, 8, 4, 4), (0, 3, 4, 3), (0, 1, 4, 1), (0, 8, 3, 2)):
        x, y = tokens[start:stop], labels[start:stop]
        # a sum over tokens by a factor, which must not be divided again
        value = pipeline.step(staged, x, y, loss=tokens_loss, microbatches=asked, scale=0.25)
        expected = tokens_loss(whole(x), y) * 0.25
        expected.backward()
        torch.testing.assert_close(value, expected.detach(), rtol=1e-5, atol=1e-6)
        assert staged.runner is not None
        assert staged.runner.fitting(stop - start, asked) == cuts
    same(staged, whole)  # of four batches, added up
    staged.zero_grad()
    whole.zero_grad()
    x, y = tokens[:8], tokens[1:9]
    value = pipeline.step(staged, x, y, loss=mean_loss, microbatches=4)
    expected = mean_loss(whole(x), y)
    expected.backward()
    torch.testing.assert_close(value, expected.detach(), rtol=1e-5, atol=1e-6)
    same(staged, whole)
    # evaluation: the loss, and nothing else changes
    staged.eval()
    before = {n: None if p.grad is None else p.grad.clone() for n, p in staged.named_parameters()}
    value = pipeline.step(staged, x, y, loss=mean_loss, microbatches=4, backward=False)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-5, atol=1e-6)
    for name, parameter in staged.named_parameters():
        assert before[name] is None or torch.equal(parameter.grad, before[name]), name
    staged.train()

# an optimiser's steps over the stages are those over the whole
staged, whole = cut(mlp(), "1f1b"), mlp()
inputs, classes = torch.randn(8, 6, generator=generator), torch.arange(8) % 4
for model in (staged, whole):
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        optimiser.zero_grad()
        if model is staged:
            pipeline.step(model, inputs, classes, loss=mean, microbatches=4)
        else:
            mean(model(inputs), classes).backward()
        optimiser.step()
for name, value in staged.state_dict().items():
    torch.testing.assert_close(value, whole.state_dict()[name], rtol=1e-5, atol=1e-6)

# frozen first stage, targets in a dict, several arguments
frozen = mlp()
for parameter in list(frozen.parameters())[:4]:
    parameter.requires_grad_(False)
staged = pipeline.cut_for(frozen, [["0", "1", "2", "3"], ["4", "5", "6"]], group=group)
whole = mlp()
for parameter in list(whole.parameters())[:4]:
    parameter.requires_grad_(False)
value = pipeline.step(
    staged, (inputs,), {"y": classes}, loss=lambda out, t: mean(out, t["y"]), microbatches=2
)
mean(whole(inputs), classes).backward()
same(staged, whole)

# what every stage takes by name
torch.manual_seed(0)
placed = Placed()
staged_placed = cut(placed, "1f1b")
positions = torch.arange(3, 24, 3).repeat(8, 1)
value = pipeline.step(
    staged_placed, {"tokens": tokens[:8], "positions": positions}, tokens[1:9], loss=mean_loss
)
expected = mean_loss(placed(tokens[:8], positions=positions), tokens[1:9])
torch.testing.assert_close(value, expected.detach())
other = mean_loss(placed(tokens[:8], positions=positions + 5 * positions), tokens[1:9])
assert abs(float(other.detach() - value)) > 1e-5  # positions do matter

# random numbers and buffers are as if shapes had not been looked for by a run
noisy = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.BatchNorm1d(6), nn.Linear(6, 4))
noisy = pipeline.cut_for(noisy, [["0", "1", "2"], ["3"]], group=group)
states = []
for _ in range(2):  # the first time with a look, the second without
    torch.manual_seed(3)
    pipeline.step(noisy, inputs, classes, loss=mean, microbatches=2)
    states.append(torch.get_rng_state())
assert torch.equal(*states)
assert [int(b) for n, b in noisy.named_buffers() if "num_batches" in n] == [4] * (rank == 0)
assert "each microbatch by itself" in "".join(noisy.notes)

# mistakes are errors on every rank, and the pipeline goes on
raises(DataShardError, lambda: pipeline.step(staged, inputs, classes[:3], loss=mean), "[3, 8]")
raises(DataShardError, lambda: pipeline.step(staged, "text", classes, loss=mean), "str")
raises(PlanError, lambda: pipeline.step(staged, inputs, classes, loss=mean, microbatches=0), "0")
raises(StageError, lambda: staged(inputs), "train_step")
raises(StageError, lambda: pipeline.step(whole, inputs, classes, loss=mean), "TinyMlp")
raises(
    RankMismatchError,
    lambda: pipeline.step(staged, inputs[: 4 + 2 * rank], classes[: 4 + 2 * rank], loss=mean),
    "different batches",
)

# a stage that cannot run is an error everywhere at once, and the next batch runs
wrong = lambda: pipeline.step(staged, inputs.double(), classes, loss=mean)  # noqa: E731
if rank == 0:
    raises(RuntimeError, wrong, "dtype", "in stage 0")
else:
    raises(StageError, wrong, "stage 0", "dtype")
value = pipeline.step(staged, inputs, classes, loss=mean, backward=False)
torch.testing.assert_close(value, mean(whole(inputs), classes).detach())
said = "\n".join(staged.explain())
assert all(text in said for text in ("stage 1", "schedule 1f1b", "of 8 items: 2 microbatches"))
group.close()
