"""Train ResNet-50 with torch or MindSpore, on a folder of images or on scikit-learn's digits.

    python examples/train_resnet.py
    parallelkit run -n 2 examples/train_resnet.py --framework mindspore
    parallelkit run -n 2 examples/train_resnet.py --framework mindspore --api model --mode graph
    torchrun --nproc-per-node 2 examples/train_resnet.py --data imagenet --size 224

The hyper-parameters are those of a seed script that each of its users started from: momentum,
0.01 and 0.9, cross entropy, 32 images in a batch of each rank, and a plan that is searched for.
What comes from parallelkit are the lines with `pk.`, `context.`, `group.` and `loader.`: the same
for both frameworks. What is a framework's own is in `on_torch.py` and `on_mindspore.py`.

Batch statistics are those of each rank's own 32 images, as is usual; for statistics over all
ranks, on GPUs, put torch's model through `torch.nn.SyncBatchNorm.convert_sync_batchnorm` first.

Both frameworks begin with the same weights where one process gives them to the other:

    python examples/train_resnet.py --norm group --give /tmp/ticket &
    python examples/train_resnet.py --norm group --take /tmp/ticket --framework mindspore
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from handover import give, take
from images import Filled, open_images

import parallelkit as pk


def main() -> None:
    args = arguments()
    own = importlib.import_module(f"on_{args.framework}")
    own.seed(args.seed)
    train, test = (open_images(args.data, args.size, train=flag) for flag in (True, False))
    net = own.network(len(train.classes), args)

    with pk.init_process_group(framework=args.framework, device=args.device) as group:
        context = pk.parallel_context("auto", reduce="mean", fallback=True, **own.search(net, args))
        if args.take and group.rank == 0:  # the others get them by parallelize
            take(net, args.take)
        model = context.parallelize(net)
        if args.give:
            give(model, args.give, group)
        context.seed(args.seed)  # each rank crops and flips in its own way
        options = {"batch_size": args.batch, "seed": args.seed, **own.workers(args.workers)}
        loader = context.shard(train, mode="drop", shuffle=True, drop_last=True, **options)
        filled = Filled(test, context.plan.data_shard_count)
        held_out = context.shard(filled, shuffle=False, **options)
        optimizer = own.momentum(net)
        with pk.execution_mode(args.mode) as mode:
            forward = mode.compile(model)
            if group.rank == 0:
                print(context.explain(), mode.explain(), sep="\n", flush=True)
            trainer = Trainer(own, args, group, context, net, forward, optimizer)
            trainer.run(loader, held_out)


class Trainer:
    """The loop over epochs, alike for both frameworks.

    Attributes:
        step: steps taken so far, also before a checkpoint that was loaded.
    """

    def __init__(
        self,
        own: Any,
        args: argparse.Namespace,
        group: pk.ProcessGroup,
        context: pk.ParallelContext,
        net: Any,
        model: Any,
        optimizer: Any,
    ) -> None:
        self.own, self.args, self.group, self.context = own, args, group, context
        self.net, self.model, self.optimizer = net, model, optimizer
        self.step = 0

    def run(self, loader: Any, held_out: Any) -> None:
        args, group, context = self.args, self.group, self.context
        if args.resume:
            extra = context.load(args.resume, self.model, self.optimizer)
            self.step = extra["step"]
            loader.load_state_dict(extra["loader"])
        for epoch in range(loader.epoch, args.epochs):
            if self.step == args.steps:
                break
            loader.set_epoch(epoch)
            self.own.training(self.net, True)
            start, losses = time.perf_counter(), self.epoch(loader)
            if not losses:  # the checkpoint was of an epoch's end
                continue
            loss = float(group.all_reduce(self.own.vector([np.mean(losses)], group), "mean")[0])
            rate = len(losses) * args.batch * group.world_size / (time.perf_counter() - start)
            self.share_statistics()
            right, seen = self.evaluate(held_out)
            if group.rank == 0:
                print(
                    f"epoch {epoch}, step {self.step}: loss {loss:.4f}, accuracy "
                    f"{right / seen:.4f} of {seen} images, {rate:.1f} images/s",
                    flush=True,
                )
            if args.save:
                extra = {"step": self.step, "loader": loader.state_dict()}
                context.save(args.save, self.model, self.optimizer, extra=extra, overwrite=True)

    def epoch(self, loader: Any) -> list[float]:
        """Train for what is left of an epoch, and return the losses of this rank's batches."""
        args, most = self.args, None
        if args.steps is not None:
            most = args.steps - self.step
        if args.api == "model":
            losses: list[float] = self.own.train_by_model(
                self.model, loader, self.optimizer, sink=args.sink, most=most
            )
            loader.set_epoch(loader.epoch + 1)  # a native data set counts nothing
            for loss in losses:
                self.took(loss)
            return losses
        losses = []
        for batch in loader:
            images, labels = self.own.move(batch, self.group)
            loss = self.context.train_step(self.model, images, labels, loss=self.own.cross_entropy)
            self.context.apply_gradients(self.model, self.optimizer)
            losses.append(float(loss))
            self.took(losses[-1])
            if len(losses) == most:
                break
        return losses

    def took(self, loss: float) -> None:
        """Count a step."""
        self.step += 1
        if self.group.rank == 0 and self.args.every and self.step % self.args.every == 0:
            print(f"  step {self.step}: loss {loss:.6f}", flush=True)

    def share_statistics(self) -> None:
        """Give every rank the mean of all ranks' running statistics, each made of its own data.

        So it does not matter which rank evaluates an image, or saves.
        """
        own = self.own.statistics(self.net)
        if not own:
            return
        arrays = [self.own.array(tensor) for tensor in own]
        flat = self.own.vector(np.concatenate([value.ravel() for value in arrays]), self.group)
        mean = self.own.array(self.group.all_reduce(flat, "mean"))
        ends = np.cumsum([value.size for value in arrays])[:-1]
        parts = zip(np.split(mean, ends), arrays, strict=True)
        self.own.write(own, [part.reshape(old.shape).astype(old.dtype) for part, old in parts])

    def evaluate(self, loader: Iterable[Any]) -> tuple[int, int]:
        """Return how many images of all ranks are labelled right, of how many; each counts once."""
        self.own.training(self.net, False)
        right = seen = 0.0
        for batch in loader:
            images, labels = self.own.move(batch, self.group)
            share = self.context.train_step(
                self.model, images, labels, loss=self.own.accuracy, backward=False
            )
            right += round(float(share) * len(labels))
            seen += int((labels >= 0).sum())
        totals = self.group.all_reduce(self.own.vector([right, seen], self.group), "sum")
        return int(totals[0]), int(totals[1])


