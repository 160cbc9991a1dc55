"""Load plugins, each in isolation, once, on first need; never at import.

pluggy's own loader stops at the first broken entry point and lets the order of `sys.path` decide
between two that share a name. Here one plugin's failure is that plugin's failure: it is kept with
its reason, warned about once, shown by `parallelkit doctor`, and an error only when that plugin
is asked for or `PARALLELKIT_STRICT_PLUGINS=1`.

A `PluginManager` is a value. Functions of parallelkit use the default one, made on first use;
tests make their own, or call `reset()`.
"""

from __future__ import annotations

import importlib
import inspect
import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Literal

import attrs
import pluggy

from parallelkit import __version__, hookspecs
from parallelkit.discovery import (
    HOOKS,
    Entry,
    Settings,
    canonical,
    check_api,
    check_shape,
    list_entries,
)
from parallelkit.errors import PluginContractError, PluginError, PluginLoadError, PluginWarning
from parallelkit.records import HookFailure, Implementation, PluginInfo, PluginSet

if TYPE_CHECKING:
    from parallelkit.selection import Selection

BUILTIN: Final = "parallelkit._builtin"


class PluginManager:
    """The plugins of one process, or of one test.

    Args:
        environ: where the `PARALLELKIT_*` variables are read, `os.environ` by default.
        path: folders to search for distributions, `sys.path` by default.
        scan: look for entry points at all; False for a test that registers its own.
        builtin: register the core's own plugin.
    """

    def __init__(
        self,
        *,
        environ: Mapping[str, str] | None = None,
        path: Sequence[str] | None = None,
        scan: bool = True,
        builtin: bool = True,
    ) -> None:
        self._environ = environ
        self._path = path
        self._scan = scan
        self._builtin = builtin
        self._lock = threading.RLock()
        self._state: Literal["new", "loading", "loaded"] = "new"
        self._strict = False
        self._infos: list[PluginInfo] = []
        self._notes: list[str] = []
        self._warned: set[object] = set()
        self.failures: list[HookFailure] = []
        self.selections: dict[str, Selection] = {}
        self._pm = pluggy.PluginManager(hookspecs.PROJECT)
        self._pm.add_hookspecs(hookspecs)

    # --- loading

    def load(self, *, strict: bool | None = None) -> PluginSet:
        """Scan entry points if that has not been done, and return what there is.

        Args:
            strict: raise for a plugin that failed; None: as `PARALLELKIT_STRICT_PLUGINS` says.

        Raises:
            PluginLoadError: a plugin failed to load and `strict` holds; chained to its cause.
        """
        messages: list[str] = []
        with self._lock:
            if self._state == "loading":
                raise PluginError(
                    "plugins are being loaded; a plugin must not use parallelkit's functions "
                    "while it is imported"
                )
            if self._state == "new":
                self._state = "loading"
                try:
                    messages = self._load()
                except BaseException:
                    self._state = "new"
                    raise
                self._state = "loaded"
        found = self.plugins
        if (self._strict if strict is None else strict) and found.failures:
            bad = found.failures[0]
            raise PluginLoadError(f"plugin {bad.label} failed to load: {bad.reason}") from bad.error
        for message in messages:
            warnings.warn(message, PluginWarning, stacklevel=3)
        return found

    @property
    def plugins(self) -> PluginSet:
        """What is known so far, without scanning."""
        with self._lock:
            return PluginSet(
                plugins=tuple(sorted(self._infos, key=_order)), notes=tuple(self._notes)
            )

    def _load(self) -> list[str]:
        """Load everything once; return messages to warn about, when the lock is released."""
        settings = Settings.from_environ(os.environ if self._environ is None else self._environ)
        self._strict = settings.strict
        if self._builtin and find_spec(BUILTIN) is not None:
            info = PluginInfo(
                name="builtin",
                dist="parallelkit",
                version=__version__,
                value=BUILTIN,
                first_party=True,
            )
            self._add(info, lambda: importlib.import_module(BUILTIN))
        if not self._scan:
            return []
        entries = list_entries(self._path)
        allowed = [e for e in entries if not self._block(e, settings)]
        clashes = _clashes(allowed)
        for entry in allowed:
            info = _info(entry)
            if entry.problem:
                self._fail(info, PluginContractError(entry.problem))
            elif entry in clashes:
                self._clash(info, clashes[entry])
            else:
                self._add(info, entry.load)
        messages = [f"plugin {p.label} is left out: {p.reason}" for p in self._failed()]
        known = {e.name for e in entries} | {e.dist for e in entries}
        return messages + settings.unknown(known - {""})

    def _block(self, entry: Entry, settings: Settings) -> bool:
        variable = settings.blocked_by(entry.name, entry.dist)
        if variable:
            reason = f"switched off by {variable}"
            self._infos.append(attrs.evolve(_info(entry), state="blocked", reason=reason))
        return bool(variable)

    def _clash(self, info: PluginInfo, others: Sequence[Entry]) -> None:
        """Several distributions have this name: a sole third party wins, else nobody does."""
        outsiders = [e for e in others if not e.first_party]
        if info.first_party and len(outsiders) == 1:
            reason = f"{outsiders[0].label} provides {info.name!r} too, and comes before us"
            self._infos.append(attrs.evolve(info, state="shadowed", reason=reason))
            self._notes.append(f"plugin {info.label} is shadowed: {reason}")
            return
        labels = " and ".join(e.label for e in others)
        error = PluginContractError(
            f"{labels} both provide a plugin named {info.name!r}; switch one off by "
            f"PARALLELKIT_DISABLE_PLUGINS=<distribution>"
        )
        self._fail(info, error)

    def _add(self, info: PluginInfo, load: Callable[[], Any]) -> None:
        """Load and register one plugin; whatever goes wrong is its own failure."""
        held = next((p for p in self._infos if p.name == info.name and p.state == "loaded"), None)
        if held is not None:
            reason = f"{held.label} has the name already"
            self._infos.append(attrs.evolve(info, state="shadowed", reason=reason))
            self._notes.append(f"plugin {info.label} is shadowed: {reason}")
            return
        try:
            plugin = load()
            twin = None if inspect.isclass(plugin) else self._twin(plugin)
            if twin is not None:
                reason = f"it is the same object as {twin!r}; one of the names is enough"
                self._infos.append(attrs.evolve(info, state="duplicate", reason=reason))
                self._notes.append(f"plugin {info.label}: {reason}")
                return
            self._register(plugin, info.name)
        except (Exception, SystemExit) as error:  # a plugin does not end the program
            self._fail(info, error)
        else:
            self._infos.append(info)

    def _twin(self, plugin: object) -> str | None:
        """Return the name that this very object is registered under."""
        return next((n for n, p in self._pm.list_name_plugin() if p is plugin), None)

    def _register(self, plugin: object, name: str) -> None:
        check_api(plugin)
        check_shape(plugin)
        try:
            self._pm.register(plugin, name=name)
        except pluggy.PluginValidationError as error:
            raise PluginContractError(str(error)) from error
        finally:
            # pluggy 1.6 leaves hooks of a plugin behind that it refused
            if self._pm.get_plugin(name) is not plugin and self._twin(plugin) is not None:
                self._pm.unregister(plugin)

    def _fail(self, info: PluginInfo, error: BaseException) -> None:
        kind = "" if isinstance(error, PluginError) else f"{type(error).__name__}: "
        self._infos.append(attrs.evolve(info, state="failed", reason=f"{kind}{error}", error=error))

    def _failed(self) -> list[PluginInfo]:
        return [p for p in self._infos if p.state == "failed"]

    # --- registration by a program

    def register(self, plugin: object, name: str) -> PluginInfo:
        """Add a plugin that no entry point names; allowed at any time, it counts at once.

        One that entry points brought under the same name is shadowed.

        Raises:
            PluginLoadError: it is no plugin, or `name` is registered by a program already.
        """
        info = PluginInfo(name=name, value=getattr(plugin, "__name__", type(plugin).__qualname__))
        with self._lock:
            for held in [p for p in self._infos if p.name == name and p.state == "loaded"]:
                if not held.dist:
                    raise PluginLoadError(f"a plugin is registered as {name!r} already")
                self._pm.unregister(name=name)
                reason = f"a program registered another plugin as {name!r}"
                shadowed = attrs.evolve(held, state="shadowed", reason=reason)
                self._infos[self._infos.index(held)] = shadowed
                self._notes.append(f"plugin {held.label} is shadowed: {reason}")
            try:
                self._register(plugin, name)
            except (Exception, SystemExit) as error:
                raise PluginLoadError(f"cannot register plugin {name!r}: {error}") from error
            self._infos.append(info)
        return info

    def unregister(self, name: str) -> None:
        """Remove a plugin that `register` added; harmless if there is none."""
        with self._lock:
            for held in [p for p in self._infos if p.name == name and not p.dist]:
                self._pm.unregister(name=name)
                self._infos.remove(held)

    # --- calling (used by `parallelkit.hooks` only)

    def implementations(self, hook: str, *, plugin: str | None = None) -> list[Implementation]:
        """List implementations of `hook`: tryfirst, third party, first party, core, by name.

        The order depends on names only, never on who registered when. Scans on first need.
        """
        if hook not in HOOKS:
            raise ValueError(f"{hook!r} is not a hook")
        self.load()
        with self._lock:
            by_name = {p.name: p for p in self._infos if p.state == "loaded"}
            found = []
            for impl in getattr(self._pm.hook, hook).get_hookimpls():
                info = by_name[impl.plugin_name]
                if plugin is None or info.name == plugin:
                    arguments = (*impl.argnames, *impl.kwargnames)
                    place = (not impl.tryfirst, impl.trylast, info.first_party, _order(info))
                    found.append((place, Implementation(info, impl.function, arguments)))
        return [implementation for _, implementation in sorted(found, key=lambda pair: pair[0])]

    def record(self, plugin: PluginInfo, hook: str, error: BaseException) -> HookFailure:
        """Keep a hook's failure, and warn about it the first time."""
        failure = HookFailure(plugin=plugin, hook=hook, error=error)
        key = (plugin.name, hook, failure.reason)
        with self._lock:
            first = key not in self._warned
            self._warned.add(key)
            if first:
                self.failures.append(failure)
        if first:
            warnings.warn(f"plugin {plugin.label}: {failure.reason}", PluginWarning, stacklevel=3)
        return failure


