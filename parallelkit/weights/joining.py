"""The open phase at the subscriber: `subscribe_weights`."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from parallelkit import __version__, hooks
from parallelkit.errors import (
    NoBackendError,
    ParallelKitError,
    ProtocolError,
    TicketError,
    TransportError,
    UnsupportedFeatureError,
    UpdateTimeoutError,
    WeightTransferError,
)
from parallelkit.protocols import (
    DeviceSink,
    DeviceSubscriber,
    LoaderSink,
    RegionSink,
    SubscriberTransport,
    WeightSink,
)
from parallelkit.weights import messages as m
from parallelkit.weights.client import ControlClient
from parallelkit.weights.device_placement import DevicePlacement, DeviceReaders
from parallelkit.weights.endpoint import check_timeout
from parallelkit.weights.lanes import DEVICE
from parallelkit.weights.manifest import Manifest, check_exact, check_manifest
from parallelkit.weights.moves import needs_of
from parallelkit.weights.options import check_subscribe_options
from parallelkit.weights.orders import identity_of
from parallelkit.weights.placement import Placement
from parallelkit.weights.placing import Placing
from parallelkit.weights.plan import TransferPlan, plan_transfer
from parallelkit.weights.readers import Readers
from parallelkit.weights.subscriber import WeightSubscriber
from parallelkit.weights.ticket import MAX_MEMBERS, Ticket


def subscribe_weights(
    target: Any,
    ticket: str,
    *,
    member: int = 0,
    timeout: float = 60.0,
    loader: Callable[..., Any] | None = None,
    partial: bool = False,
    **options: Any,
) -> WeightSubscriber:
    """Let `target` follow a publisher.

    Blocks until the publisher has admitted this process and both ends agree on manifest and plan.
    Nothing of `target` is touched before the first update.

    Args:
        target: an `nn.Module`, whatever a plugin knows, or a `WeightSink`. One that keeps parts of
            tensors (`RegionSink`) gets those alone, from the ranks that have them.
        ticket: from `publisher.ticket` or `publisher.new_ticket()`; used up by this call.
        member: this process's rank within its group, for tickets with several members.
        timeout: seconds for joining; later waits use the publisher's.
        loader: places tensors that have other names or forms than the target's own, such as an
            engine's `module.load_weights`: takes pairs of published name and tensor, may return
            the names that it loaded. It is called once now, on a copy of the target without data,
            and in updates as far as plain copies do not do the same.
        partial: the target is meant to lack some of what is published. Else what the members of
            its ticket keep together has to be everything. Of a target that is not in parts
            (`RegionSink`) nothing may be lacking in any case.
        options: for transports; `connections=4` makes `tcp` pull over so many connections from
            each rank of the publisher, 1 to 16 (default 2).

    Raises:
        TicketError: malformed, altered, expired, used, or for another member rank.
        ManifestMismatchError: the target needs something else than is published; every difference
            is listed, and the publisher is told. With a loader also: a parameter that it gives no
            value, a published tensor that it makes nothing of.
        CoverageError: the members of the ticket together lack tensors, or parts of some. The last
            one gets it here, the others in their next `step()`.
        PeerLostError: nobody listens at the ticket's endpoint, or the publisher went away.
        TransportError: the publisher's memory cannot be reached from here, or an option is not one
            of those allowed.
        NeedsError: a `RegionSink` keeps something that is no part of its tensors.
        UpdateTimeoutError: no answer within `timeout`.
        NoBackendError: no plugin knows the target's type.
        UnsupportedFeatureError: the plugin that does has no way for loaders.

    Example:
        >>> follower = pk.subscribe_weights(model, ticket)       # doctest: +SKIP
        >>> while True:                                          # doctest: +SKIP
        ...     version = follower.step(timeout=600)
        ...     generate(model)
    """
    check_timeout(timeout)
    if isinstance(member, bool) or not isinstance(member, int) or not 0 <= member < MAX_MEMBERS:
        raise TicketError(f"member is {member!r:.80}; it is a rank within the group, from 0")
    if not isinstance(partial, bool):
        raise WeightTransferError(f"partial is {partial!r:.80}; it is True or False")
    decoded = Ticket.decode(ticket)
    sink = _sink_of(target, loader)
    needs: Manifest | None = None
    if not isinstance(sink, LoaderSink):
        needs = sink.needs()
        check_manifest(needs, sink)
    client = ControlClient(decoded, timeout)
    placement: Placing | None = None
    try:
        deadline = time.monotonic() + timeout
        client.send(
            m.hello(decoded.token, member, identity_of(sink), socket.gethostname(), __version__)
        )
        welcome = _expect(client, m.Welcome, deadline, timeout)
        try:
            published = m.manifest_of(welcome)
            if published.digest() != welcome.manifest_digest:
                raise ProtocolError("the two ends read different manifests")
            if isinstance(sink, LoaderSink):
                sink.learn(published)
            needs = sink.needs() if needs is None else needs
            check_exact(published, needs, partial=isinstance(sink, RegionSink))
            kept = needs_of(sink, needs, published)
            plan = plan_transfer(published, kept)
            check_subscribe_options(options)
            placement = _placement(sink, needs, plan, welcome, options)
        except (ParallelKitError, OSError) as error:
            client.send(m.Refused(error=type(error).__name__, message=m.clip(str(error), 60000)))
            raise
        wire = None if kept is None else m.Kept(*kept.to_wire())
        client.send(
            m.Opened(session=welcome.session, plan_digest=plan.digest, kept=wire, partial=partial)
        )
        _expect(client, m.Joined, deadline, timeout)
    except BaseException:
        if placement is not None:
            placement.readers.close()
        client.close()
        raise
    return WeightSubscriber(client, welcome, placement)


def _sink_of(target: Any, loader: Callable[..., Any] | None) -> WeightSink:
    if loader is not None and not callable(loader):
        raise WeightTransferError(f"loader is {loader!r:.200}; it is a function, or None")
    given = isinstance(target, WeightSink)
    sink = target if given else hooks.weight_sink(target, loader=loader)
    if sink is None:
        raise NoBackendError(
            f"no installed plugin places weights into a {type(target).__module__}."
            f"{type(target).__qualname__}; for an nn.Module: pip install parallelkit-torch"
        )
    if loader is not None and (given or not isinstance(sink, LoaderSink)):
        raise UnsupportedFeatureError(
            f"weights cannot be placed into a {type(target).__qualname__} by a loader; leave out "
            "loader=, or give an nn.Module"
        )
    return sink


def _placement(
    sink: WeightSink,
    needs: Manifest,
    plan: TransferPlan,
    welcome: m.Welcome,
    options: Mapping[str, Any],
) -> Placing:
    """Connect to the publisher by the lane that it chose."""
    if welcome.lane != DEVICE:
        readers = connect(welcome, plan, options)
        return Placement(sink, needs, readers, welcome.verify, welcome.run_id)
    if not isinstance(sink, DeviceSink):
        raise ProtocolError("the publisher lets a device read its weights, and there is none here")
    return DevicePlacement(
        sink, needs, connect_device(welcome, plan, sink), welcome.verify, welcome.run_id
    )


def connect(
    welcome: m.Welcome, plan: TransferPlan, options: Mapping[str, Any] | None = None
) -> Readers:
    """Open a transport to every rank of the publisher that this member gets bytes from."""
    sources = _sources(welcome, plan)
    with contextlib.ExitStack() as opened:
        transports = {
            rank: _transport(source, welcome.slots, options or {}, opened)
            for rank, source in sources.items()
        }
        readers = Readers(plan, transports, {rank: x.nbytes for rank, x in sources.items()})
        opened.pop_all()  # the readers close them
    return readers


def connect_device(welcome: m.Welcome, plan: TransferPlan, sink: DeviceSink) -> DeviceReaders:
    """The same, for the device that the target is on."""
    sources = _sources(welcome, plan)
    with contextlib.ExitStack() as opened:
        transports = {rank: _device(source, sink, opened) for rank, source in sources.items()}
        readers = DeviceReaders(plan, transports)
        opened.pop_all()
    return readers


def _sources(welcome: m.Welcome, plan: TransferPlan) -> dict[int, m.Source]:
    """How each rank of the plan is reached."""
    sources = {source.rank: source for source in welcome.sources}
    missing = [rank for rank in plan.ranks if rank not in sources]
    if missing:
        raise ProtocolError(f"the publisher did not say how its rank {missing[0]} is reached")
    return {rank: sources[rank] for rank in plan.ranks}


def _device(source: m.Source, sink: DeviceSink, opened: contextlib.ExitStack) -> DeviceSubscriber:
    transport = hooks.connect_device(source.transport, source.offer, source.key, sink)
    if transport is None:
        raise TransportError(
            f"no plugin installed here has the publisher's transport {source.transport!r}"
        )
    opened.callback(transport.close)
    return transport


def _transport(
    source: m.Source, slots: int, options: Mapping[str, Any], opened: contextlib.ExitStack
) -> SubscriberTransport:
    transport = hooks.connect_transport(source.transport, source.offer, source.key, options)
    if transport is None:
        raise TransportError(
            f"no plugin installed here has the publisher's transport {source.transport!r}"
        )
    opened.callback(transport.close)
    size = None if transport.memory is None else transport.memory.nbytes
    if size is not None and size != slots * source.nbytes:
        raise ProtocolError(
            f"the arena of the publisher's rank {source.rank} has {size} bytes instead of {slots} "
            f"times {source.nbytes}"
        )
    return transport


def _expect(client: ControlClient, kind: type[Any], deadline: float, timeout: float) -> Any:
    message = client.receive(deadline)
    if isinstance(message, kind):
        return message
    if isinstance(message, m.Refused):
        raise m.error_of(message)
    if message is None:
        raise UpdateTimeoutError(
            f"the {client.peer} did not answer within {timeout:g} s",
            missing=[client.peer],
        )
    raise ProtocolError(f"the publisher answered with {type(message).__name__}")
