"""Reports: for people, for programs, for a trace viewer, and through a broadcast."""

from __future__ import annotations

import json

import attrs
import pytest

from parallelkit.weights.report import (
    MemberReport,
    TransferReport,
    report_from_dict,
    verified_by_all,
)

PHASES = {
    "begin": 0.001,
    "stage": 0.25,
    "ready": 0.002,
    "digest": 0.047,
    "verify": 0.1,
    "commit": 0.1,
}


def member(name="subscriber-1.0 (pid 42 on h)", state="committed", **fields):
    return MemberReport(name=name, state=state, **{"version": 3} | fields)


def report(**fields):
    given = {
        "version": 3,
        "nbytes": 1_000_000_000,
        "tensors": 290,
        "transport": "shm",
        "verify": "digest",
        "verified": "verified: every byte",
        "phases": PHASES,
        "started_at": 1.7e9,
        "members": (
            member(
                prepare_seconds=0.08,
                pause_seconds=0.05,
                transport="shm",
                sources=((0, 10**9),),
                live_tensors=288,
                staged_tensors=2,
            ),
            member(
                "b.0",
                "staged",
                transport="tcp",
                sources=((2, 5 * 10**6), (3, 10**6)),
                staged_tensors=290,
            ),
            member("c.0", "quarantined", version=2, pause_seconds=0.07, reason="disk on fire"),
            member("d.0", "lost", version=2, reason="its connection ended"),
        ),
        "changed_ratio": 0.25,
        "notes": ("staged members go live later",),
    }
    return TransferReport(**given | fields)


def test_derived_values():
    made = report()
    assert made.seconds == pytest.approx(0.5)
    assert made.gigabytes_per_second == pytest.approx(2.0)
    assert made.pause_seconds == 0.07
    assert made.quarantined == ("c.0", "d.0")
    assert [m.nbytes for m in made.members] == [10**9, 6 * 10**6, 0, 0]
    assert made.moved_bytes == 10**9 + 6 * 10**6


@pytest.mark.parametrize(
    ("transport", "ranks", "text"),
    [
        ("shm", (0,), "ms\n"),
        ("tcp", (0,), "ms, by tcp\n"),
        ("shm", (3,), "ms, 0.0 MB by shm from rank 3\n"),
        ("shm+tcp", (0, 1, 2), "ms, 0.0 MB by shm+tcp from ranks 0-2\n"),
        ("tcp", (0, 5), "ms, 0.0 MB by tcp from ranks 0, 5\n"),
        ("tcp", tuple(range(0, 40, 2)), "from ranks 0, 2, 4, 6, 8, 10, 12, 14, ...\n"),
    ],
)
def test_where_bytes_came_from_is_said_unless_it_is_rank_0_s_memory(transport, ranks, text):
    one = member(transport=transport, sources=tuple((rank, 8) for rank in ranks))
    assert text in str(report(members=(one,)))


@pytest.mark.parametrize(
    ("encrypted", "ranks", "text"),
    [
        (True, (0,), "ms, by tcp, encrypted\n"),
        (False, (0,), "ms, by tcp, in the clear\n"),
        (True, (0, 1), "ms, 0.0 MB by tcp from ranks 0-1, encrypted\n"),
    ],
)
def test_what_a_network_could_see_is_said(encrypted, ranks, text):
    one = member(transport="tcp", encrypted=encrypted, sources=tuple((rank, 8) for rank in ranks))
    made = report(members=(one,))
    assert text in str(made)
    assert json.loads(made.to_json())["members"][0]["encrypted"] is encrypted


def test_a_report_of_nothing():
    made = report(phases={}, members=(), nbytes=0, changed_ratio=None, notes=())
    assert (made.seconds, made.gigabytes_per_second, made.pause_seconds) == (0, 0.0, 0.0)
    assert made.quarantined == ()
    assert "0.0 MB" in str(made)
    assert report_from_dict(json.loads(made.to_json())) == made
    assert json.loads(made.to_chrome_trace())["traceEvents"] == []


@pytest.mark.parametrize(
    ("verify", "commit", "counts", "text"),
    [
        ("digest", "staged", [(0, 3)], "at the source and as received"),
        ("digest", "in_place", [(3, 0), (3, 0)], "at the source and as placed"),
        ("digest", "in_place", [(3, 0), (2, 1)], "at the source and as received"),
        ("readback", "staged", [(3, 0)], "as received and in live memory"),
        ("readback", "in_place", [(3, 0)], "as placed and in live memory"),
        ("readback", "staged", [(3, 0), (0, 3)], "live memory where a member says so"),
        ("sample", "staged", [(0, 3)], "a sixteenth"),
        ("off", "staged", [(0, 0)], "not verified"),
        ("readback", "staged", [], "nothing was sent"),
    ],
)
def test_no_more_is_claimed_of_all_members_than_holds_of_each(verify, commit, counts, text):
    members = [member(live_tensors=live, staged_tensors=staged) for live, staged in counts]
    assert text in verified_by_all(verify, commit == "in_place", members)


