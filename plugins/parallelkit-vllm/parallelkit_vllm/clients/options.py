"""The options of `publisher.attach` that every client of a vLLM engine knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from parallelkit import options
from parallelkit.errors import EngineError

CACHE: Final = ("reset", "keep")
PAUSE: Final = ("keep", "wait", "abort")
COMMON: Final = ("name", "cache", "pause")


@attrs.frozen(kw_only=True)
class AttachOptions:
    """How an attached engine is treated at each commit.

    Attributes:
        name: for reports; None: the client finds one.
        cache: `reset`: nothing computed with the old weights is used again, requests in flight
            have their context recomputed. `keep`: cached keys and values stay, so what is
            generated next is of no version until they are gone.
        pause: what becomes of requests in flight: `keep` freezes them and they go on with the new
            weights, `wait` lets them end before, `abort` ends them with what they have.
        extra: the options that only one kind of client knows.
    """

    name: str | None = None
    cache: str = "reset"
    pause: str = "keep"
    extra: Mapping[str, Any] = attrs.field(factory=dict)

    @classmethod
    def of(
        cls, given: Mapping[str, object], *, what: str, also: Mapping[str, Any]
    ) -> AttachOptions:
        """Check what `attach` was given.

        Args:
            what: the kind of engine, for errors; also: further names, with their defaults.

        Raises:
            UnsupportedFeatureError: a name is unknown.
            EngineError: a value is not one of those allowed.
        """
        known = options.check(given, (*COMMON, *also), what=what)
        name, cache = known.pop("name", None), known.pop("cache", "reset")
        pause = known.pop("pause", "keep")
        for option, value, allowed in (("cache", cache, CACHE), ("pause", pause, PAUSE)):
            if value not in allowed:
                raise EngineError(
                    f"attach({option}={value!r}): allowed are {', '.join(map(repr, allowed))}"
                )
        printable = isinstance(name, str) and 0 < len(name) <= 200 and name.isprintable()
        if name is not None and not printable:
            raise EngineError(f"attach(name={name!r:.80}): a printable string of 200 characters")
        return cls(name=name, cache=cache, pause=pause, extra={**also, **known})
