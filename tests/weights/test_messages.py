"""Control messages: what is one of ours comes through, all else is a `ProtocolError`."""

from __future__ import annotations

import math

import attrs
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelkit.errors import ProtocolError
from parallelkit.specs import HostIdentity
from parallelkit.weights import messages as m
from parallelkit.weights.layout import Mesh, ShardLayout
from parallelkit.weights.manifest import Manifest, TensorSpec

KEY = b"s" * 16
UPDATE = {"version": 3, "epoch": 7}
MEMBER = {"session": KEY, **UPDATE}
HELLO = {
    "protocol": 1,
    "token": bytes(32),
    "member": 0,
    "boot_id": "b",
    "uid": 1000,
    "pid": 42,
    "pid_namespace": 1,
    "net_namespace": 2,
    "ipc_namespace": 3,
    "host": "h",
    "library": "0.1.0",
    "accelerator": m.Device(
        device="GPU-1", reads=["GPU-1"], sees=["GPU-1"], fused=True, obstacles=["none"]
    ),
}
WELCOME = {
    "session": KEY,
    "run_id": KEY,
    "name": "subscriber-1.0 (pid 42 on h)",
    "version": 0,
    "mesh": [("data", 2), ("tensor", 2)],
    "layouts": [([("tensor", 1)], [("data", 0)])],
    "tensors": [("w", "float32", [2, 3], None, 0, None), ("v", "float32", [2, 3], "w", 0, None)],
    "manifest_digest": KEY,
    "sources": [m.Source(rank=0, nbytes=256, transport="shm", offer=b"offer", key=b"pass")],
    "lane": "host",
    "slots": 1,
    "verify": "digest",
    "commit": "staged",
    "timeout": 60.0,
}
TO_PUBLISHER = [
    m.Hello(**HELLO),
    m.Opened(session=KEY, plan_digest=KEY, kept=None, partial=False),
    m.Opened(
        session=KEY, plan_digest=KEY, kept=m.Kept([([0, 1], [2, 3])], [0, None]), partial=True
    ),
    m.Refused(error="ManifestMismatchError", message="no"),
    m.Ready(**MEMBER),
    m.Prepared(**MEMBER, digests=b"12345678", seconds=0.5),
    m.Committed(**MEMBER, readback=b"", pause=0.25, staged=False, repeated=0, live=3, received=1),
    m.Failed(**MEMBER, phase="commit", error="OSError", message="disk"),
    m.Leave(session=KEY),
]
TO_SUBSCRIBER = [
    m.Welcome(**WELCOME),
    m.Joined(version=3),
    m.Refused(error="TicketError", message="used"),
    m.Begin(**UPDATE, slot=0, timeout=60.0),
    m.Transfer(**UPDATE, offers=[(0, b"offer")]),
    m.Commit(**UPDATE, digests=b"12345678"),
    m.Abort(**UPDATE, reason="a member failed"),
    m.Close(reason="the publisher closed"),
]
WAYS = [(m.decode_at_publisher, x) for x in TO_PUBLISHER]
WAYS += [(m.decode_at_subscriber, x) for x in TO_SUBSCRIBER]
NAMED = [pytest.param(*way, id=type(way[1]).__name__ + f"-{i}") for i, way in enumerate(WAYS)]
ENDS = [m.decode_at_publisher, m.decode_at_subscriber]

pack = msgspec.msgpack.encode


def plain(message):
    """A message as a dictionary that can be broken."""
    return msgspec.msgpack.decode(m.encode(message))


def refused(decode, data):
    with pytest.raises(ProtocolError, match="no control message"):
        decode(data if isinstance(data, bytes) else pack(data))


# --- what is ours ------------------------------------------------------------------------------


@pytest.mark.parametrize(("decode", "message"), NAMED)
def test_every_message_comes_through(decode, message):
    frame = m.encode(message)
    assert decode(frame) == message
    assert type(decode(frame)) is type(message)


def test_every_type_is_tested():
    assert {type(x) for x in TO_PUBLISHER} == set(m.ToPublisher.__args__)
    assert {type(x) for x in TO_SUBSCRIBER} == set(m.ToSubscriber.__args__)


@pytest.mark.parametrize("message", TO_PUBLISHER, ids=lambda x: type(x).__name__)
def test_no_end_takes_what_is_for_the_other(message):
    if not isinstance(message, m.Refused):
        refused(m.decode_at_subscriber, m.encode(message))


def test_the_largest_hello_is_a_hello():
    whole = m.Hello(**HELLO | {"boot_id": "b" * 256, "host": "h" * 256, "library": "1" * 256})
    assert len(m.encode(whole)) < m.MAX_HELLO


