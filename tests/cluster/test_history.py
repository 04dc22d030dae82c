"""A gateway's history of real requests: their traces, events, and the traffic of each worker."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from cluster.events import ClusterError, Delta
from cluster.observe.ledger import now_ns
from cluster.spec import Role
from tests.cluster.local import Cluster, cluster, completed, generate, request, split_spec

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def subject() -> AsyncIterator[Cluster]:
    async with cluster(split_spec(1, 2)) as running:
        yield running


async def test_the_history_has_the_ledger_that_the_client_got(subject: Cluster) -> None:
    end = completed(await subject.run(request("kept", 40)))
    (trace,) = [each for each in subject.dispatcher.window(0, now_ns()).traces if each.request_id == "kept"]
    assert trace.ledger == end.ledger and trace.open_ns == 0
    trace.ledger.check()
    assert (trace.outcome, trace.prompt_tokens, trace.output_tokens, trace.attempts) == ("completed", 40, 8, 1)
    assert (trace.prefill_worker, trace.decode_worker) == ("prefill-0", end.decode_workers[0])
    assert trace.transfer_bytes == sum(report.num_bytes for report in end.transfers) > 0


async def test_traffic_is_counted_at_its_worker(subject: Cluster) -> None:
    await subject.run(request("before", 40))  # workers without any traffic are left out
    before = dict(subject.dispatcher.recent().traffic)
    end = completed(await subject.run(request("counted", 33, first=500)))
    after = dict(subject.dispatcher.recent().traffic)
    prompts = after["prefill-0"].prompt_tokens - before["prefill-0"].prompt_tokens
    decode = end.decode_workers[0]
    assert (prompts, after["prefill-0"].prompts - before["prefill-0"].prompts) == (33, 1)
    moved = sum(each.transfer_bytes for each in after.values()) - sum(each.transfer_bytes for each in before.values())
    assert moved == sum(report.num_bytes for report in end.transfers) and after[decode].transfers >= 1
    drawn = sum(each.output_tokens for each in after.values()) - sum(each.output_tokens for each in before.values())
    assert drawn == 8


async def test_a_migration_is_an_event_and_splits_the_trace(subject: Cluster) -> None:
    other, before = "", {name: each.output_tokens for name, each in subject.dispatcher.recent().traffic}
    async for event in generate(subject.dispatcher, request("moving", 40, max_tokens=60)):
        if isinstance(event, Delta) and event.first_position >= 3 and not other:
            (trace,) = [each for each in subject.dispatcher.window(0, now_ns()).traces if not each.outcome]
            assert [each.request_id for each in subject.dispatcher.oldest_requests(8)] == [trace.request_id]
            assert subject.dispatcher.oldest_requests(0) == []
            assert trace.request_id == "moving" and trace.end_ns <= now_ns()
            other = next(name for name in ("decode-0", "decode-1") if name != trace.decode_worker)
            moving = asyncio.ensure_future(subject.dispatcher.move("moving", other))
    assert await moving
    (trace,) = [each for each in subject.dispatcher.window(0, now_ns()).traces if each.request_id == "moving"]
    ((at_ns, worker),) = trace.moves
    assert worker == other != trace.decode_worker and trace.arrived_ns < at_ns < trace.end_ns
    (_, happening) = subject.dispatcher.recent().events[-1]
    assert (happening.kind, happening.worker, happening.request_id) == ("move", other, "moving")
    assert dict(subject.dispatcher.recent().traffic)[other].change == f"move from {trace.decode_worker}"
    after = {name: each.output_tokens - before.get(name, 0) for name, each in subject.dispatcher.recent().traffic}
    assert after[other] > 0 < after[trace.decode_worker], "tokens count where they were computed"
    assert sum(after.values()) == trace.output_tokens == 60


async def test_a_request_that_fails_has_all_of_its_time(subject: Cluster) -> None:
    with pytest.raises(ClusterError):
        await subject.run(request("late", 40, max_tokens=60), deadline_s=0.03)
    (trace,) = [each for each in subject.dispatcher.window(0, now_ns()).traces if each.request_id == "late"]
    assert trace.outcome == "deadline" and "deadline" in trace.detail
    assert trace.end_ns - trace.arrived_ns >= 0.03e9


async def test_lost_workers_and_leaving_workers_are_different_events() -> None:
    async with cluster(split_spec(1, 2)) as subject:
        lost = subject.workers["decode-0"]
        await lost.close()
        await subject.until(lambda view: sorted(each.restarts for each in view.ready(Role.DECODE)) == [0, 1])
        await subject.controller.drain("decode-1", 0, 1.0)
        await subject.until(lambda view: all(worker.name != "decode-1" for worker in view.workers))
        received = [(each.kind, each.worker) for _, each in subject.dispatcher.recent().events]
    assert ("lost", "decode-0") in received and ("left", "decode-1") in received
