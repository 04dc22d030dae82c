"""What a running cluster should change: its own load, simulated on its own measured costs. Pure, except for the runs.

Workers are those of the profile, each with the KV that its pool has now. Roles, replicas and, where pools differ in TP
or PP, the parallel setting of each role are tried, up to one worker more or less than the cluster has. Engine settings
are the defaults.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from statistics import fmean
from typing import Any

from msgspec import to_builtins

from cluster.offline.plan.dollars import ServingCost, cost_at
from cluster.offline.plan.request import PlanError
from cluster.offline.scoring.figures import Attainment, attainment, slo_text
from cluster.offline.scoring.goodput import Map, TimeUp
from cluster.offline.sim.case import PoolModel
from cluster.offline.sim.systems import RARE_HEARTBEATS
from cluster.offline.workload.arrivals import Arrival, Workload, mean_lengths
from cluster.spec import ClusterSpec, GatewaySpec, PoolSpec, Role
from diptych.history import RequestTrace, Window
from diptych.request_ids import PROFILE_PREFIX
from diptych.view import ClusterView, WorkerState
from workers.config import EngineConfig, ParallelConfig
from workers.profiles.measured import ClusterProfile, PoolProfile
from workers.request import SLO

MAX_TRIED = 32  # arrangements, those closest to the current one first
MAX_REQUESTS = 2000  # of the load, the latest ones
MAX_ERROR = 0.1  # of the simulated attainment of the current cluster; above, there is no advice
BLOCK_SIZE = 16

Part = tuple[Role, str, int]  # a role, the measured pool whose workers have it, and how many


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Workers by role."""

    parts: tuple[Part, ...]

    def description(self, profile: ClusterProfile) -> str:
        def named(part: Part) -> str:
            role, pool, count = part
            measured = profile.pool(pool)
            return f"{count} x {role.value} TP{measured.tensor} PP{measured.pipeline}"

        return " + ".join(named(part) for part in self.parts)

    def workers(self, role: Role) -> int:
        return sum(count for at, _, count in self.parts if at is role)

    def ranks(self, profile: ClusterProfile) -> int:
        return sum(count * _ranks(profile.pool(pool)) for _, pool, count in self.parts)

    def distance(self, other: "Arrangement") -> int:
        """How many workers would have to change."""
        mine, theirs = ({(role, pool): count for role, pool, count in each.parts} for each in (self, other))
        return sum(abs(mine.get(key, 0) - theirs.get(key, 0)) for key in mine.keys() | theirs.keys())


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """A cluster, its latest load, and what its steps take. By pool: `kv_tokens` of one worker, and `prices`, dollars an
    hour of one rank, if they are known."""

    profile: ClusterProfile
    load: Workload
    now: Arrangement
    kv_tokens: Mapping[str, int]
    slo: SLO
    target: float
    prices: Mapping[str, float] = field(default_factory=dict)
    measured: Attainment | None = None  # what the gateway saw of this load

    @property
    def rate(self) -> float:
        """Requests/s."""
        return len(self.load.arrivals) / max(self.load.arrivals[-1].at_s, 1e-9)

    def cost(self, tried: "RatedArrangement") -> ServingCost | None:
        """Of the requests that meet the SLO. None: a price is not known, or there are none."""
        parts = tried.arrangement.parts
        ranks = [(count * _ranks(self.profile.pool(pool)), self.prices.get(pool)) for _, pool, count in parts]
        return cost_at(self.load.arrivals, self.rate * tried.attained.both, ranks)


@dataclass(frozen=True, slots=True)
class RatedArrangement:
    """An arrangement, and the shares of requests that met the SLOs."""

    arrangement: Arrangement
    attained: Attainment


