"""Four ranks publish what contexts made of a decoder, under any plan: it is the whole model."""

from __future__ import annotations

import torch
from models import decoder
from parallelkit_torch.sharded_weights import ShardedModuleSource
from sharded_models import collect, step_parts, stepped

import parallelkit as pk

group = pk.init_process_group(device="cpu", timeout=60)
plans = [
    ({"data_shard": 2, "tensor": 2}, "sharded over data_shard 2 x tensor 2"),
    ({"data": 2, "data_shard": 2}, "sharded over data_shard 2"),
    ({"pipeline": 2, "tensor": 2}, "sharded over tensor 2 at pipeline 1"),
    ({"pipeline": 2, "data_shard": 2, "schedule": "interleaved"}, "data_shard 2 at pipeline 0"),
    ({"pipeline": 2, "data": 2}, "replicated at pipeline 1"),
]
for degrees, said in plans:
    context = pk.parallel_context(**degrees)
    model = context.parallelize(decoder(layers=4))
    whole = decoder(layers=4).state_dict()
    with pk.publish_weights(model, timeout=30) as publisher:
        names = [t.name for t in publisher.plan.manifest.tensors]
        assert sorted(names) == sorted(whole), (degrees, set(names) ^ set(whole))
        assert said in publisher.explain(), (degrees, publisher.explain())
        assert publisher.update().version == 1
    source = ShardedModuleSource(model)
    source.join(group)
    for _ in range(2):
        for name, tensor in collect(source, group).items():
            assert torch.equal(tensor, whole[name]), (degrees, name)
        whole = {name: stepped(tensor) for name, tensor in whole.items()}
        step_parts(model)
    context.reset()
group.close()