def test_hello_states_an_identity_and_cuts_what_is_long():
    identity = HostIdentity(
        boot_id="b" * 300, uid=1, pid=2, pid_namespace=3, net_namespace=4, ipc_namespace=5
    )
    said = m.hello(bytes(32), 6, identity, "h" * 300, "0.1.0")
    heard = m.decode_at_publisher(m.encode(said))
    assert isinstance(heard, m.Hello)
    assert (heard.protocol, heard.member, heard.host) == (m.PROTOCOL, 6, "h" * 256)
    stated = m.identity_of(heard)
    assert stated.boot_id == "b" * 256
    assert (stated.uid, stated.pid) == (1, 2)
    assert (stated.pid_namespace, stated.net_namespace, stated.ipc_namespace) == (3, 4, 5)


# --- what is not -------------------------------------------------------------------------------


@pytest.mark.parametrize(("decode", "message"), NAMED)
def test_a_message_with_a_field_too_many_or_too_few(decode, message):
    fields = plain(message)
    refused(decode, fields | {"more": 1})
    for name in fields:
        refused(decode, {k: v for k, v in fields.items() if k != name})


@pytest.mark.parametrize(("decode", "message"), NAMED)
def test_a_field_of_another_type(decode, message):
    fields = plain(message)
    for name, good in fields.items():
        for value in (None, True, [], {}, {"a": 1}, [[]], -1, 1.5, "x", b"x", 2**63):
            if not _may_be(name, good, value):
                refused(decode, fields | {name: value})


def _may_be(name, good, value):
    """Whether a value is as good as the right one for a field."""
    if name in ("kept", "accelerator"):  # None: everything; and no device
        return value is None
    if isinstance(good, bool):
        return isinstance(value, bool)
    if isinstance(good, str):
        return name != "t" and isinstance(value, str)
    if isinstance(good, bytes):  # without a Meta, as of offers and digests, any length is allowed
        return name in ("digests", "readback", "offer") and isinstance(value, bytes)
    if isinstance(good, float):
        return value == 1.5
    return isinstance(good, list) and value == []


@pytest.mark.parametrize("tag", ["", "hell", "Hello", "HELLO", "update", "x" * 10000, 7, None, b""])
@pytest.mark.parametrize("decode", ENDS)
def test_an_unknown_tag(decode, tag):
    refused(decode, {"t": tag, "version": 1})
    refused(decode, {"version": 1})


@pytest.mark.parametrize(("decode", "message"), NAMED)
def test_counts_are_neither_negative_nor_huge(decode, message):
    fields = plain(message)
    for name in [k for k, v in fields.items() if type(v) is int]:
        for value in (-1, -(2**63), 2**62 + 1, 2**63, 2**64 - 1):
            refused(decode, fields | {name: value})


@pytest.mark.parametrize(("decode", "message"), NAMED)
def test_seconds_are_numbers_of_seconds(decode, message):
    fields = plain(message)
    for name in [k for k, v in fields.items() if type(v) is float]:
        for value in (math.nan, math.inf, -math.inf, -0.5, 1e300):
            refused(decode, fields | {name: value})


@pytest.mark.parametrize(
    ("message", "name", "limit"),
    [
        (m.Hello(**HELLO), "boot_id", 256),
        (m.Hello(**HELLO), "host", 256),
        (m.Hello(**HELLO), "library", 256),
        (m.Failed(**MEMBER, phase="p", error="E", message="m"), "phase", 256),
        (m.Failed(**MEMBER, phase="p", error="E", message="m"), "error", 256),
        (m.Failed(**MEMBER, phase="p", error="E", message="m"), "message", 65536),
        (m.Refused(error="E", message="m"), "message", 65536),
    ],
)
def test_text_has_a_largest_length(message, name, limit):
    fields = plain(message)
    assert m.decode_at_publisher(pack(fields | {name: "x" * limit}))
    refused(m.decode_at_publisher, fields | {name: "x" * (limit + 1)})


@pytest.mark.parametrize("key", [b"", b"k" * 15, b"k" * 65])
def test_keys_have_a_length(key):
    refused(m.decode_at_publisher, plain(m.Leave(session=KEY)) | {"session": key})
    refused(m.decode_at_publisher, plain(m.Hello(**HELLO)) | {"token": key})
    refused(m.decode_at_subscriber, plain(m.Welcome(**WELCOME)) | {"manifest_digest": key})


@pytest.mark.parametrize(
    "rows",
    [
        [["w", "float32", [1], None, 0]],
        [["w", "float32", [1], None, 0, None, 0]],
        [["w", "float32", "1", None, None, None]],
        [["w", "float32", [1.5], None, None, None]],
        [["w", "float32", [None], None, None, None]],
        [[b"w", "float32", [1], None, None, None]],
        [["w", 4, [1], None, None, None]],
        [["w", "float32", [1], 4, None, None]],
        [["w", "float32", [1], None, -1, None]],
        [["w", "float32", [1], None, "0", None]],
        [["w", "float32", [1], None, [["data", 0]], None]],
        [["w", "float32", [1], None, None, 0]],
        ["w"],
        {"w": 1},
        None,
    ],
)
def test_rows_of_a_manifest_have_their_types(rows):
    refused(m.decode_at_subscriber, plain(m.Welcome(**WELCOME)) | {"tensors": rows})


