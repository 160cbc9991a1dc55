"""Reading variables of a launcher one by one, each fact with where it comes from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import attrs

from parallelkit.errors import LaunchError

_INTEGER = re.compile(r"[+-]?\d{1,18}", re.ASCII)


@attrs.define
class Reading:
    """Facts read so far, by the names of `LaunchInfo`'s fields.

    Attributes:
        environ: what is read; a blank value counts as unset.
        arguments: facts given explicitly; their variables are not even looked at.
        run_identity: names the run where no variable does.
        uid: user id for file names, if known.
    """

    environ: Mapping[str, str]
    arguments: Mapping[str, Any]
    run_identity: str | None = None
    uid: int | None = None
    launcher: str = "none"
    reason: str = ""
    facts: dict[str, Any] = attrs.field(factory=dict)
    provenance: dict[str, str] = attrs.field(factory=dict)

    def text(self, name: str) -> str | None:
        value = self.environ.get(name, "")
        if not isinstance(value, str):
            raise LaunchError(f"{name}={value!r}: a variable's value is a string")
        return value.strip() or None

    def seen(self, *names: str) -> list[str]:
        return [name for name in names if self.text(name) is not None]

    def number(self, name: str, low: int = 0, high: int | None = None) -> int | None:
        """Return the variable as an integer within bounds, or None where it is not set."""
        text = self.text(name)
        if text is None:
            return None
        allowed = f"an integer of at least {low}" if high is None else f"{low} to {high}"
        value = int(text) if _INTEGER.fullmatch(text) else None
        if value is None or value < low or (high is not None and value > high):
            raise LaunchError(
                f"{name}={text!r} ({self.launcher}) is not valid: allowed is {allowed}; "
                f"correct it, or unset it where this launch is not meant"
            )
        return value

    def take(self, field: str, *names: str, low: int = 0, high: int | None = None) -> Any:
        """Take an integer fact from the first of `names` that is set; an argument goes first.

        Raises:
            LaunchError: a value is malformed, or two of the variables disagree.
        """
        if field in self.arguments:
            return self.arguments[field]
        values = {name: self.number(name, low, high) for name in self.seen(*names)}
        if len(set(values.values())) > 1:
            said = ", ".join(f"{name}={value}" for name, value in values.items())
            raise LaunchError(
                f"{said} ({self.launcher}) contradict each other; they name the same thing, "
                f"so unset all but the right one"
            )
        for name, value in values.items():
            return self.put(field, value, f"{name} ({self.launcher})")
        return None

    def need(self, field: str, *names: str, low: int = 0) -> Any:
        """Like `take`, and a fact that is not there is an error: the set is partial."""
        value = self.take(field, *names, low=low)
        if value is None:
            raise self.partial(*names)
        return value

    def partial(self, *names: str) -> LaunchError:
        """Say that a launch is recognised but one of its variables is missing."""
        if self.launcher == "none":
            return LaunchError(
                f"{' and '.join(names)} not set, so this launch is partial ({self.reason}); start "
                "the script with a launcher such as torchrun, set them too, or unset the rest"
            )
        how = {"slurm": "srun", "mpi": "mpirun"}.get(self.launcher, self.launcher)
        return LaunchError(
            f"{' or '.join(names)} is not set, so this {self.launcher} launch is partial "
            f"({self.reason}); start the script with {how}, set {names[0]} too, or unset the rest"
        )

    def word(self, field: str, *names: str) -> str | None:
        """Take a text fact from the first of `names` that is set; an argument goes first."""
        if field in self.arguments:
            return str(self.arguments[field])
        for name in self.seen(*names):
            return str(self.put(field, self.text(name), f"{name} ({self.launcher})"))
        return None

    def put(self, field: str, value: Any, where: str) -> Any:
        self.facts[field] = value
        self.provenance[field] = where
        return value
