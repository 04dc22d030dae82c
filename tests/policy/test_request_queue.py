"""The order of the request queue. Seconds and tokens are made up."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.policy.admission.classes import Classes
from cluster.policy.admission.queue import QueuedRequest, RequestQueue
from cluster.spec import ClassSpec, GatewaySpec
from workers.errors import InvalidRequest
from workers.request import SLO, Request, SamplingParams

CLASSES = {
    "interactive": ClassSpec(ttft_s=2.0, max_wait_s=5.0, max_queued=6),
    "relaxed": ClassSpec(ttft_s=8.0, max_wait_s=20.0, max_queued=6),
    "batch": ClassSpec(priority=1, max_wait_s=60.0, max_queued=6),
}
TENANTS = {"alice": 0.7, "bob": 0.2, "*": 0.1}
GATEWAY = GatewaySpec(classes=CLASSES, tenants=TENANTS, max_queued=12)


def request(name: str, of: str = "interactive", tenant: str = "alice", tokens: int = 10, **slo: float) -> Request:
    """A request of this many tokens, one of them in the answer."""
    sampling = SamplingParams(seed=1, max_tokens=1)
    asked = Request(name, (1,) * (tokens - 1), sampling, SLO(class_name=of, **slo), tenant=tenant)  # type: ignore[arg-type]
    return Classes(GATEWAY).resolved(asked)


def names(room: RequestQueue, now_s: float) -> list[str]:
    return [seat.request_id for seat in room.in_order(now_s)]


def test_priority_then_deadline_and_late_requests_last() -> None:
    room = RequestQueue(GATEWAY)
    room.enter(request("batch", "batch"), 0.0, 0.1)
    room.enter(request("relaxed", "relaxed"), 0.0, 0.1)
    room.enter(request("soon"), 1.0, 0.1)
    room.enter(request("sooner", ttft_s=1.0), 1.0, 0.1)
    assert names(room, 1.0) == ["sooner", "soon", "relaxed", "batch"]
    assert names(room, 2.5) == ["soon", "relaxed", "sooner", "batch"], "its deadline has passed"
    room.enter(request("long"), 2.4, 1.95)
    assert names(room, 2.5) == ["soon", "relaxed", "sooner", "long", "batch"], "it needs more than it has left"
    room.check()


def test_a_request_that_rejects_is_refused_once_it_is_too_late() -> None:
    room = RequestQueue(GATEWAY)
    room.enter(request("batch", "batch"), 0.0, 0.1)
    room.enter(request("relaxed", "relaxed"), 0.0, 0.1)
    seat = room.enter(request("soon"), 0.0, 0.1)
    assert not room.to_reject(1.9) and room.to_reject(1.91) == [seat]
    room.leave(seat)
    assert not room.to_reject(3.0)
    room.check()


def test_a_request_that_waited_for_max_wait_goes_first() -> None:
    room = RequestQueue(GATEWAY)
    room.enter(request("batch", "batch"), 0.0, 0.1)
    room.enter(request("new"), 59.0, 0.1)
    assert names(room, 59.9) == ["new", "batch"]
    assert names(room, 60.0) == ["batch", "new"]
    assert not room.outranks(request("more"), 60.0) and not room.outranks(request("more"), 59.9)


def test_only_a_higher_priority_outranks_all_waiting_requests() -> None:
    room = RequestQueue(GATEWAY)
    assert room.outranks(request("first", "batch"), 0.0), "the queue is empty"
    room.enter(request("b", "batch"), 0.0, 0.1)
    assert room.outranks(request("a"), 0.0) and not room.outranks(request("c", "batch"), 0.0)


def test_places_are_bounded_by_class_and_by_gateway() -> None:
    room = RequestQueue(GATEWAY)
    seats = [room.enter(request(f"i{n}"), 0.0, 0.1) for n in range(6)]
    assert "class 'interactive' is full (6 of 6)" in room.full(request("one more"))
    for n in range(6):
        room.enter(request(f"b{n}", "batch"), 0.0, 0.1)
    assert "the queue of this gateway is full (12 of 12)" in room.full(request("r", "relaxed"))
    room.leave(seats[3])
    assert not room.full(request("one more"))
    room.check()


def test_a_class_without_a_queue_has_no_place() -> None:
    gateway = GatewaySpec(classes={"now": ClassSpec(ttft_s=1.0, max_queued=0)})
    assert RequestQueue(gateway).full(Request("r", (1,), slo=SLO(class_name="now")))


def test_unknown_classes_and_tenants_are_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match="the classes are interactive, relaxed, batch"):
        request("r", "premium")
    strict = Classes(GatewaySpec(tenants={"alice": 1.0}))
    with pytest.raises(InvalidRequest, match=r"tenant: is 'eve'.*tenants with a share: alice"):
        strict.resolved(Request("r", (1,), tenant="eve"))
    assert Classes(GATEWAY).share(Request("r", (1,), tenant="eve")) == ("*", 0.1)
    free = Request("r", (1,), slo=SLO(class_name="whatever"), tenant="anybody")
    assert Classes(GatewaySpec()).resolved(free) is free, "without classes and shares nothing changes"


def test_a_request_without_a_class_gets_the_gateway_s_slo_under_admission_by_slo() -> None:
    gateway = GatewaySpec(admission="slo", slo=SLO(1.0, 0.1), classes=CLASSES)
    assert Classes(gateway).resolved(Request("r", (1,))).slo == SLO(1.0, 0.1, "default", 0, True)
    own = Request("r", (1,), slo=SLO(ttft_s=0.5, class_name="relaxed"))
    assert Classes(gateway).resolved(own).slo == SLO(0.5, None, "relaxed", 0, True), "its own SLO comes first"


PACKETS = st.lists(st.integers(2, 200), min_size=30, max_size=30)


@settings(max_examples=40)
@given(st.fixed_dictionaries({name: PACKETS for name in TENANTS}), st.integers(1, 60))
def test_backlogged_tenants_are_within_a_packet_of_their_shares(packets: dict[str, list[int]], served: int) -> None:
    room = RequestQueue(GatewaySpec(tenants=TENANTS, classes={"batch": ClassSpec(max_queued=100)}))
    for tenant, sizes in packets.items():
        for number, tokens in enumerate(sizes):
            asked = request(f"{tenant}{number}", "batch", tenant, tokens)
            room.enter(asked, float(number), 0.1)
    work = dict.fromkeys(TENANTS, 0.0)
    for _ in range(served):
        (seat,) = room.in_order(30.0, 1)
        room.take(seat)
        work[seat.tenant] += seat.tokens / seat.share
        if min(len([each for each in room.in_order(30.0) if each.tenant == name]) for name in TENANTS) == 0:
            break  # one has nothing left: it is no longer backlogged
        for one in TENANTS:
            for other in TENANTS:
                slack = max(packets[one]) / TENANTS[one] + max(packets[other]) / TENANTS[other]
                assert abs(work[one] - work[other]) <= slack
    room.check()


def test_an_idle_tenant_neither_saves_up_nor_owes() -> None:
    room = RequestQueue(GatewaySpec(tenants={"alice": 0.5, "bob": 0.5}))
    for number in range(10):
        room.enter(request(f"a{number}", "default", "alice"), 0.0, 0.0)
    for _ in range(6):
        room.take(room.in_order(0.0, 1)[0])
    for number in range(4):
        room.enter(request(f"b{number}", "default", "bob"), 0.0, 0.0)
    turns = []
    while len(room):
        seat = room.in_order(0.0, 1)[0]
        room.take(seat)
        turns.append(seat.tenant)
    assert sorted(turns[:2]) == sorted(turns[2:4]) == sorted(turns[4:6]) == ["alice", "bob"]


ARRIVALS = st.lists(
    st.tuples(
        st.floats(0.0, 3.0),
        st.sampled_from(sorted(CLASSES)),
        st.sampled_from(sorted(TENANTS)),
        st.integers(2, 500),
        st.floats(0.0, 4.0),
    ),
    min_size=1,
    max_size=120,
)


@settings(max_examples=60, deadline=None)
@given(ARRIVALS, st.floats(0.5, 10.0))
def test_no_request_starves_while_any_is_served(
    arrivals: list[tuple[float, str, str, int, float]], service_s: float
) -> None:
    """One request is served every `service_s`. After `patience_s` at most one full queue is ahead of a request."""
    room, now_s, next_s = RequestQueue(GATEWAY), 0.0, service_s
    arrived: dict[QueuedRequest, tuple[float, str]] = {}

    def serve(until_s: float) -> None:
        nonlocal next_s
        while next_s <= until_s and len(room):
            seat = room.in_order(next_s, 1)[0]
            room.take(seat)
            came_s, of = arrived.pop(seat)
            assert next_s - came_s <= CLASSES[of].patience_s + (GATEWAY.max_queued + 1) * service_s
            next_s += service_s
        next_s = max(next_s, until_s)

    for number, (gap_s, of, tenant, tokens, need_s) in enumerate(arrivals):
        now_s += gap_s
        serve(now_s)
        asked = request(f"r{number}", of, tenant, tokens)
        if not room.full(asked):
            arrived[room.enter(asked, now_s, need_s)] = now_s, of
        room.check()
    serve(now_s + 1e6)
    assert not arrived and not len(room)


@settings(max_examples=60, deadline=None)
@given(ARRIVALS, st.lists(st.tuples(st.booleans(), st.integers(0, 11)), max_size=120), st.floats(0.0, 100.0))
def test_the_order_is_that_of_claims_priorities_and_deadlines(
    arrivals: list[tuple[float, str, str, int, float]], ends: list[tuple[bool, int]], later_s: float
) -> None:
    room, now_s = RequestQueue(GATEWAY), 0.0
    for number, (gap_s, of, tenant, tokens, need_s) in enumerate(arrivals):
        now_s += gap_s
        if not room.full(asked := request(f"r{number}", of, tenant, tokens)):
            room.enter(asked, now_s, need_s)
        if number < len(ends) and (seats := room.in_order(now_s)):
            served, which = ends[number]
            (room.take if served else room.leave)(seats[which % len(seats)])
        room.check()
    now_s += later_s
    seats = room.in_order(now_s)
    assert len(set(seats)) == len(seats) == len(room)
    for before, behind in pairwise(seats):
        claims = before.claim_s <= now_s, behind.claim_s <= now_s
        assert claims[0] or not claims[1]
        if all(claims):
            assert before.claim_s <= behind.claim_s
        elif not any(claims):
            assert before.priority <= behind.priority
    for tenant in TENANTS:
        for priority in (0, 1):
            line = [s for s in seats if (s.tenant, s.priority) == (tenant, priority) and s.claim_s > now_s]
            late = [seat.latest_s < now_s for seat in line]
            assert late == sorted(late), "requests that can still meet their deadline come first"
            for same in (True, False):
                deadlines = [seat.deadline_s for seat, is_late in zip(line, late, strict=True) if is_late is same]
                assert deadlines == sorted(deadlines)
