"""Decides role changes and pool sizes: one change at a time, each with a reason. Pure.

    load reports ──> `OfferedLoad` ──> mix ──> `utilization`, now and after each possible change ──> `Decision`

- Flip: one worker gets another role. The best change, or the first one toward workers that are all split or all mixed,
  is made once `balance.gain` has been above 0 for `dwell_s`, and the last change is `cooldown_s` ago. Both times are
  divided by the utilization where that exceeds 1. In doubt roles stay: below `MIN_FLIP_UTILIZATION`, and while few
  requests may only look like more.
- Grow: a pool gets a worker when no role change would meet the SLOs.
- Shrink: a pool loses a worker that it has not needed for `PATIENCE` times `dwell_s`.

Changing roles too often costs more than roles that are slightly wrong: Mooncake and Splitwise find that ratios drift
slowly, Narwhal uses hysteresis.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import median

from cluster.policy.scaling.balance import Group, Mix, Utilization, gain, utilization
from cluster.policy.scaling.offered_load import MIN_REQUESTS, LoadReport, OfferedLoad
from cluster.spec import ClusterSpec, PoolSpec, Role
from diptych.view import ClusterView, Decision, WorkerState, WorkerStats, WorkerView
from workers.costs import CorrectedCost, CostModel, LinearCost

MIN_FLIP_UTILIZATION = 0.75  # no role changes below it
MAX_TRANSIENT_RISE = 1.1  # factor by which the first of several changes may raise the worst utilization
SHRUNK_UTILIZATION = 0.6  # at most, after a pool has shrunk
PATIENCE = 20.0  # times `dwell_s` before a pool shrinks
_MAX_TARGETS = 256


@dataclass(frozen=True, slots=True)
class _Change:
    """A worker leaves `source` and joins `target`; None: it joins or leaves the cluster.

    `after`: the utilization after this change. `final_worst`: the worst one at the end of the changes that it begins.
    `gain`: of all these changes (`balance.gain`).
    """

    source: Group | None
    target: Group | None
    after: Utilization
    final_worst: float = math.inf
    gain: float = 0.0


class Elastic:
    """The elastic policy. Owned by the scaling loop."""

    def __init__(self, spec: ClusterSpec) -> None:
        self._elastic = spec.elastic
        self._pools = {pool.name: pool for pool in spec.pools}
        postpones_late = all(pool.engine.prompt_order == "deadline" for pool in spec.pools)
        self._offered = OfferedLoad(spec.elastic, spec.gateway.slo, postpones_late=postpones_late)
        self._wanted_since_s: dict[str, float] = {}  # kind of change -> since when it has been wanted without a break
        self._changed_s: float | None = None

    def on_report(self, report: LoadReport, now_s: float) -> None:
        """Take a gateway's load report."""
        self._offered.on_report(report, now_s)

    def decide(self, view: ClusterView, now_s: float) -> Decision | None:
        """The next change; None: no change."""
        mix = self._offered.mix(view.workers, now_s)
        groups = self._groups(view)
        if mix is None or not groups:
            self._wanted_since_s = {kind: since_s for kind, since_s in self._wanted_since_s.items() if kind == "shrink"}
            return self._shrink_idle(view, groups, now_s)
        now = utilization(groups, mix)
        at_least = now.worst * (1.0 - mix.relative_error)
        in_danger = at_least > MIN_FLIP_UTILIZATION or (now.worst > 1.0 and mix.is_known)
        flip = self._best_flip(groups, now, mix) if in_danger else None
        urgency = max(1.0, now.worst)
        flips = flip is not None and flip.gain > 0.0
        grows = in_danger and now.worst > 1.0 and (flip is None or flip.final_worst > 1.0)
        if self._is_due("flip", flips, now_s, self._elastic.dwell_s, urgency):
            assert flip is not None
            return self._flip(view, flip, now, mix, now_s)
        if self._is_due("grow", grows and not flips, now_s, self._elastic.dwell_s, urgency):
            return self._grow(view, groups, now, mix, now_s)
        removal = self._best(list(self._removals(groups, mix)))
        if self._is_due("shrink", removal is not None, now_s, PATIENCE * self._elastic.dwell_s):
            assert removal is not None
            return self._shrink(view, removal, now, mix, now_s)
        return None

    def _groups(self, view: ClusterView) -> list[Group]:
        """The ready workers of each pool by role; an empty group for each role that a pool's workers could take."""
        counts: dict[tuple[str, Role], int] = {(pool, role): 0 for pool in self._pools for role in Role}
        kv_tokens: dict[str, int] = {}
        learned: defaultdict[str, list[WorkerStats]] = defaultdict(list)
        for worker in _ready(view):
            counts[worker.pool, worker.role] += 1
            size = self._pools[worker.pool].engine.block_size
            kv_tokens[worker.pool] = worker.stats.total_blocks * size
            learned[worker.pool].append(worker.stats)
        costs = {pool: _cost(self._pools[pool], found) for pool, found in learned.items()}
        return [
            self._group(self._pools[pool], role, count, kv_tokens[pool], costs[pool])
            for (pool, role), count in counts.items()
            if pool in kv_tokens
        ]

    @staticmethod
    def _group(pool: PoolSpec, role: Role, count: int, kv_tokens: int, cost: CostModel) -> Group:
        return Group(pool.name, role, count, cost, kv_tokens, pool.engine.max_running)

    # ---- possible changes --------------------------------------------------------------------------------------

    def _flips(self, groups: Sequence[Group], mix: Mix) -> Iterator[_Change]:
        for source in groups:
            for target in groups:
                if source.count and target.pool == source.pool and target.role is not source.role:
                    after = _changed(groups, source, target)
                    if self._meets_floors(after):
                        yield _Change(source, target, utilization(after, mix))

    def _best_flip(self, groups: Sequence[Group], now: Utilization, mix: Mix) -> _Change | None:
        """The change that gains the most: a single flip, or the first one toward `_targets`."""
        flips = [flip for flip in self._flips(groups, mix) if flip.after.worst <= now.worst * MAX_TRANSIENT_RISE]
        found = []
        for flip in flips:
            assert flip.source is not None and flip.target is not None
            final = _changed(groups, flip.source, flip.target)
            found.append(replace(flip, final_worst=flip.after.worst, gain=gain(groups, now, final, 1, mix)))
        kinds = _by_kind(groups)
        for targets in _targets(kinds):
            final = [group for target in targets for group in target]
            first = self._best([flip for flip in flips if _leads_to(flip, kinds, targets)])
            if first is not None and self._meets_floors(final):
                count = sum(map(_num_flips, kinds, targets))
                at_end = gain(groups, now, final, count, mix)
                found.append(replace(first, final_worst=utilization(final, mix).worst, gain=at_end))
        return max(found, key=lambda each: (round(each.gain, 3), -each.after.worst, -each.after.ttft), default=None)

    def _removals(self, groups: Sequence[Group], mix: Mix) -> Iterator[_Change]:
        for source, rest in self._without_one(groups):
            if (after := utilization(rest, mix)).worst <= SHRUNK_UTILIZATION:
                yield _Change(source, None, after)

    def _without_one(self, groups: Sequence[Group]) -> Iterator[tuple[Group, list[Group]]]:
        """Each group that may lose a worker, and all groups without that worker."""
        for source in groups:
            least, _ = self._pools[source.pool].bounds
            count = sum(group.count for group in groups if group.pool == source.pool)  # draining workers do not count
            rest = _changed(groups, source, None)
            if source.count and count > least and self._meets_floors(rest):
                yield source, rest

    def _meets_floors(self, groups: Sequence[Group]) -> bool:
        floors = self._elastic.floors
        prompting = sum(group.count for group in groups if group.role is not Role.DECODE)
        decoding = sum(group.count for group in groups if group.role is not Role.PREFILL)
        return prompting >= floors.get("prefill", 0) and decoding >= floors.get("decode", 0)

    @staticmethod
    def _best(changes: Sequence[_Change]) -> _Change | None:
        """The change with the lowest worst share."""
        return min(
            changes,
            key=lambda each: (round(min(each.final_worst, each.after.worst), 3), each.after.worst, each.after.ttft),
            default=None,
        )

    def _is_due(self, kind: str, is_wanted: bool, now_s: float, dwell_s: float, urgency: float = 1.0) -> bool:
        """Whether this kind of change has been wanted for `dwell_s` and the cooldown is over; urgency shortens both."""
        if not is_wanted:
            self._wanted_since_s.pop(kind, None)
            return False
        since_s = self._wanted_since_s.setdefault(kind, now_s)
        is_cool = self._changed_s is None or now_s - self._changed_s >= self._elastic.cooldown_s / urgency
        return is_cool and now_s - since_s >= dwell_s / urgency

    # ---- decisions ---------------------------------------------------------------------------------------------

    def _flip(self, view: ClusterView, change: _Change, now: Utilization, mix: Mix, now_s: float) -> Decision:
        assert change.source is not None and change.target is not None
        worker = _least_busy(view, change.source)
        reason = f"{change.source.role.value} to {change.target.role.value}: {_explain(now, change.after, mix)}"
        self._note_change(now_s)
        return Decision("flip", reason, worker=worker.name, role=change.target.role)

    def _grow(
        self, view: ClusterView, groups: Sequence[Group], now: Utilization, mix: Mix, now_s: float
    ) -> Decision | None:
        may_grow = {pool.name for pool in view.pools if pool.wanted < pool.max_replicas}
        changes = []
        for target in groups:
            if target.role is self._pools[target.pool].role and target.pool in may_grow:
                changes.append(_Change(None, target, utilization(_changed(groups, None, target), mix)))
        change = self._best(changes)
        if change is None or change.target is None:
            return None
        self._note_change(now_s)
        reason = f"one more worker: {_explain(now, change.after, mix)}; no role change is enough"
        return Decision("grow", reason, pool=change.target.pool)

    def _shrink(self, view: ClusterView, change: _Change, now: Utilization, mix: Mix, now_s: float) -> Decision:
        assert change.source is not None
        self._note_change(now_s)
        worker = _members(view, change.source)[-1]  # the newest: its decodes migrate, and its node may be released
        reason = f"one worker fewer: {_explain(now, change.after, mix)}"
        return Decision("shrink", reason, worker=worker.name, pool=change.source.pool)

    def _shrink_idle(self, view: ClusterView, groups: Sequence[Group], now_s: float) -> Decision | None:
        """With hardly any requests, remove an idle worker, after the same time as under load."""
        spare = (worker for source, _ in self._without_one(groups) for worker in _members(view, source))
        idle = [worker for worker in spare if _is_idle(worker)] if self._offered.has_reports else []
        if not self._is_due("shrink", bool(idle), now_s, PATIENCE * self._elastic.dwell_s):
            return None
        self._note_change(now_s)
        reason = f"one worker fewer: fewer than {MIN_REQUESTS} requests in {self._elastic.window_s:g} s"
        return Decision("shrink", reason, worker=idle[-1].name, pool=idle[-1].pool)

    def _note_change(self, now_s: float) -> None:
        self._changed_s = now_s
        self._wanted_since_s.clear()