def _finished(window: Window) -> list[RequestTrace]:
    """By arrival, at most `MAX_REQUESTS`, without those that `diptych profile` sent. Raises `PlanError`."""
    done = [
        each
        for each in window.traces
        if each.prompt_tokens
        and each.output_tokens
        and each.outcome == "completed"
        and not each.request_id.startswith(PROFILE_PREFIX)
    ]
    done = sorted(done, key=lambda each: each.arrived_ns)[-MAX_REQUESTS:]
    if len(done) < 2:
        raise PlanError(
            f"the gateway remembers {len(done)} finished requests of this time, too few to plan for; give a longer "
            "--last; gateway.trace_s and gateway.trace_requests set how much it keeps"
        )
    return done


def observed_load(window: Window) -> Workload:
    """Its finished requests, at their times. Raises `PlanError`."""
    done = _finished(window)
    begin_ns, cached = done[0].arrived_ns, sum(each.cached_tokens for each in done)
    notes = [f"{cached} cached prompt tokens count as computed"] if cached else []
    if window.whole_ns:
        notes.append(
            "the gateway remembers only a part of this time; gateway.trace_s and gateway.trace_requests set how much "
            "it keeps"
        )
    return Workload(
        "the cluster's load",
        tuple(Arrival((each.arrived_ns - begin_ns) / 1e9, each.prompt_tokens, each.output_tokens) for each in done),
        notes=tuple(notes),
    )


def observed_attainment(window: Window, slo: SLO) -> Attainment:
    """What the gateway measured for these requests. Raises `PlanError`."""
    done = _finished(window)
    ttft = [each.ledger.ttft_ns / 1e9 <= (slo.ttft_s or inf) for each in done]
    tpot = [
        (each.ledger.total_ns - each.ledger.ttft_ns) / 1e9 <= (slo.tpot_s or inf) * (each.output_tokens - 1)
        for each in done
    ]
    both = [one and two for one, two in zip(ttft, tpot, strict=True)]
    return Attainment(fmean(ttft), fmean(tpot), fmean(both), 1.0)


def observed(
    view: ClusterView,
    window: Window,
    profile: ClusterProfile,
    slo: SLO,
    target: float,
    prices: Mapping[str, float] | None = None,
) -> RunningCluster:
    """Raises `PlanError`, and `ProfileError` for a pool that the profile lacks."""
    ready = [worker for worker in view.workers if worker.state is WorkerState.READY]
    if not ready:
        raise PlanError("the cluster has no ready worker")
    if view.other_models:
        names = ", ".join(model.name for model in view.models)
        raise PlanError(f"the cluster serves several models ({names}), and a plan takes one")
    kv_tokens = {profile.pool(worker.pool).pool: worker.capacity_tokens for worker in ready}
    parts = sorted({(worker.role, worker.pool) for worker in ready}, key=lambda each: (each[0].value, each[1]))
    now = Arrangement(
        tuple((role, pool, sum((each.role, each.pool) == (role, pool) for each in ready)) for role, pool in parts)
    )
    measured = observed_attainment(window, slo)
    return RunningCluster(profile, observed_load(window), now, kv_tokens, slo, target, prices or {}, measured)


def _ranks(pool: PoolProfile) -> int:
    return pool.tensor * pool.pipeline


def arrangements(running: RunningCluster) -> list[Arrangement]:
    """The current one first, then the others from near to far. Splits need a measured KV link."""
    profile = running.profile
    pools = [profile.pool(name) for name in running.kv_tokens]
    largest, ranks = max(map(_ranks, pools)), running.now.ranks(profile)
    found = [each for each in _all(running, pools, ranks + largest) if each.ranks(profile) >= ranks - largest]
    found.sort(key=lambda each: (each.distance(running.now), each.ranks(profile)))
    return [running.now, *(each for each in found if each != running.now)][:MAX_TRIED]


