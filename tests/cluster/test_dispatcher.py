"""The dispatcher over real workers with simulated times: KV handoff, ledger, cancel, deadlines, recovery."""

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from cluster.events import Accepted, AttemptsExhausted, DeadlineExceeded, Delta, Rejected, Unservable
from cluster.runtime.interface import WorkerOrder
from cluster.spec import GatewaySpec, Role
from diptych.view import WorkerState
from kvtransfer.open import SharedMemory
from kvtransfer.transport import Read
from tests.cluster.local import (
    cluster,
    completed,
    generate,
    in_virtual_time,
    mixed_spec,
    request,
    split_spec,
    tokens_of,
)
from workers.build import build_worker
from workers.costs import LinearCost
from workers.errors import UnknownSequence, WorkerError
from workers.executor.simulated import simulated_token
from workers.request import FinishReason
from workers.server import WorkerServer

SLOW = LinearCost(0.02, 0.002, 0.0, 0.001, 0.0, 0.0, 0.0)


def expected(name: str, length: int, count: int) -> list[int]:
    return [simulated_token(f"{name}/0", length + n, 1000, (0,)) for n in range(count)]


@pytest.mark.parametrize("backends", [("memory",), ("tcp",), ("nixl", "tcp")])
async def test_a_request_goes_through_both_workers_and_leaves_nothing_behind(backends: tuple[str, ...]) -> None:
    async with cluster(split_spec(backends=backends)) as subject:
        events = await subject.run(request("a", 50))
        assert isinstance(events[0], Accepted)
        assert (events[0].prefill_worker, events[0].decode_worker) == ("prefill-0", "decode-0")
        assert tokens_of(events) == expected("a", 50, 8)
        end = completed(events)
        assert end.finish is FinishReason.LENGTH and (end.prompt_tokens, end.completion_tokens) == (50, 8)
        (report,) = end.transfers
        assert report.num_blocks == 4 and report.digests_verified == 4
        assert report.transport == "memory" if backends == ("memory",) else report.transport in backends
        end.ledger.check()
        await subject.settle()


@in_virtual_time
async def test_a_mixed_worker_serves_alone() -> None:
    async with cluster(mixed_spec()) as subject:
        events = await subject.run(request("a", 50))
        assert tokens_of(events) == expected("a", 50, 8)
        assert completed(events).transfers == ()
        completed(events).ledger.check()
        await subject.settle()


@in_virtual_time
async def test_a_request_for_one_token_needs_no_handoff() -> None:
    async with cluster(split_spec()) as subject:
        events = await subject.run(request("a", 50, max_tokens=1))
        assert tokens_of(events) == expected("a", 50, 1) and completed(events).transfers == ()
        await subject.settle()


async def test_concurrent_requests_get_their_own_tokens_and_free_all_blocks() -> None:
    # 40 requests wait for 2 x 16 decode slots in real time, which takes as long as the machine is busy.
    spec = replace(split_spec(2, 2, backends=("nixl", "tcp")), gateway=GatewaySpec(placement_timeout_s=60.0))
    async with cluster(spec) as subject:
        draw = random.Random(5)
        wanted = {f"r{n}": (draw.randint(1, 300), draw.randint(1, 40)) for n in range(40)}
        runs = await asyncio.gather(
            *(subject.run(request(name, length, max_tokens=count)) for name, (length, count) in wanted.items())
        )
        for (name, (length, count)), events in zip(wanted.items(), runs, strict=True):
            assert tokens_of(events) == expected(name, length, count)
            completed(events).ledger.check()
        await subject.settle()


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    shapes=st.lists(st.tuples(st.integers(1, 200), st.integers(1, 20)), min_size=1, max_size=12),
    mixed=st.booleans(),
)
def test_ledger_parts_are_positive_and_sum_exactly(shapes: list[tuple[int, int]], mixed: bool) -> None:
    async def run() -> None:
        async with cluster(mixed_spec() if mixed else split_spec()) as subject:
            runs = await asyncio.gather(
                *(subject.run(request(f"r{n}", length, max_tokens=count)) for n, (length, count) in enumerate(shapes))
            )
            for events in runs:
                ledger = completed(events).ledger
                ledger.check()
                assert ledger.ttft_ns > 0
                assert {"prefill_queue", "prefill_compute", "prefill_wire"} <= dict(ledger.first).keys()
            await subject.settle()

    asyncio.run(run())