def _ready(view: ClusterView) -> list[WorkerView]:
    return [worker for worker in view.workers if worker.state is WorkerState.READY]


def _cost(pool: PoolSpec, workers: Sequence[WorkerStats]) -> CostModel:
    """The pool's cost model, corrected by the median of what its workers have learned."""
    decode = median(stats.decode_ratio for stats in workers)
    return CorrectedCost.of(pool.cost or LinearCost(), decode, median(stats.prompt_ratio for stats in workers))


def _by_kind(groups: Sequence[Group]) -> list[list[Group]]:
    """The groups whose workers differ only in pool and role together, in a deterministic order."""
    kinds: list[list[Group]] = []
    for group in groups:
        for kind in kinds:
            if replace(group, pool=kind[0].pool, role=kind[0].role, count=kind[0].count) == kind[0]:
                kind.append(group)
                break
        else:
            kinds.append([group])
    return kinds


def _counts(groups: Sequence[Group]) -> dict[Role, int]:
    return {role: sum(group.count for group in groups if group.role is role) for role in Role}


def _splits(kind: Sequence[Group]) -> Iterator[list[Group]]:
    """Equal workers, as one pool: each split into prefill and decode workers, and last all mixed."""
    count = sum(group.count for group in kind)
    one = {group.role: group for group in kind if group.pool == kind[0].pool}
    for number in range(count + 1):
        yield [replace(one[Role.PREFILL], count=number), replace(one[Role.DECODE], count=count - number)]
    yield [replace(one[Role.MIXED], count=count)]


