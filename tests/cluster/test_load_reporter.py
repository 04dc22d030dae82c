"""A load report has each event once, and is bounded."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from cluster.events import Accepted, Rejected
from cluster.observe.load_reporter import MAX_SAMPLES, LoadReporter
from cluster.observe.request_observer import RequestEnd
from cluster.policy.scaling.offered_load import LoadReport
from cluster.policy.slo_attainment import Ended
from cluster.runtime.runtime_errors import WorkerGone
from cluster.spec import ElasticSpec, GatewaySpec
from diptych.history import RequestTrace
from tests.cluster.local import cluster, request, split_spec, tokens_of
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


def ended(wanted: Request, error: BaseException | None, num_tokens: int = 0) -> RequestEnd:
    def no_trace() -> RequestTrace:
        raise AssertionError("a load report needs no trace")

    return RequestEnd(wanted, Ended("failed"), error, None, num_tokens, (), no_trace)


def test_a_report_covers_the_time_since_the_last_one(load_reporter: LoadReporter, clock: Clock) -> None:
    wanted = [request("a", 20), request("b", 30)]
    for each in wanted:
        load_reporter.on_arrived(each, 99.0, 7)
    clock.now_s = 100.5
    assert load_reporter.report() == LoadReport("gateway-0", 0.5, 2, 50, 14)
    clock.now_s = 101.5
    for each in wanted:
        load_reporter.on_end(ended(each, asyncio.CancelledError()))
    assert load_reporter.report() == LoadReport("gateway-0", 1.0, 0, 0)


def test_a_refused_request_is_a_sample_and_a_cancelled_one_is_not(
    load_reporter: LoadReporter,
) -> None:
    for wanted in (request("a", 20), request("b"), request("late", 20)):
        load_reporter.on_arrived(wanted, 100.0, 0)
    load_reporter.on_end(ended(request("a", 20), Rejected("full", 1.0)))
    load_reporter.on_end(ended(request("b"), asyncio.CancelledError()))
    load_reporter.on_first_token(request("late", 20))
    load_reporter.on_end(ended(request("late", 20), Rejected("late", 1.0), num_tokens=1))
    refused, late = load_reporter.report().samples
    assert (refused.computed_tokens, refused.ttft_slo_s, refused.tpot_slo_s) == (0, 2.0, 0.1)
    assert late.computed_tokens == 20


def test_a_prompt_that_several_answers_share_is_counted_once(load_reporter: LoadReporter) -> None:
    first, second = (replace(request(name, 20), group="g") for name in ("g#0", "g#1"))
    for wanted in (first, second):
        load_reporter.on_arrived(wanted, 100.0, 0)
    for wanted in (first, second):
        load_reporter.on_end(ended(wanted, asyncio.CancelledError()))
    received = load_reporter.report()
    assert (received.arrived, received.arrived_tokens) == (2, 20)
    load_reporter.on_arrived(first, 100.0, 0)
    assert load_reporter.report().arrived_tokens == 20, "later ones are others"


def test_a_report_is_bounded(load_reporter: LoadReporter) -> None:
    for index in range(MAX_SAMPLES + 9):
        wanted = request(f"r{index}", index + 1)
        load_reporter.on_arrived(wanted, 100.0, 0)
        load_reporter.on_end(ended(wanted, Rejected("full", 1.0)))
    received = load_reporter.report()
    assert received.arrived == MAX_SAMPLES + 9 and len(received.samples) == MAX_SAMPLES
    assert received.samples[-1].prompt_tokens == MAX_SAMPLES + 9


async def test_gateways_report_what_they_served_every_period() -> None:
    spec = replace(
        split_spec(),
        elastic=ElasticSpec(mode="advise", period_s=0.05),
        gateway=GatewaySpec(slo=SLO(5.0, 0.5), placement_timeout_s=5.0),
    )
    reports: list[LoadReport] = []
    async with cluster(spec) as subject:
        heard = asyncio.Event()

        async def report(received: LoadReport) -> None:
            reports.append(received)
            heard.set()

        controller: Any = subject.controller
        controller.report = report
        events = await subject.run(request("a", 40, max_tokens=9))
        while not any(each.samples for each in reports):
            heard.clear()
            await asyncio.wait_for(heard.wait(), 30.0)
    assert sum(each.arrived for each in reports) == 1 and sum(each.arrived_tokens for each in reports) == 40
    ((sample,),) = [each.samples for each in reports if each.samples]
    assert any(isinstance(event, Accepted) for event in events) and len(tokens_of(events)) == 9
    assert (sample.prompt_tokens, sample.computed_tokens) == (40, 40)
    assert (sample.ttft_slo_s, sample.tpot_slo_s) == (5.0, 0.5)
    assert {each.gateway for each in reports} == {"gateway-0"}


async def test_a_report_that_is_lost_costs_only_what_it_counted() -> None:
    spec = replace(split_spec(), elastic=ElasticSpec(mode="advise", period_s=0.05))
    reports: list[LoadReport] = []
    lost: list[LoadReport] = []
    async with cluster(spec) as subject:

        async def report(received: LoadReport) -> None:
            if received.arrived and not lost:
                lost.append(received)
                raise WorkerGone("the controller is away")
            reports.append(received)

        controller: Any = subject.controller
        controller.report = report
        for name in ("a", "b"):
            await subject.run(request(name, 40, max_tokens=9))
            async with asyncio.timeout(30.0):
                while sum(each.arrived for each in (*lost, *reports)) < (1 if name == "a" else 2):
                    await asyncio.sleep(0.01)
    assert sum(each.arrived for each in lost) == sum(each.arrived for each in reports) == 1
