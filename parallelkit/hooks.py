"""One typed function for each hook. Nothing else in parallelkit calls a plugin.

*Collect* hooks ask every plugin by itself, so that one that raises costs nobody else's answer.
*First result* hooks ask one plugin where one was selected, else each in a fixed order until one
answers. Answers are checked: a wrong one is blamed on the plugin, by name and distribution.
"""

# Protocol classes are passed about here to be checked against, never to be instantiated.
# mypy: disable-error-code="type-abstract"

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar, cast

import attrs

from parallelkit import graphs, protocols, specs
from parallelkit.errors import ParallelKitError, PluginContractError, PluginError
from parallelkit.loader import PluginManager, default_manager
from parallelkit.records import HookFailure, Implementation, PluginInfo

T = TypeVar("T")

#: Hooks that are shown a user's object of any type: what they raise by mistake is the plugin's.
_WRAPPED = (
    "parallelkit_weight_source",
    "parallelkit_weight_sink",
    "parallelkit_engine_client",
)


@attrs.frozen
class Answer:
    """One plugin's answer to a collect hook."""

    plugin: PluginInfo
    value: Any


# --- discovery ---------------------------------------------------------------------------------


def probe(
    request: specs.ProbeRequest, *, manager: PluginManager | None = None
) -> tuple[list[Answer], list[HookFailure]]:
    """Ask every plugin what it could do; answers are `specs.Candidate`, failures are kept."""

    def check(value: object) -> specs.Candidate:
        return _instance(value, specs.Candidate, "parallelkit_probe")

    return _collect("parallelkit_probe", check, manager, request=request)


def diagnostics(*, manager: PluginManager | None = None) -> tuple[list[Answer], list[HookFailure]]:
    """Collect the sections of `parallelkit doctor`: each answer is a list of `specs.Section`."""

    def check(value: object) -> list[specs.Section]:
        return _list_of(value, specs.Section, "parallelkit_diagnostics")

    return _collect("parallelkit_diagnostics", check, manager)


# --- life of a training process ----------------------------------------------------------------


def init_process_group(
    plugin: PluginInfo, spec: specs.GroupSpec, *, manager: PluginManager | None = None
) -> protocols.ProcessGroup:
    """Open the default group by `plugin`. Collective; blocks up to `spec.timeout`.

    Raises:
        PluginContractError: it answered None, or something that is no `ProcessGroup`.
    """
    return _selected(
        "parallelkit_init_process_group", plugin, manager, protocols.ProcessGroup, spec=spec
    )


def setup_parallel_context(
    plugin: PluginInfo,
    spec: specs.ContextSpec,
    group: protocols.ProcessGroup,
    *,
    manager: PluginManager | None = None,
) -> protocols.ParallelContext:
    """Make a parallel context by `plugin`. Collective over `group`."""
    return _selected(
        "parallelkit_setup_parallel_context",
        plugin,
        manager,
        protocols.ParallelContext,
        spec=spec,
        group=group,
    )


def set_execution_mode(
    plugin: PluginInfo, spec: specs.ExecutionSpec, *, manager: PluginManager | None = None
) -> protocols.ExecutionMode:
    """Prepare an execution mode by `plugin`. Not collective."""
    return _selected(
        "parallelkit_set_execution_mode", plugin, manager, protocols.ExecutionMode, spec=spec
    )


def check_graph(
    plugin: PluginInfo, spec: specs.GraphSpec, *, manager: PluginManager | None = None
) -> graphs.GraphReport:
    """Check a function by `plugin`. Runs it once; collective where the function is."""
    answer = _call_one("parallelkit_check_graph", plugin, manager, spec=spec)
    check = partial(_instance, answer, graphs.GraphReport, "parallelkit_check_graph")
    return _checked(plugin, check)