def _targets(kinds: Sequence[list[Group]]) -> Iterator[list[list[Group]]]:
    """Combinations of `_splits`, or the present roles, of each kind; kind by kind if there are too many combinations.

    Kinds are combined because the best role of one kind of hardware depends on the others.
    """
    splits = [list(_splits(kind)) for kind in kinds]
    if math.prod(len(each) + 1 for each in splits) > _MAX_TARGETS:
        for number, each in enumerate(splits):
            yield from ([*kinds[:number], split, *kinds[number + 1 :]] for split in each)
        return
    yield from map(list, product(*([kind, *each] for kind, each in zip(kinds, splits, strict=True))))


def _num_flips(present: Sequence[Group], target: Sequence[Group]) -> int:
    before, after = _counts(present), _counts(target)
    return sum(max(0, before[role] - after[role]) for role in Role)


def _leads_to(change: _Change, kinds: Sequence[list[Group]], targets: Sequence[list[Group]]) -> bool:
    """Whether this flip brings the roles closer to these targets."""
    assert change.source is not None and change.target is not None
    for kind, target in zip(kinds, targets, strict=True):
        if change.source in kind:
            present, wanted = _counts(kind), _counts(target)
            source, to = change.source.role, change.target.role
            return present[source] > wanted[source] and present[to] < wanted[to]
    return False


