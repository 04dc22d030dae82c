"""Spans of requests and steps, and their lanes."""

from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.observe.ledger import PHASES, LatencyLedger
from cluster.offline.report.spans import lanes, phases, transfer, typical, whole
from cluster.offline.scoring.records import RequestOutcome, StepRecord
from tests.offline.scoring.made import refused, served, split_run


def test_phases_fill_the_request_from_arrival_to_its_end_without_a_gap() -> None:
    one = split_run(1).served[0]
    spans = phases(one)
    assert spans[0].begin_ns == round(one.arrival_s * 1e9) == whole(one).begin_ns
    assert all(sooner.end_ns == later.begin_ns for sooner, later in pairwise(spans))
    assert spans[-1].end_ns == whole(one).end_ns
    assert [span.name for span in spans] == [name for name in PHASES if name != "recovery"]


def test_the_kv_handoff_ends_when_the_wait_for_it_ends() -> None:
    one = split_run(1).served[0]
    moved = transfer(one)
    wait = next(span for span in phases(one) if span.name == "transfer_wait")
    assert moved is not None
    assert (moved.end_ns, moved.end_ns - moved.begin_ns) == (wait.end_ns, 30_000_000)


def test_an_unfinished_request_has_a_span_and_no_phases() -> None:
    cut = served(0, 1.0, [1.5, 2.0], outcome=RequestOutcome.UNFINISHED)
    assert phases(cut) == () and transfer(cut) is None
    assert whole(cut).end_ns - whole(cut).begin_ns == 1_000_000_000
    assert whole(refused(1, 3.0)).begin_ns == whole(refused(1, 3.0)).end_ns


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10_000_000), st.integers(1, 3_000_000)), max_size=30))
def test_lanes_never_overlap_and_are_as_few_as_possible(drawn: list[tuple[int, int]]) -> None:
    """In whole microseconds."""
    steps = [StepRecord("w", begin / 1e6, (begin + length) / 1e6, 1, 0) for begin, length in drawn]
    laid = lanes(steps)
    assert sorted(id(step) for _, step in laid) == sorted(map(id, steps))
    for lane, step in laid:
        others = [other for at, other in laid if at == lane and other is not step]
        assert all(other.end_s <= step.begin_s or step.end_s <= other.begin_s for other in others)
    for step in steps:
        at_once = sum(other.begin_s <= step.begin_s < other.end_s for other in steps)
        assert max(lane for lane, _ in laid) + 1 >= at_once
    most = max((sum(o.begin_s <= s.begin_s < o.end_s or o is s for o in steps) for s in steps), default=0)
    assert 1 + max((lane for lane, _ in laid), default=-1) <= most


def test_a_step_behind_another_shares_its_lane_though_floats_do_not_meet() -> None:
    begin = 0.1 + 0.2
    assert begin > 0.3
    steps = [StepRecord("w", 0.0, begin, 0, 1), StepRecord("w", 0.3, 0.4, 0, 1)]
    assert [lane for lane, _ in lanes(steps)] == [0, 0]


def test_what_took_less_than_a_microsecond_is_no_phase_and_moves_nothing() -> None:
    ledger = LatencyLedger((("route", 5_000), ("reserve", 1)), (("decode_compute", 2_000),), 5_001, 7_001)
    spans = phases(served(0, 0.0, [5e-6], ledger=ledger))
    assert [(span.name, span.begin_ns, span.end_ns) for span in spans] == [
        ("route", 0, 5_000),
        ("decode_compute", 5_001, 7_001),
    ]


def test_the_typical_request_stands_in_the_middle() -> None:
    run = split_run(5, tokens=8)
    assert typical(run) is not None
    slow = typical(run, 100.0)
    assert slow is not None and slow.e2e_s == max(each.e2e_s or 0.0 for each in run.served)
    assert typical(replace(run, served=(refused(0, 0.0),))) is None
