"""`parallelkit plan`: who has which place, from integers only."""

from __future__ import annotations

import argparse
from pathlib import Path

from parallelkit.errors import OutputError
from parallelkit.plan import plan


def run(args: argparse.Namespace) -> int:
    """Print the plan as a table or as JSON, and write its picture where one is asked for."""
    planned = plan(
        args.ranks if args.world_size is None else args.world_size,
        args.mode,
        pipeline=args.pipeline,
        data=args.data,
        data_shard=args.data_shard,
        context=args.context,
        tensor=args.tensor,
        expert=args.expert,
        offset=args.offset,
    )
    if args.svg is not None:
        from parallelkit.picture import to_svg

        picture = to_svg(planned)
        if args.svg == "-":
            print(picture, end="")
            return 0
        try:
            Path(args.svg).write_text(picture, encoding="utf-8")
        except OSError as error:
            raise OutputError(
                f"the picture cannot be written to {args.svg!r}: {error.strerror}; give --svg a "
                f"file in a folder that exists and may be written to"
            ) from error
    print(planned.to_json() if args.json else planned)
    return 0
