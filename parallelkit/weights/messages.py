"""Control messages: msgpack of typed structs. Unknown types, fields and sizes are refused.

Directions are marked P (publisher) and S (subscriber). Every message of an update carries version
and epoch; a message of another epoch is late and changes nothing.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from parallelkit.errors import (
    CoverageError,
    ManifestError,
    ManifestMismatchError,
    ProtocolError,
    StateError,
    TicketError,
    TransportError,
    WeightTransferError,
)
from parallelkit.specs import Accelerator, HostIdentity
from parallelkit.weights.layout import MAX_AXES, Mesh, ShardLayout
from parallelkit.weights.manifest import Manifest, TensorSpec

PROTOCOL = 4
#: Largest frame that a publisher accepts (digests of a petabyte; what a member keeps of three
#: million tensors), and that a subscriber accepts (a manifest of a million names).
MAX_TO_PUBLISHER = 16 << 20
MAX_TO_SUBSCRIBER = 256 << 20
#: Largest frame from a peer that has not shown a ticket yet.
MAX_HELLO = 4096

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # neither NaN nor infinite
Text = Annotated[str, msgspec.Meta(max_length=65536)]
Short = Annotated[str, msgspec.Meta(max_length=256)]
Key = Annotated[bytes, msgspec.Meta(min_length=16, max_length=64)]
#: Of one host, by UUID.
Devices = Annotated[list[Annotated[str, msgspec.Meta(max_length=48)]], msgspec.Meta(max_length=32)]
#: The name of an axis and its degree, a dim, or a coordinate.
Axis = tuple[Short, Count]
Axes = Annotated[list[Axis], msgspec.Meta(max_length=MAX_AXES)]
#: Name, dtype, shape, the name it is an alias of, which of the layouts it has, its fusion group.
Row = tuple[str, str, list[int], str | None, Count | None, str | None]
#: Offsets and sizes of a region.
Box = tuple[list[Count], list[Count]]


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="t"):
    """Base of all messages."""


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The device that a member's target is on; see `specs.Accelerator`."""

    device: Short
    reads: Devices
    sees: Devices
    fused: bool
    obstacles: Annotated[list[Short], msgspec.Meta(max_length=8)]


class Hello(_Message, frozen=True, tag="hello"):
    """S to P: let me join. The first message of a connection."""

    protocol: Count
    token: Key
    member: Count
    boot_id: Short
    uid: Count
    pid: Count
    pid_namespace: Count
    net_namespace: Count
    ipc_namespace: Count
    host: Short
    library: Short
    accelerator: Device | None


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank of the publisher that hands parts out, and how this member reaches it.

    `nbytes` are those of its export, which its arena holds `Welcome.slots` times; `key` is a pass.
    """

    rank: Count
    nbytes: Count
    transport: Short
    offer: bytes
    key: bytes


class Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a member keeps: the different regions, and for each unique tensor which, or None."""

    regions: list[Box]
    which: list[Count | None]


class Welcome(_Message, frozen=True, tag="welcome"):
    """P to S: you are in; this is what there is."""

    session: Key
    run_id: Key
    name: Text
    version: Count
    mesh: Axes
    layouts: list[tuple[Axes, Axes]]
    tensors: list[Row]
    manifest_digest: Key
    sources: list[Source]
    lane: Short
    slots: Annotated[int, msgspec.Meta(ge=1, le=2)]
    verify: Short
    commit: Short
    timeout: Seconds


class Opened(_Message, frozen=True, tag="opened"):
    """S to P: the target needs exactly this manifest and keeps this, the transports are connected.

    `kept` None: all of every tensor. `partial`: nobody in its group need keep the rest.
    """

    session: Key
    plan_digest: Key
    kept: Kept | None
    partial: bool


class Joined(_Message, frozen=True, tag="joined"):
    """P to S: you take part from the next update on."""

    version: Count


class Refused(_Message, frozen=True, tag="refused"):
    """Either way: no. `error` is the class name of the error to raise at the other side."""

    error: Short
    message: Text


class Begin(_Message, frozen=True, tag="begin"):
    """P to S: an update starts. `slot`: in which part of the arenas its bytes will be."""

    version: Count
    epoch: Count
    slot: Annotated[int, msgspec.Meta(ge=0, le=1)]
    timeout: Seconds


class Ready(_Message, frozen=True, tag="ready"):
    """S to P: I take part."""

    session: Key
    version: Count
    epoch: Count


class Transfer(_Message, frozen=True, tag="transfer"):
    """P to S: the bytes are there; fetch and hash them.

    `offers`: of ranks whose weights lie elsewhere since the member heard of them, the new offer.
    """

    version: Count
    epoch: Count
    offers: list[tuple[Count, bytes]]


class Prepared(_Message, frozen=True, tag="prepared"):
    """S to P: I hold the bytes, these are their digests (8 bytes a bucket, little endian).

    To be committed in place: nothing was fetched, I am ready to, and there are no digests.
    """

    session: Key
    version: Count
    epoch: Count
    digests: bytes
    seconds: Seconds


class Commit(_Message, frozen=True, tag="commit"):
    """P to S: decided. Put the bytes in place; `digests` are the source's where that fetches."""

    version: Count
    epoch: Count
    digests: bytes


class Committed(_Message, frozen=True, tag="committed"):
    """S to P: in place. `pause` is how long live memory was being written, in seconds.

    `repeated`: buckets that had to be fetched a second time, in place. `live`: tensors whose live
    memory was hashed; `received`: those of which only the bytes as received were.
    """

    session: Key
    version: Count
    epoch: Count
    readback: bytes
    pause: Seconds
    staged: bool
    repeated: Count
    live: Count
    received: Count