@in_virtual_time
async def test_a_shared_prefix_is_moved_once() -> None:
    async with cluster(split_spec()) as subject:
        first = completed(await subject.run(request("a", 64)))
        second = completed(await subject.run(request("b", 64)))
        assert first.transfers[0].num_blocks == 4
        assert (second.transfers[0].reused_blocks, second.transfers[0].num_blocks) == (4, 0)
        assert second.cached_tokens > 0
        await subject.settle()


@pytest.mark.parametrize("after", [0, 1, 3])
@in_virtual_time
async def test_closing_the_stream_frees_both_workers(after: int) -> None:
    async with cluster(split_spec(), SLOW) as subject:
        stream = generate(subject.dispatcher, request("a", 120, max_tokens=500))
        seen = 0
        async for event in stream:
            if isinstance(event, Accepted) and after == 0:
                break
            seen += isinstance(event, Delta)
            if after and seen >= after:
                break
        await stream.aclose()
        await subject.settle()


@in_virtual_time
async def test_finish_frees_all_blocks() -> None:
    async with cluster(split_spec(), SLOW) as subject:
        events = []
        async for event in generate(subject.dispatcher, request("a", 20, max_tokens=500)):
            events.append(event)
            if isinstance(event, Delta) and event.first_position >= 3:
                subject.dispatcher.finish("a")
        end = completed(events)
        assert end.finish is FinishReason.STOP
        end.ledger.check()
        assert dict(end.ledger.rest)["decode_compute"] > 0
        await subject.settle()


@pytest.mark.parametrize(
    ("phase", "length", "deadline_s", "engine"),
    [("queueing", 400, 0.3, {"kv_blocks": 40}), ("prefill", 800, 0.2, {}), ("decode", 20, 0.6, {})],
)
@in_virtual_time
async def test_a_passed_deadline_names_the_phase_and_frees_both_workers(
    phase: str, length: int, deadline_s: float, engine: dict[str, Any]
) -> None:
    async with cluster(split_spec(**engine), SLOW) as subject:
        blocker = None
        if phase == "queueing":
            blocker = generate(subject.dispatcher, request("blocker", 400, max_tokens=100))
            await anext(blocker)
        with pytest.raises(DeadlineExceeded) as caught:
            await subject.run(request("a", length, max_tokens=500, first=400), deadline_s=deadline_s)
        assert caught.value.phase == phase
        if blocker is not None:
            await blocker.aclose()
        await subject.settle()


@in_virtual_time
async def test_a_prompt_beyond_every_pool_is_unservable() -> None:
    async with cluster(split_spec(kv_blocks=20)) as subject:
        with pytest.raises(Unservable, match="500 tokens"):
            await subject.run(request("a", 500))
        await subject.settle()


@in_virtual_time
async def test_a_request_without_a_worker_in_time_is_rejected_with_a_retry_time() -> None:
    spec = split_spec()
    spec = replace(spec, gateway=replace(spec.gateway, placement_timeout_s=0.3))
    async with cluster(spec, SLOW) as subject:
        running = [generate(subject.dispatcher, request(f"b{n}", 20, max_tokens=2000)) for n in range(16)]
        for stream in running:
            await anext(stream)
        with pytest.raises(Rejected) as caught:
            await subject.run(request("late", 20))
        assert caught.value.retry_after_s > 0
        for stream in running:
            await stream.aclose()
        await subject.settle()


@pytest.mark.parametrize(("victim", "after_s"), [("prefill-0", 0.2), ("prefill-0", 0.5), ("decode-0", 0.7)])
@in_virtual_time
async def test_another_worker_continues_with_the_same_tokens_when_one_dies(victim: str, after_s: float) -> None:
    async with cluster(split_spec(2, 2), SLOW) as subject:
        streams = [asyncio.ensure_future(subject.run(request(f"r{n}", 60 + n, max_tokens=30))) for n in range(10)]
        await asyncio.sleep(after_s)
        await subject.workers[victim].close()
        runs = await asyncio.gather(*streams)
        assert any(completed(events).attempts > 1 for events in runs)
        for n, events in enumerate(runs):
            assert tokens_of(events) == expected(f"r{n}", 60 + n, 30)
            completed(events).ledger.check()
        await subject.settle()


@in_virtual_time
async def test_without_a_decode_pool_a_prefill_worker_serves_alone() -> None:
    async with cluster(split_spec(), SLOW) as subject:
        stream = await subject.begin(request("a", 60, max_tokens=60), 5)
        await subject.workers["decode-0"].close()
        events = await stream
        assert tokens_of(events) == expected("a", 60, 60)
        chosen = [(each.prefill_worker, each.decode_worker) for each in events if isinstance(each, Accepted)]
        assert len(chosen) == 2 and chosen[0] == ("prefill-0", "decode-0")
        await subject.settle()