@pytest.mark.parametrize(
    "mesh",
    [
        [["data"]],
        [["data", 2, 2]],
        [["data", -1]],
        [["data", "2"]],
        [["data", True]],
        [["data", 1.0]],
        [[b"data", 2]],
        [["a" * 257, 2]],
        ["data"],
        {"data": 2},
        None,
        [[f"axis{i}", 1] for i in range(17)],
    ],
)
def test_axes_have_their_types_and_a_largest_number(mesh):
    fields = plain(m.Welcome(**WELCOME))
    refused(m.decode_at_subscriber, fields | {"mesh": mesh})
    refused(m.decode_at_subscriber, fields | {"layouts": [[mesh, []]]})
    refused(m.decode_at_subscriber, fields | {"layouts": [[[], mesh]]})
    refused(m.decode_at_subscriber, fields | {"layouts": [mesh]})


@pytest.mark.parametrize(
    "kept",
    [
        {},
        [[], []],
        {"regions": [], "which": [], "more": 1},
        {"regions": [[[0], [1], [2]]], "which": []},
        {"regions": [[[0]]], "which": []},
        {"regions": [[[-1], [1]]], "which": []},
        {"regions": [[[2**63], [1]]], "which": []},
        {"regions": [[[0.5], [1]]], "which": []},
        {"regions": [["0", [1]]], "which": []},
        {"regions": [], "which": [-1]},
        {"regions": [], "which": ["0"]},
        {"regions": [], "which": None},
        5,
    ],
)
def test_what_is_kept_has_its_types(kept):
    opened = m.Opened(session=KEY, plan_digest=KEY, kept=None, partial=False)
    refused(m.decode_at_publisher, plain(opened) | {"kept": kept})


@pytest.mark.parametrize("field", ["rank", "nbytes", "transport", "offer", "key"])
def test_sources_have_their_types(field):
    fields = plain(m.Welcome(**WELCOME))
    source = fields["sources"][0]
    for bad in (None, 1.5, -1, [], {"a": 1}):
        refused(m.decode_at_subscriber, fields | {"sources": [source | {field: bad}]})
    without = {k: v for k, v in source.items() if k != field}
    refused(m.decode_at_subscriber, fields | {"sources": [without]})


@pytest.mark.parametrize("slots", [0, 3, -1, "1", None])
def test_an_arena_has_one_slot_or_two(slots):
    refused(m.decode_at_subscriber, plain(m.Welcome(**WELCOME)) | {"slots": slots})


@pytest.mark.parametrize(("decode", "message"), NAMED)
def test_a_frame_that_is_cut_or_too_long(decode, message):
    frame = m.encode(message)
    for end in range(len(frame)):
        refused(decode, frame[:end])
    refused(decode, frame + b"\xc0")
    refused(decode, frame + frame)


@pytest.mark.parametrize("decode", ENDS)
@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\xc0",
        b"\x81\xa1t\xc1",
        b"\x81\xa1t\xa2\xff\xfe",
        b"\x81\xa2\xff\xfe\xa1x",
        b"\x80",
        b"\x90",
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x81\xa1t\xdb\xff\xff\xff\xff",
        b"\x82\xa1t\xa5leave\xa7session\xc6\xff\xff\xff\xffx",
        b"\xd6\xff\x00\x00\x00\x00",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\x81\x01\x02",
        b"\x81\xc4\x01t\xa5leave",
        b"\x91" * 100_000,
        b"\x81\xa1t" * 100_000,
        b"\x81" + b"\x91" * 100_000,
        b"\x82\xa1t\xa5leave\xa1x" + b"\x91" * 100_000,
        b"\x82\xa1t\xa5leave\xa1x" + b"\x81\xa1x" * 100_000,
        b"\x82\xa1t\xa7welcome\xa7tensors" + b"\x91" * 100_000,
        b"cos\nsystem\n(S'true'\ntR.",
        b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00K\x01.",
        b'{"t": "leave", "session": "ssssssssssssssss"}',
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=lambda frame: repr(frame[:12]),
)
def test_frames_that_are_nothing_of_ours(decode, frame):
    refused(decode, frame)


