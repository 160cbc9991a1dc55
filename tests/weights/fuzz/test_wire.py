"""What comes from a peer as text or bytes is taken as it is meant, or refused by a named error."""

from __future__ import annotations

import base64
import ipaddress
import itertools
import socket

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelkit.errors import ManifestError, ProtocolError, TicketError, TransportError
from parallelkit.weights import messages as m
from parallelkit.weights import ticket as ticket_module
from parallelkit.weights.endpoint import parse_endpoint
from parallelkit.weights.exports import export
from parallelkit.weights.manifest import DTYPE_BYTES, MAX_TENSOR_BYTES
from parallelkit.weights.passes import PASS_BYTES
from parallelkit.weights.plan import plan_transfer
from parallelkit.weights.shm import ShmSubscriber
from parallelkit.weights.ticket import PREFIX, Ticket

many = settings(max_examples=120, deadline=None, derandomize=True)
TICKET = Ticket("tcp://127.0.0.1:5600", "k" * 40, bytes(range(32)), 3)
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats()
ANYTHING = st.recursive(
    SCALARS | st.text(max_size=80) | st.binary(max_size=80),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=12,
)


def signed(body):
    """A ticket of any content whose checksum is right."""
    raw = ticket_module._checksum(body) + body
    return PREFIX + base64.urlsafe_b64encode(raw).decode().rstrip("=")


def decoded(text):
    """The ticket, or None where it was refused; that never shows the secret."""
    try:
        ticket = Ticket.decode(text)
    except TicketError as error:
        assert len(str(error)) < 500
        return None
    assert 1 <= ticket.members <= 65536
    assert (len(ticket.server_key), len(ticket.token)) == (40, 32)
    assert ticket.token.hex() not in repr(ticket)
    return ticket


@many
@given(ANYTHING)
def test_tickets_of_any_content(content):
    decoded(signed(msgspec.msgpack.encode(content)))


@many
@given(
    st.tuples(
        st.just("tcp://127.0.0.1:1") | ANYTHING,
        st.just("k" * 40) | ANYTHING,
        st.just(bytes(32)) | ANYTHING,
        st.just(1) | ANYTHING,
    )
)
def test_tickets_of_the_right_form(fields):
    ticket = decoded(signed(msgspec.msgpack.encode(fields)))
    right = isinstance(fields[0], str) and fields[1] == "k" * 40 and fields[2] == bytes(32)
    assert (ticket is not None) >= (right and fields[3] == 1 and fields[3] is not True)
    if ticket is not None:
        assert (ticket.endpoint, ticket.server_key) == fields[:2]


@many
@given(st.binary(max_size=300))
def test_tickets_of_random_bytes(body):
    assert decoded(PREFIX + base64.urlsafe_b64encode(body).decode().rstrip("=")) is None
    decoded(signed(body))


@many
@given(st.data())
def test_tickets_that_were_altered_in_several_places(data):
    text = list(TICKET.encode())
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at] = data.draw(st.characters(codec="utf-8", max_codepoint=300))
    assert decoded("".join(text)) in (None, TICKET)


ROWS = st.tuples(
    st.sampled_from(["w", "v", "", "x" * 600, "\ud7ff"]) | st.text(max_size=5),
    st.sampled_from([*DTYPE_BYTES, "object", "O", "__class__", "float31"]),
    st.lists(st.integers(-2, 5) | st.sampled_from([2**31, 2**62]), max_size=4),
    st.none() | st.sampled_from(["w", "v"]),
    st.none() | st.integers(0, 2),
    st.none() | st.sampled_from(["qkv", ""]),
)
AXES = st.lists(
    st.tuples(st.sampled_from(["data", "tensor", ""]), st.integers(0, 4) | st.just(2**62)),
    max_size=3,
)


@many
@given(
    tensors=st.lists(ROWS, max_size=4),
    mesh=st.just([("data", 2), ("tensor", 2)]) | AXES,
    layouts=st.lists(st.tuples(AXES, AXES), max_size=2),
)
def test_manifests_from_the_wire(tensors, mesh, layouts):
    welcome = m.Welcome(
        session=bytes(16),
        run_id=bytes(16),
        name="n",
        version=0,
        mesh=mesh,
        layouts=layouts,
        tensors=tensors,
        manifest_digest=bytes(16),
        sources=[],
        lane="host",
        slots=1,
        verify="digest",
        commit="staged",
        timeout=1.0,
    )
    heard = m.decode_at_subscriber(m.encode(welcome))
    try:
        manifest = m.manifest_of(heard)
    except ProtocolError as error:
        assert len(str(error)) < 3000
        return
    assert all(t.dtype in DTYPE_BYTES and t.nbytes <= MAX_TENSOR_BYTES for t in manifest.tensors)
    assert len({t.name for t in manifest.tensors}) == len(tensors)
    try:
        plan = plan_transfer(manifest)
    except ManifestError:
        assert not tensors
        return
    assert plan.nbytes == sum(t.nbytes for t in manifest.unique)
    for rank in plan.ranks:
        held = export(manifest, rank)
        ends = [(part.offset, part.offset + part.nbytes) for part in held.parts()]
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
        assert ends[-1][1] <= held.nbytes


OFFERS = st.fixed_dictionaries(
    {"nbytes": st.integers(-1, 5000) | ANYTHING},
    optional={
        "socket": st.text(max_size=120) | ANYTHING,
        "key": st.binary(max_size=40) | ANYTHING,
        "path": st.sampled_from(["/etc/passwd", "/dev/shm/../x", "/dev/shm/parallelkit-", "\0"])
        | st.text(max_size=40),
        "more": ANYTHING,
    },
)


@many
@given(OFFERS.map(msgspec.msgpack.encode) | ANYTHING.map(msgspec.msgpack.encode) | st.binary())
def test_offers_of_shared_memory(offer):
    try:
        ShmSubscriber(offer, bytes(PASS_BYTES)).close()
    except (ProtocolError, TransportError) as error:
        assert len(str(error)) < 1000
    else:
        raise AssertionError("it was given memory that nobody offered")


PARTS = st.sampled_from(
    ["tcp://", "127.0.0.1", "0.0.0.0", "::", "[", "]", ":", "*", "0", "1", "::1", "65535", "5600"]
)


@many
@given(st.lists(PARTS | st.text(max_size=3), max_size=6).map("".join))
def test_endpoints(text):
    real = socket.getaddrinfo

    def numeric_only(host, *args, **kwargs):
        return real(host, *args, flags=socket.AI_NUMERICHOST, **kwargs)

    socket.getaddrinfo = numeric_only
    try:
        host, port = parse_endpoint(text)
    except TransportError:
        return
    finally:
        socket.getaddrinfo = real
    address = ipaddress.ip_address(host.strip("[]"))
    assert not (getattr(address, "ipv4_mapped", None) or address).is_unspecified
    assert 0 <= port < 65536
