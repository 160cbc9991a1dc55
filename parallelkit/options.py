"""Options that go on to a torch function: checked by name before anything else happens."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from parallelkit.errors import UnsupportedFeatureError


def accepted(function: Callable[..., Any], *, ours: Collection[str]) -> list[str]:
    """Names of the parameters of `function` that a user may set; `ours` are set by us."""
    names = inspect.signature(function).parameters
    return [name for name in names if name not in ours and name != "self"]


def check(
    given: Mapping[str, Any], allowed: Collection[str], *, what: str, also: Collection[str] = ()
) -> dict[str, Any]:
    """Return `given` as a dict, or raise.

    Args:
        also: names of other arguments, which a wrong name may have meant.

    Raises:
        UnsupportedFeatureError: a name is unknown; the nearest and all allowed names are given.
    """
    for name in given:
        if name not in allowed:
            close = difflib.get_close_matches(name, [*also, *allowed], n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise UnsupportedFeatureError(
                f"{what} has no option {name!r}{hint} Allowed are "
                f"{', '.join(sorted(allowed)) or 'none'}"
            )
    return dict(given)
