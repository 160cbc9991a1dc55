"""Printing: rich tables for people, JSON for programs."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from parallelkit.errors import PluginWarning

if TYPE_CHECKING:
    from rich.console import Console


def console() -> Console:
    """Return a console for standard output; rich is imported here, on use."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print `value` as JSON, readable and in a fixed order."""
    print(json.dumps(value, indent=2, sort_keys=True, default=str))


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    """Return a rich table; cells are taken literally, not as markup."""
    from rich.table import Table
    from rich.text import Text

    made = Table(*columns, title=title, title_justify="left", show_header=bool(columns))
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    return made


def facts(title: str, values: Mapping[str, str]) -> Any:
    """Return a rich table of names and values."""
    from rich.table import Table
    from rich.text import Text

    made = Table(title=title, title_justify="left", show_header=False)
    for name, value in values.items():
        made.add_row(Text(name), Text(str(value)))
    return made


@contextmanager
def quiet_plugins() -> Iterator[None]:
    """Drop warnings about plugins where the report itself shows every failure."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)
        yield
