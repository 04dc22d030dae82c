"""The trace of a window of a real cluster: valid format, parts that sum to the total, each on the right worker."""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.observe.history import CHANGES, MAX_EVENTS, History
from cluster.observe.ledger import PHASES, LatencyLedger, parts
from cluster.offline.report.perfetto import us
from cluster.offline.report.window import events
from diptych.history import ClusterEvent, Load, RequestTrace, Window
from tests.offline.report.trace_rules import check
from tests.offline.scoring.made import split_ledger

DAY_NS = 1_795_370_705_703_589_123  # a time of day
MS = 1_000_000
LEDGER = split_ledger(5, 20, 10, 400)


def trail(name: str, arrived_ns: int = DAY_NS, ledger: LatencyLedger = LEDGER, **more: Any) -> RequestTrace:
    fields: dict[str, Any] = {
        "class_name": "default",
        "outcome": "completed",
        "detail": "",
        "phase": "decode",
        "open_ns": 0,
        "prompt_tokens": 100,
        "cached_tokens": 0,
        "output_tokens": 8,
        "attempts": 1,
        "prefill_worker": "prefill-0",
        "decode_worker": "decode-0",
    }
    return RequestTrace(name, arrived_ns=arrived_ns, ledger=ledger, **(fields | more))


def drawn(*traces: RequestTrace, **more: Any) -> list[dict[str, Any]]:
    found = list(events({"gateway-0": Window(traces, **more)}))
    check(found)
    times = [event["ts"] for event in found if event["ph"] != "M"]
    assert times == sorted(times)
    return found


def processes(found: list[dict[str, Any]]) -> dict[int, str]:
    return {event["pid"]: event["args"]["name"] for event in found if event["name"] == "process_name"}


def slices(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in found if event["ph"] == "X" and event["name"] != "transfer"]


def test_each_part_lies_on_the_worker_where_it_was_spent() -> None:
    found = drawn(trail("one", transfer_bytes=4096, transfer_ns=12 * MS))
    places = processes(found)
    names = defaultdict(list)
    for event in slices(found):
        names[places[event["pid"]]].append(event["name"])
    assert names == {
        "gateway-0": ["admission", "route", "reserve"],
        "prefill-0": ["prefill_queue", "prefill_compute", "prefill_wire"],
        "decode-0": ["transfer_wait", "decode_queue", "decode_compute", "decode_wire"],
    }
    (moved,) = [event for event in found if event["ph"] == "X" and event["name"] == "transfer"]
    assert places[moved["pid"]] == "decode-0" and moved["dur"] == 12_000


LEDGERS = st.builds(
    lambda first, rest: LatencyLedger(first, rest, sum(ns for _, ns in first), sum(ns for _, ns in first + rest)),
    *(st.lists(st.tuples(st.sampled_from(PHASES), st.integers(0, 10**10)), max_size=8).map(tuple) for _ in range(2)),
)
TRAILS = st.builds(
    trail,
    st.uuids().map(str),
    st.integers(DAY_NS, DAY_NS + 10**10),
    LEDGERS,
    outcome=st.sampled_from(["completed", "", "failed"]),
    open_ns=st.integers(0, 10**9),
    moves=st.lists(st.tuples(st.integers(DAY_NS, DAY_NS + 10**10), st.sampled_from(["decode-1", "decode-0"]))).map(
        lambda moves: tuple(sorted(moves))
    ),
    prefill_worker=st.sampled_from(["", "prefill-0", "decode-0"]),
    decode_worker=st.sampled_from(["", "decode-0"]),
    transfer_ns=st.integers(0, 10**9),
)


@settings(max_examples=40)
@given(st.lists(TRAILS, max_size=6))
def test_the_slices_of_a_request_touch_and_sum_to_its_time(traces: list[RequestTrace]) -> None:
    found = drawn(*traces)
    by_request = defaultdict(list)
    for event in slices(found):
        by_request[event["args"]["request"]].append((event["ts"], event["ts"] + event["dur"]))
    for each in traces:
        whole = us(each.end_ns) - us(each.arrived_ns)
        spans = by_request[each.request_id]
        assert sum(end - begin for begin, end in spans) == whole
        assert all(one[1] == other[0] for one, other in pairwise(spans))
        assert sum(span.end_ns - span.begin_ns for span in parts(each)) == each.end_ns - each.arrived_ns


def test_a_decode_that_moved_is_cut_where_it_did() -> None:
    moved_ns = DAY_NS + 200 * MS
    found = drawn(trail("one", moves=((moved_ns, "decode-1"),)))
    places = processes(found)
    computing = [event for event in slices(found) if event["name"] == "decode_compute"]
    assert [places[event["pid"]] for event in computing] == ["decode-0", "decode-1"]
    assert computing[1]["ts"] == us(moved_ns) and computing[0]["ts"] + computing[0]["dur"] == us(moved_ns)


def test_a_request_under_way_ends_now() -> None:
    found = drawn(trail("one", outcome="", open_ns=50 * MS))
    last = slices(found)[-1]
    assert last["name"] == "decode, no further part known" and last["dur"] == 50_000
    assert next(event for event in found if event["ph"] == "b")["args"]["outcome"] == "under way"