def _all(running: RunningCluster, pools: list[PoolProfile], max_ranks: int) -> Iterator[Arrangement]:
    """With at most this many ranks. Of pools with the same parallel setting, the one that has the role now stands."""
    now = {role: pool for role, pool, _ in running.now.parts}
    for role, pool in product((Role.MIXED,), _kinds(pools, now.get(Role.MIXED))):
        for count in range(1, max_ranks // _ranks(pool) + 1):
            yield Arrangement(((role, pool.pool, count),))
    if not running.profile.links:
        return
    for one, two in product(_kinds(pools, now.get(Role.PREFILL)), _kinds(pools, now.get(Role.DECODE))):
        for count in range(1, max_ranks // _ranks(one) + 1):
            for other in range(1, (max_ranks - count * _ranks(one)) // _ranks(two) + 1):
                yield Arrangement(((Role.DECODE, two.pool, other), (Role.PREFILL, one.pool, count)))


def _kinds(pools: list[PoolProfile], preferred: str | None) -> list[PoolProfile]:
    """One pool of each parallel setting."""
    found = {(each.tensor, each.pipeline): each for each in pools}
    return list((found | {(each.tensor, each.pipeline): each for each in pools if each.pool == preferred}).values())


def attained(running: RunningCluster, arrangement: Arrangement) -> Attainment:
    """Simulate the load on it."""
    from cluster.offline.sim.cluster import Environment
    from cluster.offline.sim.run import RunOptions, simulate

    profile = running.profile
    ratio = max((each.ratio for each in profile.interference), default=0.0)
    loads = [(role.value, has_prompts) for role in Role for has_prompts in (True, False)]
    slowdown = dict.fromkeys(product(loads, loads), ratio) if ratio else None
    options = RunOptions(slo=running.slo, environment=Environment(slowdown, profile.frontend_s))
    run = simulate(_spec(running, arrangement), _models(running, arrangement), running.load, options)
    return attainment(run, running.slo)


def _spec(running: RunningCluster, arrangement: Arrangement) -> ClusterSpec:
    def pool_of(role: Role, name: str, count: int) -> PoolSpec:
        measured = running.profile.pool(name)
        engine = EngineConfig(block_size=BLOCK_SIZE, kv_blocks=running.kv_tokens[name] // BLOCK_SIZE, max_waiting=4096)
        return PoolSpec(
            role.value, role, count, parallel=ParallelConfig(measured.tensor, measured.pipeline), engine=engine
        )

    pools = tuple(pool_of(*part) for part in arrangement.parts)
    requests = 2 * sum(pool.replicas * pool.engine.max_running for pool in pools)
    return ClusterSpec(
        model=running.profile.model,
        pools=pools,
        gateway=GatewaySpec(max_requests=requests, slo=running.slo),
        health=RARE_HEARTBEATS,
    )


def _models(running: RunningCluster, arrangement: Arrangement) -> dict[str, PoolModel]:
    """KV moves as slowly as over the slowest measured link."""
    profile = running.profile
    links = [link for link in profile.links if link.bytes_per_s > 0.0]
    latency_s = max((link.latency_s for link in links), default=0.0)
    byte_s = max((1.0 / link.bytes_per_s for link in links), default=0.0)
    return {
        role.value: PoolModel(
            replace(profile.pool(name).served, transfer_latency_s=latency_s, transfer_byte_s=byte_s),
            kv_token_bytes=profile.kv_token_bytes or 4,
            context_length=profile.context_length,
            vocab_size=profile.vocab_size,
            call_s=profile.pool(name).call_s,
            idle_ratio=1.0 if role is Role.DECODE else profile.idle_ratio(name),
        )
        for role, name, _ in arrangement.parts
    }


def try_all(running: RunningCluster, each: Map = map) -> Iterator[RatedArrangement]:
    """In the order of `arrangements`, until the time is up."""
    wanted = arrangements(running)
    try:
        for one, met in zip(wanted, each(attained, [running] * len(wanted), wanted), strict=False):
            yield RatedArrangement(one, met)
    except TimeUp:
        return


def advice(running: RunningCluster, tried: Sequence[RatedArrangement]) -> str:
    """What to change. `tried`: the current arrangement first."""
    if not tried:
        return "Not decided in time: give a longer --limit"
    profile, target = running.profile, running.target
    now, ranks = tried[0], running.now.ranks(running.profile)
    measured = running.measured
    if measured is not None and abs(measured.both - now.attained.both) > MAX_ERROR:
        return (
            f"No advice: {measured.both:.1%} of requests met the SLO, but {now.attained.both:.1%} do in the simulation "
            "of the current cluster. Measure its costs again while it is idle (diptych profile), without other programs"
        )
    meets = [each for each in tried if each.attained.both >= target]
    fewer = [each for each in meets if each.arrangement.ranks(profile) < ranks]
    if now in meets and not fewer:
        return f"Change nothing: {now.attained.both:.1%} of requests meet the SLO"
    if not meets:
        best = max(tried, key=lambda each: (each.attained.both, -each.arrangement.ranks(profile)))
        tells = f"{best.attained.both:.1%} with {best.arrangement.description(profile)}, {now.attained.both:.1%} now"
        return f"No arrangement of up to one worker more meets the SLO for {target:.0%} of requests; closest: {tells}"
    best = min(meets, key=lambda each: (each.arrangement.ranks(profile), each.arrangement.distance(running.now)))
    what = " and ".join(_differences(profile, running.now, best.arrangement))
    return (
        f"Change {what}: {best.arrangement.description(profile)} meets the SLO for {best.attained.both:.1%} of "
        f"requests, {running.now.description(profile)} for {now.attained.both:.1%}"
    )


def _differences(profile: ClusterProfile, now: Arrangement, then: Arrangement) -> list[str]:
    def settings(arrangement: Arrangement) -> set[tuple[int, int]]:
        return {(profile.pool(pool).tensor, profile.pool(pool).pipeline) for _, pool, _ in arrangement.parts}

    off = [then.workers(role) - now.workers(role) for role in Role]
    return [
        what
        for what, changed in (
            ("roles", max(off) > 0 > min(off)),
            ("replicas", sum(off) != 0),
            ("parallel settings", settings(now) != settings(then)),
        )
        if changed
    ]


def advice_lines(running: RunningCluster, tried: Sequence[RatedArrangement]) -> list[str]:
    profile, load = running.profile, advice_json(running, tried)["load"]
    lines = [
        f"{load['requests']} requests in {load['seconds']:.0f} s: {load['rate']:.3g} requests/s; on average prompts of "
        f"{load['prompt']:.0f} and answers of {load['output']:.0f} tokens",
        f"costs measured {profile.date[:10]} on {profile.machine}; {slo_text(running.slo)}",
    ]
    if running.measured is not None:
        lines.append(f"measured: {_met(running.measured)}; simulated:")
    for number, each in enumerate(tried):
        name = each.arrangement.description(profile)
        now = "" if number else " (now)"
        lines.append(f"  {name}{now}: {_met(each.attained)}")
        lines += [f"    {cost.words}"] if (cost := running.cost(each)) else []
    prices = ", ".join(f"{pool} ${dollars:g}/h" for pool, dollars in running.prices.items())
    summary = (
        f"Prices of one rank: {prices}"
        if prices
        else "No prices: name the GPU, --hardware l4, or give --price POOL=DOLLARS"
    )
    return [*lines, "", advice(running, tried), "", summary, *running.load.notes]


def _met(attained: Attainment) -> str:
    return f"{attained.both:.1%} meet both (TTFT {attained.ttft:.1%}, TPOT {attained.tpot:.1%})"


def advice_json(running: RunningCluster, tried: Sequence[RatedArrangement]) -> dict[str, Any]:
    profile, arrivals = running.profile, running.load.arrivals
    prompt, output = mean_lengths(arrivals)
    return {
        "load": {
            "requests": len(arrivals),
            "seconds": arrivals[-1].at_s,
            "rate": running.rate,
            "prompt": prompt,
            "output": output,
        },
        "now": running.now.description(profile),
        "measured": to_builtins(running.measured),
        "tried": [
            {
                "arrangement": each.arrangement.description(profile),
                "attained": to_builtins(each.attained),
                "cost": to_builtins(running.cost(each)),
            }
            for each in tried
        ],
        "prices": dict(running.prices),
        "advice": advice(running, tried),
    }
