"""The first rank of the second of two stages compiles its part. Arguments: library, folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import mindspore as ms
from mindspore import nn
from mindspore.parallel.nn import Pipeline
from parallelkit_mindspore.parallel.strategies import read_file
from world import Perceptron, World, batch, file_of, lines


class PipelineStep(nn.Cell):
    """Two microbatches over two stages, and momentum."""

    def __init__(self, net: Perceptron) -> None:
        super().__init__(auto_prefix=False)
        stages = {"_backbone.up": 0, "_backbone.relu": 0, "_backbone.down": 1, "_loss_fn": 1}
        self.loss = Pipeline(nn.WithLossCell(net, nn.MSELoss()), 2, stage_config=stages)
        self.optimizer = nn.Momentum(net.trainable_params(), 0.01, 0.9)
        # that of mindspore.parallel.nn uses a name that it does not define
        self.reducer = nn.PipelineGradReducer(self.optimizer.parameters, opt_shard=False)
        self.grad = ms.value_and_grad(self.loss, None, self.optimizer.parameters)

    def construct(self, inputs: Any, target: Any) -> Any:
        loss, grads = self.grad(inputs, target)
        grads = self.reducer(grads)
        self.optimizer(grads)
        return loss


def main(library: str, folder: str) -> None:
    ms.set_context(mode=ms.GRAPH_MODE)
    world = World(library)
    context = world.context(
        "semi_auto",
        {
            "layouts": {"**.up": "colwise", "**.down": "rowwise"},
            "dataset_strategy": "full_batch",
            "strategy_save": file_of(folder, "pipe.json"),
            "pipeline_scheduler": "1f1b",
        },
        pipeline=2,
        tensor=4,
        data=1,
    )
    step = context.parallelize(PipelineStep(Perceptron(64, 128)).set_train())
    with world.device():
        context.compile(step, batch(64), batch(64))
    stage = world.rank // 4
    mine, other = ("down", "up") if stage else ("up", "down")
    shown = {
        "up": "up.weight [128, 64]: dim 0 over tensor (4)",
        "down": "down.weight [64, 128]: dim 1 over tensor (4)",
    }
    assert lines(context, "parameters of stage") == [f"parameters of stage {stage}: 2"]
    assert lines(context, f"{mine}.weight") == [shown[mine]]
    assert lines(context, f"{other}.weight") == []
    assert [path.name for path in Path(folder).glob("pipe*")] == [f"pipe-stage{stage}.json"]
    assert read_file(file_of(folder, f"pipe-stage{stage}.json")).stage == stage


if __name__ == "__main__":
    main(*sys.argv[1:])
