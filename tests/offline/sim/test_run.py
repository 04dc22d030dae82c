"""A run in virtual time: its figures, that it repeats to the bit, and that it reports stuck requests and leaks."""

import asyncio
import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.events import Accepted, Completed, Delta, Event
from cluster.offline.scoring.records import RequestOutcome, Run
from cluster.offline.sim.clock import Deadlock, run
from cluster.offline.sim.cluster import open_cluster
from cluster.offline.sim.run import Leaked, RunOptions, simulate
from cluster.offline.workload.arrivals import Arrival, Workload
from cluster.offline.workload.load import load_workload
from cluster.spec import ClusterSpec, GatewaySpec
from kvtransfer.ticket import PeerAddress
from tests.offline.sim.cases import COST, ENGINE, colocated, models, split, steady, tiered  # noqa: F401
from workers.config import ParallelConfig
from workers.engine.engine import Engine
from workers.engine.leases import LeaseManager
from workers.request import SLO, Request, SamplingParams
from workers.worker import Worker

ROOT = Path(__file__).resolve().parents[3]
MIXED = "poisson:rate=20,count=60,lengths=mixed"


def fingerprint(run: Run) -> str:
    digest = hashlib.sha256()
    for served in run.served:
        digest.update(repr(list(served.token_s)).encode())
        digest.update(f"{served.outcome}{served.prefill_worker}{served.decode_worker}{served.ledger}".encode())
    digest.update(repr(run.workers).encode())
    return digest.hexdigest()


def repeatable(spec: ClusterSpec) -> str:
    workload = load_workload(MIXED, seed=3)
    prefixes = ((7 * index % 20, 20 + index % 10) for index in range(len(workload.arrivals)))
    shared = [
        replace(each, prefix=prefix) if each.prompt_tokens > 512 else each
        for each, prefix in zip(workload.arrivals, prefixes, strict=True)
    ]
    return fingerprint(simulate(spec, models(spec), replace(workload, arrivals=tuple(shared))))


def test_a_lone_request_takes_what_the_cost_model_says() -> None:
    run = simulate(colocated(), models(colocated()), steady(1, 1.0, prompt=100, output=10))
    (served,) = run.served
    first = COST.prefill_seconds(100)
    later = sum(COST.decode_seconds(1, 100 + index) for index in range(1, 10))
    assert served.ttft_s == pytest.approx(first)
    assert served.e2e_s == pytest.approx(first + later)
    assert run.clock == "virtual" and run.gpus == 1 and run.seconds == pytest.approx(first + later)


def test_a_split_request_shows_its_kv_handoff_in_the_ledger() -> None:
    run = simulate(split(), models(split()), steady(1, 1.0, prompt=100, output=10))
    (served,) = run.served
    assert (served.prefill_worker, served.decode_worker) == ("prefill-0", "decode-0")
    assert served.transfer_bytes == 7 * 16 * 46_080  # whole blocks
    assert served.transfer_s >= 7 * 16 * 46_080 * COST.transfer_byte_s
    assert served.ledger is not None
    served.ledger.check()
    assert served.e2e_s is not None
    assert served.ledger.total_ns == pytest.approx(served.e2e_s * 1e9, abs=2)
    assert dict(served.ledger.rest)["transfer_wait"] > 0


def test_meters_count_every_token_and_every_busy_second() -> None:
    spec = split(2, 2, engine=replace(ENGINE, kv_blocks=4000))
    run = simulate(spec, models(spec), load_workload(MIXED, seed=3), RunOptions(trace=True))
    assert sum(worker.prompt_tokens for worker in run.workers) == sum(each.prompt_tokens for each in run.served)
    assert sum(worker.output_tokens for worker in run.workers) == sum(each.output_tokens for each in run.served)
    for worker in run.workers:
        steps = [step for step in run.steps if step.worker == worker.name]
        assert len(steps) == worker.steps
        assert sum(step.end_s - step.begin_s for step in steps) == pytest.approx(worker.busy_s)
        assert 0.0 < worker.used_block_s < worker.kv_blocks * (run.seconds + 2.0)


@pytest.mark.grid
@pytest.mark.parametrize("kind", ["split(2, 2)", "colocated(3)", "split(1, 1, gateways=3)", "tiered(2)"])
def test_a_run_repeats_to_the_bit_in_another_process_with_other_hash_seeds(kind: str) -> None:
    program = f"from tests.offline.sim.test_run import *; print(repeatable({kind}))"
    here = repeatable(eval(kind))
    environment = os.environ | {"PYTHONHASHSEED": "12345", "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
    there = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env=environment, check=True
    )
    assert there.stdout.split() == [here]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.0, 0.3), st.integers(1, 900), st.integers(1, 40)), min_size=1, max_size=25),
    st.sampled_from([(1, 1), (2, 1), (1, 3), (0, 2)]),
    st.sampled_from([120, 600]),
)
def test_any_workload_is_served_whole_and_nothing_leaks(
    rows: list[tuple[float, int, int]], shape: tuple[int, int], blocks: int
) -> None:
    prefills, decodes = shape
    engine = replace(ENGINE, kv_blocks=blocks, max_running=8)
    spec = split(prefills, decodes, engine=engine) if prefills else colocated(decodes, engine=engine)
    at_s, arrivals = 0.0, []
    for gap_s, prompt, output in rows:
        at_s += gap_s
        arrivals.append(Arrival(at_s, prompt, output))
    run = simulate(spec, models(spec), Workload("drawn", tuple(arrivals)))
    for served in run.served:
        assert served.outcome is RequestOutcome.FINISHED, served
        assert len(served.token_s) == served.output_tokens
        assert list(served.token_s) == sorted(served.token_s) and served.token_s[0] > served.arrival_s


