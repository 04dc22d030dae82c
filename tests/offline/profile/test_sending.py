"""A workload is sent at its own times, and every request's outcome is recorded."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from functools import partial

import pytest

from cluster.events import Accepted, Delta, Rejected, Unservable
from cluster.offline.load.grpc_endpoint import drive_cluster, workers_between
from cluster.offline.load.sender import LoadOptions, drive
from cluster.offline.scoring.records import RequestOutcome
from cluster.offline.workload.arrivals import Arrival, Workload
from cluster.spec import Role
from diptych.view import ClusterView, WorkerState, WorkerView
from tests.cluster.local import VOCAB, cluster, generate, split_spec
from tests.offline.profile.served import served, spec
from workers.request import Request
from workers.stats import WorkerStats

WORKLOAD = Workload("few", tuple(Arrival(0.01 * index, 20 + index, 3 + index % 4) for index in range(8)))


async def test_every_request_of_a_split_cluster_is_recorded_as_its_client_saw_it() -> None:
    async with cluster(split_spec()) as running:
        run = await drive(partial(generate, running.dispatcher), WORKLOAD, LoadOptions(VOCAB, deadline_s=20.0, seed=3))
        await running.settle()
        assert run.clock == "real" and run.seed == 3 and run.workload == "few"
        for each, arrival in zip(run.served, WORKLOAD.arrivals, strict=True):
            assert each.outcome is RequestOutcome.FINISHED and len(each.token_s) == arrival.output_tokens
            assert each.ttft_s is not None and each.ttft_s > 0.0 and list(each.token_s) == sorted(each.token_s)
            assert (each.prefill_worker, each.decode_worker) == ("prefill-0", "decode-0")
            assert each.transfer_bytes > 0 and each.ledger is not None
            assert each.ledger.ttft_ns / 1e9 <= each.ttft_s
        assert run.seconds <= run.wall_s


async def test_a_run_over_grpc_is_recorded_the_same_way() -> None:
    async with served(spec()) as (client, _):
        run = await drive_cluster(client, WORKLOAD, LoadOptions(VOCAB, deadline_s=20.0))
        assert [each.outcome for each in run.served] == [RequestOutcome.FINISHED] * 8
        assert run.gpus == 2 and {worker.name for worker in run.workers} == {"prefill-0", "decode-0"}
        assert [len(each.token_s) for each in run.served] == [arrival.output_tokens for arrival in WORKLOAD.arrivals]


async def test_several_answers_to_a_prompt_are_one_request_and_recorded_each() -> None:
    arrivals = [Arrival(0.01 * number, 40, 3 + number, sample=sample) for number in range(2) for sample in range(3)]
    async with served(spec()) as (client, _):
        run = await drive_cluster(client, Workload("answers", tuple(arrivals)), LoadOptions(VOCAB, deadline_s=20.0))
        assert [each.outcome for each in run.served] == [RequestOutcome.FINISHED] * 6
        assert [len(each.token_s) for each in run.served] == [arrival.output_tokens for arrival in arrivals]
        ledgers = [each.ledger for each in run.served]
        assert all(ledger is not None and ledger.ttft_ns <= ledger.total_ns for ledger in ledgers)
        assert {(each.prefill_worker, each.decode_worker) for each in run.served} == {("prefill-0", "decode-0")}


def test_a_worker_is_counted_from_the_beginning_of_the_run() -> None:
    before, after, again = (
        ClusterView(1, "c", None, (WorkerView("w", "p", Role.MIXED, WorkerState.READY, incarnation, stats=stats),))
        for incarnation, stats in (
            ("1", WorkerStats(steps=5, preemptions=1, total_blocks=8)),
            ("1", WorkerStats(steps=9, preemptions=1, total_blocks=8)),
            ("2", WorkerStats(steps=3, total_blocks=8)),
        )
    )
    (record,) = workers_between(before, after)
    assert (record.steps, record.preemptions, record.kv_blocks) == (4, 0, 8)
    assert workers_between(before, again)[0].steps == 3


class Scripted:
    """Answers once `go` is set, or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.go = asyncio.Event()
        self.sent_s: list[float] = []
        self.closed = 0

    async def __call__(self, request: Request) -> AsyncGenerator[Accepted | Delta, None]:
        self.sent_s.append(asyncio.get_running_loop().time())
        try:
            if self.error is not None:
                raise self.error
            await self.go.wait()
            yield Delta((1,), 0)
        finally:
            self.closed += 1


def ended(run: object) -> Iterator[RequestOutcome]:
    return (each.outcome for each in run.served)  # type: ignore[attr-defined]


async def test_a_request_above_the_in_flight_limit_is_refused_at_once() -> None:
    ask = Scripted()
    driving = asyncio.ensure_future(drive(ask, WORKLOAD, LoadOptions(VOCAB, max_in_flight=3, deadline_s=20.0)))
    async with asyncio.timeout(30.0):
        while len(ask.sent_s) < 3:
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.15)
    ask.go.set()
    run = await driving
    assert list(ended(run)).count(RequestOutcome.REJECTED) == 5
    assert "3 requests were in flight" in run.served[-1].detail


async def test_a_request_past_its_deadline_fails() -> None:
    ask = Scripted()
    run = await drive(ask, WORKLOAD, LoadOptions(VOCAB, deadline_s=0.05))
    assert set(ended(run)) == {RequestOutcome.FAILED} and "0.05" in run.served[0].detail
    assert ask.closed == 8


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(Rejected("full", 1.0), RequestOutcome.REJECTED), (Unservable("too long"), RequestOutcome.FAILED)],
)
async def test_a_refusal_or_an_error_is_recorded_as_an_outcome(error: Exception, outcome: RequestOutcome) -> None:
    run = await drive(Scripted(error), WORKLOAD, LoadOptions(VOCAB))
    assert set(ended(run)) == {outcome} and str(error) in run.served[0].detail


async def test_an_unexpected_error_ends_the_run_and_every_request() -> None:
    ask = Scripted(ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        await drive(ask, WORKLOAD, LoadOptions(VOCAB))
    assert ask.closed == len(ask.sent_s)


async def test_cancelling_a_run_ends_its_requests() -> None:
    ask = Scripted()
    driving = asyncio.ensure_future(drive(ask, WORKLOAD, LoadOptions(VOCAB)))
    async with asyncio.timeout(30.0):
        while len(ask.sent_s) < 8:
            await asyncio.sleep(0.005)
    driving.cancel()
    await asyncio.wait([driving])
    assert ask.closed == 8


async def test_requests_are_sent_when_the_workload_says_though_none_is_answered() -> None:
    ask = Scripted()
    driving = asyncio.ensure_future(drive(ask, WORKLOAD, LoadOptions(VOCAB)))
    async with asyncio.timeout(30.0):
        while len(ask.sent_s) < 8:
            await asyncio.sleep(0.005)
    ask.go.set()
    run = await driving
    gaps = [later - sooner for sooner, later in zip(ask.sent_s, ask.sent_s[1:], strict=False)]
    assert sum(gaps) >= WORKLOAD.duration_s - 0.011  # the first may be late, none is early
    # Scripted streams end without a Completed.
    assert set(ended(run)) == {RequestOutcome.UNFINISHED}
    assert "load generator lag" in run.notes[-1]


def test_invalid_limits_are_refused() -> None:
    for bad in (partial(LoadOptions, VOCAB, deadline_s=0.0), partial(LoadOptions, VOCAB, max_in_flight=0)):
        with pytest.raises(ValueError, match="above 0"):
            bad()