def _changed(groups: Sequence[Group], source: Group | None, target: Group | None) -> list[Group]:
    """The groups with one worker fewer in the source and one more in the target."""
    return [replace(group, count=group.count - (group is source) + (group is target)) for group in groups]


def _members(view: ClusterView, group: Group) -> list[WorkerView]:
    return [worker for worker in _ready(view) if worker.pool == group.pool and worker.role is group.role]


def _is_idle(worker: WorkerView) -> bool:
    stats = worker.stats
    return not (stats.running or stats.waiting or stats.reserved or stats.leases or stats.queued_tokens)


def _least_busy(view: ClusterView, group: Group) -> WorkerView:
    """The worker with the least work of its role."""
    workers = _members(view, group)
    if group.role is Role.PREFILL:
        return min(workers, key=lambda worker: (worker.stats.queued_tokens, worker.name))
    return min(workers, key=lambda worker: (worker.stats.running + worker.stats.reserved, worker.name))


def _explain(now: Utilization, after: Utilization, mix: Mix) -> str:
    load = f"{mix.rate:.3g} requests/s of {mix.prompt_tokens:.0f} + {mix.output_tokens:.0f} tokens"
    return f"{load} are {now}; then {after}"


class ElasticModels:
    """An elastic policy for each model, which sees this model's pools and load. Owned by the scaling loop."""

    def __init__(self, spec: ClusterSpec) -> None:
        self._policies = {model: Elastic(spec.of_model(model)) for model in spec.models}
        self._pools = {model: {pool.name for pool in spec.pools_of(model)} for model in spec.models}

    def on_report(self, report: LoadReport, now_s: float) -> None:
        self._policies[report.model].on_report(report, now_s)

    def decide(self, view: ClusterView, now_s: float) -> Decision | None:
        """The change of the first model that wants one. The others' changes stay due: they take turns."""
        for model in list(self._policies):
            decision = self._policies[model].decide(view.of_pools(self._pools[model]), now_s)
            if decision is not None:
                self._policies[model] = self._policies.pop(model)  # last in the next round
                return decision
        return None


def elastic_policy(spec: ClusterSpec) -> Elastic | ElasticModels:
    return Elastic(spec) if len(spec.models) == 1 else ElasticModels(spec)