def test_a_longer_queue_waits_longer() -> None:
    calm, busy = (simulate(colocated(), models(colocated()), steady(60, gap)) for gap in (1.0, 0.01))
    assert max(each.ttft_s or 0 for each in calm.served) < max(each.ttft_s or 0 for each in busy.served)
    assert len({round(each.ttft_s or 0, 9) for each in calm.served}) == 1


def test_what_the_cluster_refuses_is_recorded_with_its_reason() -> None:
    tight = replace(ENGINE, max_waiting=1, max_running=1)
    spec = replace(colocated(engine=tight), gateway=GatewaySpec(placement_timeout_s=1.0))
    run = simulate(spec, models(spec), steady(12, 0.0, output=50))
    outcomes = [each.outcome for each in run.served]
    assert outcomes.count(RequestOutcome.REJECTED) >= 8 and RequestOutcome.FINISHED in outcomes
    assert all(each.detail for each in run.served if each.outcome is RequestOutcome.REJECTED)


def test_a_prompt_that_fits_nowhere_fails_alone() -> None:
    workload = Workload("large", (Arrival(0.0, 100, 5), Arrival(0.1, 100_000, 5), Arrival(0.2, 100, 5)))
    run = simulate(split(), models(split()), workload)
    assert [each.outcome for each in run.served] == [
        RequestOutcome.FINISHED,
        RequestOutcome.FAILED,
        RequestOutcome.FINISHED,
    ]
    assert "100000 tokens" in run.served[1].detail


def test_a_run_that_is_cut_leaves_nothing_behind() -> None:
    spec = split()
    run = simulate(spec, models(spec), steady(50, 0.01, output=100), RunOptions(until_s=0.5))
    outcomes = {each.outcome for each in run.served}
    assert RequestOutcome.UNFINISHED in outcomes
    assert all(at_s <= 0.5 for each in run.served for at_s in each.token_s)


def test_an_unexpected_error_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: Worker, request: object, lenders: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Worker, "generate", broken)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        simulate(colocated(), models(colocated()), steady(3, 0.1))


def test_a_lost_wake_up_names_the_waiting_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def deaf(self: Worker, key: str, first_token: int) -> None:
        """The call arrives, and is forgotten."""

    monkeypatch.setattr(Worker, "decode", deaf)
    with pytest.raises(Deadlock, match=r"1 requests wait: w-0 \(1 tokens, on decode-0\)"):
        simulate(split(), models(split()), steady(1, 1.0))


def test_blocks_that_are_not_released_are_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeaseManager, "drop", lambda self, key: False)
    monkeypatch.setattr(LeaseManager, "release", lambda self, key, epoch: None)
    monkeypatch.setattr(Engine, "expire", lambda self, now_s: None)
    with pytest.raises(Leaked, match="prefill-0 still hold"):
        simulate(split(), models(split()), steady(1, 1.0))


def test_a_pipeline_has_its_stages_and_its_gpus() -> None:
    one = colocated()
    two = replace(one, pools=(replace(one.pools[0], parallel=ParallelConfig(tensor=2, pipeline=2)),))
    alone, piped = (simulate(spec, models(spec), steady(40, 0.0, output=20)) for spec in (one, two))
    assert piped.gpus == 4
    assert piped.seconds < 0.75 * alone.seconds


def test_the_slo_travels_with_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[SLO] = []
    generate = Worker.generate

    async def watched(self: Worker, request: Request, lenders: tuple[PeerAddress, ...]) -> None:
        seen.append(request.slo)
        await generate(self, request, lenders)

    monkeypatch.setattr(Worker, "generate", watched)
    simulate(colocated(), models(colocated()), steady(3, 0.1), RunOptions(slo=SLO(0.5, 0.05)))
    assert seen == [SLO(0.5, 0.05)] * 3


def test_a_turn_of_a_conversation_fetches_the_last_answer_from_its_decode_worker() -> None:
    """The prefill worker of the first turn is busy, so the second turn goes to the other one, which has nothing."""
    spec = replace(split(2), gateway=GatewaySpec(routing="slo"))

    async def turns() -> tuple[list[Event], list[Event], list[int]]:
        async with open_cluster(spec, models(spec)) as cluster:
            (dispatcher,) = cluster.dispatchers

            async def ask(name: str, prompt: list[int], max_tokens: int) -> list[Event]:
                events: list[Event] = []
                sampling = SamplingParams(seed=1, max_tokens=max_tokens)
                await dispatcher.run(Request(name, tuple(prompt), sampling), events.append)
                return events

            prompt = [*range(1, 601)]
            first = await ask("w-0", prompt, 300)
            history = prompt + [token for event in first if isinstance(event, Delta) for token in event.tokens]
            await asyncio.sleep(2.0)
            busy = asyncio.ensure_future(ask("w-1", [7] * 2000, 2))
            await asyncio.sleep(0.01)
            second = await ask("w-2", [*history, *range(1, 50)], 10)
            await busy
            return first, second, history

    first, second, history = run(turns())
    accepted = [next(event for event in each if isinstance(event, Accepted)) for each in (first, second)]
    assert [each.prefill_worker for each in accepted] == ["prefill-0", "prefill-1"]
    assert "with a prefix fetched" in accepted[1].reason
    completed = second[-1]
    assert isinstance(completed, Completed) and completed.cached_tokens >= len(history) - ENGINE.block_size


def test_a_run_ends_the_loop_it_made() -> None:
    simulate(colocated(), models(colocated()), steady(2, 0.1))
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()
