"""What is known about plugins: values that the loader makes and reports print."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import attrs

State = Literal["loaded", "failed", "blocked", "shadowed", "duplicate"]


@attrs.frozen(kw_only=True)
class PluginInfo:
    """One plugin that was found, and what became of it.

    Attributes:
        name: entry-point name, or the name it was registered under.
        dist, version: distribution; empty for one registered by a program.
        value: what the entry point names.
        state: `"loaded"`; `"failed"`; `"blocked"` by an environment variable; `"shadowed"` by
            another of the same name; `"duplicate"`: the same object as another.
        reason: why it is not loaded.
        first_party: it comes from this project.
        error: the exception behind `"failed"`.
    """

    name: str
    dist: str = ""
    version: str = ""
    value: str = ""
    state: State = "loaded"
    reason: str = ""
    first_party: bool = False
    error: BaseException | None = attrs.field(default=None, eq=False, repr=False)

    @property
    def label(self) -> str:
        """`'torch' (parallelkit-torch 0.1.0)`, for messages."""
        return f"{self.name!r} ({f'{self.dist} {self.version}'.strip() or 'registered here'})"

    def as_dict(self) -> dict[str, Any]:
        """The plain facts, for JSON."""
        return {
            "name": self.name,
            "dist": self.dist,
            "version": self.version,
            "value": self.value,
            "state": self.state,
            "reason": self.reason,
            "first_party": self.first_party,
        }


@attrs.frozen(kw_only=True)
class PluginSet:
    """Every plugin found, in a fixed order, and notes about them."""

    plugins: tuple[PluginInfo, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def loaded(self) -> tuple[PluginInfo, ...]:
        return tuple(p for p in self.plugins if p.state == "loaded")

    @property
    def failures(self) -> tuple[PluginInfo, ...]:
        return tuple(p for p in self.plugins if p.state == "failed")


@attrs.frozen(kw_only=True)
class HookFailure:
    """An exception from one plugin's implementation of a hook that asks all of them."""

    plugin: PluginInfo
    hook: str
    error: BaseException = attrs.field(eq=False)

    @property
    def reason(self) -> str:
        return f"{self.hook} raised {type(self.error).__name__}: {self.error}"


@attrs.frozen
class Implementation:
    """One plugin's function for one hook."""

    plugin: PluginInfo
    function: Callable[..., Any]
    arguments: tuple[str, ...]

    def __call__(self, **given: Any) -> Any:
        """Call it with those arguments that it takes."""
        return self.function(**{name: given[name] for name in self.arguments if name in given})
