"""Train ResNet-50 on a folder of images, or on scikit-learn's digits.

    python examples/train_resnet.py
    parallelkit run -n 2 examples/train_resnet.py
    torchrun --nproc-per-node 2 examples/train_resnet.py --data imagenet --size 224

The hyper-parameters are those of a seed script that each of its users started from: SGD with
momentum, 0.01 and 0.9, cross entropy, 32 images in a batch of each rank. What comes from
parallelkit are the lines with `pk.`, `context.`, `group.` and `loader.`.

Batch statistics are those of each rank's own 32 images, as is usual; for statistics over all
ranks, on GPUs, put the model through `torch.nn.SyncBatchNorm.convert_sync_batchnorm` first.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from images import open_images
from resnet import ResNet50
from torch import Tensor, nn

import parallelkit as pk


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    train, test = (open_images(args.data, args.size, train=flag) for flag in (True, False))

    with pk.init_process_group(device=args.device) as group:
        context = pk.parallel_context(data=-1, reduce="mean")
        net = ResNet50(len(train.classes))
        model = context.parallelize(net)
        context.seed(args.seed)  # each rank crops and flips in its own way
        options = {"batch_size": args.batch, "num_workers": args.workers, "seed": args.seed}
        loader = context.shard(train, mode="drop", shuffle=True, drop_last=True, **options)
        held_out = context.shard(test, mode="uneven", **options)
        forward = pk.execution_mode(args.mode).compile(model)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        step = 0
        if args.resume:
            extra = context.load(args.resume, model, optimizer)
            step = extra["step"]
            loader.load_state_dict(extra["loader"])

        for epoch in range(loader.epoch, args.epochs):
            if step == args.steps:
                break
            loader.set_epoch(epoch)
            model.train()
            start, losses = time.perf_counter(), []
            for images, labels in loader:
                losses.append(train_step(forward, images, labels, optimizer, group.device))
                step += 1
                if group.rank == 0 and args.every and step % args.every == 0:
                    print(f"  step {step}: loss {float(losses[-1]):.4f}", flush=True)
                if step == args.steps:
                    break
            if not losses:  # the checkpoint was of an epoch's end
                continue
            loss = float(group.all_reduce(torch.stack(losses).mean(), "mean"))
            rate = len(losses) * args.batch * group.world_size / (time.perf_counter() - start)
            share_statistics(net, group)
            right, seen = evaluate(net, held_out, group)
            if group.rank == 0:
                print(
                    f"epoch {epoch}, step {step}: loss {loss:.4f}, accuracy {right / seen:.4f} of "
                    f"{seen} images, {rate:.1f} images/s",
                    flush=True,
                )
            if args.save:
                extra = {"step": step, "loader": loader.state_dict()}
                context.save(args.save, model, optimizer, extra=extra, overwrite=True)


def train_step(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    optimizer: torch.optim.Optimizer,
    device: torch.device | str,
) -> Tensor:
    """Take one step on this rank's batch, and return its loss, detached."""
    loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def share_statistics(net: nn.Module, group: pk.ProcessGroup) -> None:
    """Give every rank the mean of all ranks' running statistics, which each made of its own data.

    So it does not matter which rank evaluates an image, or saves.
    """
    buffers = [buffer for buffer in net.buffers() if buffer.is_floating_point()]
    flat = group.all_reduce(torch.cat([buffer.flatten() for buffer in buffers]), "mean")
    for buffer, mean in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
        buffer.copy_(mean.view_as(buffer))


@torch.no_grad()
def evaluate(
    net: nn.Module, loader: Iterable[tuple[Tensor, Tensor]], group: pk.ProcessGroup
) -> tuple[int, int]:
    """Return how many images of all ranks are labelled right, of how many; each counts once.

    The plain module is asked, not its wrapper: ranks may have different numbers of batches, and
    nothing here waits for another rank before the sum.
    """
    net.eval()
    counts = torch.zeros(2, dtype=torch.int64, device=group.device)
    for images, labels in loader:
        right = net(images.to(group.device)).argmax(1) == labels.to(group.device)
        counts += torch.tensor([int(right.sum()), len(labels)], device=group.device)
    right_ones, seen = group.all_reduce(counts, "sum").tolist()
    return right_ones, seen


def arguments() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--data", default="digits", help="a folder of images, or digits (default)")
    made.add_argument("--size", type=int, default=64, help="pixels of an image's sides, from 32")
    made.add_argument("--batch", type=int, default=32, help="images in a batch of one rank")
    made.add_argument("--epochs", type=int, default=6)
    made.add_argument("--steps", type=int, help="stop after so many steps in all")
    made.add_argument("--every", type=int, default=10, help="steps between two lines; 0: none")
    made.add_argument("--mode", choices=("eager", "graph"), default="eager")
    made.add_argument("--device", default="auto", help="auto, cpu, cuda")
    made.add_argument("--workers", type=int, default=0, help="processes that load images, a rank")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--save", type=Path, help="write a checkpoint here after each epoch")
    made.add_argument("--resume", type=Path, help="go on from a checkpoint")
    return made.parse_args()


if __name__ == "__main__":
    main()
