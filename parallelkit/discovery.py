"""Where plugins come from: the environment's lists, entry points, and what a plugin must be.

Nothing here keeps state. `parallelkit.loader` calls it once, on first need.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any, Final

import attrs

from parallelkit import hookspecs
from parallelkit.errors import PluginContractError

GROUP: Final = "parallelkit.plugins"
ALLOW: Final = "PARALLELKIT_PLUGINS"
DENY: Final = "PARALLELKIT_DISABLE_PLUGINS"
STRICT: Final = "PARALLELKIT_STRICT_PLUGINS"

FIRST_PARTY: Final = frozenset(
    {
        "parallelkit",
        "parallelkit-torch",
        "parallelkit-mindspore",
        "parallelkit-vllm",
        "parallelkit-hccl",
    }
)

#: Every hook's name.
HOOKS: Final = frozenset(
    name for name, value in vars(hookspecs).items() if hasattr(value, hookspecs.PROJECT + "_spec")
)

_OFF: Final = frozenset({"", "0", "false", "off", "no"})


def canonical(name: str) -> str:
    """Normalise a distribution's name: `Parallelkit_Torch` is `parallelkit-torch`."""
    return re.sub(r"[-_.]+", "-", name).lower()


@attrs.frozen(kw_only=True)
class Settings:
    """The environment's say about plugins.

    Attributes:
        allow: the only entry or distribution names to load; None: no such list.
        deny: entry or distribution names not to load.
        strict: a plugin that fails to load is an error.
    """

    allow: tuple[str, ...] | None = None
    deny: tuple[str, ...] = ()
    strict: bool = False

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Read the three variables; blanks are stripped, `0`, `false` and nothing mean off."""
        allow = environ.get(ALLOW)
        return cls(
            allow=None if allow is None else _split(allow),
            deny=_split(environ.get(DENY, "")),
            strict=environ.get(STRICT, "").strip().lower() not in _OFF,
        )

    def blocked_by(self, entry: str, dist: str) -> str:
        """Name the variable that keeps this entry out, with its value; empty if none does."""
        names = {canonical(entry), canonical(dist)}
        if names & {canonical(n) for n in self.deny}:
            return f"{DENY}={','.join(self.deny)!r}"
        if self.allow is not None and not names & {canonical(n) for n in self.allow}:
            return f"{ALLOW}={','.join(self.allow)!r}"
        return ""

    def unknown(self, known: Iterable[str]) -> list[str]:
        """List the names in the variables that no installed plugin has, as messages."""
        names = sorted({canonical(n) for n in known})
        lines = []
        for variable, values in ((ALLOW, self.allow or ()), (DENY, self.deny)):
            for value in values:
                if canonical(value) not in names:
                    close = difflib.get_close_matches(canonical(value), names, n=1)
                    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"
                    lines.append(f"{variable} names {value!r}, which is no plugin here; {hint}")
        return lines


def _split(value: str) -> tuple[str, ...]:
    if value.strip().lower() in _OFF:
        return ()
    return tuple(part for part in (p.strip() for p in value.split(",")) if part)


@attrs.frozen(kw_only=True, order=True)
class Entry:
    """One entry point; sorts by distribution, then name.

    Attributes:
        dist: canonical name of the distribution; version: its version.
        name, value: the two sides of the entry point; name is empty where the distribution's
            `entry_points.txt` cannot be parsed, and then `problem` says why.
    """

    dist: str
    name: str
    version: str = ""
    value: str = ""
    problem: str = ""

    @property
    def first_party(self) -> bool:
        return self.dist in FIRST_PARTY

    @property
    def label(self) -> str:
        return f"{self.dist} {self.version}".strip()

    def load(self) -> Any:
        """Import what the entry point names; whatever the import raises comes through."""
        point = metadata.EntryPoint(name=self.name, value=self.value, group=GROUP)
        if point.pattern.match(self.value) is None:
            raise PluginContractError(
                f"its entry `{self.name} = {self.value}` is malformed; it is written "
                "`name = package.module` or `name = package.module:attribute`"
            )
        return point.load()


def list_entries(path: Sequence[str] | None = None) -> list[Entry]:
    """List the entry points of every distribution, in a fixed order; one bad file hurts nobody.

    Args:
        path: folders to search, `sys.path` by default.
    """
    where: dict[str, Any] = {} if path is None else {"path": list(path)}
    entries: dict[tuple[str, str, str], Entry] = {}
    seen: set[str] = set()
    for dist in metadata.distributions(**where):
        broken = ""
        try:
            try:
                if GROUP not in (dist.read_text("entry_points.txt") or ""):
                    continue  # most of them: neither parsed nor named, which keeps the scan short
            except UnicodeDecodeError as error:
                broken = f"its entry_points.txt is no UTF-8 text: {error.reason}"
            name = canonical(_name_of(dist))
        except Exception:  # an unreadable folder on sys.path is not ours to complain about
            continue
        if name in seen:
            continue
        seen.add(name)
        if broken:
            entries[name, "", ""] = Entry(dist=name, name="", problem=broken)
            continue
        if not _is_visible(dist, name, where):
            continue
        for entry in _entries_of(dist, name):
            entries[entry.dist, entry.name, entry.value] = entry
    return sorted(entries.values())


def _name_of(dist: metadata.Distribution) -> str:
    """Return the distribution's name, from its folder where the metadata is missing."""
    name = dist.metadata["Name"] if _has_metadata(dist) else None
    folder = getattr(dist, "_path", None)
    return name or (folder.name.partition("-")[0] if folder is not None else "unknown")