def compare_modes(
    plugin: PluginInfo, spec: specs.ComparisonSpec, *, manager: PluginManager | None = None
) -> graphs.ModeComparison:
    """Compare modes by `plugin`. Runs the function many times; collective where it is."""
    answer = _call_one("parallelkit_compare_modes", plugin, manager, spec=spec)
    check = partial(_instance, answer, graphs.ModeComparison, "parallelkit_compare_modes")
    return _checked(plugin, check)


def launch(
    plugin: PluginInfo, spec: specs.LaunchSpec, *, manager: PluginManager | None = None
) -> list[str]:
    """Return the command line with which `plugin`'s framework starts ranks."""
    answer = _call_one("parallelkit_launch", plugin, manager, spec=spec)
    return _checked(plugin, lambda: _list_of(answer, str, "parallelkit_launch"))


def demo(plugin: PluginInfo, spec: specs.DemoSpec, *, manager: PluginManager | None = None) -> int:
    """Run `plugin`'s demo to its end and return the exit code."""
    answer = _call_one("parallelkit_demo", plugin, manager, spec=spec)
    return _checked(plugin, lambda: _instance(answer, int, "parallelkit_demo"))


# --- weight transfer ---------------------------------------------------------------------------


def weight_source(
    model: Any, *, manager: PluginManager | None = None
) -> protocols.WeightSource | None:
    """Return the reader of the first plugin that knows `model`'s type, or None."""
    return _first("parallelkit_weight_source", manager, protocols.WeightSource, model=model)


def weight_sink(
    target: Any,
    *,
    loader: Callable[..., Any] | None = None,
    manager: PluginManager | None = None,
) -> protocols.WeightSink | None:
    """Return the writer of the first plugin that knows `target`'s type, or None."""
    return _first(
        "parallelkit_weight_sink", manager, protocols.WeightSink, target=target, loader=loader
    )


def engine_client(
    target: Any, options: Mapping[str, object], *, manager: PluginManager | None = None
) -> protocols.EngineClient | None:
    """Return the client of the first plugin that knows the engine `target`, or None."""
    return _first(
        "parallelkit_engine_client",
        manager,
        protocols.EngineClient,
        target=target,
        options=options,
    )


def transports(
    request: specs.TransportRequest, *, manager: PluginManager | None = None
) -> list[specs.TransportCandidate]:
    """List every plugin's transports, those that do not reach included."""

    def check(value: object) -> list[specs.TransportCandidate]:
        return _list_of(value, specs.TransportCandidate, "parallelkit_transports")

    answers, _ = _collect("parallelkit_transports", check, manager, request=request)
    return [candidate for answer in answers for candidate in answer.value]


def open_transport(
    spec: specs.TransportSpec, *, manager: PluginManager | None = None
) -> protocols.PublisherTransport | None:
    """Open the publisher's end of `spec.name`, or return None where nobody has it."""
    return _first("parallelkit_open_transport", manager, protocols.PublisherTransport, spec=spec)


def connect_transport(
    name: str,
    offer: bytes,
    key: bytes,
    options: Mapping[str, Any] | None = None,
    *,
    manager: PluginManager | None = None,
) -> protocols.SubscriberTransport | None:
    """Open the subscriber's end from an offer and a pass; None where nobody has `name`."""
    return _first(
        "parallelkit_connect_transport",
        manager,
        protocols.SubscriberTransport,
        name=name,
        offer=offer,
        key=key,
        options=options or {},
    )


def open_device(
    spec: specs.DeviceSpec, *, manager: PluginManager | None = None
) -> protocols.DevicePublisher | None:
    """Open the publisher's end of `spec.name`, or return None where nobody has it."""
    return _first("parallelkit_open_device", manager, protocols.DevicePublisher, spec=spec)


def connect_device(
    name: str,
    offer: bytes,
    key: bytes,
    sink: protocols.DeviceSink,
    *,
    manager: PluginManager | None = None,
) -> protocols.DeviceSubscriber | None:
    """Open the subscriber's end from an offer and a pass; None where nobody has `name`."""
    return _first(
        "parallelkit_connect_device",
        manager,
        protocols.DeviceSubscriber,
        name=name,
        offer=offer,
        key=key,
        sink=sink,
    )


