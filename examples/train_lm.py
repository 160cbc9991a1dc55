"""Train a small language model under any plan: one flag says how it is spread over the ranks.

    python examples/train_lm.py
    parallelkit run -n 2 examples/train_lm.py --context data_shard=2
    parallelkit run -n 4 examples/train_lm.py --context pipeline=2,tensor=2 --accumulate 2
    torchrun --nproc-per-node 4 examples/train_lm.py --context data_shard=2,tensor=2 --save DIR
    parallelkit run -n 2 examples/train_lm.py --resume DIR

The batch is given for all ranks together, and which windows of the text are in it depends on the
seed alone. So every plan takes the same steps, and a checkpoint of one goes on under another.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from decoder import Decoder
from text import Windows, load_text
from torch import Tensor, nn

import parallelkit as pk

CLIP = 1.0
WARMUP = 20


def main() -> None:
    args = arguments()
    vocabulary, train, test = load_text()
    torch.manual_seed(args.seed)
    padded = -(-vocabulary // 64) * 64  # so that a tensor axis divides it
    net = Decoder(padded, args.hidden, args.layers, args.heads, args.kv_heads)

    with pk.init_process_group(device=args.device) as group:
        context = pk.parallel_context(**args.context, **looked_at(net, args))
        model = context.parallelize(net)
        items = items_of_a_part(args, context.plan.data_shard_count)
        windows = Windows(train, args.length, stride=args.length // 2)
        options = {"batch_size": items, "mode": "drop", "seed": args.seed}
        loader = context.shard(windows, shuffle=True, drop_last=True, **options)
        held_out = context.shard(Windows(test, args.length, stride=args.length), **options)
        forward = pk.execution_mode(args.mode).compile(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, betas=(0.9, 0.95))
        first = 0
        if args.resume:
            extra = context.load(args.resume, model, optimizer)
            first = extra["step"]
            loader.load_state_dict(extra["loader"])
        if group.rank == 0:
            print(context.explain(), flush=True)

        batches = endless(loader)
        for step in range(first, args.steps):
            for parameters in optimizer.param_groups:
                parameters["lr"] = args.rate * min(1.0, (step + 1) / WARMUP)
            losses = []
            for number in range(args.accumulate):
                inputs, targets = (x.to(group.device) for x in next(batches))
                last = number == args.accumulate - 1
                loss = context.train_step(forward, inputs, targets, loss=loss_of(args), sync=last)
                losses.append(loss)
            norm = context.clip_grad_norm_(model, CLIP)
            optimizer.step()
            optimizer.zero_grad()
            mean = float(group.all_reduce(torch.stack(losses).sum(), "mean"))
            if group.rank == 0:
                print(f"step {step + 1}: loss {mean:.5f}, norm {norm:.4f}", flush=True)

        model.eval()
        losses = [
            context.train_step(
                forward, x.to(group.device), y.to(group.device), loss=cross_entropy, backward=False
            )
            for x, y in itertools.islice(held_out, 8 * args.accumulate)
        ]
        mean = float(group.all_reduce(torch.stack(losses).mean(), "mean"))
        if group.rank == 0:
            print(f"held-out text: loss {mean:.5f}", flush=True)
        if args.save:
            extra = {"step": max(first, args.steps), "loader": loader.state_dict()}
            context.save(args.save, model, optimizer, extra=extra, overwrite=True)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over tokens, in nats a character."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def loss_of(args: argparse.Namespace) -> Any:
    """Return the loss of one of several batches that make up a step."""
    return lambda logits, targets: cross_entropy(logits, targets) / args.accumulate


def endless(loader: Any) -> Iterator[Any]:
    """Give batches again and again, in another order each epoch."""
    for epoch in itertools.count(loader.epoch):
        loader.set_epoch(epoch)
        yield from loader


def looked_at(net: nn.Module, args: argparse.Namespace) -> dict[str, Any]:
    """Return what a search for the best plan looks at, with `--auto`."""
    if not args.auto:
        return {}
    memory = int(args.memory * 1e9) if args.memory else None
    example = torch.zeros(1, args.length, dtype=torch.int64)
    search = {"model": net, "example": example, "global_batch": args.batch, "memory": memory}
    return {"mode": "auto", **search}


def items_of_a_part(args: argparse.Namespace, parts: int) -> int:
    """Divide the batch of all ranks by data parts and accumulated batches."""
    items, rest = divmod(args.batch, parts * args.accumulate)
    if rest or not items:
        raise SystemExit(
            f"--batch {args.batch} is the batch of all ranks: it is a multiple of {parts} data "
            f"parts times --accumulate {args.accumulate}"
        )
    return items


def context_of(text: str) -> dict[str, Any]:
    """Read degrees and options.

    Example:
        >>> context_of("data_shard=-1,tensor=2,sequence=true")
        {'data_shard': -1, 'tensor': 2, 'sequence': True}
    """
    found: dict[str, Any] = {}
    for word in filter(None, text.split(",")):
        name, equals, value = word.strip().partition("=")
        if not equals:
            raise argparse.ArgumentTypeError(f"{word!r} is not AXIS=DEGREE")
        if value.lower() in ("true", "false"):
            found[name] = value.lower() == "true"
        else:
            found[name] = int(value) if value.lstrip("-").isdigit() else value
    return found


def arguments() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument(
        "--context",
        type=context_of,
        default="",
        metavar="AXIS=DEGREE,...",
        help="how the ranks share the work, and options: data_shard=-1, tensor=2,sequence=true, "
        "pipeline=2,schedule=gpipe; default: data, over all ranks",
    )
    made.add_argument("--auto", action="store_true", help="search for the degrees left open")
    made.add_argument("--memory", type=float, help="GB of a device, for the search; default: all")
    made.add_argument("--batch", type=int, default=16, help="windows in a step of all ranks")
    made.add_argument("--accumulate", type=int, default=1, help="batches that make up a step")
    made.add_argument("--length", type=int, default=128, help="characters in a window")
    made.add_argument("--hidden", type=int, default=128, help="width of the model")
    made.add_argument("--layers", type=int, default=4)
    made.add_argument("--heads", type=int, default=4)
    made.add_argument("--kv-heads", type=int, default=2)
    made.add_argument("--rate", type=float, default=4e-3, help="learning rate")
    made.add_argument("--steps", type=int, default=200)
    made.add_argument("--mode", choices=("eager", "graph"), default="eager")
    made.add_argument("--device", default="auto", help="auto, cpu, cuda")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--save", type=Path, help="write a checkpoint here at the end")
    made.add_argument("--resume", type=Path, help="go on from a checkpoint")
    return made.parse_args()


if __name__ == "__main__":
    main()