def _has_metadata(dist: metadata.Distribution) -> bool:
    """Tell whether a name is on file: `PKG-INFO` is that of an `.egg-info`, in a checkout."""
    return bool(dist.read_text("METADATA") or dist.read_text("PKG-INFO"))


def _is_visible(dist: metadata.Distribution, name: str, where: Mapping[str, Any]) -> bool:
    """Tell whether `dist` is the first of its name on the path, as imports would find it."""
    first = next(iter(metadata.distributions(name=name, **where)), None)
    return first is None or first.read_text("entry_points.txt") == dist.read_text(
        "entry_points.txt"
    )


def _entries_of(dist: metadata.Distribution, name: str) -> list[Entry]:
    version = ""
    try:
        version = (dist.metadata["Version"] or "") if _has_metadata(dist) else ""
        header = _broken_header(dist.read_text("entry_points.txt") or "")
        if header:
            raise ValueError(f"{header!r} is not the section header '[{GROUP}]'")
        return [
            Entry(dist=name, version=version, name=point.name.strip(), value=point.value)
            for point in dist.entry_points.select(group=GROUP)
        ]
    except Exception as error:
        return [
            Entry(
                dist=name,
                version=version,
                name="",
                problem=f"its entry_points.txt is malformed: {type(error).__name__}: {error}",
            )
        ]


def _broken_header(text: str) -> str:
    """Return the line that was meant to start our section and does not; empty if none."""
    for line in map(str.strip, text.splitlines()):
        if line.strip("[] \t") == GROUP and line.strip("[]") != GROUP:
            return line
        if line.strip("[]") == GROUP and line.startswith("[") != line.endswith("]"):
            return line
    return ""


# --- what a plugin must be ---------------------------------------------------------------------


def check_api(plugin: object) -> None:
    """Raise `PluginContractError` unless the plugin states the API version of this core."""
    from parallelkit.plugin import API_VERSION

    stated = getattr(plugin, "parallelkit_api", None)
    if stated is None:
        raise PluginContractError(
            "it states no API version; write `parallelkit_api = "
            f"{API_VERSION}` beside its hooks (this parallelkit speaks {API_VERSION})"
        )
    if isinstance(stated, bool) or not isinstance(stated, int) or stated != API_VERSION:
        raise PluginContractError(
            f"it was written for API version {stated!r}, this parallelkit speaks {API_VERSION}; "
            "install versions that agree"
        )


def check_shape(plugin: object) -> None:
    """Raise `PluginContractError` for what pluggy would take silently and fail on later."""
    if inspect.isclass(plugin):
        raise PluginContractError(
            f"it is the class {plugin.__qualname__}, not an instance; "
            f"point the entry point at an instance or a module"
        )
    if not inspect.ismodule(plugin) and type(plugin).__eq__ is not object.__eq__:
        raise PluginContractError(
            f"{type(plugin).__qualname__} compares by value, so pluggy cannot tell two of them "
            "apart; declare the class with @attrs.define(eq=False)"
        )
    marked = 0
    for name in dir(plugin):
        function = _function(plugin, name)
        if function is None:
            continue
        options = getattr(function, hookspecs.PROJECT + "_impl", None)
        if options is None:
            if name in HOOKS:
                raise PluginContractError(f"{name} lacks the @hookimpl marker, so it is no hook")
            continue
        _check_hook(name, function, options)
        marked += 1
    if not marked:
        raise PluginContractError("it implements no hook; mark them with @hookimpl")


def _function(plugin: object, name: str) -> Any:
    """Return the plain function behind an attribute, without running a property."""
    try:
        found = inspect.getattr_static(plugin, name)
    except AttributeError:
        return None
    if isinstance(found, staticmethod | classmethod):
        found = found.__func__
    return found if inspect.isroutine(found) else None


def _check_hook(name: str, function: Any, options: Mapping[str, Any]) -> None:
    hook = options.get("specname") or name
    if hook not in HOOKS:
        if options.get("optionalhook"):
            return
        close = difflib.get_close_matches(hook, HOOKS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"hooks are {', '.join(sorted(HOOKS))}"
        raise PluginContractError(f"{hook} is not a hook; {hint}")
    if options.get("wrapper") or options.get("hookwrapper"):
        raise PluginContractError(
            f"{hook} is a hook wrapper; parallelkit calls only the chosen plugin's "
            "implementation, so a wrapper would never run"
        )
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise PluginContractError(f"{hook} is a coroutine or a generator; hooks are plain calls")