def stages(text: str) -> tuple[int, ...]:
    """Read the numbers of blocks of the four stages."""
    numbers = tuple(int(word) for word in text.split(",") if word.strip().isdigit())
    if len(numbers) != 4 or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not four numbers, such as 3,4,6,3")
    return numbers


def arguments() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--framework", choices=("torch", "mindspore"), default="torch")
    made.add_argument(
        "--api", choices=("loop", "model"), default="loop", help="model: mindspore.Model"
    )
    made.add_argument("--sink", action="store_true", help="of --api model: dataset_sink_mode")
    made.add_argument("--data", default="digits", help="a folder of images, or digits (default)")
    made.add_argument("--size", type=int, default=64, help="pixels of an image's sides, from 32")
    made.add_argument("--blocks", type=stages, default="3,4,6,3", help="of each stage")
    made.add_argument("--width", type=int, default=64, help="channels of the first stage")
    made.add_argument("--norm", choices=("batch", "group"), default="batch")
    made.add_argument("--batch", type=int, default=32, help="images in a batch of one rank")
    made.add_argument("--epochs", type=int, default=6)
    made.add_argument("--steps", type=int, help="stop after so many steps in all")
    made.add_argument("--every", type=int, default=10, help="steps between two lines; 0: none")
    made.add_argument("--mode", choices=("eager", "graph"), default="eager")
    made.add_argument("--device", default="auto", help="auto, cpu, cuda, npu")
    made.add_argument("--workers", type=int, default=0, help="processes that load images, a rank")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--give", type=Path, help="give the first weights to who reads this ticket")
    made.add_argument("--take", type=Path, help="begin with the weights given by this ticket")
    made.add_argument("--save", type=Path, help="write a checkpoint here after each epoch")
    made.add_argument("--resume", type=Path, help="go on from a checkpoint")
    args = made.parse_args()
    if args.api == "model" and (args.framework != "mindspore" or args.resume):
        made.error("--api model is MindSpore's, and begins at an epoch's start: no --resume")
    return args


if __name__ == "__main__":
    main()
