"""Tickets: whole or refused, once, in time, by whom they are for; and they leak nothing."""

from __future__ import annotations

import base64
import threading
import time
import traceback

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelkit.errors import TicketError
from parallelkit.weights import ticket as ticket_module
from parallelkit.weights.ticket import MAX_TICKET_CHARS, PREFIX, Ticket, TicketOffice

KEY = "k" * 40
TOKEN = bytes(range(32))
TICKET = Ticket("tcp://127.0.0.1:5600", KEY, TOKEN, 3)
CHARS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"


@pytest.fixture
def office():
    return TicketOffice("tcp://127.0.0.1:5600", KEY)


def token_of(text):
    return Ticket.decode(text).token


def signed(*fields):
    """A ticket with any fields and a right checksum."""
    body = msgspec.msgpack.encode(fields)
    raw = ticket_module._checksum(body) + body
    return PREFIX + base64.urlsafe_b64encode(raw).decode().rstrip("=")


# --- the string --------------------------------------------------------------------------------


@given(
    endpoint=st.text(st.characters(codec="utf-8"), max_size=60),
    token=st.binary(min_size=32, max_size=32),
    members=st.integers(1, 65536),
)
def test_a_ticket_survives_its_string(endpoint, token, members):
    ticket = Ticket(endpoint, KEY, token, members)
    text = ticket.encode()
    assert Ticket.decode(text) == ticket
    assert text.isascii()
    assert set(text[len(PREFIX) :]) <= set(CHARS)


@pytest.mark.parametrize("around", ["{}\n", "  {}  ", "\t{}\r\n"])
def test_space_around_it_is_forgiven(around):
    assert Ticket.decode(around.format(TICKET.encode())) == TICKET


def test_any_one_character_that_is_altered_is_refused():
    text = TICKET.encode()
    for at, old in enumerate(text):
        others = set(CHARS if at >= len(PREFIX) else ".aPK2") - {old}
        for new in others | {"=", "+", "/", "é", "\0"}:
            with pytest.raises(TicketError):
                Ticket.decode(text[:at] + new + text[at + 1 :])


def test_any_character_that_is_missing_doubled_or_swapped_is_refused():
    text = TICKET.encode()
    for at in range(len(text)):
        with pytest.raises(TicketError):
            Ticket.decode(text[:at] + text[at + 1 :])
        if at >= len(PREFIX):
            with pytest.raises(TicketError):
                Ticket.decode(text[:at] + text[at] + text[at:])
        if at + 1 < len(text) and text[at] != text[at + 1]:
            with pytest.raises(TicketError):
                Ticket.decode(text[:at] + text[at + 1] + text[at] + text[at + 2 :])


def test_a_ticket_that_is_cut_is_refused():
    text = TICKET.encode()
    for end in range(len(text)):
        with pytest.raises(TicketError):
            Ticket.decode(text[:end])


@pytest.mark.parametrize(
    "text",
    ["", " ", "pk1", "pk2.AAAA", "PK1.AAAA", "hello", None, 7, b"pk1.AAAA", ["pk1."], "tcp://h:1"],
)
def test_what_is_no_ticket_says_where_tickets_come_from(text):
    with pytest.raises(TicketError, match=r"not a parallelkit ticket.*publisher\.new_ticket"):
        Ticket.decode(text)


