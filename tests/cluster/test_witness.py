"""What a gateway tells of the load is what happened, once, and bounded."""

import asyncio
from dataclasses import replace

import pytest

from cluster.events import Accepted, Delta, Event, Rejected
from cluster.observe.load_reporter import MOST_SAMPLES, LoadReporter
from cluster.policy.scaling.evidence import Report
from cluster.spec import ElasticSpec, GatewaySpec
from tests.cluster.local import cluster, completed, request, split_spec, tokens_of
from workers.request import SLO, Request


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def load_reporter(clock: Clock) -> LoadReporter:
    return LoadReporter("gateway-0", SLO(2.0, 0.1), clock)


def delta(count: int) -> Delta:
    return Delta(tuple(range(count)), 0)


def ignore(event: Event) -> None:
    """Nobody listens."""


def test_those_who_wait_are_told_until_their_first_token(load_reporter: LoadReporter, clock: Clock) -> None:
    impatient = replace(request("b", 30), slo=SLO(0.5))
    with (
        load_reporter.seen(request("a", 20), ignore, 99.0) as hear,
        load_reporter.seen(impatient, ignore, 99.4),
        load_reporter.seen(replace(request("c", 5), slo=SLO(60.0)), ignore, 90.0),
    ):
        clock.now_s = 100.5
        told = load_reporter.report()
        assert (told.arrived, told.arrived_tokens, told.seconds) == (3, 55, 0.5)
        assert (told.waiting, told.overdue, told.oldest_wait_s) == (3, 1, 10.5)
        clock.now_s = 101.5
        assert load_reporter.report().overdue == 2, "the gateway's own promise counts where none was asked"
        hear(delta(1))
        hear(delta(2))
        told = load_reporter.report()
        assert (told.waiting, told.overdue, told.arrived, told.samples) == (2, 1, 0, ())
    assert load_reporter.report() == Report("gateway-0", 0.0, 0, 0)


def test_a_request_that_is_turned_away_is_a_sample_and_one_that_its_caller_ends_is_none(
    load_reporter: LoadReporter, clock: Clock
) -> None:
    with pytest.raises(Rejected), load_reporter.seen(request("a", 20), ignore, 100.0):
        raise Rejected("full", 1.0)
    with pytest.raises(asyncio.CancelledError), load_reporter.seen(request("b"), ignore, 100.0):
        raise asyncio.CancelledError
    with pytest.raises(Rejected), load_reporter.seen(request("late", 20), ignore, 100.0) as hear:
        clock.now_s = 101.0
        hear(delta(1))
        raise Rejected("late", 1.0)
    refused, late = load_reporter.report().samples
    assert refused.ttft_s is None and refused.output_tokens == 0
    assert (refused.ttft_slo_s, refused.tpot_slo_s) == (2.0, 0.1)
    assert late.ttft_s == 1.0 and late.output_tokens == 1


def test_a_prompt_that_siblings_share_is_counted_once(load_reporter: LoadReporter) -> None:
    def sibling(name: str) -> Request:
        return replace(request(name, 20), group="g")

    with load_reporter.seen(sibling("g#0"), ignore, 100.0), load_reporter.seen(sibling("g#1"), ignore, 100.0):
        pass
    told = load_reporter.report()
    assert (told.arrived, told.arrived_tokens) == (2, 20)
    with load_reporter.seen(sibling("g#0"), ignore, 100.0):
        assert load_reporter.report().arrived_tokens == 20, "later ones are others"


def test_a_report_is_bounded(load_reporter: LoadReporter) -> None:
    for index in range(MOST_SAMPLES + 9):
        with pytest.raises(Rejected), load_reporter.seen(request(f"r{index}", index + 1), ignore, 100.0):
            raise Rejected("full", 1.0)
    told = load_reporter.report()
    assert told.arrived == MOST_SAMPLES + 9 and len(told.samples) == MOST_SAMPLES
    assert told.samples[-1].prompt_tokens == MOST_SAMPLES + 9


async def test_gateways_report_what_they_served_every_period() -> None:
    spec = replace(
        split_spec(),
        elastic=ElasticSpec(mode="advise", period_s=0.05),
        gateway=GatewaySpec(slo=SLO(5.0, 0.5), placement_timeout_s=5.0),
    )
    reports: list[Report] = []
    async with cluster(spec) as subject:
        heard = asyncio.Event()

        async def report(told: Report) -> None:
            reports.append(told)
            heard.set()

        subject.controller.report = report  # type: ignore[method-assign]
        events = await subject.run(request("a", 40, max_tokens=9))
        while not any(each.samples for each in reports):
            heard.clear()
            await asyncio.wait_for(heard.wait(), 5.0)
    assert sum(each.arrived for each in reports) == 1 and sum(each.arrived_tokens for each in reports) == 40
    ((sample,),) = [each.samples for each in reports if each.samples]
    ledger = completed(events).ledger
    assert any(isinstance(event, Accepted) for event in events) and len(tokens_of(events)) == 9
    assert (sample.prompt_tokens, sample.computed_tokens, sample.output_tokens) == (40, 40, 9)
    assert sample.ttft_s == ledger.ttft_ns / 1e9
    assert sample.tpot_s == (ledger.total_ns - ledger.ttft_ns) / 1e9 / 8
    assert (sample.ttft_slo_s, sample.tpot_slo_s) == (5.0, 0.5)
    assert {each.gateway for each in reports} == {"gateway-0"}