def test_no_speed_is_claimed_where_nothing_was_sent():
    made = report(members=())
    assert made.gigabytes_per_second == 0
    assert "500.0 ms, 25% changed; " in str(made)


def test_the_table_for_people():
    text = str(report())
    first, phases, *rest = text.splitlines()
    assert first == (
        "version 3: 1000.0 MB in 290 tensors, 500.0 ms (2.00 GB/s) by shm, 25% changed; "
        "verified: every byte"
    )
    assert phases.split() == [
        *("begin", "1.0", "ms", "stage", "250.0", "ms", "ready", "2.0", "ms"),
        *("digest", "47.0", "ms", "verify", "100.0", "ms", "commit", "100.0", "ms"),
    ]
    assert rest == [
        "  subscriber-1.0 (pid 42 on h): committed, version 3, verified: live memory; staged bytes "
        "for 2 of 290 tensors, pause 50.0 ms",
        "  b.0: staged, version 3, verified: staged bytes, pause 0.0 ms, 6.0 MB by tcp from ranks "
        "2-3",
        "  c.0: quarantined, version 2, verified: nothing, pause 70.0 ms (disk on fire)",
        "  d.0: lost, version 2, verified: nothing, pause 0.0 ms (its connection ended)",
        "  note: staged members go live later",
    ]
    assert "changed" not in str(report(changed_ratio=None))


def test_json_holds_every_field_and_the_derived_ones():
    made = report()
    data = json.loads(made.to_json())
    assert set(data) == {a.name for a in attrs.fields(TransferReport)} | {
        "seconds",
        "gigabytes_per_second",
        "pause_seconds",
        "moved_bytes",
        "quarantined",
    }
    assert data["quarantined"] == ["c.0", "d.0"]
    assert list(data["phases"]) == list(PHASES)
    assert data["members"][2]["reason"] == "disk on fire"
    assert [m["verified"] for m in data["members"]] == [
        "live memory; staged bytes for 2 of 290 tensors",
        "staged bytes",
        "nothing",
        "nothing",
    ]
    assert data["members"][0]["live_tensors"] == 288
    assert data["seconds"] == made.seconds


@pytest.mark.parametrize(
    "made", [report(), report(members=(), notes=(), changed_ratio=None), report(changed_ratio=0.0)]
)
def test_a_report_comes_back_from_its_dictionary(made):
    for data in (made.to_dict(), json.loads(made.to_json())):
        back = report_from_dict(data)
        assert back == made
        assert isinstance(back.members, tuple)
        assert isinstance(back.notes, tuple)
        assert str(back) == str(made)


def test_to_dict_is_a_copy():
    made = report()
    made.to_dict()["phases"]["begin"] = 99.0
    assert made.phases["begin"] == 0.001


def test_reports_do_not_change():
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        report().version = 4
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        member().state = "old"


def events(made):
    trace = json.loads(made.to_chrome_trace())
    assert trace["displayTimeUnit"] == "ms"
    for event in trace["traceEvents"]:
        assert event["ph"] == "X"
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
    return trace["traceEvents"]


def test_the_trace_has_the_phases_one_after_another():
    phases = [e for e in events(report()) if e["tid"] == 0]
    assert [e["name"] for e in phases] == list(PHASES)
    end = 0.0
    for event in phases:
        assert event["ts"] == pytest.approx(end)
        end = event["ts"] + event["dur"]
    assert end == pytest.approx(0.5e6)


def test_the_trace_has_each_member_in_a_row_of_its_own():
    made = report()
    for row, one in enumerate(made.members, 1):
        prepare, pause = (e for e in events(made) if e["tid"] == row)
        assert prepare["name"] == f"prepare {one.name}"
        assert prepare["ts"] + prepare["dur"] == pytest.approx(0.4e6), "ends with verify"
        assert pause["name"] == f"pause {one.name}"
        assert pause["ts"] + pause["dur"] == pytest.approx(0.5e6), "ends with commit"


def test_the_trace_of_a_member_slower_than_the_update_starts_at_zero():
    events(report(members=(member(prepare_seconds=100.0, pause_seconds=100.0),)))
    events(report(phases={"begin": 0.1}, members=(member(prepare_seconds=1.0),)))