@pytest.mark.parametrize(
    "text",
    [
        PREFIX,
        PREFIX + "====",
        PREFIX + "A",
        PREFIX + "A" * 100,
        PREFIX + "ÄÖÜ" * 20,
        PREFIX + "A" * (MAX_TICKET_CHARS + 1),
        TICKET.encode() + "A" * MAX_TICKET_CHARS,
        TICKET.encode() + "=",
        TICKET.encode() + "\0",
        TICKET.encode().replace(".", ".\n"),
        PREFIX + TICKET.encode(),
        signed(),
        signed("tcp://127.0.0.1:1", KEY, TOKEN),
        signed("tcp://127.0.0.1:1", KEY, TOKEN, 1, 1),
        signed(1, KEY, TOKEN, 1),
        signed("tcp://127.0.0.1:1", KEY[:-1], TOKEN, 1),
        signed("tcp://127.0.0.1:1", KEY, TOKEN[:-1], 1),
        signed("tcp://127.0.0.1:1", KEY, TOKEN + b"0", 1),
        signed("tcp://127.0.0.1:1", KEY, "t" * 32, 1),
        signed("tcp://127.0.0.1:1", KEY, TOKEN, 0),
        signed("tcp://127.0.0.1:1", KEY, TOKEN, -1),
        signed("tcp://127.0.0.1:1", KEY, TOKEN, 65537),
        signed("tcp://127.0.0.1:1", KEY, TOKEN, True),
        signed("tcp://127.0.0.1:1", KEY, TOKEN, 1.5),
        signed("tcp://127.0.0.1:1", KEY, TOKEN, None),
    ],
)
def test_what_is_damaged_says_to_copy_it_whole(text):
    with pytest.raises(TicketError, match=r"damaged or was altered.*publisher.new_ticket\(\)"):
        Ticket.decode(text)


def test_the_longest_endpoint_that_fits_is_read_and_a_longer_one_is_not():
    assert Ticket.decode(Ticket("e" * 600, KEY, TOKEN, 1).encode()).endpoint == "e" * 600
    with pytest.raises(TicketError):
        Ticket.decode(Ticket("e" * 1000, KEY, TOKEN, 1).encode())


def test_nothing_printed_holds_the_token(office):
    text, _ = office.issue(1, None, None)
    token = token_of(text)
    issued = office.redeem(token, 0)
    printed = [repr(Ticket.decode(text)), str(Ticket.decode(text)), repr(issued)]
    secret = text[len(PREFIX) + 12 :]
    broken = text[:-1] + ("A" if text[-1] != "A" else "B")
    for call in (
        lambda: Ticket.decode(broken),
        lambda: Ticket.decode(secret),
        lambda: Ticket.decode(text[1:]),
        lambda: office.redeem(token, 0),
        lambda: office.redeem(token, 5),
    ):
        with pytest.raises(TicketError) as caught:
            call()
        printed.append("".join(traceback.format_exception_only(caught.value)))
        printed.append(str(caught.value.__cause__))
    for line in printed:
        assert repr(token)[2:-1] not in line
        assert token.hex() not in line
        assert not any(secret[i : i + 16] in line for i in range(len(secret) - 16))


# --- the office --------------------------------------------------------------------------------


def test_tickets_are_numbered_and_labelled(office):
    numbers = [office.issue(1, None, name)[1] for name in (None, "eval", None)]
    assert numbers == [1, 2, 3]
    tokens = [token_of(office.issue(1, None, "late")[0]) for _ in range(20)]
    assert len(set(tokens)) == 20
    assert office.redeem(tokens[0], 0).label == "late"
    text, number = office.issue(1, None, None)
    assert office.redeem(token_of(text), 0).label == f"subscriber-{number}"


def test_the_string_names_the_publisher_and_the_group(office):
    ticket = Ticket.decode(office.issue(4, 60.0, None)[0])
    assert (ticket.endpoint, ticket.server_key) == ("tcp://127.0.0.1:5600", KEY)
    assert ticket.members == 4


@pytest.mark.parametrize("members", [0, -1, 65537, True, 1.0, "1", None])
def test_members_out_of_range_cannot_be_issued(office, members):
    with pytest.raises(TicketError, match="a ticket is for 1 to 65536 member ranks"):
        office.issue(members, None, None)


@pytest.mark.parametrize("expires", [0, -1.0, float("nan"), "5", True])
def test_an_impossible_expiry_cannot_be_issued(office, expires):
    with pytest.raises(TicketError, match="give seconds above 0, or None for never"):
        office.issue(1, expires, None)


def test_tickets_that_nobody_can_use_any_more_are_forgotten_but_for_the_latest(office, monkeypatch):
    monkeypatch.setattr(ticket_module, "REMEMBERED", 3)
    open_, open_number = office.issue(2, None, "open")
    office.redeem(token_of(open_), 0)
    tickets = []
    for _ in range(10):
        tickets.append(office.issue(1, None, "again"))
        office.redeem(token_of(tickets[-1][0]), 0)
    assert len(office._issued) == 5, "the open one, three that are spent, and the newest"
    assert [number for _, number in tickets] == list(range(2, 12))
    with pytest.raises(TicketError, match="used or expired long ago"):
        office.redeem(token_of(tickets[0][0]), 0)
    with pytest.raises(TicketError, match="has joined already"):
        office.redeem(token_of(tickets[-1][0]), 0)
    assert not office.usable(tickets[0][1])
    assert not office.usable(open_number)
    assert office.redeem(token_of(open_), 1).label == "open"
    assert len({ticket.label for ticket in office._issued}) == 5