@in_virtual_time
async def test_a_dead_worker_comes_back_as_a_new_incarnation() -> None:
    async with cluster(split_spec()) as subject:
        before = {worker.name: worker.incarnation for worker in subject.dispatcher.view.workers}
        await subject.workers["decode-0"].close()
        async with asyncio.timeout(10):
            while not (
                len(subject.dispatcher.view.ready(Role.DECODE)) == 1
                and subject.dispatcher.view.ready(Role.DECODE)[0].incarnation != before["decode-0"]
            ):
                await asyncio.sleep(0.02)
        assert subject.dispatcher.view.linked("prefill-0", "decode-0")
        events = await subject.run(request("a", 40))
        assert len(completed(events).transfers) == 1
        await subject.settle()


@in_virtual_time
async def test_corrupted_kv_is_noticed_and_recomputed() -> None:
    async with cluster(split_spec()) as subject:
        executor = subject.workers["prefill-0"]._executor
        honest, lies = executor.execute, 1

        async def lying(plan):
            nonlocal lies
            result = await honest(plan)
            if plan.digest_blocks and lies:
                lies -= 1
                damaged = tuple(tuple(bytes([cells[0] ^ 1]) + cells[1:] for cells in rank) for rank in result.digests)
                result = structs.replace(result, digests=damaged)
            return result

        executor.execute = lying
        events = await subject.run(request("a", 40))
        assert tokens_of(events) == expected("a", 40, 8)
        assert completed(events).attempts == 2
        pulls = subject.workers["decode-0"]._stats().pulls
        assert (pulls.failed, pulls.corrupt, pulls.arrived, pulls.num_bytes) == (1, 1, 0, 0)
        await subject.settle()


@in_virtual_time
async def test_attempts_are_bounded() -> None:
    async with cluster(split_spec()) as subject:

        async def broken(*_: object) -> None:
            raise WorkerError("this worker is broken")

        workers: list[Any] = list(subject.workers.values())
        for worker in workers:
            worker.prefill = worker.generate = worker.reserve = broken
        with pytest.raises(AttemptsExhausted, match=r"6 attempts failed.*broken"):
            await subject.run(request("a", 40))
        await subject.settle()


@in_virtual_time
async def test_a_failed_worker_is_avoided_while_another_is_ready() -> None:
    async with cluster(split_spec(1, 2)) as subject:

        async def broken(*_: object) -> None:
            raise WorkerError("this worker is broken")

        failing: Any = subject.workers["decode-0"]
        failing.reserve = broken
        events = await subject.run(request("a", 40))
        chosen = [event.decode_worker for event in events if isinstance(event, Accepted)]
        assert chosen == ["decode-1"] and completed(events).attempts == 2
        await subject.settle()


@in_virtual_time
async def test_a_deadline_during_the_transfer_names_the_phase_and_frees_both_workers() -> None:
    async with cluster(split_spec()) as subject:
        executor = subject.workers["decode-0"]._executor
        honest, held = executor.pull, []

        def stuck(order):
            held.append(asyncio.get_running_loop().create_future())
            read = Read(asyncio.get_running_loop().create_future(), held[-1])
            return read

        executor.pull = stuck
        with pytest.raises(DeadlineExceeded) as caught:
            await subject.run(request("a", 40), deadline_s=0.5)
        assert caught.value.phase == "transfer"
        await asyncio.sleep(0.1)
        stats = subject.workers["decode-0"].engine.stats()
        assert stats.quarantined_blocks == 3 == stats.total_blocks - stats.free_blocks
        subject.workers["decode-0"].engine.check()
        for settled in held:
            settled.set_result(None)
        executor.pull = honest
        await subject.settle()


@in_virtual_time
async def test_a_prefill_worker_that_dies_after_the_handoff_is_not_missed() -> None:
    async with cluster(split_spec(), SLOW) as subject:
        stream = await subject.begin(request("a", 60, max_tokens=60), 5)
        await subject.workers["prefill-0"].close()
        events = await stream
        assert tokens_of(events) == expected("a", 60, 60) and completed(events).attempts == 1
        await subject.settle()


