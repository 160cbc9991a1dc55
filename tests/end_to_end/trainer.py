"""A two-rank data-parallel trainer that publishes; one JSON line for each event."""

from __future__ import annotations

import json
import sys

import torch

import parallelkit as pk


def emit(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")  # one write: both ranks share the pipe
    sys.stdout.flush()


def digest(model: torch.nn.Module) -> float:
    return float(sum(p.detach().double().sum() for p in model.parameters()))


def model_of(width: int) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, width), torch.nn.GELU(), torch.nn.Linear(width, 4)
    )
    model[2].bias = model[0].bias if width == 4 else model[2].bias  # tied, where the shapes allow
    return model


def main(scenario: str, followers: int) -> None:
    torch.set_num_threads(1)
    with pk.init_process_group(device="cpu") as group:
        context = pk.parallel_context(data=-1, reduce="mean")
        width = 4 + 4 * group.rank if scenario == "mismatch" else 4
        module = model_of(width)
        model = module if scenario == "mismatch" else context.parallelize(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = context.shard(torch.randn(32, 4), batch_size=4, shuffle=True, seed=1)
        try:
            verify = "bad" if scenario == "argument" and group.rank == 1 else "digest"
            timeout = 3.0 if scenario == "idle" else 20.0
            publisher = pk.publish_weights(model, timeout=timeout, verify=verify)
        except pk.ParallelKitError as error:
            emit(rank=group.rank, error=type(error).__name__, message=str(error))
            return
        with publisher:
            if group.rank == 0:
                for _ in range(followers):
                    emit(ticket=publisher.new_ticket())
            publisher.wait(followers, timeout=60.0)
            if group.rank == 1:
                try:
                    publisher.new_ticket()
                except pk.ParallelKitError as error:
                    emit(rank=group.rank, refused=str(error))
            for batch in loader:
                optimizer.zero_grad()
                loss = (model(batch) - batch).pow(2).mean()
                loss.backward()
                optimizer.step()
                try:
                    report = publisher.update()
                    emit(rank=group.rank, version=report.version, digest=digest(module))
                except pk.ParallelKitError as error:
                    emit(rank=group.rank, error=type(error).__name__, message=str(error))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
