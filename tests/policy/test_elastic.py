"""The elastic policy: closed forms against known results, and each rule by a load that needs it."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from cluster.policy.scaling.balance import SOON_S, Group, Mix, attained, gain, utilization
from cluster.policy.scaling.elastic import MIN_FLIP_UTILIZATION, PATIENCE, Elastic
from cluster.policy.scaling.offered_load import RECENT_S, LoadReport, Sample
from cluster.spec import ClusterSpec, ElasticSpec, GatewaySpec, PoolSpec, Role
from diptych.view import ClusterView, Decision, PoolView, WorkerState, WorkerView
from workers.config import EngineConfig
from workers.costs import LinearCost
from workers.request import SLO
from workers.stats import WorkerStats

# A prompt token costs 0.2 ms, a step 20 ms and 0.5 ms for each sequence.
COST = LinearCost(0.02, 0.0002, 0.0, 0.0005, 0.0, 0.0, 0.0, 0.0)
PROMPTS = Mix(rate=6.0, prompt_tokens=3000, computed_tokens=3000, output_tokens=40, ttft_s=2.0, tpot_s=0.04)
ANSWERS = Mix(rate=6.0, prompt_tokens=300, computed_tokens=300, output_tokens=800, ttft_s=2.0, tpot_s=0.04)


def group(role: Role, count: int, pool: str = "all", cost: LinearCost = COST) -> Group:
    return Group(pool, role, count, cost, kv_tokens=200_000, most_running=256)


def split(prefill: int, decode: int, mixed: int = 0) -> list[Group]:
    return [group(Role.PREFILL, prefill), group(Role.DECODE, decode), group(Role.MIXED, mixed)]


# ---- the closed forms --------------------------------------------------------------------------------------------


def test_idle_workers_have_a_share_of_zero_and_those_that_miss_an_slo_alone_an_infinite_one() -> None:
    found = utilization(split(1, 1), replace(PROMPTS, rate=1e-6))
    assert max(found.ttft, found.tpot) < 1e-4 and found.decode_queue == pytest.approx(0.0, abs=0.03)
    idle = replace(PROMPTS, rate=1e-6, ttft_s=0.6, tpot_s=0.02)
    found = utilization(split(1, 1), idle)
    assert found.ttft == pytest.approx(0.62 / 0.6, rel=1e-3), "the step alone takes as long"
    assert found.tpot == pytest.approx(0.0205 / 0.02, rel=1e-3)


def test_a_batch_whose_step_takes_as_long_as_the_slo_is_full_load() -> None:
    found = utilization(split(1, 4), replace(ANSWERS, rate=2.0))
    batch = (0.04 - 0.02) / 0.0005
    assert found.tpot == pytest.approx(2.0 * 799 * 0.04 / 4 / batch, rel=0.02)


def test_prompts_wait_as_in_the_queue_of_one_server() -> None:
    """Pollaczek and Khinchine: load / (1 - load) * (1 + spread) / 2 services; one in ten waits for twice that."""
    load = 0.5
    in_time = replace(PROMPTS, rate=load / 0.62, spread=0.0, ttft_s=0.62 + 2.0 * 0.62 * load / (1.0 - load) / 2.0)
    assert utilization(split(1, 4), in_time).ttft == pytest.approx(1.0, rel=0.01)


def test_a_missing_phase_is_an_infinite_load() -> None:
    assert utilization(split(2, 0), PROMPTS).worst == math.inf == utilization(split(0, 2), PROMPTS).worst


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(0, 4),
    st.floats(0.1, 30),
    st.integers(20, 6000),
    st.integers(1, 900),
)
def test_more_load_never_lowers_a_share(
    prefill: int, decode: int, mixed: int, rate: float, prompt: int, output: int
) -> None:
    mix = Mix(rate, prompt, prompt, output, 2.0, 0.04)
    now, more = (
        utilization(split(prefill, decode, mixed), mix),
        utilization(split(prefill, decode, mixed), replace(mix, rate=rate * 1.5)),
    )
    assert more.ttft >= now.ttft - 1e-6 and more.decode_queue >= now.decode_queue - 1e-3
    assert more.tpot >= now.tpot - 1e-3 and now.worst > 0.0


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.floats(0.1, 30), st.sampled_from([PROMPTS, ANSWERS]))
def test_one_more_worker_never_raises_a_share(prefill: int, decode: int, rate: float, mix: Mix) -> None:
    mix = replace(mix, rate=rate)
    now = utilization(split(prefill, decode), mix)
    assert utilization(split(prefill + 1, decode), mix).ttft <= now.ttft + 1e-6
    assert utilization(split(prefill, decode + 1), mix).tpot <= now.tpot + 1e-3


# ---- the decision ------------------------------------------------------------------------------------------------


def spec(prefill: int = 3, decode: int = 3, most: int | None = None, **elastic: object) -> ClusterSpec:
    engine = EngineConfig(kv_blocks=12_500, max_running=256, max_batch_tokens=4096)
    bounds: dict[str, Any] = {"min_replicas": 1, "max_replicas": most} if most else {}
    pools = tuple(
        PoolSpec(role.value, role, count, engine=engine, cost=COST, **bounds)
        for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode))
    )
    known = {"mode": "act", "dwell_s": 2.0, "cooldown_s": 5.0, "window_s": 20.0} | elastic
    return ClusterSpec("m", pools, elastic=ElasticSpec(**known), gateway=GatewaySpec(slo=SLO(2.0, 0.04)))  # type: ignore[arg-type]


class Cluster:
    """A controller's view to which decisions are applied, under a load that gateways report each second."""

    def __init__(self, like: ClusterSpec) -> None:
        self.subject = Elastic(like)
        self.like = like
        self.now_s = 100.0
        self.flips: list[Decision] = []
        self.answering = Answering()
        stats = WorkerStats(total_blocks=12_500, free_blocks=12_500)
        self.workers = {
            f"{pool.name}-{index}": WorkerView(
                f"{pool.name}-{index}", pool.name, pool.role, WorkerState.READY, "1", stats=stats
            )
            for pool in like.pools
            for index in range(pool.replicas)
        }

    @property
    def view(self) -> ClusterView:
        staff = Counter(each.pool for each in self.workers.values() if each.state is not WorkerState.DRAINING)
        pools = (PoolView(pool.name, pool.role, staff[pool.name], *pool.bounds) for pool in self.like.pools)
        return ClusterView(1, "c", None, tuple(self.workers.values()), pools=tuple(pools))

    def roles(self) -> tuple[int, int, int]:
        found = [worker.role for worker in self.workers.values()]
        return found.count(Role.PREFILL), found.count(Role.DECODE), found.count(Role.MIXED)

    def run(self, seconds: int, mix: Mix | None) -> list[Decision]:
        """Applies all decisions."""
        made = []
        for _ in range(seconds):
            self.now_s += 1.0
            if mix is not None:
                received = report(mix)
                self.subject.on_report(received, self.now_s)
                self.workers = {
                    each.name: each for each in self.answering.later(tuple(self.workers.values()), received, self.now_s)
                }
            decision = self.subject.decide(self.view, self.now_s)
            if decision is None:
                continue
            made.append(decision)
            if decision.kind == "flip":
                assert decision.role is not None
                self.workers[decision.worker] = structs.replace(self.workers[decision.worker], role=decision.role)
            elif decision.kind == "shrink":
                del self.workers[decision.worker]
            else:
                name = f"{decision.pool}-new-{len(self.workers)}"
                like = next(worker for worker in self.workers.values() if worker.pool == decision.pool)
                self.workers[name] = structs.replace(like, name=name, stats=structs.replace(like.stats, running=0))
        return made