def test_labels_and_revoking_go_by_number_after_others_are_forgotten(office, monkeypatch):
    monkeypatch.setattr(ticket_module, "REMEMBERED", 2)
    for _ in range(6):
        number = office.issue(1, 300.0, None)[1]
        office.revoke(number)
    kept, last = office.issue(1, 300.0, "kept"), office.issue(1, 300.0, "last")
    assert (office.label(kept[1]), office.label(last[1])) == ("kept", "last")
    office.revoke(kept[1])
    office.revoke(1)  # forgotten long ago
    assert not office.usable(kept[1])
    assert office.usable(last[1])


def test_a_ticket_is_used_once(office):
    text, number = office.issue(1, 60.0, None)
    assert office.usable(number)
    office.redeem(token_of(text), 0)
    assert not office.usable(number)
    with pytest.raises(TicketError, match=r"joined already.*publisher.new_ticket\(\)"):
        office.redeem(token_of(text), 0)


def test_each_member_of_a_group_uses_it_once(office):
    text, number = office.issue(3, None, None)
    for member in (2, 0, 1):
        office.redeem(token_of(text), member)
        assert not office.usable(number)
    for member in range(3):
        with pytest.raises(TicketError, match=f"member {member} of this ticket has joined"):
            office.redeem(token_of(text), member)


@pytest.mark.parametrize("member", [-1, 3, 2**62])
def test_a_member_that_it_is_not_for(office, member):
    text, number = office.issue(3, None, None)
    with pytest.raises(TicketError, match="this ticket is for member ranks 0 to 2"):
        office.redeem(token_of(text), member)
    assert office.usable(number), "a refused member uses nothing up"


def test_an_expired_ticket_says_how_to_get_another(office):
    text, number = office.issue(2, 0.05, None)
    assert office.usable(number)
    office.redeem(token_of(text), 0)
    time.sleep(0.06)
    assert not office.usable(number)
    with pytest.raises(TicketError, match=r"expired.*new_ticket\(expires="):
        office.redeem(token_of(text), 1)


@pytest.mark.parametrize("expires", [None, float("inf")])
def test_a_ticket_may_never_expire(office, expires, monkeypatch):
    text, number = office.issue(1, expires, None)
    now = time.monotonic()
    monkeypatch.setattr(ticket_module.time, "monotonic", lambda: now + 1e9)
    assert office.usable(number)
    office.redeem(token_of(text), 0)


@pytest.mark.parametrize("token", [b"", TOKEN, bytes(32), b"x" * 64])
def test_an_unknown_token_is_refused(office, token):
    office.issue(1, None, None)
    with pytest.raises(TicketError, match="issued no such ticket: altered, of another run, or"):
        office.redeem(token, 0)


def test_another_publisher_s_ticket_is_unknown(office):
    text, _ = TicketOffice("tcp://127.0.0.1:5600", KEY).issue(1, None, None)
    with pytest.raises(TicketError, match="of another run"):
        office.redeem(token_of(text), 0)


def test_of_sixteen_threads_exactly_one_wins(office):
    for _ in range(20):
        token = token_of(office.issue(1, None, None)[0])
        start = threading.Barrier(16)
        outcomes = []

        def use(token=token, start=start, outcomes=outcomes):
            start.wait()
            try:
                office.redeem(token, 0)
            except TicketError:
                outcomes.append(False)
            else:
                outcomes.append(True)

        threads = [threading.Thread(target=use) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(outcomes) == [False] * 15 + [True]


def test_threads_that_issue_get_numbers_of_their_own(office):
    numbers = []
    threads = [
        threading.Thread(target=lambda: numbers.append(office.issue(1, None, None)[1]))
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(1, 17))
