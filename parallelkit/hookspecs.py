"""The hooks a plugin may implement, and the reference for all of them.

Common rules:

* A hook is called on the control plane only: at discovery, construction, diagnosis. What it
  returns is a *handle*; afterwards plain methods of the handle are called and pluggy is out of
  the way. No hook is ever called per step, per batch or per tensor.
* Hooks marked *collect* ask every plugin; an exception is that plugin's failure alone: it is
  kept, shown by `parallelkit doctor`, and the others are still asked.
* Hooks marked *first result* are called on the plugin that selection chose (see
  `parallelkit.selection`), or, where nothing was selected, on every plugin in a fixed order
  until one answers other than None. An exception from them reaches the user.
* An implementation takes the arguments by name and may leave out those it does not need. It is
  a plain function or method: coroutines, generators and hook wrappers are refused when the
  plugin is loaded, since only the chosen plugin's own implementation is called.
* Importing the module that holds the implementations must not import the framework: probes use
  `importlib.util.find_spec`; factories import on call.

Write implementations with `from parallelkit.plugin import hookimpl`.
"""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from parallelkit import graphs, protocols, specs

PROJECT = "parallelkit"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


# --- discovery ---------------------------------------------------------------------------------


@hookspec
def parallelkit_probe(request: specs.ProbeRequest) -> specs.Candidate | None:
    """Say what this plugin could do here. *Collect.*

    Called before each selection, in every process, possibly often: it must be fast, have no side
    effect and not import the framework.

    Returns:
        A `Candidate`, or None when the plugin serves no framework (a transport, say). A plugin
        whose framework is not installed answers with score 0 and the reason.
    """


# --- life of a training process ----------------------------------------------------------------


@hookspec(firstresult=True)
def parallelkit_init_process_group(spec: specs.GroupSpec) -> protocols.ProcessGroup | None:
    """Open the default process group. *First result*, of the selected plugin.

    Called by `pk.init_process_group` on every rank, after all arguments were validated and before
    any framework call of ours. The plugin sets the device from `spec.device` first, then makes
    the rendezvous within `spec.timeout`, adopts a group that the user opened before, and raises
    `RendezvousTimeoutError`, `PortInUseError` or `DeviceError` rather than the framework's own.
    None means "not mine" and, from a selected plugin, is reported as a bug of the plugin.
    """


@hookspec(firstresult=True)
def parallelkit_setup_parallel_context(
    spec: specs.ContextSpec, group: protocols.ProcessGroup
) -> protocols.ParallelContext | None:
    """Make a parallel context over an open group. *First result*, of the group's plugin.

    Collective over `group`. The plan is already validated against the group's world size and the
    plugin's features.
    """


@hookspec(firstresult=True)
def parallelkit_set_execution_mode(spec: specs.ExecutionSpec) -> protocols.ExecutionMode | None:
    """Prepare eager or graph execution. *First result*, of the selected plugin. Not collective."""


@hookspec(firstresult=True)
def parallelkit_check_graph(spec: specs.GraphSpec) -> graphs.GraphReport | None:
    """Say what keeps a function from being one graph. *First result*, of the selected plugin.

    The function is run once and everything that graph mode cannot take is reported, with file
    and line of the user's code. Other compiled functions of the process keep what was compiled.
    What the function itself raises becomes a `FunctionFailedError`, chained to it.
    """


@hookspec(firstresult=True)
def parallelkit_compare_modes(spec: specs.ComparisonSpec) -> graphs.ModeComparison | None:
    """Run a function in both modes and compare. *First result*, of the selected plugin.

    Each run sees the same arguments, random state and model state; all are restored. Errors as
    in `parallelkit_check_graph`.
    """


@hookspec(firstresult=True)
def parallelkit_launch(spec: specs.LaunchSpec) -> list[str] | None:
    """Give the command line that starts ranks with the framework's own launcher. *First result.*

    Called by `parallelkit run`. It starts nothing itself.
    """


# --- weight transfer ---------------------------------------------------------------------------


@hookspec(firstresult=True)
def parallelkit_weight_source(model: Any) -> protocols.WeightSource | None:
    """Read weights out of a model. *First result*, of the first plugin that knows its type.

    None means the type is not mine; tell by `sys.modules` and `isinstance`, never by importing.
    """


@hookspec(firstresult=True)
def parallelkit_weight_sink(
    target: Any, loader: Callable[..., Any] | None
) -> protocols.WeightSink | None:
    """Place weights into a target. *First result*, like `parallelkit_weight_source`.

    With a `loader` the answer is a `LoaderSink` that places by it; a plugin that has none leaves
    the argument out, and the user is told.
    """


@hookspec
def parallelkit_transports(request: specs.TransportRequest) -> list[specs.TransportCandidate]:
    """List the transports this plugin has, and whether they reach. *Collect.*

    Transports that do not reach are listed too, with the reason.
    """


@hookspec(firstresult=True)
def parallelkit_open_transport(spec: specs.TransportSpec) -> protocols.PublisherTransport | None:
    """Open one publisher rank's end of `spec.name`. *First result.* None: not my transport.

    Called in every rank that hands parts out, and told options of all transports: ignore those
    of others. What no candidate names among its options was refused before.
    """


@hookspec(firstresult=True)
def parallelkit_connect_transport(
    name: str, offer: bytes, key: bytes, options: Mapping[str, Any]
) -> protocols.SubscriberTransport | None:
    """Open the subscriber's end from one publisher rank's offer. *First result.*

    `key` is a pass for this connection. Both came over the authenticated control channel; they
    are still checked, never unpickled. `options` are those of `subscribe_weights`, for all
    transports: ignore those of others.
    """


@hookspec(firstresult=True)
def parallelkit_open_device(spec: specs.DeviceSpec) -> protocols.DevicePublisher | None:
    """Open one publisher rank's end of a transport of the lane `device`. *First result.*

    Called for `spec.name` in every rank that hands parts out. None: not my transport.
    """


@hookspec(firstresult=True)
def parallelkit_connect_device(
    name: str, offer: bytes, key: bytes, sink: protocols.DeviceSink
) -> protocols.DeviceSubscriber | None:
    """Open the subscriber's end of such a transport, to be read by `sink`'s device. *First result.*

    `offer` and `key` as of `parallelkit_connect_transport`.
    """


@hookspec(firstresult=True)
def parallelkit_engine_client(
    target: Any, options: Mapping[str, object]
) -> protocols.EngineClient | None:
    """Control an inference engine for `publisher.attach(target, **options)`. *First result.*

    Called on rank 0, in the thread that called `attach`. None means the type is not mine; tell by
    `sys.modules` and `isinstance`, or for an address by its form, never by importing. Whoever
    takes the target refuses options it does not know, by name. All clients know `name` (a string
    or None), `cache` (`"reset"` or `"keep"`) and `pause` (`"keep"`, `"wait"` or `"abort"`).
    Nothing of the engine is touched yet; that is the client's `init`.
    """


# --- people ------------------------------------------------------------------------------------


@hookspec
def parallelkit_diagnostics() -> list[specs.Section]:
    """Sections for `parallelkit doctor`. *Collect.* May import the framework; must not hang."""


@hookspec(firstresult=True)
def parallelkit_demo(spec: specs.DemoSpec) -> int | None:
    """Run `parallelkit demo` to its end and return the exit code. *First result*, of the
    selected plugin."""
