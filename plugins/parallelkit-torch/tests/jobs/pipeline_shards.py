"""Four ranks, stages whose parameters are sharded or replicated: batches that add up.

Data parts have batches of other sizes, so of other numbers of microbatches, and the second batch
has a new shape while gradients of the first are still to be reduced.
"""

from __future__ import annotations

import torch
from models import decoder
from torch import nn
from torch.distributed.tensor import DTensor

import parallelkit as pk


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


group = pk.init_process_group(device="cpu", timeout=60)
generator = torch.Generator().manual_seed(0)
sizes = {False: (4, 4), True: (4, 3)}  # by sync: of the first and the second data part
batches = {
    sync: [torch.randint(0, 32, (2, n, 5), generator=generator) for n in items]
    for sync, items in sizes.items()
}
for axis, schedule in (("data", "1f1b"), ("data_shard", "interleaved")):
    context = pk.parallel_context(pipeline=2, **{axis: 2}, schedule=schedule, reduce="sum")
    model = context.parallelize(decoder(layers=3))
    part = context.plan.data_shard_index(group.rank)
    whole = decoder(layers=3)
    for _ in range(2):  # the second time with every shape known
        model.zero_grad()
        whole.zero_grad()
        for sync in (False, True):
            x, y = batches[sync][part]
            context.train_step(model, x, y, loss=loss, microbatches=4, sync=sync)
            for x, y in batches[sync]:
                loss(whole(x), y).backward()
        theirs = dict(whole.named_parameters())
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor), name  # sharded again after the batch
            gradient = parameter.grad
            assert isinstance(gradient, DTensor), name
            torch.testing.assert_close(
                gradient.full_tensor(), theirs[name].grad, rtol=2e-5, atol=2e-6, msg=name
            )
group.close()
