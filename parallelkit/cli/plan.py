"""`parallelkit plan`: who has which place, from integers only."""

from __future__ import annotations

import argparse

from parallelkit.plan import plan


def run(args: argparse.Namespace) -> int:
    """Print the plan as a table, or as JSON."""
    planned = plan(
        args.world_size,
        args.mode,
        pipeline=args.pipeline,
        data=args.data,
        data_shard=args.data_shard,
        context=args.context,
        tensor=args.tensor,
        expert=args.expert,
    )
    print(planned.to_json() if args.json else planned)
    return 0
