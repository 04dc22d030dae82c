"""The environment of simulated workers: a machine that they share, and calls that take time."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.offline.sim.clock import run
from cluster.offline.sim.cluster import Environment, PoolModel
from cluster.offline.sim.environment import SharedMachine
from cluster.offline.sim.run import RunOptions, simulate
from cluster.offline.workload.arrivals import Arrival, Workload
from tests.offline.sim.cases import COST, colocated, models, split, steady


def spent(slowdown: dict[tuple[str, str], float], steps: list[tuple[float, str, float]]) -> list[tuple[float, float]]:
    """Each step's duration and end; steps are (begin, pool, seconds alone)."""

    async def main() -> list[tuple[float, float]]:
        kinds = (True, False)
        machine = SharedMachine(
            {((one, p), (other, q)): ratio for (one, other), ratio in slowdown.items() for p in kinds for q in kinds}
        )
        loop = asyncio.get_running_loop()

        async def one(begin_s: float, pool: str, seconds: float) -> tuple[float, float]:
            await asyncio.sleep(begin_s)
            return await machine.spend(pool, seconds, seconds > 0.5), loop.time()

        return await asyncio.gather(*(one(*step) for step in steps))

    return run(main())


def test_a_step_alone_takes_its_own_time() -> None:
    assert spent({("a", "b"): 2.0}, [(0.0, "a", 1.0), (5.0, "b", 1.0)]) == [(1.0, 1.0), (1.0, 6.0)]


def test_steps_side_by_side_slow_each_other_only_while_both_run() -> None:
    # a does half its work in 1 s beside b, which ends at 1 s; the other half takes 0.5 s alone.
    (a, _), (b, _) = spent({("a", "b"): 2.0, ("b", "a"): 1.25}, [(0.0, "a", 1.0), (0.0, "b", 0.8)])
    assert a == pytest.approx(1.5) and b == pytest.approx(1.0)


@given(
    st.lists(
        st.tuples(st.floats(0.0, 2.0), st.sampled_from(["a", "b", "c"]), st.floats(0.0, 1.0)), min_size=1, max_size=8
    ),
    st.floats(1.0, 3.0),
)
def test_no_step_is_faster_than_alone_or_slower_than_always_disturbed(
    steps: list[tuple[float, str, float]], ratio: float
) -> None:
    slowdown = {(one, other): ratio for one in "abc" for other in "abc"}
    for (_, _, alone), (took, _) in zip(steps, spent(slowdown, steps), strict=True):
        assert alone - 1e-9 <= took <= alone * ratio + 1e-9


def test_a_cancelled_step_slows_no_other_step() -> None:
    async def main() -> float:
        machine = SharedMachine({(("a", True), ("b", False)): 2.0, (("b", False), ("a", True)): 2.0})
        other = asyncio.create_task(machine.spend("b", 100.0, False))
        asyncio.get_running_loop().call_later(1.0, other.cancel)
        return await machine.spend("a", 1.0, True)

    assert run(main()) == pytest.approx(1.5)


def test_calls_and_the_frontend_delay_the_first_token_but_no_later_one() -> None:
    near = simulate(colocated(), models(colocated()), steady(1, 1.0)).served[0]
    far_models = {"mixed": PoolModel(COST, call_s=0.004)}
    far = simulate(
        colocated(), far_models, steady(1, 1.0), RunOptions(environment=Environment(frontend_s=0.01))
    ).served[0]
    assert far.ttft_s == pytest.approx((near.ttft_s or 0) + 0.01 + 0.004)
    assert far.tpot_s == pytest.approx(near.tpot_s)


def test_a_shared_machine_slows_decode_while_prompts_are_computed() -> None:
    spec, load = split(), steady(30, 0.03, prompt=400, output=20)
    prefill, decode = ("prefill", True), ("decode", False)
    slowdown = {(prefill, decode): 1.5, (decode, prefill): 1.5}
    alone, shared = (
        simulate(spec, models(spec), load, RunOptions(environment=Environment(slowdown=each)))
        for each in (None, slowdown)
    )
    mean = [sum(each.tpot_s or 0 for each in made.served) / 30 for made in (alone, shared)]
    assert 1.2 * mean[0] < mean[1] < 1.6 * mean[0]


@pytest.mark.parametrize(("gap_s", "more"), [(5.0, 0.25), (0.2, 0.0)])
def test_a_prompt_takes_longer_on_a_worker_that_was_idle(gap_s: float, more: float) -> None:
    spec, load = colocated(), steady(2, gap_s)
    usual = simulate(spec, models(spec), load).served
    found = simulate(spec, {"mixed": PoolModel(COST, idle_ratio=1.25)}, load).served
    late_s = [(two.ttft_s or 0.0) - (one.ttft_s or 0.0) for one, two in zip(usual, found, strict=True)]
    prompt_s = COST.prefill_seconds(100)
    assert late_s == pytest.approx([0.25 * prompt_s, more * prompt_s])


def test_further_answers_to_a_prompt_wait_for_its_kv_and_not_for_each_other() -> None:
    load = Workload("samples", tuple(Arrival(0.0, 100, 10, sample=number) for number in range(4)))
    first, *others = simulate(split(), models(split()), load).served
    assert [each.cached_tokens for each in others] == [99] * 3
    assert {each.ttft_s for each in others} == {others[0].ttft_s}
    assert (others[0].ttft_s or 0.0) > (first.ttft_s or 0.0)