@pytest.mark.full
@in_virtual_time
async def test_a_reservation_that_waits_on_a_worker_that_dies_costs_an_attempt() -> None:
    async with cluster(split_spec(kv_blocks=40), SLOW) as subject:
        blocker = await subject.begin(request("blocker", 400, max_tokens=100), 1)
        waiting = asyncio.ensure_future(subject.run(request("a", 400, first=500)))
        async with asyncio.timeout(30.0):
            while not subject.workers["decode-0"]._reservations:
                await asyncio.sleep(0.01)
        await subject.workers["decode-0"].close()
        for name, count, events in (("blocker", 100, await blocker), ("a", 8, await waiting)):
            assert tokens_of(events) == expected(name, 400, count) and completed(events).attempts == 2
        await subject.settle()


@in_virtual_time
async def test_a_worker_whose_queue_is_full_refuses_with_a_retry_time() -> None:
    async with cluster(mixed_spec(max_waiting=2, max_running=1), SLOW) as subject:
        running = await subject.begin(request("running", 20, max_tokens=50), 1)
        waiting = [asyncio.ensure_future(subject.run(request(f"w{n}", 20))) for n in range(2)]
        async with asyncio.timeout(30.0):
            while subject.workers["mixed-0"].engine.stats().waiting < 2:
                await asyncio.sleep(0.01)
        with pytest.raises(Rejected) as caught:
            await subject.run(request("late", 20))
        assert caught.value.retry_after_s > 0
        assert tokens_of(await running) == expected("running", 20, 50)
        for n, events in enumerate(await asyncio.gather(*waiting)):
            assert tokens_of(events) == expected(f"w{n}", 20, 8)
        await subject.settle()


@in_virtual_time
async def test_a_deadline_in_recovery_names_the_phase_and_leaves_nothing() -> None:
    shared, started = SharedMemory(), []

    def once(order: WorkerOrder) -> WorkerServer:
        started.append(order.config.name)
        if len(started) > 1:
            raise WorkerError("it does not start again")
        return build_worker(order.config, heartbeat_s=order.heartbeat_s, shared=shared, cost=SLOW)

    async with cluster(mixed_spec(), build=once) as subject:
        stream = asyncio.ensure_future(subject.run(request("a", 20, max_tokens=500), deadline_s=1.5))
        async with asyncio.timeout(30.0):
            while not subject.workers["mixed-0"].engine.stats().running:
                await asyncio.sleep(0.01)
        await subject.workers["mixed-0"].close()
        with pytest.raises(DeadlineExceeded) as caught:
            await stream
        assert caught.value.phase == "recovery" and len(started) > 1


@in_virtual_time
async def test_a_silent_gateway_loses_its_requests_and_its_waiting_reservations(monkeypatch) -> None:
    monkeypatch.setattr("workers.subscribers.SUBSCRIBER_TIMEOUT_S", 0.3)
    monkeypatch.setattr("workers.worker.SWEEP_S", 0.05)
    async with cluster(split_spec(kv_blocks=40)) as subject:
        decode = subject.workers["decode-0"]
        first, second = request("a", 300), request("b", 300, first=500)
        ghost = asyncio.ensure_future(decode.subscribe("ghost", lambda _: None, asyncio.Event().wait))
        await asyncio.sleep(0)
        await decode.reserve(replace(first, reply_to="ghost"), 5.0)
        waiting = asyncio.ensure_future(decode.reserve(replace(second, reply_to="ghost"), 5.0))
        with pytest.raises(UnknownSequence, match="does not listen any more"):
            await waiting
        ghost.cancel()
        await subject.settle()


@in_virtual_time
async def test_the_client_of_a_live_worker_is_reconnected() -> None:
    async with cluster(split_spec()) as subject:
        subject.dispatcher.discovery.clients["decode-0"].give_up("for the test")
        assert not subject.dispatcher.view.ready(Role.DECODE)
        async with asyncio.timeout(30.0):
            while not subject.dispatcher.view.ready(Role.DECODE):
                await asyncio.sleep(0.02)
        assert len(completed(await subject.run(request("a", 40))).transfers) == 1
        await subject.settle()


@in_virtual_time
async def test_a_restarted_controller_does_not_end_running_streams() -> None:
    async with cluster(split_spec(), SLOW) as subject:
        stream = await subject.begin(request("a", 40, max_tokens=30), 5)
        known = subject.dispatcher.discovery.membership
        starting = (structs.replace(w, state=WorkerState.STARTING, incarnation="") for w in known.view.workers)
        anew = replace(known.view, workers=tuple(starting))
        subject.dispatcher.discovery.take(structs.replace(known, view=anew))
        await asyncio.sleep(0.1)
        subject.dispatcher.discovery.take(known)
        events = await stream
        assert tokens_of(events) == expected("a", 40, 30) and completed(events).attempts == 1
        await subject.settle()
