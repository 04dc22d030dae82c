"""Which roles the workers that are there should have, under a load that was seen: candidates by closed forms, the best
of them simulated.

Workers, their cuts and their hardware stay as they are; pools that are alike are one kind. The closed forms of the
elastic rule order all ways to give each kind its roles. Of those that look best, split, mixed and both, each is
simulated once, and given up as soon as it cannot be among the best any more; the last few once more, with another seed,
and at a rate a quarter above: of two that keep everything the one with more room is better.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from statistics import fmean

from cluster.control.replanning import Counts, PlanFailed, Planned, Question
from cluster.offline.plan.deploy import Layout
from cluster.offline.plan.load import Load
from cluster.offline.plan.trial import Trial
from cluster.offline.scoring.figures import Attainment
from cluster.offline.sim.cluster import PoolModel
from cluster.offline.sim.compare import Case
from cluster.offline.sim.fleet import pool_model
from cluster.offline.workload.arrivals import Arrival, Workload
from cluster.policy.scaling.balance import Group, Mix, shares
from cluster.spec import ClusterSpec, ElasticSpec, HealthSpec, PoolSpec, Role
from workers.profiles.errors import ProfileError

LOOKED_AT = 9  # ways that are simulated, besides the present one
FINAL = 2
SEEDS = (0, 1)
ROOM = 1.25  # times the rate that was seen
BETTER = 0.02  # by so much a way must keep more than the present one
GIVEN_UP = 0.1  # below the best so far: too far to be among the last few
MOST_RANKED = 2000
LEAST_REQUESTS = 100  # of one run
CHAINS = 8  # conversations that cached prompts belong to: what nobody says, but one would be kept by one worker only
BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Kind:
    """Pools whose workers are alike. `now`: roles of the workers there are, all its pools together."""

    pools: tuple[PoolSpec, ...]
    now: Mapping[Role, int]

    @property
    def count(self) -> int:
        return sum(self.now.values())


Way = tuple[Mapping[Role, int], ...]  # roles of each kind


@dataclass(frozen=True, slots=True)
class _Judged:
    """`attained`: the share of requests that keep both promises at the rate that was seen."""

    way: Way
    attained: float
    merit: float = 0.0


def planned(question: Question, hurry: Callable[[], bool] = lambda: False) -> Planned:
    """`hurry` is asked before runs: once it is so, the best of what was tried is the answer, if there is a choice.

    Raises `PlanFailed`, and what production raises for a cluster that cannot start.
    """
    return Search(question, hurry).best()


class Search:
    """One search."""

    def __init__(self, question: Question, hurry: Callable[[], bool]) -> None:
        self._question = question
        self._hurry = hurry
        self._kinds = kinds_of(question)
        self._models = {kind.pools[0].name: _model(question, kind.pools[0]) for kind in self._kinds}
        self._load = load_of(question)
        self._simulated = 0

    def best(self) -> Planned:
        now = tuple(kind.now for kind in self._kinds)
        if not any(_serves(way) for way in (now, *self._ways())):
            raise PlanFailed("these workers serve nobody in any roles")
        tried = self._tried(self._looked_at(now))
        last = sorted(tried, key=lambda each: (-each.attained, _flips(now, each.way)))[:FINAL]
        last += [each for each in tried if each.way == now and each not in last]
        once_more = not self._hurry()
        judged = [self._judged(each) if once_more else replace(each, merit=each.attained) for each in last]
        chosen = max(judged, key=lambda each: (each.merit, -_flips(now, each.way)))
        present = next((each for each in judged if each.way == now), None)
        if present is not None and chosen.merit < present.merit + BETTER:
            chosen = present
        counts = dealt(self._kinds, chosen.way, self._question.counts)
        return Planned(counts, chosen.attained, present.attained if present else 0.0, self._simulated)

    def _ways(self) -> Iterator[Way]:
        """All, within the floors; of very many by twos, threes, ..., and of many kinds of workers only so many."""
        counts = [kind.count for kind in self._kinds]
        step = 1
        while (total := math.prod(_num_ways(count, step) for count in counts)) > MOST_RANKED and step < max(counts):
            step += 1
        every = math.ceil(total / MOST_RANKED)
        for way in islice(product(*(_ways(count, step) for count in counts)), 0, None, every):
            if _serves(way) and self._keeps_floors(way):
                yield way

    def _keeps_floors(self, way: Way) -> bool:
        floors = self._question.spec.elastic.floors
        prompting = sum(counts[Role.PREFILL] + counts[Role.MIXED] for counts in way)
        decoding = sum(counts[Role.DECODE] + counts[Role.MIXED] for counts in way)
        return prompting >= floors.get("prefill", 0) and decoding >= floors.get("decode", 0)

    def _looked_at(self, now: Way) -> list[Way]:
        """What looks best, of each sort: the closed forms know less of one than of another."""
        mix = _mix(self._question)
        sorts: dict[tuple[bool, bool], list[tuple[float, int, Way]]] = {}
        for number, way in enumerate(self._ways()):
            split, mixed = (any(counts[role] for counts in way) for role in (Role.PREFILL, Role.MIXED))
            needed = shares(self._groups(way), mix).worst
            sorts.setdefault((split, mixed), []).append((needed, number, way))
        each = max(1, LOOKED_AT // max(1, len(sorts)))
        first = [one for ranked in sorts.values() for one in sorted(ranked, key=_rank)[:each]]
        rest = sorted((one for ranked in sorts.values() for one in sorted(ranked, key=_rank)[each:]), key=_rank)
        chosen = [way for _, _, way in sorted([*first, *rest[: LOOKED_AT - len(first)]], key=_rank)]
        return [*([now] if _serves(now) else []), *(way for way in chosen if way != now)]

    def _groups(self, way: Way) -> list[Group]:
        made = []
        for kind, counts in zip(self._kinds, way, strict=True):
            pool, engine = kind.pools[0], kind.pools[0].engine
            cost, kv_tokens = self._models[pool.name].cost, engine.kv_blocks * engine.block_size
            made += [Group(pool.name, role, counts[role], cost, kv_tokens, engine.max_running) for role in Role]
        return made

    def _tried(self, ways: Sequence[Way]) -> list[_Judged]:
        """Each once, the present one first and to the end. What is given up is not among the best."""
        tried: list[_Judged] = []
        for way in ways:
            if len(tried) > 1 and self._hurry():
                break
            best = sorted((each.attained for each in tried), reverse=True)[:FINAL]
            enough = best[-1] - GIVEN_UP if len(best) == FINAL else 0.0
            trial = replace(self._trial(way), give_up=enough if enough > 0.0 else None)
            tried.append(_Judged(way, self._run(trial, self._question.rate, SEEDS[0]).both))
        return tried

    def _judged(self, tried: _Judged) -> _Judged:
        """What it keeps at the rate that was seen, and in the mean of that and some more."""
        trial, rate = self._trial(tried.way), self._question.rate
        seen = fmean([tried.attained, *(self._run(trial, rate, seed).both for seed in SEEDS[1:])])
        more = self._run(trial, rate * ROOM, SEEDS[0]).both
        return _Judged(tried.way, seen, (seen + more) / 2.0)

    def _run(self, trial: Trial, rate: float, seed: int) -> Attainment:
        self._simulated += min(trial.requests, len(self._load.arrivals))
        return trial(rate, seed)

    def _trial(self, way: Way) -> Trial:
        spec, models = self._fixed(way)
        case = Case(spec.name, spec, models)
        requests = min(len(self._load.arrivals), max(LEAST_REQUESTS, len(self._load.arrivals) // 2))
        slo, gpus = self._question.slo, case.gpus
        return Trial(Layout("roles", ()), case, self._load, slo, requests, gpus, float(gpus), math.inf, math.inf, 1.0)

    def _fixed(self, way: Way) -> tuple[ClusterSpec, dict[str, PoolModel]]:
        """The same cluster with these roles, which stay."""
        pools, models = [], {}
        for number, (kind, counts) in enumerate(zip(self._kinds, way, strict=True)):
            for role in Role:
                if counts[role]:
                    like, name = kind.pools[0], f"{role.value}-of-{number}"
                    sized = replace(like, replicas=counts[role], min_replicas=None, max_replicas=None)
                    pools.append(replace(sized, name=name, role=role))
                    models[name] = self._models[like.name]
        health = HealthSpec(heartbeat_s=1.0, dead_after_s=10.0)
        spec = replace(self._question.spec, name="planned", pools=tuple(pools), health=health, elastic=ElasticSpec())
        return spec, models


def kinds_of(question: Question) -> list[Kind]:
    """Alike are workers of equal engines on equal hardware that cost the same. Pools without ready workers are none."""
    alike: list[list[PoolSpec]] = []
    for pool in question.spec.pools:
        if not any(name == pool.name for name, _ in question.counts):
            continue
        for kind in alike:
            if all(
                getattr(pool, name) == getattr(kind[0], name) for name in ("engine", "parallel", "hardware", "cost")
            ):
                kind.append(pool)
                break
        else:
            alike.append([pool])
    return [Kind(tuple(pools), _roles(question.counts, pools)) for pools in alike]


def _roles(counts: Counts, pools: Sequence[PoolSpec]) -> Mapping[Role, int]:
    names = {pool.name for pool in pools}
    return {role: sum(n for (name, each), n in counts.items() if name in names and each is role) for role in Role}


def dealt(kinds: Sequence[Kind], way: Way, now: Counts) -> Counts:
    """To pools, so that as few workers as can be take another role."""
    dealt_out: Counter[tuple[str, Role]] = Counter()
    for kind, wanted in zip(kinds, way, strict=True):
        left = dict(wanted)
        for pool in kind.pools:
            for role in Role:
                kept = min(left[role], now.get((pool.name, role), 0))
                dealt_out[pool.name, role] += kept
                left[role] -= kept
        for pool in kind.pools:
            room = sum(now.get((pool.name, role), 0) - dealt_out[pool.name, role] for role in Role)
            for role in Role:
                taken = min(room, left[role])
                dealt_out[pool.name, role] += taken
                left[role] -= taken
                room -= taken
    return {key: count for key, count in dealt_out.items() if count}


def load_of(question: Question) -> Load:
    """The requests at their own gaps. Cached tokens are those of `CHAINS` conversations, which go on in turn."""
    arrivals, longest = [], 0
    for each in question.requests:
        longest = max(longest, each.prompt_tokens // BLOCK_TOKENS + 1)
    for number, each in enumerate(question.requests):
        blocks = (each.prompt_tokens - each.computed_tokens) // BLOCK_TOKENS
        begin = number % CHAINS * longest
        prefix = tuple(range(begin, begin + blocks))
        arrivals.append(Arrival(each.at_s, each.prompt_tokens, each.output_tokens, prefix))
    if len(arrivals) < 2 or arrivals[-1].at_s <= arrivals[0].at_s:
        raise PlanFailed(f"{len(arrivals)} requests at one time make no load")
    return Load(Workload("as seen", tuple(arrivals), BLOCK_TOKENS), own_times=True)


def _mix(question: Question) -> Mix:
    requests = question.requests
    computed = [each.computed_tokens for each in requests]
    mean = fmean(computed)
    return Mix(
        rate=question.rate,
        prompt_tokens=fmean(each.prompt_tokens for each in requests),
        computed_tokens=mean,
        output_tokens=fmean(each.output_tokens for each in requests),
        ttft_s=question.slo.ttft_s,
        tpot_s=question.slo.tpot_s,
        spread=fmean((each - mean) ** 2 for each in computed) / mean**2,
    )


def _model(question: Question, pool: PoolSpec) -> PoolModel:
    """Raises `PlanFailed` for workers of whom nobody knows what their steps cost."""
    if pool.cost is not None:
        size = question.kv_token_bytes.get(pool.name)
        return PoolModel(pool.cost) if size is None else PoolModel(pool.cost, size)
    try:
        if pool.hardware:
            return pool_model(pool.model or question.spec.model, pool.hardware, pool.parallel)
    except ProfileError as error:
        raise PlanFailed(str(error)) from None
    raise PlanFailed(
        f"pool {pool.name} has neither cost (measure it with `diptych profile`) nor hardware (a GPU's name), so nobody "
        "can say how long its steps take"
    )


def _ways(count: int, step: int) -> Iterator[Mapping[Role, int]]:
    for mixed in _numbers(count, step):
        for prefill in _numbers(count - mixed, step):
            yield {Role.PREFILL: prefill, Role.DECODE: count - mixed - prefill, Role.MIXED: mixed}


def _numbers(most: int, step: int) -> list[int]:
    """0 and `most` among them."""
    return sorted({*range(0, most + 1, step), most})


def _num_ways(count: int, step: int) -> int:
    return sum(len(_numbers(count - mixed, step)) for mixed in _numbers(count, step))


def _serves(way: Way) -> bool:
    """Somebody computes prompts and somebody decodes."""
    numbers = {role: sum(counts[role] for counts in way) for role in Role}
    return bool(numbers[Role.MIXED] or (numbers[Role.PREFILL] and numbers[Role.DECODE]))


def _flips(now: Way, way: Way) -> int:
    return sum(max(0, then[role] - one[role]) for one, then in zip(now, way, strict=True) for role in Role)


def _rank(one: tuple[float, int, Way]) -> tuple[float, int]:
    return one[0], one[1]