# --- how they are called -----------------------------------------------------------------------


def _collect(
    hook: str, check: Callable[[object], Any], manager: PluginManager | None, **given: Any
) -> tuple[list[Answer], list[HookFailure]]:
    manager = manager or default_manager()
    answers, failures = [], []
    for implementation in manager.implementations(hook):
        try:
            value = implementation(**given)
            if value is not None:
                answers.append(Answer(implementation.plugin, check(value)))
        except (Exception, SystemExit) as error:
            failures.append(manager.record(implementation.plugin, hook, error))
    return answers, failures


def _first(hook: str, manager: PluginManager | None, protocol: type[T], **given: Any) -> T | None:
    for implementation in (manager or default_manager()).implementations(hook):
        try:
            value = _invoke(implementation, hook, given)
        except ParallelKitError:
            raise
        except (Exception, SystemExit) as error:
            if hook not in _WRAPPED:
                raise
            label = implementation.plugin.label
            raise PluginError(
                f"plugin {label}: {hook} raised {type(error).__name__}: {error}"
            ) from error
        if value is not None:
            return _handle(implementation.plugin, hook, protocol, value)
    return None


def _selected(
    hook: str, plugin: PluginInfo, manager: PluginManager | None, protocol: type[T], **given: Any
) -> T:
    return _handle(plugin, hook, protocol, _call_one(hook, plugin, manager, **given))


def _call_one(hook: str, plugin: PluginInfo, manager: PluginManager | None, **given: Any) -> Any:
    """Call the selected plugin's implementation; an answer of None is that plugin's bug."""
    own = (manager or default_manager()).implementations(hook, plugin=plugin.name)
    if not own:
        raise PluginContractError(f"plugin {plugin.label} was selected but has no {hook}")
    for implementation in own:
        value = _invoke(implementation, hook, given)
        if value is not None:
            return value
    raise PluginContractError(
        f"plugin {plugin.label} was selected, yet its {hook} answered None ('not mine'); "
        "its probe and its hook disagree, please report it to the plugin's authors"
    )


def _invoke(implementation: Implementation, hook: str, given: dict[str, Any]) -> Any:
    try:
        return implementation(**given)
    except Exception as error:
        error.add_note(f"raised by {hook} of plugin {implementation.plugin.label}")
        raise


def _handle(plugin: PluginInfo, hook: str, protocol: type[T], value: object) -> T:
    """Return `value` as a `protocol`, or blame the plugin with the members that it lacks."""
    # By names, not by isinstance: before Python 3.12 that reads every property, and reading some,
    # such as a context's native mesh, makes what they give.
    own = set(dir(value))
    missing = [name for name in _members(protocol) if name not in own]
    if not missing:
        return cast("T", value)
    raise PluginContractError(
        f"plugin {plugin.label} answered {hook} with a {type(value).__qualname__}, which is no "
        f"{protocol.__name__}: it lacks {', '.join(missing)}"
    )


def _members(protocol: type[Any]) -> list[str]:
    """List what a protocol class itself declares: public names, and `with` where it has that."""
    context = ("__enter__", "__exit__")
    return sorted(n for n in vars(protocol) if not n.startswith("_") or n in context)


def _checked(plugin: PluginInfo, check: Callable[[], T]) -> T:
    try:
        return check()
    except PluginContractError as error:
        raise PluginContractError(f"plugin {plugin.label}: {error}") from None


def _instance(value: object, kind: type[T], hook: str) -> T:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise PluginContractError(
            f"{hook} answered {type(value).__name__} {value!r:.100}; it answers {kind.__name__}"
        )
    return value


def _list_of(value: object, kind: type[T], hook: str) -> list[T]:
    if not isinstance(value, list | tuple):
        raise PluginContractError(
            f"{hook} answered {type(value).__name__}; it answers a list of {kind.__name__}"
        )
    return [_instance(item, kind, hook) for item in value]
