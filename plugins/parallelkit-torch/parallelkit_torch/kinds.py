"""What kind of torch's objects something is, without importing what takes a second to import.

An object of a kind whose module was never imported cannot exist.
"""

from __future__ import annotations

import sys
from typing import Any


def is_unit(module: object) -> bool:
    """Whether FSDP2 shards this very module."""
    return _is("torch.distributed.fsdp", "FSDPModule", module)


def is_dtensor(tensor: object) -> bool:
    """Whether a tensor is spread over a mesh."""
    return _is("torch.distributed.tensor", "DTensor", tensor)


def _is(where: str, name: str, thing: object) -> bool:
    kind: Any = getattr(sys.modules.get(where), name, None)
    return kind is not None and isinstance(thing, kind)