class Answering:
    """Running decodes: all that came, for as long as their SLOs allow, spread evenly, beside those of the start."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []
        self.at_first: dict[str, int] = {}

    def later(self, workers: Sequence[WorkerView], received: LoadReport, now_s: float) -> list[WorkerView]:
        answer = round(received.expected_tokens / max(1, received.arrived))
        began = [now_s + answer * (each.tpot_slo_s or 0.0) for each in received.samples]
        self.ends_s = [end_s for end_s in (*self.ends_s, *began) if end_s > now_s]
        decoding = [worker.name for worker in workers if worker.role is not Role.PREFILL]
        found = []
        for worker in workers:
            running = self.at_first.setdefault(worker.name, worker.stats.running)
            if worker.name in decoding:
                running += len(self.ends_s[decoding.index(worker.name) :: len(decoding)])
            found.append(structs.replace(worker, stats=structs.replace(worker.stats, running=running)))
        return found


def report(mix: Mix) -> LoadReport:
    arrived = round(mix.rate)
    sample = Sample(
        round(mix.prompt_tokens),
        round(mix.computed_tokens),
        mix.ttft_s,
        mix.tpot_s,
    )
    return LoadReport(
        "g",
        1.0,
        arrived,
        round(arrived * mix.prompt_tokens),
        expected_tokens=round(arrived * mix.output_tokens),
        samples=(sample,) * arrived,
    )


def test_roles_follow_the_load_one_at_a_time_and_stay() -> None:
    cluster = Cluster(spec())
    made = cluster.run(60, PROMPTS)
    assert made and all(decision.kind == "flip" for decision in made)
    prefills, _, mixed = cluster.roles()
    assert prefills + mixed > 3
    assert not cluster.run(60, PROMPTS), "a load that does not change leaves the roles alone"
    assert cluster.run(120, ANSWERS)
    _, decodes, mixed = cluster.roles()
    assert decodes + mixed > 3
    assert not cluster.run(60, ANSWERS)
    assert all("requests/s" in decision.reason and "TTFT" in decision.reason for decision in made)


def test_a_calm_cluster_changes_nothing_and_neither_does_an_idle_one() -> None:
    assert not Cluster(spec()).run(60, replace(PROMPTS, rate=1.0))
    assert not Cluster(spec()).run(60, None)


def test_steps_that_take_longer_than_their_costs_say_are_believed() -> None:
    """PROMPTS changes roles where steps take as long as configured; where they take a tenth, no phase is short."""
    fast = Cluster(spec())
    fast.workers = {
        name: structs.replace(each, stats=structs.replace(each.stats, decode_ratio=0.1, prompt_ratio=0.1))
        for name, each in fast.workers.items()
    }
    assert Cluster(spec()).run(60, PROMPTS) and not fast.run(60, PROMPTS)


def test_a_change_waits_for_dwell_and_cooldown() -> None:
    mild = replace(ANSWERS, rate=3.6)
    assert MIN_FLIP_UTILIZATION < utilization(split(3, 3), mild).worst < 1.0
    cluster = Cluster(spec(dwell_s=4.0, cooldown_s=1000.0))
    assert not cluster.run(4, mild)
    assert len(cluster.run(60, mild)) == 1


def test_floors_hold() -> None:
    cluster = Cluster(spec(floors={"prefill": 1, "decode": 3}))
    cluster.run(100, PROMPTS)
    prefills, decodes, mixed = cluster.roles()
    assert decodes + mixed >= 3 and prefills + mixed >= 1


def test_the_worker_with_the_least_work_flips() -> None:
    cluster = Cluster(spec())
    for name, running in (("decode-0", 9), ("decode-1", 2), ("decode-2", 5)):
        stats = structs.replace(cluster.workers[name].stats, running=running)
        cluster.workers[name] = structs.replace(cluster.workers[name], stats=stats)
    first = cluster.run(30, PROMPTS)[0]
    assert first.worker == "decode-1"


def test_a_pool_grows_if_no_role_change_is_enough_and_shrinks_after_long_calm() -> None:
    cluster = Cluster(spec(most=6))
    made = cluster.run(150, replace(ANSWERS, rate=11.0))
    assert "grow" in {decision.kind for decision in made}
    many = len(cluster.workers)
    assert many > 6
    quiet = cluster.run(round(PATIENCE * 2) - 5, replace(ANSWERS, rate=0.6))
    assert "shrink" not in {decision.kind for decision in quiet}
    later = cluster.run(400, replace(ANSWERS, rate=0.6))
    assert {decision.kind for decision in later} == {"shrink"} and len(cluster.workers) < many
    assert min(cluster.roles()[:2]) + cluster.roles()[2] >= 1


def test_a_draining_worker_does_not_count_when_its_pool_may_shrink() -> None:
    quiet = replace(ANSWERS, rate=1.0, output_tokens=80)

    def shrinks(state: WorkerState) -> list[str]:
        like = spec(prefill=1, decode=3, most=3)
        cluster = Cluster(replace(like, pools=(like.pools[0], replace(like.pools[1], min_replicas=2))))
        cluster.workers["decode-2"] = structs.replace(cluster.workers["decode-2"], state=state)
        return [decision.worker for decision in cluster.run(round(PATIENCE * 2) + 10, quiet)]

    assert shrinks(WorkerState.READY) == ["decode-2"], "the last one"
    assert not shrinks(WorkerState.DRAINING)


def test_without_requests_a_pool_shrinks_by_idle_workers_only() -> None:
    idle = replace(ANSWERS, rate=0.0)
    cluster = Cluster(spec(most=3))
    busy = cluster.workers["decode-2"]
    cluster.workers["decode-2"] = structs.replace(busy, stats=structs.replace(busy.stats, running=1))
    patience_s = round(PATIENCE * 2)
    assert not cluster.run(patience_s - 1, idle)
    left = [decision.worker for decision in cluster.run(5 * patience_s, idle)]
    assert left == ["decode-1", "decode-0", "prefill-2", "prefill-1"], "one of each stays"
    silent = Cluster(spec(most=3))
    assert not silent.run(3 * patience_s, None), "no gateway has reported"


def test_a_pool_at_its_maximum_or_waiting_for_a_worker_does_not_grow() -> None:
    much = replace(ANSWERS, rate=11.0)
    waiting = Cluster(spec(most=4))
    for pool in ("prefill", "decode"):
        like = waiting.workers[f"{pool}-0"]
        waiting.workers[f"{pool}-3"] = structs.replace(like, name=f"{pool}-3", state=WorkerState.STARTING)
    assert "grow" not in {decision.kind for decision in waiting.run(40, much)}
    for name in ("prefill-3", "decode-3"):
        del waiting.workers[name]
    assert "grow" in {decision.kind for decision in waiting.run(20, much)}


def test_waiting_prompts_raise_the_load() -> None:
    mild = replace(PROMPTS, rate=1.0, prompt_tokens=1500, computed_tokens=1500)
    calm, backed_up = Cluster(spec(1, 5)), Cluster(spec(1, 5))
    name = "prefill-0"
    stats = structs.replace(backed_up.workers[name].stats, queued_tokens=90_000)
    backed_up.workers[name] = structs.replace(backed_up.workers[name], stats=stats)
    assert not calm.run(8, mild)
    assert backed_up.run(8, mild)


def test_postponed_late_prompts_are_no_load() -> None:
    mild = replace(PROMPTS, rate=1.0, prompt_tokens=1500, computed_tokens=1500)
    plain = spec(1, 5)
    pools = tuple(replace(pool, engine=replace(pool.engine, prompt_order="deadline")) for pool in plain.pools)
    backed_up = Cluster(replace(plain, pools=pools))
    stats = structs.replace(backed_up.workers["prefill-0"].stats, queued_tokens=90_000)
    backed_up.workers["prefill-0"] = structs.replace(backed_up.workers["prefill-0"], stats=stats)
    assert not backed_up.run(8, mild)


def test_a_new_kind_of_prompts_shows_before_it_fills_the_window() -> None:
    cluster = Cluster(spec(window_s=60.0))
    cluster.run(120, ANSWERS)
    before = cluster.roles()
    made = cluster.run(round(RECENT_S) + 2, PROMPTS)
    assert made and made[0].role in (Role.PREFILL, Role.MIXED)
    assert cluster.roles()[0] > before[0]


def test_running_answers_keep_their_workers_when_the_kind_of_prompts_changes() -> None:
    """Right after the shift nine tenths of the decodes are long answers, which do not fit on two workers."""
    mixed = replace(PROMPTS, answers=ANSWERS.decoded)
    assert utilization(split(4, 2), mixed).tpot > 1.0 > utilization(split(4, 2), PROMPTS).tpot
    assert utilization(split(4, 2), mixed).ttft == utilization(split(4, 2), PROMPTS).ttft


def test_answers_count_once_they_accumulate_so_a_short_burst_changes_no_role() -> None:
    calm, burst = replace(ANSWERS, rate=1.0), replace(ANSWERS, rate=6.0)
    assert utilization(split(3, 3), calm).worst < MIN_FLIP_UTILIZATION and utilization(split(3, 3), burst).tpot > 1.0
    began = replace(burst, answers=replace(burst.decoded, running=20.0, soon=40.0))
    assert utilization(split(3, 3), began).tpot == utilization(split(3, 3), replace(began, rate=1.0)).tpot < 1.0
    cluster = Cluster(spec())
    assert not cluster.run(60, calm) and not cluster.run(3, burst) and not cluster.run(60, calm)
    assert cluster.run(60, burst)[0].role in (Role.DECODE, Role.MIXED)


def test_an_infinite_share_that_stays_infinite_is_no_improvement() -> None:
    """A single worker serves only as a mixed one; if it misses the SLO in any role, it stays as it is."""
    lone = Cluster(spec(1, 1, floors={}))
    del lone.workers["decode-0"]
    assert [decision.role for decision in lone.run(30, PROMPTS)] == [Role.MIXED]
    hopeless = Cluster(spec(1, 1, floors={}))
    hopeless.workers = {"prefill-0": structs.replace(hopeless.workers["prefill-0"], role=Role.MIXED)}
    assert not hopeless.run(30, replace(ANSWERS, tpot_s=0.02))


def test_few_requests_change_no_role_if_it_may_be_chance() -> None:
    """The same work in fewer, longer prompts is the same share of full load, but a less certain one."""
    many = Mix(6.0, 2100, 2100, 40, ttft_s=8.0, tpot_s=0.04, spread=0.0)
    few = replace(many, rate=1.05, prompt_tokens=10_500, computed_tokens=10_500)
    assert (
        MIN_FLIP_UTILIZATION < utilization(split(3, 3), few).worst <= utilization(split(3, 3), many).worst + 0.05 < 1.0
    )
    margins: dict[str, Any] = {"window_s": 5.0, "dwell_s": 1.0}
    assert Cluster(spec(**margins)).run(30, many)
    assert not Cluster(spec(**margins)).run(30, few)


# ---- what a change gains and costs ---------------------------------------------------------------------------------


def gained(mix: Mix, before: list[Group], after: list[Group], flips: int) -> float:
    return gain(before, utilization(before, mix), after, flips, mix)


def test_at_full_load_one_request_in_ten_is_late_and_beyond_it_those_that_exceed_it() -> None:
    assert attained(0.0) == 1.0 and attained(1.0) == pytest.approx(0.9) and attained(2.0) == pytest.approx(0.45)
    assert attained(0.75) == pytest.approx(0.99, abs=0.001) and attained(math.inf) == 0.0
    loads = [attained(number / 20) for number in range(60)]
    assert loads == sorted(loads, reverse=True)


def test_roles_that_serve_the_load_gain_nothing_by_a_change() -> None:
    quiet = replace(PROMPTS, rate=2.0, requests=100.0, seen_s=20.0)
    assert utilization(split(3, 3), quiet).worst < MIN_FLIP_UTILIZATION
    assert gained(quiet, split(3, 3), split(4, 2), 1) < 0.0
    busy = replace(quiet, rate=6.0)
    assert gained(busy, split(3, 3), split(4, 2), 1) > 0.1


def test_a_change_must_pay_within_as_long_as_the_load_has_been_seen() -> None:
    busy = replace(PROMPTS, rate=6.0, seen_s=20.0)
    long, short = (gained(replace(busy, seen_s=seconds), split(3, 3), split(4, 2), 1) for seconds in (20.0, 1.0))
    assert long - short == pytest.approx(SOON_S / 6 / 1.0 - SOON_S / 6 / 20.0)
    assert long > 0.0 > short


def test_cached_prefixes_on_the_workers_that_change_are_lost() -> None:
    """Most tokens are cached. With one mixed worker in six changed, a sixth of those is computed again."""
    cached = Mix(9.0, 3000, 300, 300, ttft_s=2.0, tpot_s=0.06, seen_s=20.0)
    cold = replace(cached, computed_tokens=300 + 2700 / 6)
    now, after = split(0, 0, 6), split(1, 0, 5)
    expected = (
        attained(utilization(after, cold).worst) / attained(utilization(now, cached).worst) - 1.0 - SOON_S / (6 * 20.0)
    )
    assert gained(cached, now, after, 1) == pytest.approx(expected)
    assert attained(utilization(after, cold).worst) < attained(utilization(after, cached).worst)


def test_mixed_workers_with_cached_prefixes_stay_mixed_where_others_split() -> None:
    """Splitting all of them loses all of their prefixes, and then the prompts are too long."""
    fresh = Mix(9.0, 600, 600, 300, ttft_s=2.0, tpot_s=0.03, seen_s=60.0)
    cached = replace(fresh, prompt_tokens=6000)
    before, after = split(0, 0, 6), split(2, 4)
    assert gained(fresh, before, after, 6) > 0.0 > gained(cached, before, after, 6)
    one_more = [gained(mix, split(2, 4), split(2, 3, 1), 1) for mix in (fresh, cached)]
    assert one_more[0] == pytest.approx(one_more[1], abs=1e-3), "a decode worker that becomes mixed loses no prefixes"