def test_happenings_are_instants_and_loads_are_counters() -> None:
    flip = ClusterEvent(DAY_NS, "flip", "decode-1", "decode -> prefill")
    refused = ClusterEvent(DAY_NS + MS, "refused", "", "queue-full", "two")
    load = Load(DAY_NS, "decode-1", 3, 2, 128, 40)
    found = drawn(events=(flip, refused), loads=(load,))
    places = processes(found)
    instants = [(places[event["pid"]], event["name"], event["args"]) for event in found if event["ph"] == "i"]
    assert instants == [
        ("decode-1", "flip", {"what": "decode -> prefill"}),
        ("gateway-0", "refused", {"what": "queue-full", "request": "two"}),
    ]
    counted = {event["name"]: event["args"] for event in found if event["ph"] == "C"}
    assert counted["sequences"] == {"running": 3, "waiting": 2} and counted["KV blocks"] == {"used": 40}


def test_two_gateways_share_the_workers_tracks() -> None:
    windows = {f"gateway-{n}": Window((trail(f"of-{n}"),), (), (Load(DAY_NS, "decode-0", n, 0, 0, 0),)) for n in (0, 1)}
    found = list(events(windows))
    check(found)
    assert sorted(processes(found).values())[:4] == ["decode-0", "gateway-0", "gateway-1", "prefill-0"]
    assert len([event for event in found if event["ph"] == "C"]) == 3  # of the first gateway only


# ---- what a gateway keeps ----------------------------------------------------------------------------------------


class Clock:
    now_ns = DAY_NS

    def __call__(self) -> int:
        return self.now_ns


def test_history_keeps_at_most_the_configured_number_and_age_of_requests() -> None:
    clock = Clock()
    history = History(3, 10.0, clock)
    for n in range(5):
        clock.now_ns += 10**9
        history.add_trace(trail(str(n), clock.now_ns - LEDGER.total_ns))
    assert [each.request_id for each in history.window(0, clock.now_ns).traces] == ["2", "3", "4"]
    clock.now_ns += 9 * 10**9
    assert [each.request_id for each in history.window(0, clock.now_ns).traces] == ["3", "4"]


def test_a_window_reports_from_when_it_is_complete() -> None:
    clock = Clock()
    history = History(3, 10.0, clock)
    assert history.window(DAY_NS - 1, clock.now_ns).whole_ns == DAY_NS, "it was not there before"
    assert history.window(DAY_NS, clock.now_ns).whole_ns == 0
    ends_ns = []
    for n in range(5):
        clock.now_ns += 10**9
        ends_ns.append(clock.now_ns)
        history.add_trace(trail(str(n), clock.now_ns - LEDGER.total_ns))
    window = history.window(DAY_NS, clock.now_ns)
    assert window.whole_ns == ends_ns[1] and [each.request_id for each in window.traces] == ["2", "3", "4"]
    assert history.window(ends_ns[1], clock.now_ns).whole_ns == 0
    clock.now_ns = ends_ns[3] + 10 * 10**9
    assert history.window(DAY_NS, clock.now_ns).whole_ns == ends_ns[2], "the third is too old now"


@pytest.mark.parametrize("kind", ["refused", "flip"])
def test_a_window_reports_missing_events(kind: str) -> None:
    clock = Clock()
    history = History(8, 1e6, clock)
    for _ in range(MAX_EVENTS + 2):
        clock.now_ns += 1
        history.add_event(kind, "", "queue-full")
    assert history.window(DAY_NS, clock.now_ns).whole_ns == DAY_NS + 2


def test_a_history_without_requests_is_complete_for_no_time() -> None:
    clock = Clock()
    history = History(0, 10.0, clock)
    clock.now_ns += 10**9
    assert history.window(DAY_NS, clock.now_ns).whole_ns == clock.now_ns


def test_a_window_has_what_reaches_into_it() -> None:
    clock = Clock()
    history = History(8, 1e6, clock)
    clock.now_ns += 10**10
    early, late = trail("early"), trail("late", DAY_NS + 5 * 10**9)
    for each in (early, late):
        history.add_trace(each)
    window = history.window(early.end_ns, late.arrived_ns - 1, [replace(late, request_id="now", outcome="")])
    assert [each.request_id for each in window.traces] == ["early"]
    window = history.window(early.end_ns + 1, late.arrived_ns, [replace(late, request_id="now", outcome="")])
    assert [each.request_id for each in window.traces] == ["late", "now"]


@pytest.mark.parametrize("kind", CHANGES)
def test_a_workers_last_change_is_remembered(kind: str) -> None:
    clock = Clock()
    history = History(0, 10.0, clock)
    history.add_event(kind, "decode-0", "decode -> prefill")
    history.add_event("refused", "", "queue-full")
    clock.now_ns += 3 * 10**9
    recent = history.recent(["decode-0", "prefill-0"])
    ((name, traffic),) = recent.traffic
    assert (name, traffic.change, traffic.changed_ns) == ("decode-0", f"{kind} decode -> prefill", 3 * 10**9)
    assert [(age_s, each.kind) for age_s, each in recent.events] == [(3.0, kind), (3.0, "refused")]


def test_a_flood_of_refusals_drowns_no_flip() -> None:
    history = History(8, 1e6, Clock())
    history.add_event("flip", "decode-0", "decode -> prefill")
    for n in range(5000):
        history.add_event("refused", "", "gateway-full", f"req-{n}")
    assert "flip" in {each.kind for _, each in history.recent(()).events}
    kinds = [each.kind for each in history.window(0, DAY_NS).events]
    assert kinds.count("flip") == 1 and 100 < kinds.count("refused") < 5000


def test_a_removed_worker_is_not_counted() -> None:
    history = History(8, 1e6, Clock())
    for number in range(50):
        history._traffic_of(f"decode-{number}").transfers += 1
        history.add_event("left", f"decode-{number}", "removed by the controller")
    assert history.recent(f"decode-{number}" for number in range(50)).traffic == ()