@settings(max_examples=2000, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes(frame):
    for decode in ENDS:
        refused(decode, frame)


SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary()
VALUES = SCALARS | st.text() | st.lists(SCALARS, max_size=3) | st.just({"t": [{}]})


@settings(max_examples=300, deadline=None)
@given(way=st.sampled_from(WAYS), data=st.data())
def test_messages_that_are_almost_ours_are_taken_or_refused(way, data):
    decode, message = way
    fields = plain(message)
    name = data.draw(st.sampled_from(sorted(fields)))
    frame = pack(fields | {name: data.draw(VALUES)})
    flip = data.draw(st.none() | st.integers(0, len(frame) - 1))
    if flip is not None:
        frame = frame[:flip] + bytes([frame[flip] ^ data.draw(st.integers(1, 255))])
        frame += pack(fields)[flip + 1 :]
    try:
        taken = decode(frame)
    except ProtocolError:
        return
    assert decode(m.encode(taken)) == taken


def test_the_error_is_short_and_says_how_many_bytes_came():
    with pytest.raises(
        ProtocolError, match="a peer sent 50006 bytes that are no control"
    ) as caught:
        m.decode_at_publisher(pack({"t": "x" * 50_000}))
    assert len(str(caught.value)) < 400


# --- manifests ---------------------------------------------------------------------------------


def test_a_manifest_comes_through():
    mesh = Mesh(("pipeline", "data_shard", "tensor"), (2, 3, 4))
    both = ShardLayout((("tensor", 0), ("data_shard", 0)), (("pipeline", 1),))
    specs = [
        TensorSpec(name="w", dtype="bfloat16", shape=(2, 3), layout=both),
        TensorSpec(name="head", dtype="bfloat16", shape=(2, 3), alias_of="w", layout=both),
        TensorSpec(name="scalar", dtype="float64", shape=(), fusion="gate_up"),
        TensorSpec(name="none", dtype="bool", shape=(0, 7), layout=ShardLayout((("tensor", 1),))),
        TensorSpec(name="again", dtype="int8", shape=(5,), layout=both),
        TensorSpec(name="replica", dtype="int8", shape=(5,), layout=ShardLayout()),
    ]
    plain_ones = [attrs.evolve(spec, layout=None) for spec in specs]
    for manifest in (Manifest(specs, mesh), Manifest(plain_ones)):
        welcome = m.Welcome(**WELCOME | m.manifest_fields(manifest))
        heard = m.decode_at_subscriber(m.encode(welcome))
        assert isinstance(heard, m.Welcome)
        assert m.manifest_of(heard) == manifest
        assert m.manifest_of(heard).digest() == manifest.digest()
    assert len(m.manifest_fields(Manifest(specs, mesh))["layouts"]) == 3


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("", "float32", [1], None)], "tensor name ''"),
        ([("n" * 513, "float32", [1], None)], "at most 512 bytes"),
        ([("w", "object", [1], None)], "allowed are"),
        ([("w", "__class__", [1], None)], "allowed are"),
        ([("w", "float32", [-1], None)], "non-negative"),
        ([("w", "float32", [1] * 17, None)], "at most 16"),
        ([("w", "float32", [2**63, 2**63], None)], "the limit is"),
        ([("w", "float32", [1], None)] * 2, "occurs twice"),
        ([("w", "float32", [1], "v")], "not an earlier tensor"),
        ([("w", "float32", [1], "w")], "not an earlier tensor"),
        ([("w", "float32", [1], None), ("v", "float32", [2], "w")], "must be equal"),
    ],
)
def test_a_manifest_that_breaks_a_rule(rows, message):
    invalid({"tensors": [(*row, None, None) for row in rows]}, message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mesh": []}, "and the manifest no mesh"),
        ({"mesh": [("data", 0), ("tensor", 2)]}, "one positive integer for each axis"),
        ({"mesh": [("data", 2**62)] * 2}, "each once"),
        ({"mesh": [("a", 2**62), ("b", 2**62)]}, "ranks"),
        ({"mesh": [("", 2), ("tensor", 2)]}, "1 to 64 bytes"),
        ({"mesh": [("data", 2), ("model", 2)]}, "no axis 'tensor'"),
        ({"layouts": []}, "none of the 0 given"),
        ({"layouts": [([("tensor", 2)], [])]}, "2 dim"),
        ({"layouts": [([("tensor", 0)], [("data", 2)])]}, "allowed are 0 to 1"),
        ({"layouts": [([("tensor", 0)], [("tensor", 0)])]}, "names axis 'tensor' twice"),
        ({"layouts": [([("tensor", 0), ("tensor", 1)], [])]}, "names axis 'tensor' twice"),
    ],
)
def test_a_layout_that_breaks_a_rule(fields, message):
    invalid(fields, message)


def invalid(fields, message):
    heard = m.decode_at_subscriber(m.encode(m.Welcome(**WELCOME | fields)))
    with pytest.raises(ProtocolError, match="the publisher's manifest is invalid: ") as caught:
        m.manifest_of(heard)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 1500