def _order(info: PluginInfo) -> tuple[bool, str, str]:
    """Core's own plugin last, the others by distribution and name."""
    return (info.dist == "parallelkit", info.dist, info.name)


def _info(entry: Entry) -> PluginInfo:
    return PluginInfo(
        name=entry.name or "(unreadable)",
        dist=entry.dist,
        version=entry.version,
        value=entry.value,
        first_party=entry.first_party,
    )


def _clashes(entries: Sequence[Entry]) -> dict[Entry, list[Entry]]:
    """Map entries that share a name with another distribution's to all of that name.

    A third party that has a first party's name to itself is no clash: it is loaded, the first
    party's is shadowed.
    """
    named: dict[str, list[Entry]] = {}
    for entry in entries:
        if not entry.problem:
            named.setdefault(canonical(entry.name), []).append(entry)
    clashes = {}
    for group in named.values():
        if len({e.dist for e in group}) < 2:
            continue
        outsiders = [e for e in group if not e.first_party]
        losers = [e for e in group if e.first_party] if len(outsiders) == 1 else group
        clashes.update(dict.fromkeys(losers, group))
    return clashes


# --- the default manager -----------------------------------------------------------------------

_default: PluginManager | None = None
_default_lock = threading.Lock()


def default_manager() -> PluginManager:
    """Return the process's manager, made on first use."""
    global _default
    with _default_lock:
        if _default is None:
            _default = PluginManager()
        return _default


def register(plugin: object, name: str, *, manager: PluginManager | None = None) -> PluginInfo:
    """Add a plugin that no entry point names; see `PluginManager.register`."""
    return (manager or default_manager()).register(plugin, name)


def plugins(*, manager: PluginManager | None = None) -> list[PluginInfo]:
    """List every plugin found, loaded or not, with the reason. Scans entry points if need be."""
    return list((manager or default_manager()).load().plugins)


def reset() -> None:
    """Forget the default manager: the next call scans again. For tests."""
    global _default
    with _default_lock:
        _default = None