class Failed(_Message, frozen=True, tag="failed"):
    """S to P: I could not do my part."""

    session: Key
    version: Count
    epoch: Count
    phase: Short
    error: Short
    message: Text


class Abort(_Message, frozen=True, tag="abort"):
    """P to S: not this time; keep what you have."""

    version: Count
    epoch: Count
    reason: Text


class Leave(_Message, frozen=True, tag="leave"):
    """S to P: I close."""

    session: Key


class Close(_Message, frozen=True, tag="close"):
    """P to S: the publisher closes, or lets this member go."""

    reason: Text


ToPublisher = Hello | Opened | Refused | Ready | Prepared | Committed | Failed | Leave
ToSubscriber = Welcome | Joined | Refused | Begin | Transfer | Commit | Abort | Close

_encoder = msgspec.msgpack.Encoder()
_to_publisher: msgspec.msgpack.Decoder[ToPublisher] = msgspec.msgpack.Decoder(ToPublisher)
_to_subscriber: msgspec.msgpack.Decoder[ToSubscriber] = msgspec.msgpack.Decoder(ToSubscriber)


def encode(message: _Message) -> bytes:
    """Wire form of a message."""
    return _encoder.encode(message)


def decode_at_publisher(frame: bytes) -> ToPublisher:
    """Parse a frame that a subscriber sent.

    Raises:
        ProtocolError: it is not one of our messages.
    """
    message: ToPublisher = _decode(_to_publisher, frame)
    return message


def decode_at_subscriber(frame: bytes) -> ToSubscriber:
    """Parse a frame that the publisher sent.

    Raises:
        ProtocolError: it is not one of our messages.
    """
    message: ToSubscriber = _decode(_to_subscriber, frame)
    return message


def clip(text: str, limit: int = 2000) -> str:
    """`text` as the wire can carry it: shortened, and without lone surrogates."""
    return text[:limit].encode("utf-8", "replace").decode()


def error_of(message: Refused) -> WeightTransferError:
    """The error to raise for a refusal from the other side."""
    kinds: tuple[type[WeightTransferError], ...] = (
        CoverageError,
        ManifestMismatchError,
        ProtocolError,
        StateError,
        TicketError,
        TransportError,
    )
    kind = {kind.__name__: kind for kind in kinds}.get(message.error, ProtocolError)
    return kind(f"the publisher refused: {message.message}")


def _decode(decoder: msgspec.msgpack.Decoder[Any], frame: bytes) -> Any:
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(
            f"a peer sent {len(frame)} bytes that are no control message: {str(error)[:200]}"
        ) from error


def hello(token: bytes, member: int, identity: HostIdentity, host: str, library: str) -> Hello:
    """A `Hello` from this process."""
    return Hello(
        protocol=PROTOCOL,
        token=token,
        member=member,
        boot_id=identity.boot_id[:256],
        uid=identity.uid,
        pid=identity.pid,
        pid_namespace=identity.pid_namespace,
        net_namespace=identity.net_namespace,
        ipc_namespace=identity.ipc_namespace,
        host=host[:256],
        library=library,
        accelerator=_device_of(identity.accelerator),
    )


def _device_of(found: Accelerator | None) -> Device | None:
    if found is None:
        return None
    return Device(
        device=found.device[:48],
        reads=[uuid[:48] for uuid in found.reads[:32]],
        sees=[uuid[:48] for uuid in found.sees[:32]],
        fused=found.fused,
        obstacles=[clip(text, 256) for text in found.obstacles[:8]],
    )


def identity_of(message: Hello) -> HostIdentity:
    """The identity that a `Hello` states."""
    said = message.accelerator
    return HostIdentity(
        boot_id=message.boot_id,
        uid=message.uid,
        pid=message.pid,
        pid_namespace=message.pid_namespace,
        net_namespace=message.net_namespace,
        ipc_namespace=message.ipc_namespace,
        accelerator=None
        if said is None
        else Accelerator(
            device=said.device,
            reads=tuple(said.reads),
            sees=tuple(said.sees),
            fused=said.fused,
            obstacles=tuple(said.obstacles),
        ),
    )


def manifest_fields(manifest: Manifest) -> dict[str, Any]:
    """Wire form of a manifest: the fields `mesh`, `layouts` and `tensors` of a `Welcome`."""
    mesh = manifest.mesh
    numbers: dict[ShardLayout | None, int | None] = {None: None}
    for t in manifest.tensors:
        numbers.setdefault(t.layout, len(numbers) - 1)
    return {
        "mesh": [] if mesh is None else list(zip(mesh.axes, mesh.degrees, strict=True)),
        "layouts": [(list(layout.shards), list(layout.at)) for layout in numbers if layout],
        "tensors": [
            (t.name, t.dtype, list(t.shape), t.alias_of, numbers[t.layout], t.fusion)
            for t in manifest.tensors
        ],
    }


def manifest_of(message: Welcome) -> Manifest:
    """Read a manifest that came over the wire; every field is checked as if typed by hand.

    Raises:
        ProtocolError: it breaks a rule of manifests.
    """
    try:
        mesh = Mesh(*zip(*message.mesh, strict=True)) if message.mesh else None
        layouts = [ShardLayout(shards, at) for shards, at in message.layouts]
        rows = message.tensors
        if any(row[4] is not None and row[4] >= len(layouts) for row in rows):
            raise ManifestError(f"a tensor has a layout that is none of the {len(layouts)} given")
        return Manifest(
            (
                TensorSpec(
                    name=name,
                    dtype=dtype,
                    shape=tuple(shape),
                    alias_of=alias,
                    layout=None if number is None else layouts[number],
                    fusion=fusion,
                )
                for name, dtype, shape, alias, number, fusion in rows
            ),
            mesh,
        )
    except ManifestError as error:
        raise ProtocolError(f"the publisher's manifest is invalid: {error}") from error
